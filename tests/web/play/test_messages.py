import json
import re
from dataclasses import fields
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagd.client import unpack
from diagd.data.actions import ActionVocabulary
from diagd.decoding.strategies.table import Diagonal, Exact
from diagd.web.play.messages import (
    MAX_MESSAGE_BYTES,
    Act,
    Adjust,
    Begin,
    Frame,
    Header,
    PageMessage,
    Pause,
    Record,
    Seen,
    ServerMessage,
    Start,
    Step,
    Welcome,
    pack,
    parse,
)
from diagd.web.play.server import STATIC

CODEC = ActionVocabulary(("none", "left"))
GOOD = {
    '{"type": "act", "action": "left", "id": 3}': Act("left", 3),
    '{"type": "step", "action": "left", "id": 4}': Step("left", 4),
    '{"type": "begin", "scene": 2, "seed": 5}': Begin(2, 5),
    '{"type": "begin", "scene": null, "seed": 4294967295}': Begin(None, 2**32 - 1),
    '{"type": "pause", "paused": true}': Pause(True),
    '{"type": "record", "on": false}': Record(False),
    '{"type": "seen", "frame": 7}': Seen(7),
    '{"type": "adjust", "strategy": "k=2", "temperature": 0, "top_p": 0.9, "paced": true}': Adjust(
        Diagonal(2), 0, 0.9, paced=True
    ),
    '{"type": "adjust", "strategy": "exact", "temperature": 2, "top_p": 1, "paced": false}': Adjust(
        Exact(), 2, 1, paced=False
    ),
}
ADJUST = '{"type": "adjust", "strategy": %s, "temperature": %s, "top_p": %s, "paced": %s}'
BAD = {
    "": "not a message: Invalid JSON",
    "[1]": "not a message: Input should be an object",
    "[" * 1000: "recursion limit exceeded",
    "x" * (MAX_MESSAGE_BYTES + 1): "at most 1024 characters, got 1025",
    "{}": "Unable to extract tag using discriminator 'type'",
    '{"type": ["act"]}': "does not match any of the expected tags: 'act', 'adjust', 'begin', ",
    '{"type": "act", "action": "left"}': "act.id: Field required",
    '{"type": "act", "action": "left", "id": 1, "more": 1}': "act.more: Unexpected keyword",
    '{"type": "act", "action": 1, "id": 1}': "act.action: Input should be a valid string",
    '{"type": "act", "action": "left", "id": true}': "act.id: Input should be a valid integer",
    '{"type": "act", "action": "fly", "id": 1}': "unknown action 'fly', expected one of: none",
    '{"type": "step", "action": "fly", "id": 1}': "unknown action 'fly', expected one of: none",
    '{"type": "act", "action": "%s", "id": 1}' % ("x" * 801): "should have at most 800 characters",
    '{"type": "pause", "paused": 1}': "pause.paused: Input should be a valid boolean",
    '{"type": "seen", "frame": NaN}': "seen.frame: Input should be a valid integer",
    ADJUST % (0, 1, 1, "true"): "adjust.strategy: strategy must be a name, got 0",
    ADJUST % ("{}", 1, 1, "true"): "adjust.strategy: strategy must be a name",
    ADJUST % ('"diagonal"', 1, 1, "true"): "adjust.strategy: strategy must look like raster, k=2",
    ADJUST % ('"k=1"', -1, 1, "true"): "temperature: Input should be greater than or equal to 0",
    ADJUST % ('"k=1"', "Infinity", 1, "true"): "temperature: Input should be a finite number",
    ADJUST % ('"k=1"', "1e999", 1, "true"): "temperature: Input should be a finite number",
    ADJUST % ('"k=1"', 1, 0, "true"): "top_p: Input should be greater than or equal to 0.01",
    ADJUST % ('"k=1"', 1, 1, "null"): "adjust.paced: Input should be a valid boolean",
}


@pytest.mark.parametrize("text", GOOD)
def test_messages_are_read(text):
    assert parse(text, CODEC) == GOOD[text]


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_what_is_no_message_is_refused_with_a_reason(text):
    with pytest.raises(ValueError, match=BAD[text]):
        parse(text, CODEC)


@given(st.text(max_size=60) | st.recursive(st.none() | st.integers(), st.lists).map(json.dumps))
def test_anything_at_all_is_read_or_refused(text):
    with pytest.raises(ValueError, match="message"):
        parse(text, CODEC)


def built(kind: type[Header]) -> st.SearchStrategy[Header]:
    return st.builds(kind, decode_ms=st.floats(0, 1e6))


@given(st.sampled_from([Frame, Start]).flatmap(built), st.binary())
def test_a_packed_frame_is_unpacked(header, picture):
    assert unpack(pack(header, picture)) == (json.loads(json.dumps(vars(header))), picture)


def kinds(union: Any) -> dict[str, set[str]]:
    """Return the fields of messages by their type; binary ones have none."""
    each = {one: {field.name for field in fields(one)} for one in get_args(union)}
    return {one.type: names for one, names in each.items() if "type" in names}


def script(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def test_the_page_handles_each_kind_of_message_and_no_other():
    handled = re.findall(r'case "(\w+)":', script("connection.js"))
    assert sorted(handled) == sorted(kinds(ServerMessage))


def test_the_page_sends_each_kind_of_message_with_its_fields():
    sent = dict(re.findall(r'connection\.send\(\{\s*type: "(\w+)",([^}]*)\}', script("play.js")))
    assert set(sent) == set(kinds(PageMessage)) - {"step"}  # of programs: time passes for a page
    for kind, names in kinds(PageMessage).items():
        if kind in sent and kind != "adjust":  # whose fields are those of `Welcome.controls`
            assert {"type", *re.findall(r"(?:^|,)\s*(\w+)", sent[kind])} == names, kind


def test_a_world_in_the_browser_is_told_what_a_server_is():
    told = set(re.findall(r'case "(\w+)":', script("worker.js")))
    assert told == kinds(PageMessage).keys() - {"step", "record"} | {
        "log"
    }  # the page records by itself
    written = set(re.findall(r"(\w+)[:,]", script("worker.js") + script("browser.js")))
    assert {field.name for kind in (Start, Frame) for field in fields(kind)} <= written


def test_the_page_reads_the_fields_that_messages_have():
    names = ("play", "connection", "readings", "token-grid", "dream")
    page = "".join(script(f"{name}.js") for name in names)
    headers = {field.name for kind in (Start, Frame) for field in fields(kind)}
    known = {
        "header": headers,
        "about": {field.name for field in fields(Welcome)} | {"threads"},  # of a browser's world
        "message": set[str]().union(*kinds(ServerMessage).values()),
    }
    for name, expected in known.items():
        read = set(re.findall(rf"(?<![.\w]){name}\.(\w+)", page))
        for unpacked in re.findall(rf"\{{([^{{}}]*)\}} = {name};", page):
            read.update(re.findall(r"\w+", unpacked))
        assert read, name
        assert read <= expected, name
    unread = set[str]().union(*known.values()) - set(re.findall(r"\w+", page))
    assert unread == {"send_ms", "received", "axes"}  # for whoever measures, and for programs
