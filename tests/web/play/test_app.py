import contextlib
import logging
import re
import socket

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from diagd.data.video import read_video, write_image, write_video
from diagd.web.play import server
from diagd.web.play.player import from_picture, to_jpeg
from diagd.web.play.server import BURST
from tests.web.play.serving import wait_until
from tests.worlds import HEIGHT, HEIGHT_PX, NAMES, WIDTH, WIDTH_PX, smooth_frames


@pytest.fixture
def served(serve):
    return serve(max_sessions=2)


@pytest.fixture
def page(served):
    with served.page() as page:
        yield page


@pytest.fixture
def own(served, page):
    """Return the address of the page's session."""
    return f"{served.url}/sessions/{page.welcome['session']}"


def close_code(page):
    """Read until the socket closes."""
    try:
        while True:
            page.receive()
    except ConnectionClosed as closed:
        return closed.rcvd and closed.rcvd.code


def test_a_page_is_welcomed_with_what_it_needs(page):
    welcome = page.welcome
    assert welcome["grid"] == [HEIGHT, WIDTH]
    assert welcome["size_px"] == [HEIGHT_PX, WIDTH_PX]
    assert welcome["strategies"] == [
        ["raster", 15],
        ["exact", None],
        ["k=4", 13],
        ["k=2", 9],
        ["k=1", 7],
    ]
    assert welcome["keyboard"]["idle"] == "none"
    assert set(welcome["keyboard"]["keys"]) == set(NAMES) - {"none"}
    assert (welcome["scenes"][0], len(welcome["scenes"])) == ("opening", 5)
    assert welcome["fps"] == 8
    assert welcome["computed"] == ["float32", "native"]


def test_frames_come_one_by_one_as_pictures_with_headers(page):
    begun, picture = page.frame()
    assert begun["begun"]
    assert from_picture(picture).shape == (HEIGHT_PX, WIDTH_PX, 3)
    headers = page.frames(4)
    assert [header["frame"] for header in headers] == [2, 3, 4, 5]
    assert [header["length"] for header in headers] == [1, 2, 3, 4]
    for header in headers:
        assert (header["action"], header["strategy"], header["steps"]) == ("none", "k=1", 7)
        assert header["decode_ms"] > 0
        assert header["picture_ms"] > 0
        assert header["encode_ms"] > 0
        assert header["holds"] == 8
        assert header["seed"] == headers[0]["seed"]


def test_no_frame_is_dreamt_before_the_last_two_are_drawn(served, page):
    for _ in range(2):
        page.frame(seen=False)
    with pytest.raises(TimeoutError):
        page.socket.recv(timeout=0.3)
    assert served.scheduler.frames == 1
    page.send("seen", frame=2)
    assert page.frame()[0]["frame"] == 3


def test_strategies_and_sampling_change_while_playing(page):
    page.frames(1)
    for strategy, steps in (("raster", 15), ("k=4", 13), ("k=2", 9)):
        page.send("adjust", strategy=strategy, temperature=0.5, top_p=0.8, paced=False)
        newest = page.frames(4)[-1]
        assert newest["steps"] == max(newest["written_at"]) + 1 == steps
    page.send("adjust", strategy="exact", temperature=0.5, top_p=0.8, paced=False)
    newest = page.frames(4)[-1]
    assert newest["written_at"] == sorted(newest["written_at"])  # in raster order
    assert len(newest["written_at"]) == HEIGHT * WIDTH
    assert newest["steps"] == newest["written_at"][-1] + 1 <= 16  # 15 tokens and an action


def test_a_scene_and_a_seed_begin_a_dream_anew_and_repeat_it(served, page):
    def dream():
        page.send("begin", scene=2, seed=77)
        while True:
            header, picture = page.frame()
            if "begun" in header and header["seed"] == 77:
                break
        assert picture == to_jpeg(served.scheduler.scenes[2].frames[-1])
        return [page.frame()[1] for _ in range(4)]

    assert dream() == dream()


def test_a_session_that_was_saved_is_dreamt_again_exactly(page, own):
    page.frames(1)
    page.send("act", action="left", id=1)
    page.frames(3)
    page.send("adjust", strategy="raster", temperature=1.5, top_p=1, paced=False)
    page.frames(3)
    page.send("pause", paused=True)
    saved = httpx.get(f"{own}/session.json").raise_for_status()
    assert saved.headers["content-disposition"] == 'attachment; filename="dream.json"'
    chosen = [row["action"] for row in saved.json()["frames"]]
    count = len(chosen)
    assert count >= 7
    assert set(chosen) == {"none", "left"}
    answer = httpx.post(f"{own}/replay", content=saved.content).json()
    assert answer == {"frames": count, "scene": "opening"}
    while "begun" not in page.frame()[0]:
        pass
    headers = [page.frame()[0] for _ in range(count)]
    assert headers[-1]["replay"] == [count, count, 0]
    assert [header["action"] for header in headers] == [
        row["action"] for row in saved.json()["frames"]
    ]


def test_a_recording_is_downloaded_as_mp4(page, tmp_path, own):
    assert httpx.get(f"{own}/video.mp4").json() == {"detail": "nothing was recorded yet"}
    page.frames(1)
    page.send("record", on=True)
    while page.frames(1)[0]["recorded"] < 5:
        pass
    page.send("record", on=False)
    answer = httpx.get(f"{own}/video.mp4").raise_for_status()
    assert answer.headers["content-type"] == "video/mp4"
    (tmp_path / "dream.mp4").write_bytes(answer.content)
    video = read_video(tmp_path / "dream.mp4")
    assert video.fps == 8
    assert len(video.frames) >= 5
    assert video.frames.shape[1:] == (HEIGHT_PX, WIDTH_PX, 3)


@pytest.mark.parametrize(("name", "frames"), [("start.png", 1), ("start.mp4", 4)])
def test_an_upload_becomes_the_start(name, frames, page, tmp_path, own):
    clip = smooth_frames(6, 48, 80, seed=5)
    if name.endswith("mp4"):
        write_video(tmp_path / name, clip)
    else:
        write_image(tmp_path / name, clip[0])
    answer = httpx.post(f"{own}/start?seed=5", content=(tmp_path / name).read_bytes())
    assert answer.json() == {"frames": frames, "notes": []}
    while not ((header := page.frame()[0]).get("begun") and header["seed"] == 5):
        pass
    assert page.frames(1)[0]["length"] == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"#EXTM3U\nfile:///etc/passwd\n", "expected a PNG, JPEG, WebP or BMP image"),
        (b"\x89PNG\r\n\x1a\n" + b"x" * 99, "cannot be decoded|no picture"),
    ],
    ids=["playlist", "damaged"],
)
def test_a_bad_upload_is_refused_in_words_and_the_dream_goes_on(data, message, page, own):
    answer = httpx.post(f"{own}/start", content=data, timeout=20)
    assert answer.status_code == 400
    assert re.search(message, answer.json()["detail"])
    assert page.frames(2)


def test_uploads_and_saved_sessions_have_a_largest_size(page, own):
    for name, megabytes in (("start", 17), ("replay", 5)):
        answer = httpx.post(f"{own}/{name}", content=bytes(megabytes * 2**20), timeout=20)
        assert (answer.status_code, answer.json()["detail"][:20]) == (413, "a request is at most")
    assert page.frames(2)


def test_a_file_that_is_no_saved_session_is_refused(own):
    answer = httpx.post(f"{own}/replay", content=b"\xff")
    assert answer.status_code == 400
    assert "not a saved dream" in answer.json()["detail"]


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_an_upload_with_an_impossible_seed_is_refused(seed, tmp_path, own):
    write_image(tmp_path / "a.png", smooth_frames(1, 24, 40)[0])
    picture = (tmp_path / "a.png").read_bytes()
    answer = httpx.post(f"{own}/start?seed={seed}", content=picture, timeout=20)
    assert (answer.status_code, answer.json()["detail"][:10]) == (400, "seed must ")


def test_a_session_is_known_by_its_own_name_only(served, page):
    for name in ("nobody", "", "..", page.welcome["session"][:-1]):
        for what in ("session.json", "video.mp4"):
            assert httpx.get(f"{served.url}/sessions/{name}/{what}").status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/scenes/99.jpg",
        "/world/nothing.bin",
        "/world/..%2fworld.bin",
        "/scenes/-1.jpg",
        "/scenes/..%2f..%2fprompt.jpg",
        "/server.py",
        "/docs",
        "/openapi.json",
    ],
)
def test_no_path_reaches_the_file_system(path, served):
    assert status_of(served, path) in (404, 422)


def status_of(served, path):
    """GET a path as it is written; clients tidy it up first."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as raw:
        request = f"GET {path} HTTP/1.1\r\nhost: {served.address}\r\nconnection: close\r\n\r\n"
        raw.sendall(request.encode())
        return int(raw.recv(4096).split()[1])


def test_pages_may_load_nothing_from_elsewhere(served):
    for path in ("/", "/static/play.js", "/static/style.css", "/scenes/0.jpg", "/nowhere"):
        headers = httpx.get(served.url + path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    page = httpx.get(served.url).text + httpx.get(served.url + "/static/play.css").text
    assert "https://" not in page
    assert "//fonts" not in page


def test_a_foreign_host_name_is_refused(served):
    answer = httpx.get(served.url, headers={"host": "evil.example:8421"})
    assert (answer.status_code, "play" in answer.text) == (403, False)
    assert "does not answer to the name" in answer.text


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_foreign_page_cannot_drive_the_server(origin, served, page, own):
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://{served.address}/play", additional_headers={"origin": origin}).__enter__()
    assert refused.value.response.status_code == 403
    answer = httpx.post(f"{own}/replay", content=b"{}", headers={"origin": origin})
    assert (answer.status_code, answer.text[:9]) == (403, "a page of")
    assert len(served.scheduler.players) == 1


def test_the_server_s_own_page_and_allowed_names_are_let_in(serve):
    served = serve(allow_host=("Box.local",))
    for host in ("box.local", "localhost", "[::1]", "192.168.0.7"):
        name = f"{host}:{served.port}"
        assert httpx.get(served.url, headers={"host": name}).status_code == 200
    headers = {"origin": served.url}
    with served.page(additional_headers=headers) as page:
        assert page.frames(1)


@pytest.mark.parametrize("message", ["", '{"type": "begin", "scene": 99, "seed": 1}', b"\x00\x01"])
def test_a_malformed_message_closes_that_socket_and_no_other(message, served, page):
    with served.page() as other:
        other.frames(1)
        other.socket.send(message)
        assert other.last_words().startswith("The page said: ")
        assert close_code(other) == 1008
    wait_until(lambda: len(served.scheduler.players) == 1)
    assert page.frames(2)


def test_a_message_that_ends_a_dream_leaves_no_trace_in_the_log(served, caplog):
    """Whatever it says, and however many frames are under way to the page."""
    for _ in range(10):
        with served.page() as page:
            page.frames(1)
            page.send("act", action="\N{SNOWMAN}" * 60, id=1)
            assert page.last_words().startswith("The page said: unknown action")
            assert close_code(page) == 1008
    wait_until(lambda: not served.scheduler.players)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_controls_that_do_not_fit_change_nothing_and_the_page_hears_why(page):
    page.frames(1)
    page.send("adjust", strategy="k=6", temperature=1, top_p=0.5, paced=False)
    while not isinstance(message := page.receive(), dict):
        page.send("seen", frame=message[0]["frame"])
    assert message["message"].startswith("That does not fit: row_lag must be in [1, width=5]")
    assert message["controls"] == page.welcome["controls"]
    assert page.frames(2)[-1]["strategy"] == "k=1"


def test_what_was_recorded_outlives_the_dream_for_a_while(served):
    with served.page() as page:
        page.frames(1)
        page.send("record", on=True)
        while page.frames(1)[0]["recorded"] < 3:
            pass
        page.send("seen", frame=10**6)  # ends it
        page.last_words()
        path = f"{served.url}/sessions/{page.welcome['session']}"
    assert httpx.get(f"{path}/video.mp4").headers["content-type"] == "video/mp4"
    assert len(httpx.get(f"{path}/session.json").json()["frames"]) >= 4
    assert httpx.post(f"{path}/replay", content=b"{}").status_code == 404


def test_an_oversized_message_closes_that_socket_and_no_other(served, page):
    with served.page() as other:
        other.frames(1)
        other.socket.send("x" * 10_000)
        assert close_code(other) == 1009
    wait_until(lambda: len(served.scheduler.players) == 1)
    assert page.frames(2)


def test_a_flood_of_messages_closes_that_socket_and_no_other(served, page):
    with served.page() as other:
        with contextlib.suppress(ConnectionClosed):
            for number in range(int(BURST) * 4):
                other.send("act", action="left", id=number)
        assert "too many messages" in other.last_words()
    wait_until(lambda: len(served.scheduler.players) == 1)
    assert page.frames(2)


def test_answers_to_frames_are_no_flood_however_fast_the_model(served, monkeypatch):
    monkeypatch.setattr(server, "BURST", 3)
    monkeypatch.setattr(server, "MESSAGES_PER_SECOND", 0)
    with served.page() as page:
        assert page.frames(20)


def test_a_page_that_disappears_frees_its_place(served, page):
    with served.page() as other:
        other.frames(2)
        assert len(served.scheduler.players) == 2
        other.socket.socket.shutdown(socket.SHUT_RDWR)  # without a goodbye
        wait_until(lambda: len(served.scheduler.players) == 1)
    assert page.frames(2)


def place_in_line(page):
    """Read the next message, and return how many wait before this page."""
    message = page.receive()
    assert message["type"] == "waiting", message
    return message["before"]


def test_who_waits_hears_how_many_are_before_and_moves_up(served, page):
    with contextlib.ExitStack() as pages:
        second, third, fourth, fifth = (
            pages.enter_context(served.page(close_timeout=0.1)) for _ in range(4)
        )
        assert second.frames(1)
        waiting = [one.welcome for one in (third, fourth, fifth)]
        assert [one["before"] for one in waiting] == [0, 1, 2]
        assert waiting[0]["message"] == "All 2 places are taken: you are next."
        assert waiting[2]["message"] == "All 2 places are taken: 2 before you."
        fourth.socket.close()  # who gives up makes the line shorter
        assert place_in_line(fifth) == 1
        second.socket.close()
        assert third.receive()["type"] == "welcome"
        assert third.frames(1)
        assert place_in_line(fifth) == 0
        page.socket.close()
        assert fifth.receive()["type"] == "welcome"
        assert fifth.frames(1)


def test_who_waits_has_nothing_to_say(serve):
    served = serve(max_sessions=1)
    with served.page() as page, served.page() as second:
        second.send("pause", paused=False)
        assert "before there is a place" in second.last_words()
        assert close_code(second) == 1008
        assert page.frames(1)
    wait_until(lambda: not served.scheduler.line)


def test_even_the_line_has_an_end(serve, monkeypatch):
    monkeypatch.setattr("diagd.web.play.scheduler.MAX_WAITING", 1)
    served = serve(max_sessions=1)
    with served.page(), served.page() as second, served.page() as third:
        assert second.welcome["type"] == "waiting"
        assert third.welcome["type"] == "refused"
        assert close_code(third) == 1013


def test_an_idle_session_ends_with_a_message(serve):
    served = serve(idle_seconds=0.4)
    with served.page() as page:
        while isinstance(message := page.receive(), tuple):
            with contextlib.suppress(ConnectionClosed):  # what was sent before can still be read
                page.send("seen", frame=message[0]["frame"])  # drawing is not playing
        assert message["message"].startswith("Nothing was pressed for 0.4 seconds")
        assert close_code(page) == 1000
    wait_until(lambda: not served.scheduler.players)


def test_an_upload_can_be_stopped_by_its_size_before_it_is_whole(page, own):
    def endless():
        while True:
            yield bytes(2**20)

    with contextlib.suppress(httpx.TransportError):
        assert httpx.post(f"{own}/start", content=endless(), timeout=20).status_code == 413
    assert page.frames(2)
