"""What anybody may send to `play` and `study`: it is answered or refused, and others play on."""

import asyncio
import contextlib
import io
import json
import zlib
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import Phase, event, example, given, seed, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed

from diagd.data.actions import ActionVocabulary
from diagd.data.video import encode_video
from diagd.pipeline.generator import VideoGenerator
from diagd.web.play.messages import parse
from diagd.web.play.player import to_jpeg
from diagd.web.play.session import load_log
from diagd.web.uploads import decode_upload
from tests.attack.fuzzing import attack
from tests.web.play.serving import Served, serving
from tests.web.study.cases import enrol, study, write_pairs
from tests.worlds import HEIGHT_PX, NAMES, WIDTH_PX, smooth_frames, write_scenes, write_world

pytestmark = pytest.mark.slow
# no shrinking: a session that waits for an answer in vain takes seconds
over_a_line = settings(attack, max_examples=100, phases=[Phase.explicit, Phase.generate])

NUMBERS = st.sampled_from([-(2**63), -1, 0, 1, 2, 9, 2**31, 2**53, 2**64, 10**18, 10**400, 1e308])
WORDS = st.sampled_from(
    "none left k=1 k=2 exact raster k=0 k=-1 k=9999999999 k=1,d=0 exact,lanes=1000000000 "
    f"k=1,window=99999999 k={'1' * 300} \0 \ud800".split(" ")
)
FIELDS = {
    "act": ("action", "id"),
    "adjust": ("strategy", "temperature", "top_p", "paced"),
    "begin": ("scene", "seed"),
    "pause": ("paused",),
    "record": ("on",),
    "seen": ("frame",),
}
JUNK = st.recursive(
    st.one_of(NUMBERS, WORDS, st.floats(), st.none(), st.booleans(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=5,
)


@st.composite
def messages(draw: Any) -> str:
    """Draw a message that is nearly one, or no message at all."""
    if not draw(st.integers(0, 9)):
        return draw(st.text(max_size=30))
    kind = draw(st.sampled_from([*FIELDS, "x"]))
    document = {"type": kind, **{name: draw(JUNK) for name in FIELDS.get(kind, ())}}
    right = {"strategy": WORDS, "action": WORDS, "temperature": st.just(1), "top_p": st.just(0.9)}
    right |= {"paced": st.booleans(), "on": st.booleans(), "paused": st.booleans()}
    right |= dict.fromkeys(("id", "seed", "frame", "scene"), st.integers(-1, 10**12))
    for name in document.keys() & right.keys():
        if draw(st.integers(0, 4)):
            document[name] = draw(right[name])
    return json.dumps(document)


@seed(15)
@attack
@given(text=messages())
@example(text='{"type": "act", "action": "left", "id": ' + "9" * 900 + "}")
@example(text="[" * 1000)
def test_a_message_of_anything_is_read_or_refused(text: str) -> None:
    complaint = ""
    try:
        parse(text, ActionVocabulary(NAMES))
    except ValueError as error:
        event("refused")
        complaint = str(error)
    assert len(complaint) < 2000


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(write_world(tmp_path_factory.mktemp("attacked")))


@pytest.fixture(scope="module")
def served(world: Path) -> Iterator[Served]:
    with serving(world, max_sessions=3) as running:
        yield running


@seed(15)
@over_a_line
@given(texts=st.lists(messages(), min_size=1, max_size=6))
def test_messages_of_anything_end_at_most_their_own_session(
    served: Served, texts: list[str]
) -> None:
    with served.page() as page:
        with contextlib.suppress(ConnectionClosed):
            for text in (*texts, "no message at all"):
                page.socket.send(text.encode(errors="replace"), text=True)
        told: Any = None
        while not (isinstance(told, dict) and told.get("type") == "ended"):
            told = page.receive()
        event(told["message"][:40])
    assert served.server.started
    assert not served.server.should_exit


def test_after_all_that_a_page_is_served(served: Served) -> None:
    with served.page() as page:
        assert len(page.frames(3)) == 3


@pytest.fixture(scope="module")
def generator(world: Path) -> VideoGenerator:
    return VideoGenerator.from_pretrained(world)


PIXELS = b64encode(zlib.compress(bytes(HEIGHT_PX * WIDTH_PX * 3))).decode()
RECORD = {"action": "none", "checksum": 7}
BOMB = b64encode(zlib.compress(bytes(2**26))).decode()


@seed(15)
@attack
@given(
    top=st.dictionaries(
        st.sampled_from(["format", "start", "scene", "frames", "seed"]), JUNK, max_size=1
    ),
    start=st.dictionaries(
        st.sampled_from(["shape", "pixels", "actions"]),
        JUNK | st.just(BOMB) | st.lists(NUMBERS, min_size=4, max_size=4),
        max_size=1,
    ),
    row=st.dictionaries(
        st.sampled_from(["strategy", "temperature", "top_p", "x"]), JUNK, max_size=3
    ),
    junk=st.none() | JUNK,
)
@example(top={}, start={}, row={"temperature": 10**400}, junk=None)
@example(top={}, start={}, row={"strategy": 10**400}, junk=None)
@example(top={"seed": 10**400}, start={}, row={}, junk=None)
def test_a_saved_dream_of_anything_is_loaded_or_refused(
    generator: VideoGenerator,
    top: dict[str, Any],
    start: dict[str, Any],
    row: dict[str, Any],
    junk: Any,
) -> None:
    plain = {"shape": [1, HEIGHT_PX, WIDTH_PX, 3], "pixels": PIXELS, "actions": []}
    rows = [{**RECORD, "controls": row}] + ([] if junk is None else [junk])
    document = {
        "format": "diagd-dream-2",
        "model": "x",
        "seed": 3,
        "frames": rows,
        "start": {**plain, **start},
        **top,
    }
    complaint = ""
    try:
        load_log(json.dumps(document), generator)
    except ValueError as error:
        event("refused")
        complaint = str(error)
    assert len(complaint) < 2000


def pictures() -> list[bytes]:
    frames = smooth_frames(3, 32, 48)
    return [encode_video(frames, 8), to_jpeg(frames[0])]


@seed(15)
@settings(attack, max_examples=60)
@given(
    of=st.sampled_from(pictures()),
    places=st.lists(st.integers(0, 2**20), min_size=1, max_size=8),
    new=st.binary(min_size=1, max_size=8),
    cut=st.integers(0, 5),
)
def test_damaged_uploads_are_decoded_or_refused(
    of: bytes, places: list[int], new: bytes, cut: int
) -> None:
    data = bytearray(of)
    for place in places:
        place = 8 + place % (len(data) - 8)  # what it is remains
        data[place : place + len(new)] = new
    if not cut:
        del data[8 + places[0] % (len(data) - 8) :]
    try:
        frames = asyncio.run(decode_upload(bytes(data), 2, HEIGHT_PX, WIDTH_PX))
    except ValueError:
        event("refused")
    else:
        assert frames.shape[1:] == (HEIGHT_PX, WIDTH_PX, 3)


@pytest.fixture(scope="module")
def rated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    with study(write_pairs(tmp_path_factory.mktemp("pairs"))) as (address, _):
        yield address, {"cookie": enrol(address)}


@seed(15)
@over_a_line
@given(
    path=st.sampled_from(["raters", "answers"]),
    fields=st.dictionaries(st.sampled_from(["name", "trial", "question", "choice", "x"]), JUNK),
    raw=st.none() | st.binary(max_size=60) | st.just(b"[" * 9000),
)
@example(path="raters", fields={"name": "\ud800"}, raw=None)
@example(path="answers", fields={"trial": 10**400, "question": "q", "choice": "left"}, raw=None)
def test_a_study_answers_or_refuses_anything(
    rated: tuple[str, dict[str, str]], path: str, fields: dict[str, Any], raw: bytes | None
) -> None:
    address, headers = rated
    body = json.dumps(fields).encode() if raw is None else raw
    headers = {**headers, "content-type": "application/json"}
    answer = httpx.post(f"{address}/api/{path}", content=body, headers=headers, timeout=20)
    assert answer.status_code in (200, 400, 409, 413, 422), answer.text
    if answer.status_code != 200:
        assert answer.json()["detail"]


@seed(15)
@over_a_line
@given(
    path=st.text(st.characters(codec="utf-8"), max_size=30),
    query=st.text(st.characters(codec="utf-8"), max_size=20),
    token=st.binary(max_size=40),
)
def test_addresses_and_cookies_of_anything_are_answered_or_refused(
    rated: tuple[str, dict[str, str]], path: str, query: str, token: bytes
) -> None:
    address, headers = rated
    name = headers["cookie"].partition("=")[0].encode()
    value = bytes(byte for byte in token if byte >= 32 and byte != 127)
    cookie = name + b"=" + value.rstrip()  # a client sends no spaces at the end of a line
    for goal in (f"media/{quote(path)}", f"results?key={quote(query)}", "api/study"):
        answer = httpx.get(f"{address}/{goal}", headers=[(b"cookie", cookie)], timeout=20)
        assert answer.status_code < 500, (answer.status_code, answer.text)


def test_the_pictures_that_are_damaged_are_good_ones() -> None:
    for data in pictures():
        assert io.BytesIO(data).getbuffer().nbytes > 500
        assert len(asyncio.run(decode_upload(data, 2, HEIGHT_PX, WIDTH_PX))) in (1, 2)
