import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve as serve_sockets

from diagd.client import PROTOCOL, AsyncSession, Session
from diagd.data.video import write_image
from tests.web.play.serving import serving, wait_until
from tests.worlds import (
    CONTEXT_FRAMES,
    HEIGHT_PX,
    NAMES,
    WIDTH_PX,
    smooth_frames,
    write_scenes,
    write_world,
)

ACTIONS = ["left", "right", "none", "forward", "forward"] * 2
PAGE = Path(__file__).parents[1] / "docs/protocol.md"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return the folder of a tiny random world model with five start scenes."""
    return write_scenes(write_world(tmp_path_factory.mktemp("elsewhere")))


@pytest.fixture(scope="module")
def served(place):
    with serving(place, max_sessions=2, strategy="k=2") as served:
        yield served


def player_of(served):
    """Return the server's side of the only session."""
    wait_until(lambda: len(served.scheduler.players) == 1)
    (player,) = served.scheduler.players.values()
    return player


def walk(session, actions, *start):
    return np.stack([session.reset(*start), *(session.step(action) for action in actions)])


def test_steps_give_the_frames_of_a_generator_here_to_the_pixel(served):
    assert len(ACTIONS) > CONTEXT_FRAMES
    scene = served.scheduler.scenes[0]
    with Session(f"ws://{served.address}") as session:
        assert (session.actions, session.size_px) == (NAMES, (HEIGHT_PX, WIDTH_PX))
        frames = walk(session, ACTIONS, scene.name, 2**32 - 1)
        assert session.header["input"] == session.header["received"] == len(ACTIONS)
        assert np.array_equal(walk(session, [2, 3, 0], 0, 2**32 - 1), frames[:4])  # numbers
        assert not np.array_equal(walk(session, ACTIONS, 0, 1), frames)
    streamed = served.scheduler.world.stream(
        scene.frames,
        iter(ACTIONS),
        strategy="k=2",
        context_actions=list(scene.actions),
        seed=2**32 - 1,
    )
    for expected, frame in zip([scene.frames[-1], *streamed], frames, strict=True):
        assert np.array_equal(expected, frame)


def test_a_world_stands_still_between_two_steps(served):
    with Session(served.url) as session:
        session.reset()
        player = player_of(served)
        for action in ("left", "right"):
            before = player.last_active
            session.step(action)
            wait_until(lambda: player.seen == player.sent)
            assert not player.ready(before + 1e6)
        assert [one.action for one in player.session.history] == ["left", "right"]


def test_a_session_has_settings_of_its_own_and_pictures_may_be_jpeg(served):
    with Session(served.url, strategy="raster", temperature=0, lossless=False) as session:
        lossy = walk(session, ["left"]).astype(int)
        assert (session.header["strategy"], session.header["steps"]) == ("raster", 15)
        with Session(served.url, strategy="raster", temperature=0) as other:
            exact = walk(other, ["left"], 0, 5)
    assert 0 < np.abs(lossy - exact).mean() < 4


def test_a_session_begins_in_a_picture_of_ones_own(served, tmp_path):
    pixels = smooth_frames(1, HEIGHT_PX, WIDTH_PX, seed=9)[0]
    write_image(file := tmp_path / "own.png", pixels)
    with Session(served.url) as session:
        for start in (pixels.numpy(), file, file.read_bytes()):
            assert np.array_equal(walk(session, ["left"], start, 3)[0], pixels)
            assert session.header["seed"] == 3
        with pytest.raises(ValueError, match=r"^http://.*: expected a PNG, JPEG, .*another kind"):
            session.reset(b"no picture")
        session.step("left")  # goes on


def test_sessions_are_awaited_side_by_side(served):
    async def play(seed):
        async with AsyncSession(served.url) as session:
            return [await session.reset(0, seed), await session.step("left")]

    async def both():
        return await asyncio.gather(play(1), play(2))

    for seed, frames in enumerate(asyncio.run(both()), start=1):
        with Session(served.url) as session:
            assert np.array_equal(walk(session, ["left"], 0, seed), frames)


def test_an_awaited_session_that_is_cancelled_while_it_opens_gives_its_place_back(served):
    async def give_up():
        task = asyncio.create_task(AsyncSession(served.url).__aenter__())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    wait_until(lambda: not served.scheduler.players)


def test_what_does_not_fit_is_refused_in_a_line_and_the_session_goes_on(served):
    wrong: Any = {"action": 1.5, "start": np.zeros((3, 5))}
    with Session(served.url) as session:
        with pytest.raises(ValueError, match=r"^reset must be called before step$"):
            session.step("left")
        session.reset()
        for call, message in (
            (lambda: session.step("fly"), "unknown action 'fly', expected one of: none, forward"),
            (lambda: session.step(4), "unknown action 4, expected"),
            (lambda: session.step(wrong["action"]), "action must be a whole number, got 1.5"),
            (lambda: session.reset("cellar"), "scene must be a number below 5 or one of: opening"),
            (lambda: session.reset(5), "scene must be a number below 5 .* got 5"),
            (lambda: session.reset(0, -1), r"seed must be in \[0, 4294967296\), got -1"),
            (lambda: session.reset(wrong["start"]), r"uint8 of shape \(height, width, 3\), got"),
            (lambda: session.reset(bytes(2**24 + 1)), "a picture has at most 16777216 bytes, got"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        session.step("left")
    settings: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"strategy": "k=9"}, ValueError, "That does not fit: row_lag must be in"),
        ({"temperature": -1}, ConnectionError, "The page said: not a message: adjust.temperature"),
    ]
    for given, error, message in settings:
        with pytest.raises(error, match=message):
            Session(served.url, **given)


@pytest.mark.parametrize("url", ["127.0.0.1:8421", "file:///etc", "ws:///play", ""])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match=r"^url must look like ws://127\.0\.0\.1:8421, got"):
        Session(url)


def test_a_full_server_is_told_after_a_while_in_line_and_a_free_place_is_taken(served):
    with Session(served.url), Session(served.url):
        message = r"^http://.* is full: All 2 places are taken: you are next\.$"
        with pytest.raises(ConnectionError, match=message):
            Session(served.url, wait_seconds=0.2)
    for _ in range(6):  # the places of the last ones may still be taken
        Session(served.url).close()


def test_a_server_that_ends_a_session_says_why(served):
    with Session(served.url, strategy="k=2") as session:
        session.reset()
        player = player_of(served)
        player.last_active -= 1000
        wait_until(lambda: player.id not in served.scheduler.players)
        with pytest.raises(ConnectionError, match=r"^http://.*: Nothing was pressed for 300 sec"):
            session.step("none")
    with pytest.raises(ConnectionError, match="the session is closed"):
        session.step("none")


@contextlib.contextmanager
def impostor(*messages, **options):
    """Run a server that says this, and no more; yields its address."""

    def say(socket):
        for message in messages:
            socket.send(message)
        with contextlib.suppress(TimeoutError, ConnectionClosed):
            socket.recv(timeout=5)

    with serve_sockets(say, "127.0.0.1", 0, **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


def test_another_protocol_and_a_refusal_are_told():
    for message, words in (
        ({"type": "welcome", "protocol": PROTOCOL + 1}, f"speaks protocol {PROTOCOL + 1}, this c"),
        ({"type": "welcome"}, f"speaks protocol None, this client {PROTOCOL}"),
        ({"type": "refused", "message": "Even the line is full."}, "Even the line is full."),
    ):
        with (
            impostor(json.dumps(message)) as url,
            pytest.raises(ConnectionError, match=f"^http://.*{words}"),
        ):
            Session(url)


def test_a_server_without_a_word_is_given_up():
    with (
        impostor() as url,
        pytest.raises(ConnectionError, match=r"/ said nothing for 0\.2 seconds$"),
    ):
        Session(url, wait_seconds=0.2)


def test_a_key_is_sent_where_one_is_asked_for():
    asked = []

    def check(socket, request):
        asked.append(request.headers.get("Authorization"))
        return socket.respond(HTTPStatus.UNAUTHORIZED, "")

    with impostor(process_request=check) as url:
        for key in (None, "secret"):
            with pytest.raises(ConnectionError, match=r"^cannot play at http.*HTTP 401"):
                Session(url, api_key=key)
    assert asked == [None, "Bearer secret"]
    with pytest.raises(ConnectionError, match=r"^cannot play at http.*refused"):
        Session(url)


def test_the_client_needs_no_pytorch_and_says_what_it_does_need():
    script = """
import sys
sys.modules["websockets"] = None
from diagd.client import Session
assert not {"torch", "fastapi"} & set(sys.modules)
Session("ws://127.0.0.1:1")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    words = "ValueError: diagd.client needs websockets: pip install -e '.[web]' in a clone of diagd"
    assert done.stderr.splitlines()[-1] == words


def test_the_page_about_it_runs(served, capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(code.replace("ws://127.0.0.1:8421", f"ws://{served.address}"), {})
    assert capsys.readouterr().out.startswith("('none', 'forward'")
