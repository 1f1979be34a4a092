import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diagd.data.video import read_video
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.decoding.strategies.table import Diagonal, Exact, Raster, parse_strategy
from diagd.families.defaults import GenerationDefaults
from diagd.web.play.session import Controls, Session, SessionLog, checksum_of
from tests.worlds import HEIGHT, NAMES, PROMPT_ACTIONS, WIDTH

choices = st.tuples(
    st.sampled_from(NAMES),
    st.builds(
        Controls,
        strategy=st.sampled_from([Raster(), Exact(), Diagonal(1), Diagonal(2), Diagonal(WIDTH)]),
        temperature=st.sampled_from([0, 0.5, 1.0, 2.0]),
        top_p=st.sampled_from([0.3, 0.9, 1]),
    ),
)


@pytest.fixture(scope="module")
def start(world):
    return SessionLog(read_video(world / "prompt.mp4").frames[-3:], PROMPT_ACTIONS[-2:], seed=5)


def test_frame_by_frame_it_is_the_pipeline_s_own_stream(generator, start):
    actions = [NAMES[number % 4] for number in range(11)]  # longer than the context
    session = Session(generator, start)
    ours = [session.advance(action, Controls()) for action in actions]
    frames = generator.stream(start.frames, iter(actions), context_actions=start.actions, seed=5)
    for tokens, frame in zip(ours, frames, strict=True):
        assert torch.equal(generator.tokenizer.decode(tokens)[0], frame)


@settings(max_examples=15, deadline=None)
@given(st.lists(choices, min_size=1, max_size=10))
def test_a_history_replays_exactly_whatever_was_changed_on_the_way(generator, start, chosen):
    first, second = Session(generator, start), Session(generator, start)
    for action, controls in chosen:
        first.advance(action, controls)
    for record in first.history:
        second.advance(record.action, record.controls)
    assert second.history == first.history


def test_controls_count_from_the_next_frame_on(generator, start):
    """Frames drawn with the same controls are the same, before as after others were used."""
    hot, cold = Controls(Diagonal(1), 2.0, 1.0), Controls(Diagonal(1), 0)
    plain, changed = Session(generator, start), Session(generator, start)
    assert torch.equal(plain.advance("left", hot), changed.advance("left", hot))
    assert not torch.equal(plain.advance("left", hot), changed.advance("left", cold))


def test_a_world_s_own_top_k_holds_while_it_is_played(generator, start):
    """The likeliest token alone is what greedy decoding takes, however hot."""
    world = dataclasses.replace(generator, defaults=GenerationDefaults(top_k=1))
    hot, greedy = Session(world, start), Session(world, start)
    for action in ("left", "forward"):
        drawn = hot.advance(action, Controls(Diagonal(1), 2.0, 1.0))
        assert torch.equal(drawn, greedy.advance(action, Controls(Diagonal(1), 0)))


def test_exact_frames_are_raster_s_among_others(generator, start):
    slow, fast = Session(generator, start), Session(generator, start)
    for number in range(11):  # longer than the context
        strategy = ("raster", "k=1", "raster")[number % 3]
        expected = slow.advance("left", Controls(parse_strategy(strategy)))
        faster = Exact() if strategy == "raster" else parse_strategy(strategy)
        tokens = fast.advance("left", Controls(faster))
        assert torch.equal(tokens, expected)
        assert fast.num_steps <= slow.num_steps + 1  # the action may take a step of its own
        if strategy == "raster":
            assert slow.written_at == tuple(range(15))
            assert list(fast.written_at) == sorted(fast.written_at)
            assert (len(fast.written_at), fast.written_at[-1]) == (15, fast.num_steps - 1)


@pytest.mark.parametrize("row_lag", [1, 2, WIDTH])
def test_it_says_which_step_wrote_each_token(row_lag, generator, start):
    session = Session(generator, start)
    session.advance("left", Controls(Diagonal(row_lag)))
    schedule = DiagonalSchedule.spatial(TokenGrid(1, HEIGHT, WIDTH), row_lag)
    written_at = [schedule.step_of(0, i, j) for i in range(HEIGHT) for j in range(WIDTH)]
    assert list(session.written_at) == written_at
    assert session.num_steps == max(written_at) + 1


def test_what_was_let_in_is_not_checked_again(generator, start, monkeypatch):
    """Messages, saved dreams and options are doors; behind them stands the kernels' boundary."""

    def refuse(*_):
        pytest.fail("a frame checks what its door has checked")

    session = Session(generator, start)
    for name in ("generate_tokens.check_ids", "strategies.table.check_at_least"):
        monkeypatch.setattr(f"diagd.decoding.{name}", refuse)
    monkeypatch.setattr("diagd.pipeline.generator.as_actions", refuse)
    monkeypatch.setattr("diagd.decoding.generate_tokens.as_strategy", refuse)
    assert session.advance("left", Controls()).shape == (1, HEIGHT, WIDTH)


def test_a_checksum_sees_every_token():
    tokens = torch.arange(15).view(1, 3, 5)
    other = tokens.clone()
    other[0, 2, 4] += 1
    assert checksum_of(tokens) == checksum_of(tokens.to(torch.int16)) != checksum_of(other)
