import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagd.data.actions import ActionVocabulary
from diagd.decoding.strategies.strategy import Diagonal, Exact
from diagd.web.play.messages import (
    MAX_MESSAGE_BYTES,
    Act,
    Adjust,
    Begin,
    Pause,
    Record,
    Seen,
    pack,
    parse,
    unpack,
)
from diagd.web.play.session import Controls

CODEC = ActionVocabulary(("none", "left"))
GOOD = {
    '{"type": "act", "action": "left", "id": 3}': Act("left", 3),
    '{"type": "begin", "scene": 2, "seed": 5}': Begin(2, 5),
    '{"type": "begin", "scene": null, "seed": 4294967295}': Begin(None, 2**32 - 1),
    '{"type": "pause", "paused": true}': Pause(True),
    '{"type": "record", "on": false}': Record(False),
    '{"type": "seen", "frame": 7}': Seen(7),
    '{"type": "adjust", "strategy": "k=2", "temperature": 0, "top_p": 0.9, "paced": true}': Adjust(
        Controls(Diagonal(2), 0, 0.9), True
    ),
    '{"type": "adjust", "strategy": "exact", "temperature": 2, "top_p": 1, "paced": false}': Adjust(
        Controls(Exact(), 2, 1), False
    ),
}
ADJUST = '{"type": "adjust", "strategy": %s, "temperature": %s, "top_p": %s, "paced": %s}'
BAD = {
    "": "must be a JSON object",
    "[1]": "must be a JSON object",
    "[" * 1000: "must be a JSON object",
    "x" * (MAX_MESSAGE_BYTES + 1): "at most 1024 characters, got 1025",
    "{}": "unknown message, expected one of: act, adjust, begin, pause, record, seen",
    '{"type": ["act"]}': "unknown message",
    '{"type": "act", "action": "left"}': "act must have the fields action, id",
    '{"type": "act", "action": "left", "id": 1, "more": 1}': "act must have the fields",
    '{"type": "act", "action": 1, "id": 1}': "act: action must not be int",
    '{"type": "act", "action": "left", "id": true}': "act: id must not be bool",
    '{"type": "pause", "paused": 1}': "pause: paused must not be int",
    '{"type": "seen", "frame": NaN}': "NaN is no JSON",
    '{"type": "act", "action": "fly", "id": 1}': "unknown action 'fly', expected one of: none",
    '{"type": "act", "action": "%s", "id": 1}' % ("x" * 201): "an action must be a short text",
    ADJUST % (0, 1, 1, "true"): "adjust: strategy must not be int",
    ADJUST % ('"diagonal"', 1, 1, "true"): "a strategy looks like raster, k=2",
    ADJUST % ('"k=1"', -1, 1, "true"): r"temperature must be in \[0, 5.0\], got -1",
    ADJUST % ('"k=1"', "Infinity", 1, "true"): "Infinity is no JSON",
    ADJUST % ('"k=1"', "1e999", 1, "true"): r"temperature must be in \[0, 5.0\], got inf",
    ADJUST % ('"k=1"', 1, 0, "true"): r"top_p must be in \[0.01, 1\], got 0",
    ADJUST % ('"k=1"', 1, 1, "null"): "paced must not be NoneType",
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
    with pytest.raises(ValueError, match=r"message|JSON"):
        parse(text, CODEC)


@given(st.dictionaries(st.text(), st.integers() | st.text()), st.binary())
def test_a_packed_frame_is_unpacked(header, picture):
    assert unpack(pack(header, picture)) == (header, picture)
