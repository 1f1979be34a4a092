"""Cosmos: NVIDIA's Cosmos-Predict1 models, that go on with a video, some of them led by a text."""

from pathlib import Path

from diagd.families.cosmos.presets import PRESETS
from diagd.families.cosmos.tokenizer import (
    DECODER_NAME,
    ENCODER_NAME,
    TEMPORAL_COMPRESSION,
    WINDOW,
    CosmosTokenizer,
)
from diagd.families.cosmos.weights import RELEASED
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Checkpoint, Family, TokenizerFolder

_CONTEXT_FRAMES = 1 + TEMPORAL_COMPRESSION  # two grids


def _defaults(found: Checkpoint) -> GenerationDefaults:
    is_small = found.config.num_layers <= PRESETS["cosmos-4b"].num_layers
    return GenerationDefaults(
        fps=25,
        context_frames=_CONTEXT_FRAMES,
        num_frames=WINDOW - _CONTEXT_FRAMES,
        row_lag=2 if is_small else 1,
        overlap=True,
        top_p=0.7 if found.config.context_size else 0.8,
    )


def _load_tokenizer(folder: Path) -> CosmosTokenizer:
    return CosmosTokenizer.from_jit(folder / ENCODER_NAME, folder / DECODER_NAME)


COSMOS = Family(
    name="Cosmos",
    licence="weights: NVIDIA Open Model License; code: Apache-2.0",
    released=RELEASED,
    tokenizer_folder=TokenizerFolder(_load_tokenizer, torchscript=(ENCODER_NAME, DECODER_NAME)),
    defaults=_defaults,
    presets=PRESETS,
)
