"""Turns, without a server: players of the tiny world who draw their frames at once."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from fractions import Fraction

import pytest

from diagd.pipeline.generator import VideoGenerator
from diagd.web.play.messages import Adjust, Begin, Seen
from diagd.web.play.player import Frame, Note
from diagd.web.play.saved import SavedDream
from diagd.web.play.scenes import Scene
from diagd.web.play.scheduler import CRASHED, Hall
from diagd.web.play.session import Controls, Start
from tests.worlds import HEIGHT_PX, WIDTH_PX, smooth_frames

SCENES = [
    Scene(name, Start(smooth_frames(1, HEIGHT_PX, WIDTH_PX, seed), (), 0), b"", Fraction(8))
    for seed, name in enumerate(("first", "second"))
]


@contextlib.asynccontextmanager
async def hall_of(
    dreamer: VideoGenerator, max_sessions: int = 4, idle_seconds: float = 60.0
) -> AsyncIterator[Hall]:
    """A hall that serves turns."""
    hall = Hall(dreamer, SCENES, max_sessions, idle_seconds)
    turns = asyncio.create_task(hall.run())
    try:
        yield hall
    finally:
        turns.cancel()
        await asyncio.wait([turns])


def enter(hall):
    """Let a player in who begins with the first scene."""
    player = hall.join()
    assert player is not None
    hall.begin(player, SavedDream(SCENES[0].start, ()))
    return player


async def play(hall, player, frames):
    """Draw frames until so many have come; returns their headers."""
    headers = []
    while len(headers) < frames:
        item = await asyncio.wait_for(player.outbox.get(), 20)
        assert isinstance(item, Frame), item
        hall.take(player, Seen(item.header["frame"]))
        headers.append(item.header)
    return headers


def test_everybody_gets_the_same_share_of_the_model_s_time(dreamer, monkeypatch):
    """One player's frames take four times as long; the others' come four times as often."""

    async def scenario():
        async with hall_of(dreamer) as hall:
            players = [enter(hall) for _ in range(3)]
            for player in players:
                await play(hall, player, 1)
                seconds = 0.08 if player is players[0] else 0.02
                monkeypatch.setattr(player.session, "advance", lambda *_, s=seconds: time.sleep(s))
            tasks = [asyncio.create_task(play(hall, player, 10**6)) for player in players]
            before = [player.sent for player in players]
            await asyncio.sleep(3)
            for task in tasks:
                task.cancel()
            return [player.sent - count for player, count in zip(players, before, strict=True)]

    monkeypatch.setattr("diagd.web.play.scheduler.Player.turn", _turn_without_pictures)
    slow, *fast = asyncio.run(scenario())
    assert slow >= 3
    assert all(2 < count / slow < 7 for count in fast), (slow, fast)
    assert abs(fast[0] - fast[1]) <= 2


def _turn_without_pictures(player):
    if player.wish is not None:
        return player._begin(0.0)
    player.session.advance("none", Controls())
    player.sent += 1
    return Frame({"frame": player.sent}, b"")


def test_the_event_loop_does_not_wait_for_the_model(dreamer, monkeypatch):
    async def scenario():
        async with hall_of(dreamer) as hall:
            player = enter(hall)
            await play(hall, player, 1)
            monkeypatch.setattr(player, "turn", lambda: time.sleep(0.5))
            hall.wake.set()
            started, longest = time.monotonic(), 0.0
            while time.monotonic() - started < 0.4:
                before = time.monotonic()
                await asyncio.sleep(0.001)
                longest = max(longest, time.monotonic() - before)
            return longest

    assert asyncio.run(scenario()) < 0.3


def test_a_crash_ends_one_session_with_a_message(dreamer, monkeypatch, caplog):
    async def scenario():
        async with hall_of(dreamer) as hall:
            one, other = enter(hall), enter(hall)
            await play(hall, one, 1)
            monkeypatch.setattr(one, "turn", lambda: 1 // 0)
            while isinstance(item := await asyncio.wait_for(one.outbox.get(), 20), Frame):
                hall.take(one, Seen(item.header["frame"]))
            assert list(hall.players.values()) == [other]
            assert one.session is None
            assert len(await play(hall, other, 3)) == 3
            return item

    note = asyncio.run(scenario())
    message = "Decoding crashed (ZeroDivisionError): this dream is over."
    assert note == Note({"type": "ended", "message": message}, CRASHED)
    assert "a session crashed" in caplog.text


def test_a_start_that_does_not_fit_ends_the_session_with_the_reason(dreamer):
    async def scenario():
        async with hall_of(dreamer) as hall:
            player = enter(hall)
            start = Start(smooth_frames(9, HEIGHT_PX, WIDTH_PX), ("none",) * 8, 0)
            hall.begin(player, SavedDream(start, ()))
            while isinstance(item := await asyncio.wait_for(player.outbox.get(), 20), Frame):
                pass
            return item

    note = asyncio.run(scenario())
    assert note.document["message"].startswith("The dream ended: prompt and one frame take")


def test_there_is_a_most_and_who_leaves_makes_room(dreamer):
    async def scenario():
        async with hall_of(dreamer, max_sessions=2) as hall:
            one, other = enter(hall), enter(hall)
            assert hall.join() is None
            hall.leave(one)
            hall.leave(one)  # twice does no harm
            assert hall.join() is not None
            assert len(await play(hall, other, 3)) == 3
            return hall.sessions

    assert asyncio.run(scenario()) == 3


def test_who_does_nothing_is_sent_off_and_who_does_something_stays(dreamer):
    async def scenario():
        async with hall_of(dreamer, idle_seconds=0.4) as hall:
            idle, busy = enter(hall), enter(hall)
            for _ in range(8):
                await asyncio.sleep(0.1)
                hall.take(busy, Adjust(Controls(), False))
            assert list(hall.players.values()) == [busy]
            items = [idle.outbox.get_nowait() for _ in range(idle.outbox.qsize())]
            assert isinstance(items[-1], Note)
            assert idle.session is None
            return items[-1].document["message"]

    assert asyncio.run(scenario()).startswith("Nothing was pressed for 0.4 seconds")


def test_a_dream_begins_from_a_scene_or_from_where_it_began(dreamer):
    async def scenario():
        async with hall_of(dreamer) as hall:
            player = enter(hall)
            hall.take(player, Begin(1, 5))
            hall.take(player, Begin(None, 6))
            assert player.wish is not None
            start = player.wish.start
            assert (start.frames is SCENES[1].start.frames, start.seed) == (True, 6)
            await play(hall, player, 2)
            hall.take(player, Begin(None, 7))
            assert player.wish is not None
            assert player.wish.start.frames is SCENES[1].start.frames
            with pytest.raises(ValueError, match=r"scene must be in \[0, 2\), got 2"):
                hall.take(player, Begin(2, 0))

    asyncio.run(scenario())
