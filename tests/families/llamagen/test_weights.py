"""LlamaGen in miniature against a plain reading of its public facts (plain.py)."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from diagd.backends.native.model import NativeModel
from diagd.decoding.generate_tokens import generate_tokens
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.decoding.visibility import Seen
from diagd.families.checkpoints import build_model, find_model, load_model, save_model
from diagd.families.presets import PRESETS
from diagd.models.guidance import GuidedModel
from diagd.models.transformer import Transformer
from tests import oracles
from tests.families.llamagen.plain import (
    Tensors,
    greedy_image,
    guided_logits,
    plain_logits,
    random_checkpoint,
)

HIDDEN, LAYERS, HEADS, CODES, NULL = 128, 2, 2, 50, 1000
HEIGHT, WIDTH, LABEL, SCALE = 3, 5, 207, 2.5
GRID = TokenGrid(1, HEIGHT, WIDTH)
VISUAL = SamplingOptions(valid_range=(0, CODES))


@pytest.fixture(scope="module")
def weights() -> Tensors:
    return random_checkpoint(HIDDEN, LAYERS, CODES)


@pytest.fixture(scope="module")
def released(weights, tmp_path_factory) -> Path:
    """Write what training leaves."""
    path = tmp_path_factory.mktemp("llamagen") / "c2i_B_256.pt"
    torch.save({"model": weights, "steps": 3}, path)
    return path


@pytest.fixture
def model(released) -> Transformer:
    """Load it for images that are not square, so that rows are told from columns."""
    found = find_model(released)
    config = replace(found.config, grid_height=HEIGHT, grid_width=WIDTH, max_positions=16)
    return build_model(replace(found, config=config), "cpu", torch.float32)


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def test_sizes_come_from_tensors_and_the_name_of_the_file(released, tmp_path):
    config = find_model(released).config
    assert (config.num_heads, config.head_dim, config.intermediate_size) == (2, 64, 512)
    assert (config.grid_height, config.grid_width, config.max_positions) == (16, 16, 257)
    assert (config.vocab_size, config.image_vocab_size) == (CODES + 1001, CODES)
    larger = tmp_path / "c2i_B_384.pt"
    larger.write_bytes(released.read_bytes())
    assert find_model(larger).config.max_positions == 24 * 24 + 1
    (tmp_path / "config.json").write_text('{"image_size": 512, "n_head": 4}')
    config = find_model(larger).config
    assert (config.grid_width, config.num_heads, config.head_dim) == (32, 4, 32)


@pytest.mark.proves("LlamaGen", "logits")
@pytest.mark.parametrize("label", [LABEL, NULL])
def test_logits_are_those_of_the_plain_model(model, weights, label):
    codes = torch.randint(CODES, (15,), generator=torch.Generator().manual_seed(1))
    logits = model.logits(torch.tensor([[CODES + label, *codes]]))[0, :, :CODES]
    lanes = list(enumerate([0, *codes.tolist()]))
    expected = plain_logits(weights, HEADS, WIDTH, label, lanes, causal(16))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.5


@cache
def plain_image(label: int, scale: float) -> torch.Tensor:
    weights = random_checkpoint(HIDDEN, LAYERS, CODES)
    return greedy_image(weights, HEADS, HEIGHT, WIDTH, label, scale)


def images(model, labels, strategy, scale=1.0) -> torch.Tensor:
    """Return (B, height, width) tokens, as the pipeline makes them."""
    if scale != 1:
        model = GuidedModel(model, torch.tensor([[CODES + NULL]]), 1, scale)
    actions = torch.tensor(labels).view(-1, 1, 1) + CODES
    prompt = torch.empty(len(labels), 0, dtype=torch.int64)
    out = generate_tokens(
        model, prompt, strategy, actions, context_frames=0, grid=GRID, sampling=VISUAL
    )
    return out.tokens[:, 0]


@pytest.mark.proves("LlamaGen", "native", "guidance", "raster")
@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("scale", [1.0, SCALE])
@pytest.mark.parametrize("strategy", ["raster", "exact"])
def test_raster_tokens_are_those_of_its_greedy_loop(model, strategy, scale, backend):
    prepared = NativeModel(model) if backend == "native" else model
    expected = torch.stack([plain_image(label, scale) for label in (LABEL, 5)])
    assert torch.equal(images(prepared, [LABEL, 5], strategy, scale), expected)
    assert len(expected.unique()) > 5


@pytest.mark.proves("LlamaGen", "native", "guidance", "diagonals")
@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("scale", [1.0, SCALE])
@pytest.mark.parametrize("row_lag", [1, 2])
def test_diagonals_are_those_of_the_oracle(model, weights, row_lag, scale, backend):
    def logits_fn(tokens, positions, visible):
        assert positions[0] == 0
        lanes = list(zip(positions.tolist(), [0, *tokens[0, 1:].tolist()], strict=True))
        logits = guided_logits(weights, HEADS, WIDTH, LABEL, lanes, visible, scale)
        return logits[None]

    prepared = NativeModel(model) if backend == "native" else model
    schedule = DiagonalSchedule.spatial(GRID, row_lag)
    assert schedule.num_steps < HEIGHT * WIDTH
    expected = oracles.diagonal_reference(
        logits_fn,
        torch.empty(1, 0, dtype=torch.int64),
        *(1, HEIGHT, WIDTH, row_lag, schedule.num_steps),
        actions=torch.tensor([[[CODES + LABEL]]]),
    )
    assert torch.equal(images(prepared, [LABEL], schedule, scale), expected[:, 0])


@pytest.mark.proves("LlamaGen", "int8")
def test_int8_keeps_close_to_float32(model):
    """Of one token; random models are chaotic, and later ones follow from it."""
    tokens, slots = torch.tensor([[CODES + LABEL, 3]]), torch.arange(2)
    logits = []
    for prepared in (model, NativeModel(model, "int8")):
        cache, seen = prepared.make_cache(1, 3), Seen(slots, slots, slots, slots)
        logits.append(prepared.forward(tokens, slots, slots, seen, cache)[..., :CODES])
    assert (logits[0] - logits[1]).std() < 0.1 * logits[0].std()


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        *(("llamagen-b", 111), ("llamagen-l", 343), ("llamagen-xl", 775)),
        *(("llamagen-xxl", 1411), ("llamagen-3b", 3097)),
    ],
)
def test_presets_have_the_parameters_of_the_released_models(name, millions):
    """Our output layer has rows of zeros for the classes."""
    config = PRESETS[name]
    with torch.device("meta"):
        count = sum(weight.numel() for weight in Transformer(config).parameters())
    count -= (config.vocab_size - config.image_vocab_size) * config.hidden_size
    assert round(count / 1e6) == millions


def test_a_folder_of_ours_makes_the_same_images(released, tmp_path):
    save_model(load_model(released), tmp_path / "ours")
    tokens = torch.tensor([[CODES + LABEL, 4, 9]])
    ours = load_model(tmp_path / "ours")
    assert torch.equal(ours.logits(tokens), load_model(released).logits(tokens))


def test_files_that_are_none_are_refused_in_one_line(weights, tmp_path):
    path = tmp_path / "c2i_B_256.pt"
    edits = {
        "missing key 'layers.1.attention.wqkv.weight'": partial(
            _without, "layers.1.attention.wqkv.weight"
        ),
        "1 missing tensor: norm.weight": partial(_without, "norm.weight"),
        "1 unknown tensor: bias": lambda found: found | {"bias": torch.zeros(3)},
        "missing key 'cls_embedding.cap_proj.fc1.weight'": lambda found: (
            found | {"cls_embedding.uncond_embedding": torch.zeros(120, 8)}
        ),
    }
    for message, edit in edits.items():
        torch.save({"model": edit(weights)}, path)
        with pytest.raises(ValueError, match=r"c2i_B_256\.pt: LlamaGen checkpoint: ") as caught:
            find_model(path)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def _without(name: str, weights: Tensors) -> Tensors:
    return {other: value for other, value in weights.items() if other != name}
