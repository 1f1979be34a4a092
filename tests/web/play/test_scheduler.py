"""Turns, without a server: players of the tiny world who draw their frames at once."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from fractions import Fraction
from functools import partial

import pytest

from diagd.decoding.engine import Batch
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import StartScene
from diagd.web.play.messages import Adjust, Alive, Begin, Ended, Header, Pause, Seen, Welcome
from diagd.web.play.player import Note
from diagd.web.play.scheduler import CRASHED, KEPT_SECONDS, Scheduler
from diagd.web.play.session import SessionLog
from tests.worlds import HEIGHT_PX, WIDTH_PX, smooth_frames

SCENES = [
    StartScene(name, smooth_frames(1, HEIGHT_PX, WIDTH_PX, seed), (), Fraction(8))
    for seed, name in enumerate(("first", "second"))
]


class Clock:
    """Stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for name in ("player.monotonic", "scheduler.monotonic", "scheduler.thread_time"):
        monkeypatch.setattr(f"diagd.web.play.{name}", clock)
    return clock


@contextlib.asynccontextmanager
async def running(
    generator: VideoGenerator, max_sessions: int = 4, batch: Batch | None = None
) -> AsyncIterator[Scheduler]:
    """A scheduler that serves turns, or the steps of a batch."""
    scheduler = Scheduler(generator, SCENES, max_sessions, idle_seconds=60.0, batch=batch)
    turns = asyncio.create_task(scheduler.run())
    try:
        yield scheduler
    finally:
        turns.cancel()
        await asyncio.wait([turns])


def enter(scheduler):
    """Admit a player, who begins with the first scene."""
    player = scheduler.join()
    assert player is not None
    welcome = player.outbox.get_nowait()
    assert isinstance(welcome.message, Welcome)
    return player


async def play(scheduler, player, frames):
    """Draw frames until so many have come; returns their headers."""
    headers = []
    while len(headers) < frames:
        item = await asyncio.wait_for(player.outbox.get(), 20)
        if item == Note(Alive()):
            continue
        assert isinstance(item.message, Header), item
        scheduler.handle(player, Seen(item.message.frame))
        headers.append(item.message)
    return headers


def test_everybody_gets_the_same_share_of_the_model_s_time(generator, clock, monkeypatch):
    """One player's turns take four times as long; the others' come four times as often."""
    turns = []

    def turn(number, seconds):
        clock.now += seconds
        turns.append(number)
        return lambda: Note(Alive())

    async def scenario():
        async with running(generator) as scheduler:
            for number, seconds in enumerate((0.5, 0.125, 0.125)):
                player = enter(scheduler)  # who is always ready: nobody really begins
                monkeypatch.setattr(player, "turn", partial(turn, number, seconds))
                monkeypatch.setattr(player, "make_room", lambda: None)
            while len(turns) < 90:
                await asyncio.sleep(0)

    asyncio.run(scenario())
    assert [turns[:90].count(number) for number in range(3)] == [10, 40, 40]
    for start in range(0, 90, 9):  # and evenly all the time
        assert turns[start : start + 9].count(0) == 1


def test_a_machine_that_stalls_in_a_turn_costs_the_player_no_other(generator, monkeypatch):
    turns = []

    def turn(number):
        turns.append(number)
        end = time.thread_time() + 0.001
        while time.thread_time() < end:
            pass
        if len(turns) == 4:
            time.sleep(0.3)  # three hundred turns of others
        return lambda: Note(Alive())

    async def scenario():
        async with running(generator) as scheduler:
            for number in range(3):
                player = enter(scheduler)
                monkeypatch.setattr(player, "turn", partial(turn, number))
                monkeypatch.setattr(player, "make_room", lambda: None)
            while len(turns) < 150:
                await asyncio.sleep(0)

    asyncio.run(scenario())
    assert min(turns[4:150].count(number) for number in range(3)) > 25, turns


def test_who_comes_late_has_no_turns_to_make_up_for(generator):
    scheduler = Scheduler(generator, SCENES, 2, 60.0)
    early = enter(scheduler)
    for _ in range(10):
        scheduler.charge(early, 1.0)
    late = enter(scheduler)
    turns = []
    for _ in range(6):
        player = scheduler.next_player(0.0)
        assert player is not None
        turns.append(player is late)
        scheduler.charge(player, 1.0)
    assert turns == [True, False] * 3


def test_who_leaves_in_the_middle_of_a_turn_is_not_let_in_again(generator):
    scheduler = Scheduler(generator, SCENES, 1, 60.0)
    player = enter(scheduler)
    scheduler.leave(player)
    scheduler.charge(player, 1.0)
    assert scheduler.next_player(0.0) is None


def test_the_event_loop_does_not_wait_for_the_model(generator, monkeypatch):
    """The turn under way ends only when the event loop says so."""
    said = threading.Event()
    heard = []

    async def scenario():
        async with running(generator) as scheduler:
            player = enter(scheduler)
            await play(scheduler, player, 1)
            under_way = threading.Event()

            def turn():
                under_way.set()
                heard.append(said.wait(20))
                return lambda: Note(Alive())

            monkeypatch.setattr(player, "turn", turn)
            scheduler.wake.set()
            while not under_way.is_set():
                await asyncio.sleep(0)
            said.set()

    asyncio.run(scenario())
    assert heard[0]


@pytest.mark.parametrize("crash", [lambda: 1 // 0, lambda: lambda: 1 // 0])
def test_a_crash_ends_one_session_with_a_message(generator, monkeypatch, caplog, crash):
    """In the model's thread, and in the painter's."""

    async def scenario():
        async with running(generator) as scheduler:
            one, other = enter(scheduler), enter(scheduler)
            await play(scheduler, one, 1)
            monkeypatch.setattr(one, "turn", crash)
            item = await asyncio.wait_for(one.outbox.get(), 20)
            while isinstance(header := item.message, Header):
                scheduler.handle(one, Seen(header.frame))
                item = await asyncio.wait_for(one.outbox.get(), 20)
            assert list(scheduler.players.values()) == [other]
            assert len(await play(scheduler, other, 3)) == 3
            assert one.session is None  # by then: a turn of its own may have been under way
            return item

    note = asyncio.run(scenario())
    message = "Decoding crashed (ZeroDivisionError): this dream is over."
    assert note == Note(Ended(message), CRASHED)
    assert "a session crashed" in caplog.text


def test_a_start_that_does_not_fit_ends_the_session_with_the_reason(generator):
    async def scenario():
        async with running(generator) as scheduler:
            player = enter(scheduler)
            start = SessionLog(smooth_frames(9, HEIGHT_PX, WIDTH_PX), ("none",) * 8, 0)
            scheduler.begin(player, start)
            while (item := await asyncio.wait_for(player.outbox.get(), 20)).picture:
                pass
            return item

    note = asyncio.run(scenario())
    assert isinstance(note.message, Ended)
    assert note.message.message.startswith("The dream ended: prompt and one frame need")


def test_there_is_a_most_and_who_leaves_makes_room(generator):
    async def scenario():
        async with running(generator, max_sessions=2) as scheduler:
            one, other = enter(scheduler), enter(scheduler)
            waiting = scheduler.join()
            assert waiting is not None
            assert waiting.before == 0
            scheduler.leave(one)
            scheduler.leave(one)  # twice does no harm
            assert set(scheduler.players.values()) == {other, waiting}
            assert len(await play(scheduler, other, 3)) == 3
            return scheduler.sessions

    assert asyncio.run(scenario()) == 3


def test_who_does_nothing_is_sent_off_and_who_does_something_stays(generator, clock):
    scheduler = Scheduler(generator, SCENES, 2, idle_seconds=60.0)
    idle, busy = enter(scheduler), enter(scheduler)
    clock.now = 59.0
    scheduler.handle(busy, Adjust(paced=False))
    scheduler.handle(idle, Seen(0))  # drawing is not playing
    scheduler.end_idle()
    assert len(scheduler.players) == 2
    clock.now = 61.0
    scheduler.end_idle()
    assert list(scheduler.players.values()) == [busy]
    note = idle.outbox.get_nowait()
    assert isinstance(note.message, Ended)
    assert note.message.message.startswith("Nothing was pressed for 60 seconds")
    assert busy.outbox.empty()


def test_who_left_last_is_remembered_for_a_while_and_not_more_than_may_play(generator, clock):
    scheduler = Scheduler(generator, SCENES, 2, idle_seconds=60.0)
    players = []
    for _ in range(4):
        players.append(enter(scheduler))
        scheduler.leave(players[-1])
        scheduler.leave(players[-1])
    assert list(scheduler.gone) == [player.id for player in players[-2:]]
    clock.now = KEPT_SECONDS + 1
    scheduler.end_idle()
    assert not scheduler.gone


def test_who_pauses_or_waits_hears_that_the_server_lives(generator, monkeypatch):
    monkeypatch.setattr("diagd.web.play.scheduler.ALIVE_SECONDS", 0.01)

    async def scenario():
        async with running(generator, max_sessions=1) as scheduler:
            player, waiting = enter(scheduler), scheduler.join()
            assert waiting is not None
            player.handle(Pause(True))
            for one in (player, waiting):
                while await asyncio.wait_for(one.outbox.get(), 20) != Note(Alive()):
                    pass
            await asyncio.sleep(0.2)
            assert waiting.outbox.qsize() <= 1  # who does not listen costs no memory

    asyncio.run(scenario())


def test_a_session_begins_from_a_scene_or_from_where_it_began(generator):
    async def scenario():
        async with running(generator) as scheduler:
            player = enter(scheduler)
            scheduler.handle(player, Begin(1, 5))
            scheduler.handle(player, Begin(None, 6))
            assert player.pending is not None
            start = player.pending
            assert (start.frames is SCENES[1].frames, start.seed) == (True, 6)
            await play(scheduler, player, 2)
            scheduler.handle(player, Begin(None, 7))
            assert player.pending is not None
            assert player.pending.frames is SCENES[1].frames
            with pytest.raises(ValueError, match=r"scene must be in \[0, 2\), got 2"):
                scheduler.handle(player, Begin(2, 0))

    asyncio.run(scenario())
