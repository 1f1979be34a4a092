import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagd.data.actions import ActionVocabulary
from diagd.decoding.strategies.table import Diagonal, Exact
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

CODEC = ActionVocabulary(("none", "left"))
GOOD = {
    '{"type": "act", "action": "left", "id": 3}': Act("left", 3),
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
    '{"type": "act", "action": "%s", "id": 1}' % ("x" * 201): "should have at most 200 characters",
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


@given(st.dictionaries(st.text(), st.integers() | st.text()), st.binary())
def test_a_packed_frame_is_unpacked(header, picture):
    assert unpack(pack(header, picture)) == (header, picture)
