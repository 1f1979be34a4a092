"""Pictures with what they show: a text, or a class, for each.

A folder tells it in one of these ways, the first that it has:

- *.parquet, with columns `image` (the bytes of a file, alone or as `bytes` of a struct) and `text`;
- metadata.jsonl, with a line `{"file_name": "a.png", "text": "a red house"}` for each picture;
- NAME.txt beside NAME.png; for classes, the names of the folders that pictures are in.

In the first two, a class is the column or key `label`.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from diagd.data.frames import PICTURE_SUFFIXES, opened
from diagd.data.video import open_video
from diagd.extras import require
from diagd.files import list_files, naming, parse_object, read_lines, read_text, require_file
from diagd.system import fingerprint

Said = Literal["text", "label"]
LINES = "metadata.jsonl"


@dataclass(frozen=True)
class Captioned:
    """A picture on disk, and its text or class."""

    where: str  # its path, or that of its table with its row
    said: str
    path: Path  # of its file, or of its table
    place: tuple[int, int] | None = None  # in a table: row group, and row of it

    def read(self) -> Tensor:
        """Decode the picture, (H_px, W_px, 3) uint8 RGB, or raise ValueError."""
        if self.place is None:
            with open_video(self.path) as shown:
                return torch.from_numpy(next(iter(shown.frames([0]))))
        group, row = self.place
        stored = _pictures(self.path, group)[row]
        stored = stored.get("bytes") if isinstance(stored, dict) else stored
        if not isinstance(stored, bytes):
            raise ValueError(f"{self.where}: image must be the bytes of a file, got none")
        with opened(io.BytesIO(stored), self.where) as shown:
            return torch.from_numpy(next(iter(shown.frames([0]))))

    @property
    def content(self) -> str:
        """A fingerprint of the picture."""
        place = "" if self.place is None else ":{}:{}".format(*self.place)
        return _fingerprint(self.path) + place


def find_captioned(folder: Path, key: Said) -> list[Captioned]:
    """List the pictures below a folder by name, with their texts (or labels, of classes).

    ValueError or FileNotFoundError unless there are pictures, and something is said of each.
    """
    tables, _ = list_files(folder, "folder of pictures", (".parquet",), below=True)
    if tables:
        found = [one for table in tables for one in _of_table(table, key)]
    elif (folder / LINES).is_file():
        found = list(_of_lines(folder, key))
    else:
        found = list(_of_files(folder, key))
    if not found:
        kinds = f"{', '.join(PICTURE_SUFFIXES[:5])}, ..., or tables, *.parquet"
        raise FileNotFoundError(f"no pictures ({kinds}) in {folder}")
    for one in found:
        if not one.said.strip():
            raise ValueError(f"{one.where}: {key} must not be empty")
    return found


def _of_table(path: Path, key: Said) -> Iterator[Captioned]:
    require("tables of pictures", "pyarrow")
    import pyarrow
    from pyarrow.parquet import ParquetFile

    damage = pyarrow.ArrowException, OSError
    with naming(f"{path} cannot be read (corrupt or truncated)", damage), ParquetFile(path) as file:
        there = file.schema_arrow.names
        missing = [column for column in ("image", key) if column not in there]
        groups = [] if missing else range(file.num_row_groups)
        said = [file.read_row_group(group, [key])[key].to_pylist() for group in groups]
    if missing:
        raise ValueError(f"{path}: expected a column {missing[0]}, got {', '.join(there)}")
    rows = ((group, row, one) for group, texts in enumerate(said) for row, one in enumerate(texts))
    for number, (group, row, one) in enumerate(rows):
        where = f"{path}, row {number}"
        yield Captioned(where, _spoken(one, where, key), path, (group, row))


def _of_lines(folder: Path, key: Said) -> Iterator[Captioned]:
    path = folder / LINES
    for number, line in enumerate(read_lines(path, LINES), start=1):
        with naming(f"{path}:{number}"):
            record = parse_object(line)
            name = record.get("file_name")
            if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"file_name must be a path inside the folder, got {name!r}")
            said = _spoken(record.get(key), f"{path}:{number}", key)
        yield Captioned(str(folder / name), said, require_file(folder / name, "picture"))


def _of_files(folder: Path, key: Said) -> Iterator[Captioned]:
    pictures, _ = list_files(folder, "folder of pictures", PICTURE_SUFFIXES, below=True)
    beside = [path.with_suffix(".txt") for path in pictures]
    if key == "text" and pictures and not any(path.is_file() for path in beside):
        raise ValueError(
            f"{folder}: no texts: expected NAME.txt beside each picture, {LINES} or *.parquet"
        )
    for path, told in zip(pictures, beside, strict=True):
        if key == "label" and path.parent == folder:
            raise ValueError(f"{path}: expected pictures in folders named by class, or {LINES}")
        said = path.parent.name if key == "label" else read_text(told, "text of a picture").strip()
        yield Captioned(str(path), said, path)


def _spoken(value: Any, where: str, key: Said) -> str:
    if key == "label" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key} must be a string, got {value!r}")
    return value


_fingerprint = lru_cache(fingerprint)  # of a table for each of its pictures


@lru_cache(maxsize=2)
def _pictures(path: Path, group: int) -> list[Any]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        return file.read_row_group(group, ["image"])["image"].to_pylist()
