import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import av
import pytest

from diagd.web.study.pairs import find_pairs
from diagd.web.study.server import MAX_BODY_BYTES
from diagd.web.study.store import StudyStore
from tests.web.study.cases import ACTIONS, call, enrol, fetch, running, study, write_pairs


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with study(write_pairs(tmp_path_factory.mktemp("pairs"))) as served:
        yield served


@pytest.fixture(scope="module")
def address(served):
    return served[0]


@pytest.fixture
def rater(address):
    return enrol(address)


def colour_of(video: bytes, path: Path) -> str:
    path.write_bytes(video)
    with av.open(str(path), "r") as container:
        red, _, blue = next(container.decode(video=0)).to_ndarray(format="rgb24")[9, 9]
    return "k=1" if red > blue else "raster"


def test_a_rater_gets_pairs_answers_them_and_is_counted(served, tmp_path):
    address, store = served
    rater = enrol(address, "  Ada   Lovelace ")
    found = fetch(f"{address}/api/study", cookie=rater)
    assert found["rater"] == "Ada Lovelace"
    assert [q["key"] for q in found["questions"]] == ["quality", "consistency", "controllability"]
    assert [trial["actions"] for trial in found["trials"]] == [list(ACTIONS)] * 3
    choices = []
    for number, trial in enumerate(found["trials"]):
        status, left, headers = call(f"{address}/media/{trial['left']}")
        assert (status, headers["content-type"]) == (200, "video/mp4")
        choice = "left" if colour_of(left, tmp_path / "left.mp4") == "k=1" else "right"
        message = {"trial": number, "question": "quality", "choice": choice}
        assert fetch(f"{address}/api/answers", message, cookie=rater) == {"saved": True}
        choices.append({"quality": choice})
    mine = [vote for vote in store.votes() if vote.rater == "Ada Lovelace"]
    assert [vote.outcome for vote in mine] == ["win"] * 3
    again = fetch(f"{address}/api/study", cookie=rater)
    assert [trial["answers"] for trial in again["trials"]] == choices


def test_nothing_a_rater_can_fetch_names_a_system_or_a_file(address, rater):
    trials = fetch(f"{address}/api/study", cookie=rater)["trials"]
    media = [f"/media/{trial[side]}" for trial in trials for side in ("left", "right")]
    for path in ("/", "/study.js", "/study.css", "/api/study", "/results", *media):
        _, body, headers = call(address + path, cookie=rater)
        told = (body + json.dumps(headers).encode()).lower()
        for secret in ("k=1", "raster", "dream_", "diagonal", "row_lag", "x264"):
            assert secret.encode() not in told, (path, secret)
        if path.startswith("/media"):
            assert not {"etag", "last-modified"} & {name.lower() for name in headers}


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"no video")])
def test_a_clip_that_is_gone_is_said_without_its_name(damage, tmp_path):
    with study(write_pairs(tmp_path, 1)) as (address, _):
        rater = enrol(address)
        (trial,) = fetch(f"{address}/api/study", cookie=rater)["trials"]
        for path in tmp_path.rglob("*.mp4"):
            damage(path)
        status, body, _ = call(f"{address}/media/{trial['left']}")
        assert (status, json.loads(body)) == (503, {"detail": "this video cannot be read any more"})


def test_raters_cannot_compare_ids(address):
    """The same video has another id for everybody."""
    ids = []
    for _ in range(2):
        rater = enrol(address)
        trials = fetch(f"{address}/api/study", cookie=rater)["trials"]
        ids += [trial[side] for trial in trials for side in ("left", "right")]
    assert len(set(ids)) == 12


def test_results_need_their_key_and_show_counts(served):
    address, store = served
    assert call(f"{address}/results?key=guess")[0] == 403
    status, body, _ = call(f"{address}/results?key={store.results_key}")
    assert status == 200
    assert b"k=1 against raster" in body
    assert b'<svg class="bar"' in body


def test_a_name_cannot_put_markup_into_the_results(served):
    address, store = served
    rater = enrol(address, "<script>")
    answer = {"trial": 0, "question": "quality", "choice": "tie"}
    fetch(f"{address}/api/answers", answer, cookie=rater)
    body = call(f"{address}/results?key={store.results_key}")[1]
    assert b"&lt;script&gt;" in body
    assert b"<script" not in body


ANSWER = {"trial": 0, "question": "quality", "choice": "left"}


@pytest.mark.parametrize(
    ("path", "message", "status", "words"),
    [
        ("/api/answers", {**ANSWER, "trial": 99}, 422, "no such trial: 99"),
        ("/api/answers", {**ANSWER, "trial": -1}, 422, "trial: Input should be greater than or"),
        ("/api/answers", {**ANSWER, "trial": 10**30}, 422, "trial: "),
        ("/api/answers", {**ANSWER, "trial": "0"}, 422, "trial: Input should be a valid integer"),
        ("/api/answers", {**ANSWER, "choice": "up"}, 422, "no such question or choice"),
        ("/api/answers", {**ANSWER, "question": "x" * 99}, 422, "question: String should have at"),
        ("/api/answers", {**ANSWER, "more": 1}, 422, "more: Unexpected keyword argument"),
        ("/api/answers", [], 422, "message: Input should be an object"),
        ("/api/answers", b"{", 422, "message: Invalid JSON"),
        ("/api/raters", {"name": "x" * 41}, 422, "name: String should have at most 40 characters"),
        ("/api/raters", {"name": "a\0b"}, 422, "a name is made of letters, digits and signs"),
        ("/api/raters", {"name": "\ud800"}, 422, "message: Invalid JSON"),
        ("/api/raters", {}, 422, "name: Field required"),
        ("/api/raters", b"x" * (MAX_BODY_BYTES + 1), 413, "a request is at most 4 kB"),
        ("/media/../study.db", None, 404, "Not Found"),
        ("/media/..%2fstudy.db", None, 404, "Not Found"),
        ("/media/study.db", None, 404, "no such video"),
        ("/study.html", None, 404, "Not Found"),
        ("/openapi.json", None, 404, "Not Found"),
        ("/api/study", {}, 405, "Method Not Allowed"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(path, message, status, words, address, rater):
    found, body, _ = call(address + path, message, cookie=rater)
    assert found == status
    assert words in json.loads(body)["detail"]


def test_who_is_not_enrolled_gets_nothing(address):
    cookie = enrol(address).partition("=")[0]
    for headers in ({}, {"cookie": f"{cookie}=guess"}, {"cookie": "rater=guess"}):
        assert fetch(f"{address}/api/study", **headers) is None
        status, body, _ = call(f"{address}/api/answers", ANSWER, **headers)
        assert status == 401
        assert "does not know you" in json.loads(body)["detail"]
    assert call(f"{address}/api/study", cookie=f"{cookie}={'x' * 65}")[0] == 422


def test_a_name_does_not_open_another_rater_s_votes(served):
    address, store = served
    ann = enrol(address, "Ann")
    fetch(f"{address}/api/answers", ANSWER, cookie=ann)
    eve = enrol(address, "ann")
    assert fetch(f"{address}/api/study", cookie=eve)["rater"] == "ann (2)"
    fetch(f"{address}/api/answers", {**ANSWER, "choice": "tie"}, cookie=eve)
    found = fetch(f"{address}/api/study", cookie=ann)
    assert found["rater"] == "Ann"
    assert found["trials"][0]["answers"] == {"quality": "left"}
    assert {vote.rater for vote in store.votes()} >= {"Ann", "ann (2)"}


def test_the_secret_is_out_of_reach_of_scripts_and_other_sites(address):
    headers = call(f"{address}/api/raters", {"name": ""})[2]
    assert {"HttpOnly", "SameSite=strict"} <= set(headers["set-cookie"].split("; "))


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"host": "evil.example"}, b"does not answer to the name 'evil.example'"),
        ({"origin": "http://evil.example"}, b"a page of http://evil.example may not use"),
        ({"origin": "http://127.0.0.1:1"}, b"a page of http://127.0.0.1:1 may not use"),
        ({"origin": "null", "content_type": "text/plain"}, b"a page of null may not use"),
    ],
)
def test_a_foreign_page_cannot_speak_for_a_visitor(headers, words, address, served):
    before = served[1].rater("x"), len(served[1].votes())
    found, body, _ = call(f"{address}/api/raters", {"name": "eve"}, **headers)
    assert (found, words in body) == (403, True)
    assert before == (served[1].rater("x"), len(served[1].votes()))


def test_our_own_page_may_speak(address):
    assert fetch(f"{address}/api/raters", {"name": ""}, origin=address)["rater"]


def test_a_name_given_by_the_owner_is_known_too(tmp_path):
    pairs = find_pairs(write_pairs(tmp_path, 1))
    store = StudyStore(tmp_path / "study.db", pairs)
    with running(pairs, store, ("Study.example",)) as address:
        port = address.rpartition(":")[2]
        assert call(f"{address}/", host=f"study.example:{port}")[0] == 200
        assert call(f"{address}/", host=f"other.example:{port}")[0] == 403
        assert call(f"{address}/", host="other.example")[0] == 403
    store.close()


def test_pages_may_load_nothing_from_elsewhere(address):
    headers = {name.lower(): value for name, value in call(f"{address}/")[2].items()}
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert headers["x-content-type-options"] == "nosniff"
    for path in ("/", "/study.js", "/study.css"):
        body = call(address + path)[1].replace(b"http://www.w3.org/2000/svg", b"")
        assert b"http://" not in body
        assert b"https://" not in body


def test_noise_on_the_line_harms_nobody_else(address, rater):
    port = int(address.rpartition(":")[2])
    for noise in (b"\x00" * 100, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 9000, b"POST /api/raters"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
            line.sendall(noise)
    assert fetch(f"{address}/api/study", cookie=rater)["trials"]


def test_answers_survive_a_kill(tmp_path):
    """SIGKILL right after the last answer was acknowledged; another server goes on from there."""
    folder = write_pairs(tmp_path)
    flags = ("study", "--pairs", str(folder), "--port", "0")
    arguments = [sys.executable, "-m", "diagd", *flags]
    server = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    with server:
        try:
            assert server.stdout is not None
            address = next(line.split()[1] for line in server.stdout if line.startswith("study "))
            address = address.rstrip("/")
            rater = enrol(address, "ann")
            before = fetch(f"{address}/api/study", cookie=rater)["trials"]
            for number, choice in enumerate(("left", "tie")):
                message = {"trial": number, "question": "quality", "choice": choice}
                fetch(f"{address}/api/answers", message, cookie=rater)
        finally:
            server.kill()
        assert server.wait(10) == -signal.SIGKILL
    with study(folder) as (address, store):
        again = fetch(f"{address}/api/study", cookie=rater)["trials"]
        assert [t["answers"] for t in again] == [{"quality": "left"}, {"quality": "tie"}, {}]
        assert [t["left"] for t in again] == [t["left"] for t in before]
        assert len(store.votes()) == 2
