import json
from dataclasses import asdict

import pytest
import torch

from diagd.families import presets
from diagd.families.presets import PRESETS
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("mc-ar-42m", 42_213_888),
        ("mc-ar-300m", 321_049_600),
        ("mc-ar-700m", 725_985_280),
        ("mc-ar-1.2b", 1_229_301_760),
        ("cosmos-4b", 4_014_088_192),
        ("cosmos-12b", 11_560_975_360),
        ("wham-200m", 224_016_384),
        ("wham-1.6b", 1_580_262_912),
        ("emu3.5", 34_103_460_864 - 151_853 * 5120),  # without output rows of words
    ],
)
def test_presets_have_the_parameters_of_the_released_models(name, num_parameters):
    with torch.device("meta"):
        model = Transformer(PRESETS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_no_two_presets_have_one_name():
    tables = [
        *(presets.WORLD_SIZES, presets.WHAM, presets.COSMOS, presets.MINEWORLD, presets.IRIS),
        *(presets.LLAMAGEN, presets.LLAMAGEN_T2I, presets.JANUS, presets.CHAMELEON, presets.EMU3),
        *(presets.EMU35, presets.GLM_IMAGE, presets.MAMMOTHMODA2),
    ]
    assert len(PRESETS) == sum(map(len, tables)) + 2  # the bundled models


def test_a_config_survives_json():
    for config in PRESETS.values():
        assert ModelConfig.from_dict(json.loads(json.dumps(asdict(config)))) == config
