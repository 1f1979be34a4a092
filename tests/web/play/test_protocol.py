"""docs/protocol.md and the messages say the same."""

import json
import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from diagd.client import PROTOCOL
from diagd.decoding.strategies.table import Strategy
from diagd.web.play import scheduler
from diagd.web.play.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    Frame,
    Header,
    PageMessage,
    ServerMessage,
    Settings,
    Start,
)
from diagd.web.play.player import MAX_STEPS, WINDOW
from diagd.web.play.server import BURST, MAX_SESSION_BYTES, MESSAGES_PER_SECOND
from diagd.web.play.session import MAX_FRAMES

PAGE = (Path(__file__).parents[3] / "docs/protocol.md").read_text(encoding="utf-8")
JSON = {str: "string", Strategy: "string", int: "integer", float: "number", bool: "boolean"}
JSON |= {tuple: "array", list: "array", dict: "object"}


def described() -> dict[str, dict[str, tuple[str, str]]]:
    """Return the type and the words of each field of each message of the page."""
    _, *parts = re.split(r"^###+ `(\w+)`$", PAGE, flags=re.MULTILINE)
    row = re.compile(r"^\| `(\w+)` \| (.+?) \| (.*?) ?\|$", re.MULTILINE)
    texts = (re.split(r"^##", part, flags=re.MULTILINE)[0] for part in parts[1::2])
    tables = [{name: (kind, words) for name, kind, words in row.findall(text)} for text in texts]
    return dict(zip(parts[::2], tables, strict=True))


def json_type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"`{json.dumps(get_args(kind)[0])}`"
    if isinstance(kind, UnionType):
        (known,) = set(get_args(kind)) - {NoneType}
        return f"{json_type(known)} or null"
    return "object" if is_dataclass(kind) and kind not in JSON else JSON[get_origin(kind) or kind]


def messages() -> dict[str, dict[str, str]]:
    """Return the type of each field of each message of the code."""
    every = {one.__name__.lower(): one for one in get_args(PageMessage) + get_args(ServerMessage)}
    found = {
        name: {field.name: json_type(get_type_hints(one)[field.name]) for field in fields(one)}
        for name, one in {**every, "header": Header}.items()
    }
    for name in ("start", "frame"):
        found[name] = {k: kind for k, kind in found[name].items() if k not in found["header"]}
    return found


def test_the_page_names_each_message_with_all_its_fields_and_their_types_and_no_other():
    told = {
        name: {field: kind for field, (kind, _) in table.items()}
        for name, table in described().items()
    }
    assert told == messages()


def test_a_message_is_called_what_its_type_is():
    for one in set(get_args(PageMessage) + get_args(ServerMessage)) - {Start, Frame}:
        assert one.type == one.__name__.lower()


def test_the_page_has_the_defaults_of_what_a_client_may_leave_out():
    table = described()["adjust"]
    for field in fields(Settings):
        default = field.default
        found = re.search(r"default `?([^`]+)`?$", table[field.name][1])
        if default is MISSING:
            assert not found, field.name
        else:
            text = default.name if isinstance(default, Strategy) else json.dumps(default)
            assert found, field.name
            assert found[1] == text.removesuffix(".0")


def test_the_page_has_what_an_upload_is_answered():
    for kind in get_args(Answer):
        for field in fields(kind):
            assert re.search(rf"Answer: .*`{field.name}`", PAGE), field.name


@pytest.mark.parametrize(
    "words",
    [
        f"at most {MAX_MESSAGE_BYTES:,} characters",
        f"longer than {4 * MAX_MESSAGE_BYTES:,} bytes",
        f"{MESSAGES_PER_SECOND:g}\nmessages a second, after a burst of {BURST:g}",
        f"At most {MAX_STEPS} may wait",
        f"at most {WINDOW} pictures that are not `seen`",
        f"{scheduler.MAX_WAITING} clients wait already",
        f"every {scheduler.ALIVE_SECONDS:g} seconds",
        f"After {4 * scheduler.ALIVE_SECONDS:g} seconds",
        f"for {scheduler.KEPT_SECONDS / 60:g} minutes",
        f"lasted {MAX_FRAMES:,} frames",
        f"at most {MAX_SESSION_BYTES >> 20} MiB",
        f"version of this page: {PROTOCOL}",
        f"`protocol` is {PROTOCOL}.",
    ],
)
def test_the_page_has_the_limits(words):
    assert words.replace("\n", " ") in PAGE.replace("\n", " ")


def test_the_page_has_the_codes_that_close_a_socket():
    codes = re.findall(r"^\| (\d{4}) \|", PAGE, re.MULTILINE)
    ours = scheduler.GONE, scheduler.TRY_LATER, scheduler.WRONG, scheduler.CRASHED
    assert set(map(str, ours)) < set(codes)
