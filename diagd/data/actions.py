"""Actions: names people write, ids models read, jsonl files on disk.

An action file holds one JSON object a frame, `{"action": "forward"}`; row t is the action that led
from frame t - 1 to frame t (row 0, before anything happened, is by custom `none`).
On the command line a sequence is written `forward*8,left*4`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ActionVocabulary:
    """The actions a world model understands; an action's id is its place in `names`."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"action names must be distinct and not empty, got {self.names}")

    def id_of(self, name: str) -> int:
        """Return the id of an action, or raise ValueError naming the known ones."""
        if name not in self.names:
            raise ValueError(f"unknown action {name!r}, expected one of: {', '.join(self.names)}")
        return self.names.index(name)

    @classmethod
    def load(cls, path: Path) -> "ActionVocabulary":
        """Read a checkpoint's `actions.json`: `{"names": [...]}`."""
        try:
            names = json.loads(path.read_text())["names"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            raise ValueError(f'{path} is no action vocabulary ({{"names": [...]}})') from None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{path}: names must be a list of strings")
        return cls(tuple(names))

    def save(self, path: Path) -> None:
        """Write `{"names": [...]}`."""
        path.write_text(json.dumps({"names": list(self.names)}) + "\n")


def parse_actions(text: str, vocabulary: ActionVocabulary) -> list[int]:
    """Turn `forward*8,left*4` into ids.

    Raises:
        ValueError: an unknown action or a count that is no positive integer.
    """
    ids = []
    for part in text.split(","):
        name, star, count = part.strip().partition("*")
        if star and not (count.strip().isascii() and count.strip().isdigit() and int(count)):
            raise ValueError(
                f"actions must look like forward*8,left*4 (counts of 1 or more), got {part!r}"
            )
        ids += [vocabulary.id_of(name.strip())] * (int(count) if star else 1)
    return ids


def read_actions(
    path: str | Path, vocabulary: ActionVocabulary, num_frames: int | None = None
) -> list[int]:
    """Read a jsonl action file into ids, one a frame.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is no `{"action": name}`, or not `num_frames` lines.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"action file not found: {path}")
    ids = []
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text file") from None
    for number, line in enumerate(lines, start=1):
        try:
            ids.append(vocabulary.id_of(json.loads(line)["action"]))
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(
                f'{path}:{number}: expected {{"action": NAME}}, got {line[:60]!r}'
            ) from None
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if num_frames is not None and len(ids) != num_frames:
        raise ValueError(f"{path}: expected {num_frames} actions (one a frame), got {len(ids)}")
    return ids


def write_actions(path: str | Path, names: Sequence[str]) -> None:
    """Write one `{"action": name}` a line."""
    Path(path).write_text("".join(json.dumps({"action": name}) + "\n" for name in names))
