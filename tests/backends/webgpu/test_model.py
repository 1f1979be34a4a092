"""The shaders against PyTorch's Transformer, on the GPU that `wgpu` finds."""

import re
import sys

import pytest
import torch

import diagd
from diagd.backends.prepare import prepare
from diagd.backends.webgpu.model import Device, WebGPUModel
from diagd.decoding.sampling_options import SamplingOptions
from tests.backends.webgpu.adapter import on_webgpu
from tests.models.feeding import feed, scrambled_steps, visible_under
from tests.models.tiny import KINDS, random_tokens, tiny_model, with_int8_weights

DTYPES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@pytest.fixture
def small_tiles(monkeypatch):
    """Multiply in tiles of four rows alone, which lavapipe compiles in half the time of sixteen."""
    monkeypatch.setattr("diagd.backends.webgpu.model.TILES", (4,))


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"chameleon", "glm-image", "mammothmoda2"}))
@torch.no_grad()
def test_logits_are_those_of_pytorch(small_tiles, kind):
    plain, tokens, steps = tiny_model(**KINDS[kind]), random_tokens(1, 40), scrambled_steps(40, 4)
    expected = plain.logits(tokens, visible=visible_under(steps))
    logits = feed(on_webgpu(plain), tokens, steps)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_weights_of_two_bytes_are_unpacked(small_tiles, dtype):
    """Norms are folded into them before they are rounded, so they are not PyTorch's."""
    plain, tokens = tiny_model(**KINDS["world"]), random_tokens(1, 9)
    expected = plain.logits(tokens)
    logits = feed(on_webgpu(plain.to(dtype)), tokens, torch.arange(9))
    assert (logits - expected).abs().max() <= DTYPES[dtype] * expected.abs().max()


@pytest.mark.parametrize("kind", ["cosmos", "wham"])
@torch.no_grad()
def test_weights_of_one_byte_are_those_that_were_rounded(small_tiles, kind):
    """Activations are not rounded. One kind has norms of heads, the other biases of layer norms."""
    tokens, steps = random_tokens(1, 40), scrambled_steps(40, 4)
    rounded = with_int8_weights(tiny_model(**KINDS[kind]))
    expected = rounded.logits(tokens, visible=visible_under(steps))
    plain = tiny_model(**KINDS[kind]).logits(tokens, visible=visible_under(steps))
    logits = feed(on_webgpu(tiny_model(**KINDS[kind]), int8=True), tokens, steps)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (plain - expected).abs().max() >= 1e-3 * expected.abs().max()


def decode(model, strategy, sampling, num_frames=4, batch_size=1, seed=5):
    """Decode frames of 3 x 5 tokens, more than the context holds (three)."""
    engine = diagd.DecodingEngine(
        model, diagd.FrameFormat(3, 5, 2), batch_size=batch_size, sampling=sampling, seed=seed
    )
    engine.prefill(random_tokens(batch_size, 16, vocab_size=44))
    actions = 44 + random_tokens(batch_size, num_frames, 2, vocab_size=6)
    return torch.stack(list(engine.decode(strategy, actions)), 1)


@pytest.mark.parametrize(
    ("strategy", "sampling"),
    [
        ("k=1", SamplingOptions()),
        ("k=2", SamplingOptions(1.0, valid_range=(3, 44))),
        ("k=1,d=3", SamplingOptions(0.8, top_k=9)),
        ("raster", SamplingOptions(1.0, top_p=0.9)),
        ("k=1", SamplingOptions(1.3, top_k=30, top_p=0.7, exclusive_top_p=True)),
    ],
    ids=["greedy", "temperature", "top-k", "top-p", "all"],
)
def test_tokens_are_those_of_pytorch_beyond_a_full_context(strategy, sampling):
    """With one seed: noise is the same, and rounding turns no draw of these."""
    expected = decode(tiny_model(), strategy, sampling)
    assert torch.equal(decode(on_webgpu(tiny_model()), strategy, sampling), expected)


def test_strategies_take_turns_in_sliding_layers(small_tiles):
    """One runs a frame in one submission, the other step by step with a mask from here."""
    decoded, strategies = [], ("k=1", "exact", "k=1")
    for prepared in (on_webgpu, lambda model: model):
        model = prepared(tiny_model(**KINDS["sliding"]))
        sampling = SamplingOptions(1.0, valid_range=(3, 44))
        engine = diagd.DecodingEngine(model, diagd.FrameFormat(3, 5, 2), sampling=sampling, seed=5)
        engine.prefill(random_tokens(1, 15, vocab_size=44))
        actions = 44 + random_tokens(1, 3, 2, vocab_size=6)
        for strategy, given in zip(strategies, actions.split(1, 1), strict=True):
            decoded += engine.decode(strategy, given)
    ours, theirs = torch.stack(decoded).chunk(2)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("seed", [2**40 + 2**31 + 3, -5])
def test_a_seed_of_64_bits_draws_as_in_pytorch(seed):
    given = "k=1", SamplingOptions(1.0), 2, 1, seed
    assert torch.equal(decode(on_webgpu(tiny_model()), *given), decode(tiny_model(), *given))


def test_a_frame_is_one_submission_of_few_dispatches(monkeypatch):
    model, submitted = on_webgpu(tiny_model()), []
    assert isinstance(model, WebGPUModel)
    submit = model.submit
    monkeypatch.setattr(
        model, "submit", lambda cache, batch: submitted.append(batch) or submit(cache, batch)
    )
    decode(model, "k=1", SamplingOptions())
    assert [len(batch.tasks) for batch in submitted[1:]] == [7] * 4  # behind the prefill
    layers = model.config.num_layers
    for batch in submitted[1:]:
        for task in batch.tasks:
            assert len(list(model.dispatches(task, batch.draws))) == 4 * layers + 3


def test_logits_that_are_broken_are_found():
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(torch.nan)
    with pytest.raises(ValueError, match=r"no token can be sampled at frame 0, row 0, column 0"):
        decode(on_webgpu(model), "k=1", SamplingOptions())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 22}, "hidden_size to be a multiple of 4, got 22"),
        ({"intermediate_size": 42}, "intermediate_size to be a multiple of 4, got 42"),
        ({"head_dim": 260}, "head_dim to be at most 256, got 260"),
        (KINDS["chameleon"], "does not support head_size or head_norm"),
        ({"mlp": "exact_gelu"}, "does not support exact GELU in MLPs"),
        ({"position_table": True}, "does not support cross-attention or a position table"),
        ({"post_norms": True}, "does not support norms behind layers or a second MLP"),
        (KINDS["mammothmoda2"], "does not support norms behind layers or a second MLP"),
    ],
)
def test_a_model_that_the_shaders_cannot_run_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(tiny_model(**changes), "webgpu")


def test_weights_of_eight_bytes_are_refused():
    with pytest.raises(
        ValueError, match=r"backend webgpu does not support weights in torch\.float64"
    ):
        prepare(tiny_model().double(), "webgpu")


def test_without_a_gpu_it_says_so(monkeypatch):
    def nothing():
        raise OSError("wgpu finds no GPU (none)")

    monkeypatch.setattr("diagd.backends.webgpu.model.open_device", nothing)
    with pytest.raises(ValueError, match=r"backend webgpu: wgpu finds no GPU \(none\)"):
        prepare(tiny_model(), "webgpu")


def test_without_wgpu_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wgpu", None)
    with pytest.raises(ValueError, match=r"needs wgpu: pip install -e '\.\[webgpu\]"):
        Device()
