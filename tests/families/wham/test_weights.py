"""WHAM in miniature against what its own code computes with the same weights."""

import pytest
import torch

from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.sampling import SamplingOptions, truncate
from diagd.decoding.schedule import DiagonalSchedule, FrameFormat, TokenGrid
from diagd.families.checkpoints import load_model
from tests.families.goldens import close, feed_in_turn, model_golden
from tests.golden import FIXTURES

WHAM = ["wham_tiny", "wham_tiny_v2"]


@pytest.mark.parametrize("name", WHAM)
@torch.no_grad()
def test_wham_logits_are_those_of_its_own_code(name):
    model, data = load_model(FIXTURES / name / "model.ckpt"), model_golden(name)
    close(model.logits(data["full_tokens"]), data["full_logits"])
    prefill = int(data["incremental_prefill_len"])
    first, others = feed_in_turn(model, data["incremental_tokens"], prefill)
    close(torch.cat([first[:, -1:], others], dim=1), data["incremental_logits"])


def image_ranges(config):
    """WHAM bans id 0 at a frame's first place."""
    ranges = torch.zeros(config.grid_height, config.grid_width, 2, dtype=torch.int64)
    ranges[..., 1] = config.image_vocab_size
    ranges[0, 0, 0] = 1
    return ranges


@pytest.mark.parametrize("name", WHAM)
def test_wham_dreams_in_its_sliding_context_are_its_own(name):
    """The full context drops its oldest frame before every frame: keep_frames is one less."""
    model, data = load_model(FIXTURES / name), model_golden(name)
    config = model.config
    frame = config.tokens_per_frame + 16
    context = data["tokens"][:, frame:]  # all but the oldest step, the last action included
    kept = context.shape[1] // frame
    forced = data["dream_future_action_tokens"][:, :-1] + config.image_vocab_size
    actions = torch.cat([context[:, None, -16:], forced], dim=1)
    engine = DecodingEngine(
        model,
        FrameFormat(config.grid_height, config.grid_width, 16),
        batch_size=2,
        keep_frames=kept,
        sampling=SamplingOptions(valid_range=image_ranges(config)),
    )
    engine.prefill(context[:, :-16], kept)
    schedule = DiagonalSchedule.raster(TokenGrid(3, config.grid_height, config.grid_width))
    dreamt = torch.stack([tokens.flatten(1) for tokens in engine.decode(schedule, actions)], dim=1)
    assert torch.equal(dreamt, data["dream_image_tokens"])
    assert engine.stream.num_dropped_frames == 2


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("sample_probs_t0p9", SamplingOptions(0.9)),
        ("sample_probs_t0p9_p0p8", SamplingOptions(0.9, top_p=0.8, exclusive_top_p=True)),
        ("sample_probs_t0p9_p1p0", SamplingOptions(0.9, top_p=1.0, exclusive_top_p=True)),
        ("sample_probs_t1p0_k5", SamplingOptions(1.0, top_k=5)),
    ],
)
@pytest.mark.parametrize("name", WHAM)
def test_wham_draws_from_the_probabilities_of_its_own_rule(name, key, options):
    data = model_golden(name)
    low, high = data["sample_valid_range"].tolist()  # inclusive
    kept = truncate(data["sample_logits"][:, low : high + 1] / options.temperature, options)
    expected = data[key][:, low : high + 1]
    torch.testing.assert_close(kept.softmax(-1), expected, atol=1e-6, rtol=0)
