import math

import pytest
import torch

from diagd.models.attention import RMSNorm, attend
from diagd.models.config import ModelConfig
from diagd.models.rotary import Rotary, grid_coordinates
from tests.models.tiny import tiny_fields


def coordinates_by_counting(height, width, num_action_tokens, prefix_length, length):
    """Write the sequence down token by token: prefix, frame 0, actions 1, frame 1, ..."""
    rows = [(0, 0, 0)] * prefix_length
    frame = 0
    while len(rows) < length:
        if frame > 0:
            rows += [(frame, -1, action) for action in range(num_action_tokens)]
        rows += [(frame, i, j) for i in range(height) for j in range(width)]
        frame += 1
    return rows[:length]


@pytest.mark.parametrize(("num_action_tokens", "prefix_length"), [(0, 0), (2, 0), (0, 1), (7, 3)])
def test_grid_coordinates_count_frames_actions_rows_and_columns(num_action_tokens, prefix_length):
    config = ModelConfig(
        **tiny_fields(
            position="rope3d", num_action_tokens=num_action_tokens, prefix_length=prefix_length
        )
    )
    expected = coordinates_by_counting(3, 5, num_action_tokens, prefix_length, 64)
    found = grid_coordinates(config, torch.arange(64))
    assert found is not None
    assert found.T.tolist() == [list(row) for row in expected]


def test_plain_positions_have_no_coordinates():
    assert grid_coordinates(ModelConfig(**tiny_fields()), torch.arange(3)) is None


def turns_of(rotary, positions, dtype=torch.float32):
    return rotary(positions, grid_coordinates(rotary.config, positions), dtype)


def test_3d_rotary_follows_the_formula():
    config = ModelConfig(
        **tiny_fields(position="rope3d", head_dim=20, rope_theta=500.0, prefix_length=1)
    )
    cos, sin = turns_of(Rotary(config), torch.arange(64))
    space_dim, time_dim = 6, 8  # 20 // 6 * 2, and the rest
    for position, (t, i, j) in enumerate(coordinates_by_counting(3, 5, 2, 1, 64)):
        angles = [t * 500.0 ** (-2 * n / time_dim) for n in range(time_dim // 2)]
        angles += [i * 500.0 ** (-2 * n / space_dim) for n in range(space_dim // 2)]
        angles += [j * 500.0 ** (-2 * n / space_dim) for n in range(space_dim // 2)]
        assert cos[position].tolist() == pytest.approx([math.cos(a) for a in angles], abs=1e-5)
        assert sin[position].tolist() == pytest.approx([math.sin(a) for a in angles], abs=1e-5)


def test_rotary_is_real_on_the_meta_device_never_rounded_and_not_saved():
    with torch.device("meta"):
        rotary = Rotary(ModelConfig(**tiny_fields()))
    assert rotary.frequencies.device.type == "cpu"
    assert rotary.bfloat16().frequencies.dtype == torch.float64
    assert not rotary.state_dict()


@pytest.mark.parametrize("position", ["rope", "rope3d"])
def test_rotary_is_as_exact_after_a_month_as_at_the_start(position):
    rotary = Rotary(ModelConfig(**tiny_fields(position=position, prefix_length=0)))
    positions, later = torch.arange(2, 20), 17 * 10**9  # whole frames of 15 + 2
    (cos, sin), (cos_later, sin_later) = (
        turns_of(rotary, positions + start, torch.float64) for start in (0, later)
    )
    first = cos * cos[:1] + sin * sin[:1]  # of the distance to the first
    again = cos_later * cos_later[:1] + sin_later * sin_later[:1]
    torch.testing.assert_close(again, first, atol=2e-6, rtol=0)


def test_rms_norm_computes_in_float32_and_returns_the_input_dtype():
    norm = RMSNorm(16, 1e-5).bfloat16()
    x = (torch.randn(3, 16) * 100).bfloat16()
    out = norm(x)
    expected = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected.bfloat16())


def softmax_attention(queries, keys, values, visible):
    """One head, one lane at a time."""
    group = queries.shape[1] // keys.shape[1]
    out = torch.zeros_like(queries)
    for b in range(queries.shape[0]):
        for h in range(queries.shape[1]):
            for lane in range(queries.shape[2]):
                seen = visible[lane]
                scores = keys[b, h // group, seen] @ queries[b, h, lane] / queries.shape[-1] ** 0.5
                out[b, h, lane] = scores.softmax(0) @ values[b, h // group, seen]
    return out


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_attention_matches_attention_head_by_head(num_kv_heads):
    queries = torch.randn(2, 6, 3, 8)
    keys, values = torch.randn(2, 2, num_kv_heads, 7, 8)
    visible = torch.rand(3, 7) > 0.4
    visible[:, 2] = True
    expected = softmax_attention(queries, keys, values, visible)
    torch.testing.assert_close(attend(queries, keys, values, visible), expected)
    first = queries, keys[:, :, :3], values[:, :, :3]  # without a mask it is causal
    expected = softmax_attention(*first, torch.ones(3, 3, dtype=torch.bool).tril())
    torch.testing.assert_close(attend(*first, None), expected)
