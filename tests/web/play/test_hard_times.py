"""Broken networks, visitors who vanish and signals, against the real server of `diagd play`."""

import contextlib
import gc
import logging
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from diagd.data.video import read_video, write_image
from diagd.web.uploads import MAX_UPLOAD_BYTES
from tests.web.play.serving import Served, wait_until
from tests.worlds import HEIGHT_PX, WIDTH_PX, smooth_frames


@pytest.fixture
def served(serve):
    return serve(max_sessions=3)


@pytest.mark.skipif(sys.platform == "win32", reason="no signals on Windows")
def test_a_recording_survives_sigterm(world, tmp_path):
    flags = ("play", "--model", world, "--port", "0", "--no-open", "--recordings", tmp_path)
    arguments = [sys.executable, "-m", "diagd", *map(str, flags)]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        try:
            assert child.stdout is not None
            found = (re.search(r"http://127\.0\.0\.1:(\d+)", line) for line in child.stdout)
            port = int(next(match for match in found if match)[1])
            with Served(None, None, port).page() as page:  # pyright: ignore[reportArgumentType]
                page.frames(1)
                page.send("record", on=True)
                while page.frames(1)[0]["recorded"] < 6:
                    pass
                child.send_signal(signal.SIGTERM)
                child.wait(20)
        finally:
            child.kill()
        written = child.stdout.read()
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"dream-\d{8}-\d{6}-1\.mp4", path.name)
    assert f"a recording was cut short: {path}" in written.replace("\n", "")
    frames = read_video(path).frames
    assert len(frames) >= 6
    assert frames.shape[1:] == (HEIGHT_PX, WIDTH_PX, 3)


def test_ten_pages_vanish_in_the_middle_of_a_frame_and_one_plays_on(served, caplog):
    """Reset, not closed: nothing is said, and what is under way to them is never read."""
    players = weakref.WeakSet()
    with served.page() as page:
        page.frames(1)
        for _ in range(10):
            with served.page() as other:
                other.frame()
                players.update(served.scheduler.players.values())
                linger = struct.pack("ii", 1, 0)
                other.socket.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                other.socket.socket.shutdown(socket.SHUT_RD)
                other.socket.socket.close()
            page.frames(1)
        wait_until(lambda: len(served.scheduler.players) == 1)
        assert page.frames(5)
        # this one, the last turn's, and those who left last
        wait_until(lambda: gc.collect() >= 0 and len(players) <= 2 + 3)
    # the pages' own client complains of the sockets that were taken from under it
    ours = [record for record in caplog.records if record.name != "websockets.client"]
    assert not [record for record in ours if record.levelno >= logging.ERROR]


def test_to_a_visitor_who_vanished_nothing_more_is_written(served, caplog):
    """Nor does asyncio complain of it: the line moves on often where many leave at once."""
    with served.page() as page, contextlib.suppress(ConnectionClosed):
        (player,) = served.scheduler.players.values()
        socket_of_page = page.socket.socket

        def vanish():  # while the server looks elsewhere
            linger = struct.pack("ii", 1, 0)
            socket_of_page.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            socket_of_page.shutdown(socket.SHUT_RD)
            socket_of_page.close()
            for before in range(20):
                player.wait(before, 1)

        served.server.servers[0].get_loop().call_soon_threadsafe(vanish)
        wait_until(lambda: not served.scheduler.players)
    assert not [record for record in caplog.records if record.name == "asyncio"]


def slow_upload(served, name):
    """Send an upload a few bytes at a time, for five seconds."""

    def dribble():
        end = time.monotonic() + 5
        while time.monotonic() < end:
            yield b"\x89PNG\r\n\x1a\n"
            time.sleep(0.02)

    return httpx.post(f"{served.url}/sessions/{name}/start", content=dribble(), timeout=20)


def test_a_slow_upload_holds_nobody_up_and_ends(served, monkeypatch, tmp_path):
    monkeypatch.setattr("diagd.web.play.server.MAX_SECONDS_OF_UPLOAD", 3.0)
    write_image(tmp_path / "a.png", smooth_frames(1, HEIGHT_PX, WIDTH_PX)[0])
    answers = []
    with served.page() as page, served.page() as other:
        name = page.welcome["session"]
        slow = threading.Thread(target=lambda: answers.append(slow_upload(served, name)))
        slow.start()
        wait_until(lambda: served.scheduler.players[name].uploading)
        picture = (tmp_path / "a.png").read_bytes()
        second = httpx.post(f"{served.url}/sessions/{name}/start", content=picture)
        assert (second.status_code, second.json()["detail"]) == (409, "another upload is under way")
        path = f"{served.url}/sessions/{other.welcome['session']}/start"
        assert httpx.post(path, content=picture, timeout=20).json()["frames"] == 1
        assert page.frames(3)
        slow.join(20)
        for answer in answers:  # none where the line broke before it could be read
            assert (answer.status_code, answer.json()["detail"][:11]) == (408, "the request")
        wait_until(lambda: not served.scheduler.players[name].uploading)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_upload_that_is_broken_off_leaves_no_trace(served, caplog):
    with served.page() as page:
        name = page.welcome["session"]
        head = f"POST /sessions/{name}/start HTTP/1.1\r\nHost: {served.address}\r\n"
        for _ in range(10):
            with socket.create_connection(("127.0.0.1", served.port), 10) as line:
                line.sendall(f"{head}Content-Length: {MAX_UPLOAD_BYTES}\r\n\r\nhalf".encode())
                wait_until(lambda: served.scheduler.players[name].uploading)
            wait_until(lambda: not served.scheduler.players[name].uploading)
        assert page.frames(2)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_players_in_different_orders_get_equal_shares_of_the_model(served, monkeypatch):
    """Frames of raster order take longer, so there are fewer of them, in the same time.

    Shares are of those who wait for the model, and here all do at every turn, however slow a busy
    machine makes their pages. Then no two differ by more than a turn of each.
    """
    names, enough = ("raster", "k=2", "exact"), threading.Event()
    spent, longest, scheduler = Counter(), 0.0, served.scheduler
    charge, next_player = scheduler.charge, scheduler.next_player

    def under_way():
        playing = {one.controls.strategy.name for one in scheduler.players.values()}
        return playing == set(names) and not enough.is_set()

    def when_all_wait(now):
        all_wait = all(player.ready(now) for player in scheduler.players.values())
        return next_player(now) if all_wait or not under_way() else None

    def note(player, seconds):
        nonlocal longest
        charge(player, seconds)
        if under_way():
            spent[player.controls.strategy.name] += seconds
            longest = max(longest, seconds)
            if sum(spent.values()) > 20 * longest:
                enough.set()

    monkeypatch.setattr(scheduler, "charge", note)
    monkeypatch.setattr(scheduler, "next_player", when_all_wait)

    def play(strategy):
        with served.page() as page:
            page.send("adjust", strategy=strategy, temperature=1, top_p=0.9, paced=False)
            try:
                while not enough.is_set():
                    page.frame()
            finally:
                enough.set()

    threads = [threading.Thread(target=play, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shares = [spent[name] / sum(spent.values()) for name in names]
    assert shares == pytest.approx([1 / 3] * 3, abs=2 / 20)


def test_a_world_is_played_over_ipv6(serve):
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        served = serve(host="::1")
        assert served.url.startswith("http://[::1]:")
        assert httpx.get(served.url).status_code == 200
        origin = {"origin": served.url}
        with served.page(additional_headers=origin) as page:
            assert page.frames(2)
        return
    pytest.skip("NO IPV6 TEST: this machine has no ::1")
