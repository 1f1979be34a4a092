import time
from dataclasses import replace
from fractions import Fraction

import pytest

from diagd.decoding.strategies.table import Diagonal, Raster
from diagd.pipeline.scenes import StartScene
from diagd.web.play.messages import (
    Act,
    Adjust,
    Begin,
    Kept,
    Pause,
    Record,
    Seen,
    Settings,
    Start,
    Step,
)
from diagd.web.play.player import MAX_STEPS, WINDOW, Note, Player, from_picture
from diagd.web.play.session import Controls, Session, SessionLog, load_log, save_log
from tests.worlds import HEIGHT_PX, WIDTH_PX, smooth_frames

SCENE = StartScene("here", smooth_frames(1, HEIGHT_PX, WIDTH_PX), (), Fraction(8))
START = SessionLog(smooth_frames(2, HEIGHT_PX, WIDTH_PX), ("left",), 3)


def begun(generator):
    """Return a player whose first picture is sent."""
    player = Player(generator, [SCENE], None)
    player.begin(START)
    player.turn()
    return player


@pytest.fixture
def player(generator):
    return begun(generator)


def see(player):
    player.handle(Seen(player.sent))


def actions(player):
    return [record.action for record in player.session.history]


def test_the_first_turn_shows_where_one_stands(generator):
    player = Player(generator, [SCENE], None)
    assert not player.ready(time.monotonic())
    player.begin(START)
    assert player.ready(time.monotonic())
    frame = player.turn()()
    header = frame.message
    assert isinstance(header, Start)
    assert (header.frame, header.length, header.held) == (1, 0, 2)
    difference = from_picture(frame.picture).float() - START.frames[-1].float()
    assert difference.abs().mean() < 4  # JPEG


def test_the_newest_press_wins_and_nothing_queues(player):
    for number, action in enumerate(("left", "right", "forward"), start=1):
        player.handle(Act(action, number))
    assert player.turn()().message.input == 3
    player.turn()
    assert actions(player) == ["forward", "forward"]


def test_a_paused_world_generates_one_frame_for_each_step_in_order(player):
    see(player)
    for message in (Pause(True), Act("forward", 1), Step("left", 2), Step("right", 3)):
        player.handle(message)
    headers = []
    while player.ready(time.monotonic()):
        headers.append(player.turn()().message)
        see(player)
    assert [(one.action, one.input, one.received) for one in headers] == [
        ("left", 2, 3),
        ("right", 3, 3),
    ]


def test_a_step_does_not_wait_for_the_pace(player):
    player.handle(Adjust(paced=True))
    for _ in range(2):
        player.turn()
        see(player)
    now = player.due - 0.01
    assert not player.ready(now)
    player.handle(Step("left", 1))
    assert player.ready(now)


def test_steps_are_dropped_by_a_beginning_and_are_never_many(player):
    for number in range(MAX_STEPS):
        player.handle(Step("left", number))
    with pytest.raises(ValueError, match=f"at most {MAX_STEPS} steps may wait"):
        player.handle(Step("left", MAX_STEPS))
    player.handle(Begin(0, 4))
    player.handle(Step("right", MAX_STEPS + 1))
    player.turn()
    player.turn()
    assert actions(player) == ["right"]
    assert not player.steps


def test_pictures_are_the_pixels_themselves_where_that_is_asked_for(generator):
    player = Player(generator, [SCENE], None)
    player.handle(Adjust(paced=False, lossless=True))
    player.begin(START)
    assert from_picture(player.turn()().picture).equal(START.frames[-1])


@pytest.mark.parametrize(
    ("pressed", "frames"),
    [
        (["left", "right", "left"], ["right", "left"]),  # while another key is held
        (["none", "right", "none"], ["right", "none"]),
        (["right", "none", "forward"], ["right", "forward"]),
        (["none", "right", "none", "forward", "none"], ["forward", "none"]),
        (["none", "left"], ["left", "left"]),  # the held key itself, let go and pressed again
    ],
)
def test_a_key_tapped_between_two_frames_acts_for_one_of_them(pressed, frames, player):
    """The newest one, whatever was pressed before and after it."""
    player.handle(Act("left", 1))
    player.turn()
    for number, action in enumerate(pressed, start=2):
        player.handle(Act(action, number))
    for _ in range(2):
        player.turn()
    assert actions(player) == ["left", *frames]


def test_a_key_that_is_held_counts_until_it_is_let_go(player):
    player.handle(Act("left", 1))
    for _ in range(2):
        player.turn()
    player.handle(Act("none", 2))
    player.turn()
    player.turn()
    assert actions(player) == ["left", "left", "none", "none"]


def test_no_more_than_the_window_is_under_way(player):
    now = time.monotonic()
    for sent in range(1, WINDOW):
        assert player.sent == sent
        player.turn()
    assert not player.ready(now)
    see(player)
    assert player.ready(now)


def test_a_pause_holds_the_dream_but_not_a_new_one(player):
    see(player)
    player.handle(Pause(True))
    assert not player.ready(time.monotonic())
    player.begin(START)
    assert player.ready(time.monotonic())


def test_the_world_s_own_pace_puts_frames_off(generator, monkeypatch):
    monkeypatch.setattr("diagd.web.play.player.monotonic", lambda: 100.0)
    player = begun(generator)
    player.handle(Adjust(paced=True))
    player.turn()
    see(player)
    assert player.due == 100.0
    player.turn()
    see(player)
    assert not player.ready(100.1)
    assert player.ready(100.125)
    for _ in range(3):
        player.turn()
    assert player.due == 100.5
    player.handle(Adjust(paced=False))
    player.turn()
    assert player.due == 0


def test_another_seed_asked_for_while_a_dream_is_built_is_of_the_same_place(player, monkeypatch):
    """What is being built can be seen by the scheduler, and what was asked for last begins."""
    seen, other = [], replace(START)

    class Slow(Session):
        def __init__(self, *rest):
            seen.append(player.pending)
            player.begin(other)
            super().__init__(*rest)

    monkeypatch.setattr("diagd.web.play.player.Session", Slow)
    first = replace(START)
    player.begin(first)
    player.turn()
    assert seen == [first]
    assert player.pending is other


def test_a_held_key_and_a_replay_are_activity(generator, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("diagd.web.play.player.monotonic", lambda: now[0])
    player = begun(generator)
    player.handle(Act("left", 1))
    now[0] = 50.0
    player.turn()
    assert player.last_active == 50.0
    player.handle(Act("none", 2))
    assert player.session is not None
    player.begin(load_log(save_log(player.session.log, "doom"), generator))
    now[0] = 90.0
    player.turn()
    player.turn()
    assert player.last_active == 90.0
    now[0] = 120.0
    player.turn()
    assert player.last_active == 90.0


def test_controls_that_do_not_fit_leave_all_as_it_was(player):
    for _ in range(50):
        player.handle(Adjust(Diagonal(6), paced=True))
    assert (player.controls, player.paced) == (Controls(), False)
    assert player.outbox.qsize() <= WINDOW + 1  # who does not listen costs no memory
    notes = [player.outbox.get_nowait() for _ in range(player.outbox.qsize())]
    words = "That does not fit: row_lag must be in [1, width=5], got 6."
    assert notes[-1] == Note(Kept(words, Settings(paced=False)))


def test_who_has_left_can_still_be_saved_but_holds_no_engine(player):
    player.turn()
    document = save_log(player.session.log, "doom")
    player.begin(START)
    player.release()
    assert (player.session, player.pending) == (None, None)
    assert player.past is not None
    assert save_log(player.past, "doom") == document


def test_only_recorded_frames_are_kept_and_not_without_end(player, monkeypatch):
    monkeypatch.setattr("diagd.web.play.player.MAX_RECORDED_FRAMES", 3)
    player.turn()
    assert not player.recorded
    player.handle(Record(True))
    pictures = [player.turn()().picture for _ in range(5)]
    assert player.recorded == pictures[:3]
    player.handle(Record(False))
    player.turn()
    assert len(player.recorded) == 3
    player.handle(Record(True))
    assert not player.recorded


def test_a_frame_counts_what_the_recording_under_way_holds(player):
    """Else a page that records again takes a frame from before for a full recording."""
    player.handle(Record(True))
    assert [player.turn()().message.recorded for _ in range(2)] == [1, 2]
    player.handle(Record(False))
    assert player.turn()().message.recorded == 0


def test_a_saved_dream_is_replayed_and_checked_and_then_goes_on(player, generator):
    player.handle(Act("right", 1))
    for strategy in (Diagonal(1), Raster()):
        player.handle(Adjust(strategy, 1.5, 1.0, paced=False))
        player.turn()
    saved = load_log(save_log(player.session.log, "doom"), generator)
    player.handle(Act("none", 2))
    player.begin(saved)
    player.turn()
    replays = [player.turn()().message.replay for _ in range(2)]
    assert replays == [(1, 2, 0), (2, 2, 0)]
    player.turn()
    assert actions(player) == ["right", "right", "none"]


def test_a_replay_that_comes_out_differently_says_so(player):
    player.turn()
    (record,) = player.session.history
    changed = replace(record, checksum=record.checksum + 1)
    player.begin(replace(START, history=(changed,)))
    player.turn()
    assert player.turn()().message.replay == (1, 1, 1)


def test_a_session_has_a_longest_length(player, monkeypatch):
    monkeypatch.setattr("diagd.web.play.player.MAX_FRAMES", 2)
    player.turn()
    player.turn()
    with pytest.raises(ValueError, match="this dream has lasted 2 frames, which is the longest"):
        player.turn()


@pytest.mark.parametrize("frame", [9, -1])
def test_a_frame_that_was_never_sent_cannot_be_seen(frame, player):
    with pytest.raises(ValueError, match=r"seen: frame must be in \[0, 1\]"):
        player.handle(Seen(frame))
