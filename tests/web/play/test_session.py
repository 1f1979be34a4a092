import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diagd.data.video import read_video
from diagd.families.defaults import GenerationDefaults
from diagd.web.play.session import Controls, Session, Start, checksum_of
from tests.worlds import NAMES, PROMPT_ACTIONS, WIDTH, smooth_frames

choices = st.tuples(
    st.sampled_from(NAMES),
    st.builds(
        Controls,
        order=st.sampled_from(["raster", "exact", 1, 2, WIDTH]),
        temperature=st.sampled_from([0, 0.5, 1.0, 2.0]),
        top_p=st.sampled_from([0.3, 0.9, 1]),
    ),
)


@pytest.fixture(scope="module")
def start(world):
    return Start(read_video(world / "prompt.mp4").frames[-3:], PROMPT_ACTIONS[-2:], seed=5)


def test_frame_by_frame_it_is_the_pipeline_s_own_stream(dreamer, start):
    actions = [NAMES[number % 4] for number in range(11)]  # longer than the context
    session = Session(dreamer, start)
    ours = [session.advance(action, Controls()) for action in actions]
    frames = dreamer.stream(start.frames, iter(actions), context_actions=start.actions, seed=5)
    for tokens, frame in zip(ours, frames, strict=True):
        assert torch.equal(dreamer.tokenizer.decode(tokens)[0], frame)


@settings(max_examples=15, deadline=None)
@given(st.lists(choices, min_size=1, max_size=10))
def test_a_history_replays_exactly_whatever_was_changed_on_the_way(dreamer, start, chosen):
    first, second = Session(dreamer, start), Session(dreamer, start)
    for action, controls in chosen:
        first.advance(action, controls)
    for moment in first.history:
        second.advance(moment.action, moment.controls)
    assert second.history == first.history


def test_controls_count_from_the_next_frame_on(dreamer, start):
    """Frames drawn with the same controls are the same, before as after others were used."""
    hot, cold = Controls(1, 2.0, 1.0), Controls(1, 0)
    plain, changed = Session(dreamer, start), Session(dreamer, start)
    assert torch.equal(plain.advance("left", hot), changed.advance("left", hot))
    assert not torch.equal(plain.advance("left", hot), changed.advance("left", cold))


def test_exact_frames_are_raster_s_among_others(dreamer, start):
    slow, fast = Session(dreamer, start), Session(dreamer, start)
    for number in range(11):  # longer than the context
        order = ("raster", 1, "raster")[number % 3]
        expected = slow.advance("left", Controls(order))
        tokens = fast.advance("left", Controls("exact" if order == "raster" else order))
        assert torch.equal(tokens, expected)
        assert (sum(fast.runs), len(fast.runs)) == ((16, fast.num_steps) if order != 1 else (0, 0))
        assert slow.runs == []
        assert fast.num_steps <= slow.num_steps + 1  # the action may take a pass of its own


def test_defaults_are_the_pipeline_s():
    assert (Controls().temperature, Controls().top_p) == (
        GenerationDefaults.temperature,
        GenerationDefaults.top_p,
    )


def test_a_seed_makes_another_dream(dreamer, start):
    dreams = []
    for seed in (1, 1, 2):
        session = Session(dreamer, Start(start.frames, start.actions, seed))
        for _ in range(3):
            session.advance("forward", Controls(1, 2.0, 1.0))
        dreams.append([moment.checksum for moment in session.history])
    assert dreams[0] == dreams[1] != dreams[2]


def test_what_the_model_cannot_do_is_refused_and_changes_nothing(dreamer, start):
    session = Session(dreamer, start)
    with pytest.raises(ValueError, match="unknown action 'fly'"):
        session.advance("fly", Controls())
    with pytest.raises(ValueError, match=r"row_lag must be in \[1, width=5\], got 6"):
        session.advance("left", Controls(6))
    assert (session.history, session.engine.num_generated) == ([], 0)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "1", True, None])
def test_a_seed_is_a_whole_number_that_javascript_holds(seed):
    with pytest.raises(ValueError, match="seed must be a whole number in"):
        Start(smooth_frames(1, 24, 40), (), seed)


def test_a_checksum_sees_every_token():
    tokens = torch.arange(15).view(1, 3, 5)
    other = tokens.clone()
    other[0, 2, 4] += 1
    assert checksum_of(tokens) == checksum_of(tokens.to(torch.int16)) != checksum_of(other)


def test_it_says_how_many_frames_the_model_holds(dreamer, start):
    assert Session(dreamer, start).max_frames == 8
