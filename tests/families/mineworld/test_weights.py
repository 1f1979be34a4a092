"""MineWorld in miniature against what its own code computes with the same weights."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from diagd.backends.native.model import NativeModel
from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import DiagonalSchedule, FrameFormat, TokenGrid
from diagd.families.checkpoints import find_model, load_model
from diagd.models.transformer import Transformer
from diagd.pipeline.generator import VideoGenerator
from tests.families.goldens import close, model_golden
from tests.golden import FIXTURES

MINEWORLD = ["mineworld_tiny", "mineworld_tiny_v256"]


@pytest.mark.parametrize("case", ["small", "real"])
@pytest.mark.parametrize("name", MINEWORLD)
@torch.no_grad()
def test_mineworld_logits_are_those_of_its_own_code(name, case):
    model, data = load_model(FIXTURES / name / "model.ckpt"), model_golden(name)
    logits = model.logits(data[f"{case}.full.input_ids"])[0]
    close(logits[data[f"{case}.full.logits_positions"]], data[f"{case}.full.logits"])
    image = logits[:, : model.config.image_vocab_size]
    assert torch.equal(image.argmax(-1), data[f"{case}.full.argmax"])


def mineworld_dream(model, name, case, make_schedule):
    """Return our tokens of one of MineWorld's runs, (1, F * height * width)."""
    data = model_golden(name)
    height, width = {"small": (4, 6), "real": (14, 24)}[case]
    actions = data[f"{case}.actions"].transpose(0, 1)  # (1, F, A)
    engine = DecodingEngine(
        model,
        FrameFormat(height, width, actions.shape[2]),
        sampling=SamplingOptions(valid_range=(0, model.config.image_vocab_size)),
    )
    engine.prefill(data[f"{case}.prompt_ids"], 1)
    schedule = make_schedule(TokenGrid(actions.shape[1], height, width))
    return torch.cat([frame.flatten(1) for frame in engine.decode(schedule, actions)], dim=1)


@pytest.mark.parametrize(("case", "prepare"), [("small", Transformer.eval), ("real", NativeModel)])
@pytest.mark.parametrize("name", MINEWORLD)
def test_mineworld_greedy_tokens_are_its_own(name, case, prepare):
    """Our kernels write the images of the released models' size, which are many tokens."""
    model = prepare(load_model(FIXTURES / name))
    tokens = mineworld_dream(model, name, case, DiagonalSchedule.raster)
    assert torch.equal(tokens, model_golden(name)[f"{case}.naive.tokens"])


def test_mineworld_diagonals_start_with_its_own_tokens_and_part_at_the_second_row():
    """Its lanes also see unwritten slots, and true row ends never reach its cache."""
    name = "mineworld_tiny"
    model = load_model(FIXTURES / name)
    ours = mineworld_dream(model, name, "small", lambda grid: DiagonalSchedule.spatial(grid, 2))
    theirs = model_golden(name)["small.image_k2.tokens"]
    assert torch.equal(ours[:, :3], theirs[:, :3])
    assert not torch.equal(ours, theirs)


@pytest.fixture
def llama_folder(tmp_path):
    """A function that writes a Hugging Face LLaMA with more config fields; returns its folder."""
    weights = torch.load(FIXTURES / "mineworld_tiny_v256" / "model.ckpt", weights_only=True)
    plain = {
        name.removeprefix("transformer."): value
        for name, value in weights["state_dict"].items()
        if name.startswith("transformer.")
    }
    save_file(plain, tmp_path / "model.safetensors")
    fields = {"model_type": "llama", "num_attention_heads": 4, "max_position_embeddings": 1041}

    def write(**more):
        (tmp_path / "config.json").write_text(json.dumps({**fields, **more}))
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("more", "rope_theta"),
    [
        ({}, 10000),
        ({"rope_theta": 500, "rope_scaling": None, "hidden_act": "silu"}, 500),
        ({"rope_parameters": {"rope_theta": 500, "rope_type": "default"}}, 500),  # transformers 5
    ],
)
def test_hugging_face_llama_folders_are_read(more, rope_theta, llama_folder):
    expected = find_model(FIXTURES / "mineworld_tiny_v256").config
    expected = dataclasses.replace(expected, rope_theta=rope_theta)
    assert find_model(llama_folder(**more)).config == expected


def test_a_frame_that_does_not_fit_is_refused_when_it_is_asked_for(tmp_path):
    source = FIXTURES / "mineworld_tiny_v256"
    folder = shutil.copytree(source, tmp_path / "world")
    lines = (source / "config.yaml").read_text().replace(": 1041", ": 156")
    (folder / "config.yaml").write_text(lines)
    world = VideoGenerator.from_pretrained(folder)
    assert (world.height, world.width, world.config.max_positions) == (14, 24, 156)
    with pytest.raises(
        ValueError, match=r"^prompt and one frame need 683 slots, the context holds 1"
    ):
        world.generate(torch.zeros(8, 8, 3, dtype=torch.uint8), ["none"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be default, got 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "type must be default, got 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"num_attention_heads": 0}, "MineWorld checkpoint: "),
        ({"model": "llama"}, "MineWorld checkpoint: "),
        ({"model": None}, "MineWorld checkpoint: "),
    ],
)
def test_a_llama_of_another_kind_is_refused(more, message, llama_folder):
    with pytest.raises(ValueError, match=message):
        find_model(llama_folder(**more))
