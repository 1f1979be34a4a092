import asyncio
import gc
import mimetypes
from fractions import Fraction

import httpx

from diagd.decoding.strategies.table import Exact
from diagd.pipeline.scenes import StartScene
from diagd.web.play.options import WorldFlags
from diagd.web.play.player import Player
from diagd.web.play.scheduler import Scheduler
from diagd.web.play.server import create_app, short_collections, warm_up
from diagd.web.play.session import Controls, Session, SessionLog
from tests.worlds import HEIGHT_PX, WIDTH_PX, smooth_frames

SCENE = StartScene("here", smooth_frames(1, HEIGHT_PX, WIDTH_PX), (), Fraction(8))


def test_what_is_warmed_up_is_what_will_be_played(generator, monkeypatch):
    used, advance = [], Session.advance

    def note(session, action, controls):
        used.append(controls)
        return advance(session, action, controls)

    monkeypatch.setattr(Session, "advance", note)
    warm_up(generator, SCENE, Controls(Exact()))
    assert used == [Controls(Exact())] * 2


def test_collections_pass_over_what_was_there_before_while_people_play():
    with short_collections():
        assert gc.get_freeze_count() > 0
        assert len(gc.get_objects()) < gc.get_freeze_count()
    assert gc.get_freeze_count() == 0


def answer_of(app, path):
    async def get():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get(path)

    return asyncio.run(get())


def test_a_dream_that_is_about_to_begin_can_be_saved(generator):
    """What the page asks for right behind an upload, before the model has had a turn."""
    scheduler = Scheduler(generator, [SCENE], 1, 60.0)
    player = scheduler.join()
    assert player is not None
    player.past = SessionLog(SCENE.frames, (), 3)
    player.begin(SessionLog(SCENE.frames, (), 5))
    answer = answer_of(
        create_app(scheduler, WorldFlags(), 1), f"/sessions/{player.id}/session.json"
    )
    assert (answer.status_code, answer.json()["seed"]) == (200, 5)


def test_a_dream_that_is_saved_while_it_makes_room_for_the_next_one_is_saved(generator):
    scheduler = Scheduler(generator, [SCENE], 1, 60.0)
    player = scheduler.join()
    assert player is not None
    player.pending = None
    log = SessionLog(SCENE.frames, (), 3)
    left = [Session(generator, log)]

    session = property(lambda _: left.pop() if left else None)
    player.past, player.__class__ = log, type("MakingRoom", (Player,), {"session": session})
    app = create_app(scheduler, WorldFlags(), 1)
    answer = answer_of(app, f"/sessions/{player.id}/session.json")
    assert (answer.status_code, answer.json()["seed"]) == (200, 3)


def test_a_script_is_one_whatever_the_machine_takes_it_for(generator, monkeypatch):
    """As on Windows, whose registry may say text; a browser runs no such module."""
    mimetypes.init()
    monkeypatch.setitem(mimetypes.types_map, ".js", "text/plain")
    app = create_app(Scheduler(generator, [SCENE], 1, 60.0), WorldFlags(), 1)
    kind = answer_of(app, "/static/play.js").headers["content-type"].partition(";")[0]
    assert kind in ("text/javascript", "application/javascript")  # of Python 3.12, and before
