import pytest
import torch

from diagd.evaluation.attention import KINDS, ROW_LAGS, capture_attention, measure_attention
from tests.models.tiny import random_tokens, tiny_model

HEIGHT, WIDTH = 3, 5
SIZE = HEIGHT * WIDTH
LAYERS, HEADS = 2, 4


def measure(model, tokens, frame=2, **options):
    return measure_attention(model, tokens, HEIGHT, WIDTH, frame, **options)


def sequence(frame, num_actions, batch_size=2):
    length = (frame + 1) * (SIZE + num_actions) - num_actions
    return random_tokens(batch_size, length, vocab_size=44)


def attention_of(model, tokens, start):
    """Return (layers, heads, Q, N), the mean over the batch, in one chunk."""
    maps = {}
    length = start + SIZE - 1
    capture_attention(
        model,
        tokens[:, :length],
        start - 1,
        lambda layer, _query, part: maps.update({layer: part.mean(0)}),
        chunk=length,
    )
    return torch.stack([maps[layer] for layer in range(LAYERS)])


def counted(attention, frame, num_actions):
    """Sort every token by the words of KINDS, one at a time."""
    shares = torch.zeros(LAYERS, HEADS, len(KINDS))
    hidden = torch.zeros(LAYERS, HEADS, len(ROW_LAGS))
    places = {}
    for t in range(frame + 1):
        for i in range(HEIGHT):
            for j in range(WIDTH):
                places[t * (SIZE + num_actions) + i * WIDTH + j] = t, i, j
    for query in range(SIZE):
        i, j = divmod(query, WIDTH)
        for slot in range(attention.shape[-1]):
            mass = attention[:, :, query, slot]
            kind = "elsewhere"
            if slot not in places:
                kind = "conditioning"
            else:
                t, row, column = places[slot]
                if t == frame:
                    for n, lag in enumerate(ROW_LAGS):
                        if row * min(lag, WIDTH) + column >= i * min(lag, WIDTH) + j:
                            hidden[:, :, n] += mass / SIZE
                if (t, row, column) == (frame, i, j - 1):
                    kind = "previous_in_row"
                elif t == frame and column == j and row < i:
                    kind = {1: "row_above", 2: "two_rows_above"}.get(i - row, "further_up")
                elif (row, column) == (i, j) and t < frame:
                    kind = "previous_frame" if t == frame - 1 else "older_frames"
                elif t >= frame - 1 and abs(row - i) <= 1 and abs(column - j) <= 1:
                    kind = "neighbours"
            shares[:, :, list(KINDS).index(kind)] += mass / SIZE
    return shares, hidden


@pytest.mark.parametrize(("frame", "num_actions"), [(1, 1), (2, 2), (2, 0)])
def test_every_token_is_counted_for_what_it_is(frame, num_actions):
    model, tokens = tiny_model(), sequence(frame, num_actions)
    found = measure(model, tokens, frame, num_action_tokens=num_actions, chunk=4)
    start = frame * (SIZE + num_actions)
    attention = attention_of(model, tokens, start)
    shares, hidden = counted(attention, frame, num_actions)
    torch.testing.assert_close(found.shares, shares, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.hidden, hidden, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.shares.sum(-1), torch.ones(LAYERS, HEADS))
    mean = attention.mean((0, 1))
    torch.testing.assert_close(found.mean_map[:, :-1], mean, atol=1e-6, rtol=0)
    assert not found.mean_map[:, -1].any()  # the last token of a frame predicts another one


def test_attention_that_is_even_has_the_even_shares():
    model, tokens = tiny_model(), sequence(1, 2)
    with torch.no_grad():
        for block in model.model.blocks:
            block.self_attn.q_proj.weight.zero_()
    found = measure(model, tokens, 1, num_action_tokens=2)
    for head in found.shares.flatten(0, 1):
        torch.testing.assert_close(head, found.even_shares, atol=1e-6, rtol=0)
    for head in found.hidden.flatten(0, 1):
        torch.testing.assert_close(head, found.even_hidden, atol=1e-6, rtol=0)


def test_a_layer_and_a_head_can_be_looked_at_alone():
    model, tokens = tiny_model(), sequence(1, 0)
    attention = attention_of(model, tokens, SIZE)
    for layer, head, expected in (
        (1, None, attention[1].mean(0)),
        (None, 2, attention[:, 2].mean(0)),
        (0, 3, attention[0, 3]),
    ):
        found = measure(model, tokens, 1, layer=layer, head=head, chunk=4)
        torch.testing.assert_close(found.mean_map[:, :-1], expected, atol=1e-6, rtol=0)
        assert torch.equal(found.shares, measure(model, tokens, 1, chunk=4).shares)


@pytest.mark.parametrize("frames_back", [0, 1])
def test_around_a_token_is_the_mean_by_offset(frames_back):
    found = measure(tiny_model(), sequence(1, 2), 1, num_action_tokens=2)
    around = found.around(frames_back, reach=2)
    start = (SIZE + 2) * (1 - frames_back)
    for up in range(-2, 3):
        for left in range(-2, 3):
            masses = []
            for i in range(HEIGHT):
                for j in range(WIDTH):
                    row, column = i + up, j + left
                    inside = 0 <= row < HEIGHT and 0 <= column < WIDTH
                    if inside and (frames_back or (row, column) < (i, j)):
                        slot = start + row * WIDTH + column
                        masses.append(found.mean_map[i * WIDTH + j, slot])
            mean = torch.stack(masses).mean() if masses else torch.tensor(torch.nan)
            torch.testing.assert_close(around[up + 2, left + 2], mean, equal_nan=True)


def test_the_report_names_all_numbers():
    report = measure(tiny_model(), sequence(1, 2), 1, num_action_tokens=2).report()
    assert (report["frame"], report["grid"], len(report["layers"])) == (1, "3x5", LAYERS)
    assert [*report["shares"]] == [*KINDS] == [*report["layers"][1]["heads"][3]]
    assert sum(report["shares"].values()) == pytest.approx(1, abs=1e-4)
    lags = report["not_written_yet"]
    assert lags["k=1"] > lags["k=2"] > lags["k=4"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frame": 0}, r"frame 0 of 3x5 takes tokens \[0, 15\) and one before"),
        ({"frame": 2}, r"frame 2 of 3x5 takes tokens \[30, 45\) .* got tokens of shape \(2, 30\)"),
        ({"layer": 2}, r"layer must be in \[0, 2\), got 2"),
        ({"head": -1}, r"head must be in \[0, 4\), got -1"),
    ],
)
def test_what_is_not_there_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        measure(tiny_model(), sequence(1, 0), **{"frame": 1, **options})
