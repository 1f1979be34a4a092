"""Actions as names, as conditioning tokens of a model, and as jsonl files.

An action file holds one JSON object per frame, `{"action": "forward"}`; row t is the action that
led from frame t - 1 to frame t (row 0, before the first action, is by convention `none`).
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diagd.checks import brief
from diagd.files import naming, parse_object, read_json_object, read_lines, write_json, write_text

# One action per frame: `forward*8,left*4`, or (T,) names or integers, indices into `codec.names`,
# or (T, axes) numbers where actions are vectors
Actions = str | Sequence[str] | Sequence[int] | Sequence[Sequence[float]] | NDArray[Any] | Tensor

IDLE_NAMES = re.compile("none|nop|no[-_]?op|(do_)?nothing|idle|null|stay|wait", re.IGNORECASE)


class ActionCodec(Protocol):
    """Translate between the names of actions and the conditioning tokens of a model."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def num_tokens(self) -> int: ...  # of one action
    @property
    def num_ids(self) -> int: ...  # local ids are in [0, num_ids), after a model's visual ids
    @property
    def combines(self) -> bool: ...  # names joined by `+` are actions as well (`forward+jump`)

    def tokens_of(self, action: str) -> tuple[int, ...]:
        """Return the `num_tokens` local ids of an action, or raise ValueError."""
        ...

    def action_of(self, record: dict[str, Any]) -> str:
        """Parse one line of an action file, or raise ValueError."""
        ...


def action_in(record: dict[str, Any], codec: ActionCodec, form: str) -> str:
    """Return the action of `{"action": ...}`, or raise a ValueError that quotes its form."""
    if not isinstance(action := record.get("action"), str):
        raise ValueError(f'expected {{"action": {form}}}, got {json.dumps(record)[:60]}')
    codec.tokens_of(action)
    return action


def parse_call(word: str, name: str, count: int) -> tuple[float, ...] | None:
    """Parse a word such as `camera(-5,12.5)` into its finite numbers, or return None."""
    match = re.fullmatch(rf"{name}\((.*)\)", word)
    try:
        numbers = tuple(map(float, match[1].split(","))) if match else ()
    except ValueError:
        return None
    return numbers if len(numbers) == count and all(map(math.isfinite, numbers)) else None


@dataclass(frozen=True)
class ActionVocabulary:
    """The actions a world model understands; an action's id is its index in `names`."""

    names: tuple[str, ...]
    num_tokens = 1
    combines = False

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            given = f"{len(self.names)}: {brief(self.names)}"
            raise ValueError(f"action names must be distinct and not empty, got {given}")

    def id_of(self, name: str) -> int:
        if name not in self.names:
            known = ", ".join(self.names)
            raise ValueError(f"unknown action {brief(name)}, expected one of: {known}")
        return self.names.index(name)

    @property
    def num_ids(self) -> int:
        return len(self.names)

    def tokens_of(self, action: str) -> tuple[int, ...]:
        return (self.id_of(action),)

    def nearest_name(self, action: str) -> str:
        return action

    def action_of(self, record: dict[str, Any]) -> str:
        """Read `{"action": NAME}`; other keys of the line are ignored."""
        return action_in(record, self, "NAME")

    @classmethod
    def load(cls, path: Path) -> "ActionVocabulary":
        """Read a checkpoint's `actions.json`: `{"names": [...]}`."""
        names = read_json_object(path).get("names")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f'{path}: expected an action vocabulary, {{"names": ["none", ...]}}')
        with naming(path):
            return cls(tuple(names))

    def save(self, path: Path) -> None:
        write_json(path, {"names": self.names})


def idle_action(codec: ActionCodec) -> str:
    """Return the idle action: `none`, `noop` or the like, else the first one."""
    return next((name for name in codec.names if IDLE_NAMES.fullmatch(name)), codec.names[0])


def as_actions(given: Actions, codec: ActionCodec, num_frames: int | None = None) -> list[str]:
    """Convert actions, in any of the forms of `Actions`, to names, or raise ValueError.

    The last action of a string is repeated up to `num_frames`; a list keeps its length.
    """
    if isinstance(given, str):
        actions = parse_actions(given, codec)
        return actions + actions[-1:] * ((num_frames or 0) - len(actions))
    values = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
    names = []
    for value in values if isinstance(values, Iterable) else [None]:
        if codec.combines and isinstance(value, list | tuple | np.ndarray):  # a vector
            value = codec.action_of({"action": np.asarray(value).tolist()})
        elif isinstance(value, bool) or not isinstance(value, str | int | np.integer):
            raise ValueError(
                "actions must be a string such as forward*8,left*4, names, or (T,) integers, "
                f"got {brief(values if value is None else value)}"
            )
        if isinstance(value, str):
            codec.tokens_of(value)
        elif not 0 <= value < len(codec.names):
            raise ValueError(f"actions as numbers must be in [0, {len(codec.names)}), got {value}")
        names.append(value if isinstance(value, str) else codec.names[int(value)])
    return names


def parse_actions(text: str, codec: ActionCodec) -> list[str]:
    """Parse `forward*8,left*4` into twelve actions, or raise ValueError."""
    actions = []
    for part in re.split(r",(?![^()]*\))", text):  # keep camera(PITCH,YAW) whole
        name, star, count = part.strip().partition("*")
        if star and not re.fullmatch(r"0*[1-9]\d{0,5}", count.strip(), re.ASCII):
            raise ValueError(
                f"actions must look like forward*8,left*4 (counts from 1 to 999999), got {part!r}"
            )
        name = name.strip()
        codec.tokens_of(name)
        actions += [name] * (int(count) if star else 1)
    return actions


def split_actions(
    actions: list[str] | None, given: int
) -> tuple[list[str] | None, list[str] | None]:
    """Return the actions between the first `given` frames, and those after them."""
    return (None, None) if actions is None else (actions[1:given], actions[given:])


def read_actions(path: str | Path, codec: ActionCodec, num_frames: int | None = None) -> list[str]:
    """Read a jsonl action file of `num_frames` lines, each an action of the codec."""
    actions = []
    for number, line in enumerate(read_lines(path, "action file"), start=1):
        with naming(f"{path}:{number}"):
            actions.append(codec.action_of(parse_object(line)))
    if num_frames is not None and len(actions) != num_frames:
        raise ValueError(f"{path}: expected {num_frames} actions, got {len(actions)}")
    return actions


def write_actions(path: str | Path, names: Sequence[str]) -> None:
    """Write one `{"action": name}` per line."""
    write_text(path, "".join(json.dumps({"action": name}) + "\n" for name in names))
