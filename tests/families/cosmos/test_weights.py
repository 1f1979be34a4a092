"""Cosmos in miniature against what NVIDIA's code computes with the same weights."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.sampling import SamplingOptions, truncate
from diagd.decoding.schedule import DiagonalSchedule, FrameFormat, TokenGrid
from diagd.decoding.strategies.table import parse_strategy
from diagd.decoding.teacher_forcing import strategy_nll
from diagd.families.checkpoints import load_model
from diagd.families.presets import COSMOS as PRESETS
from diagd.models.rotary import PositionTable, Rotary, grid_coordinates, rotary_frequencies_3d
from tests.families.goldens import close, model_golden
from tests.golden import FIXTURES

COSMOS = [f"cosmos_tiny_{letter}" for letter in "abcd"]


def raster_frame(model, prompt, height, width, **settings):
    """Decode one frame after the prompt, token by token; (B, height * width)."""
    engine = DecodingEngine(model, FrameFormat(height, width), batch_size=len(prompt), **settings)
    context = prompt.shape[1] // (height * width)
    engine.prefill(prompt, context)
    schedule = DiagonalSchedule.raster(TokenGrid(1, height, width))
    return next(engine.decode(schedule)).flatten(1)


@pytest.mark.parametrize("name", COSMOS)
@torch.no_grad()
def test_cosmos_logits_and_every_block_are_those_of_its_own_code(name):
    model, data = load_model(FIXTURES / name / "model.pt"), model_golden(name)
    blocks = []
    for block in model.model.layers:
        block.register_forward_hook(lambda module, inputs, output: blocks.append(output))
    close(model.logits(data["tokens"], data.get("context")), data["full_logits"])
    for i, output in enumerate(blocks):
        close(output, data[f"block_out_{i}"])


@pytest.mark.parametrize("name", COSMOS)
def test_cosmos_greedy_tokens_are_those_of_its_own_generate(name):
    model, data = load_model(FIXTURES / name), model_golden(name)
    tokens = raster_frame(model, data["greedy_prompt"], 4, 6, context=data.get("context"))
    assert torch.equal(tokens, data["greedy_tokens"])


@pytest.mark.parametrize("name", COSMOS)
def test_a_clip_costs_what_its_own_logits_say(name):
    """Two grids after one, and what stands before them; its text is attended to."""
    model, data = load_model(FIXTURES / name), model_golden(name)
    prefix, clip = data["tokens"].split([model.config.prefix_length, 72], 1)
    assert prefix.unique().tolist() == list(model.config.prefix_ids)
    costs = -data["full_logits"][:, -49:-1].log_softmax(-1).gather(2, clip[:, 24:, None])
    grids = clip.view(2, 3, 4, 6)
    given = {"prefix": prefix, "context": data.get("context")}
    nll = strategy_nll(model, grids, None, parse_strategy("raster"), 1, **given)
    close(nll, costs.view(2, 2, 4, 6))
    lagged = strategy_nll(model, grids, None, parse_strategy("k=1,d=4"), 1, **given)
    close(lagged[:, 0, 0], nll[:, 0, 0])  # there is nothing yet that a diagonal could miss
    assert (lagged - nll).abs().mean() > 0.01


@pytest.mark.parametrize("size", ["4b", "5b", "12b", "13b"])
def test_the_presets_have_the_tables_of_the_released_models(size):
    config, data = PRESETS[f"cosmos-{size}"], load_file(FIXTURES / "cosmos_real_tables.safetensors")
    time, space = rotary_frequencies_3d(config)
    torch.testing.assert_close(time, data[f"{size}.temporal_inv_freq"])
    torch.testing.assert_close(space, data[f"{size}.spatial_inv_freq"])
    positions = data[f"{size}.positions"]
    inside = positions < config.max_positions  # beyond are the zero angles of their padding
    assert inside.sum() > 10
    places = positions[inside]
    coordinates = grid_coordinates(config, places)
    assert coordinates is not None
    turns = Rotary(config)(places, coordinates, torch.float32)
    for name, values in zip(("cos", "sin"), turns, strict=True):
        close(values, data[f"{size}.rope_{name}"][inside, : config.head_dim // 2])
    if config.position_table:
        rows = PositionTable(config)(places, coordinates, torch.bfloat16)
        assert torch.equal(rows, data[f"{size}.abs_pos_emb"][inside])


@pytest.mark.parametrize(
    ("key", "temperature", "top_p"), [("top_p_probs", 1.0, 0.8), ("top_p_probs_t07_p09", 0.7, 0.9)]
)
@pytest.mark.parametrize("name", COSMOS)
def test_cosmos_draws_from_the_probabilities_of_its_own_rule(name, key, temperature, top_p):
    data = model_golden(name)
    logits = data["prefill_logits"][:, -1]
    kept = truncate(logits / temperature, SamplingOptions(temperature, top_p=top_p))
    torch.testing.assert_close(kept.softmax(-1), data[key], atol=1e-6, rtol=0)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_cosmos_weights_may_be_wrapped_and_prefixed_or_not(wrapped, prefix, tmp_path):
    weights = torch.load(FIXTURES / "cosmos_tiny_a" / "model.pt", weights_only=True)
    weights = {prefix + name.removeprefix("model."): value for name, value in weights.items()}
    weights[prefix + "layers.0.attention._extra_state"] = torch.zeros(1)
    torch.save({"model": weights} if wrapped else weights, tmp_path / "model.pt")
    shutil.copy(FIXTURES / "cosmos_tiny_a" / "config.json", tmp_path)
    found, expected = load_model(tmp_path), load_model(FIXTURES / "cosmos_tiny_a")
    assert found.config == expected.config
    for name, weight in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight)
