"""Atomic file writes: a run killed while writing leaves the old file.

Data goes to a hidden file beside the target (`.NAME.1a2b3c4d.partial`, different for each writer)
until it is renamed into place. Logs of JSON lines grow in place instead; readers skip a truncated
last line. Errors of a full or read-only disk name the target file.
"""

import codecs
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, AnyStr

# Raised by code that meets unexpected settings, tensors or shapes
MISFITS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError),
    ValueError,
)
FRAME_SUFFIXES = (".mp4", ".gif", ".webp", ".png")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` on success; creates the folder."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with _errors_naming(path, temporary):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            os.replace(temporary, path)
    finally:
        with suppress(OSError):  # already renamed; or the disk is read-only, which was reported
            temporary.unlink()


@contextmanager
def _errors_naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Name the target in errors of the system that name no file, or the temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or str(error.filename) not in ("None", str(temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def naming(
    where: object, kinds: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[None]:
    """Convert errors of the given kinds to a one-line ValueError that begins with `where`.

    A message that already begins with that file or folder, or with a file in it, is kept.
    """
    try:
        yield
    except kinds as error:
        reason = f"missing key {error}" if isinstance(error, KeyError) else str(error).strip()
        line = (reason or type(error).__name__).partition("\n")[0][:800]  # may quote a file
        is_named = re.match(re.escape(str(where).partition(": ")[0]) + r"[:/\\]", line)
        raise ValueError(line if is_named else f"{where}: {line}") from None


@contextmanager
def utf8_path(path: Path) -> Iterator[Path]:
    """Yield a path, or a link to it for libraries that only open UTF-8 names."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder, f"file{path.suffix}")
            link.symlink_to(path.resolve())
            yield link
    else:
        yield path


def encoded(text: str) -> bytes:
    """Encode a text that may contain file names: invalid characters become escapes."""
    return text.encode(errors="backslashreplace")


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8 atomically."""
    write_bytes(path, encoded(text))


def write_json(path: str | Path, value: object, indent: int | None = None) -> None:
    """Write a JSON document atomically; paths inside become strings."""
    write_text(path, json.dumps(value, indent=indent, default=os.fspath) + "\n")


def save_figure(figure: Any, path: Path, dpi: int = 120) -> None:
    """Write a figure of matplotlib as PNG, atomically."""
    for text in figure.findobj(lambda part: hasattr(part, "set_text")):
        text.set_text(encoded(text.get_text()).decode())
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=dpi, format="png")


def append_line(path: Path, line: str) -> None:
    """Append a line to a log and flush it to disk; an error leaves the log unchanged."""
    with _errors_naming(path), path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        left = memoryview(f"{line}\n".encode())
        try:
            while left:  # a disk that fills up accepts a part before it fails
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def require_file(path: str | Path, kind: str = "file") -> Path:
    """Return the path of a file, or raise FileNotFoundError."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{kind} not found: {path}")
    return Path(path)


def require_folder(path: str | Path, kind: str = "folder") -> Path:
    """Return the path of a folder, or raise FileNotFoundError."""
    if not Path(path).is_dir():
        raise FileNotFoundError(f"{kind} not found: {path}")
    return Path(path)


def list_files(
    folder: Path, kind: str, suffixes: Collection[str], *, below: bool = False
) -> tuple[list[Path], list[Path]]:
    """Return the files of a folder with some suffixes, and its other files, both by name.

    Hidden files are skipped; .json and .jsonl, which describe clips, are not listed as others.
    `below`: search subfolders as well.
    """
    inside = require_folder(folder, kind).glob("**/*" if below else "*")
    files = sorted(path for path in inside if path.is_file() and path.name[0] != ".")
    found = [path for path in files if path.suffix.lower() in suffixes]
    told = {*suffixes, ".json", ".jsonl"}
    return found, [path for path in files if path.suffix.lower() not in told]


@cache  # folders are listed repeatedly
def say_once(text: str) -> None:
    print(text, file=sys.stderr)


def note_left_out(
    folder: Path, paths: Sequence[Path], say: Callable[[str], object] = say_once
) -> None:
    """Print the files of a folder that were skipped, if any, on stderr."""
    names = [str(path.relative_to(folder)) for path in paths]
    if len(names) > (shown := 20):
        names[shown:] = [f"{len(names) - shown} more"]
    if names:
        say(f"note: {folder}: skipped files of other types: {', '.join(names)}")


def read_text(path: str | Path, kind: str = "file") -> str:
    """Read a UTF-8 text file, with or without byte order mark; FileNotFoundError or ValueError.

    Lines end with `\\n` or `\\r\\n`, not at the other places where `str.splitlines` splits.
    """
    data = require_file(path, kind).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:  # as in UTF-16, whose Latin letters are valid UTF-8
        is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise ValueError(f"{path}: expected a text file in UTF-8{', got UTF-16' * is_wide}")
    return text.replace("\r\n", "\n")


def read_lines(path: str | Path, kind: str) -> list[str]:
    """Read the lines of a text file, or raise FileNotFoundError or ValueError."""
    return _without_blank_end(read_text(path, kind).split("\n"))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of one JSON object per line; skip a last line truncated by a killed run."""
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")[:-1]
    records = []
    for number, line in enumerate(_without_blank_end(lines), start=1):
        with naming(f"{path}:{number}"):
            records.append(parse_object(line))
    return records


def _without_blank_end(lines: list[AnyStr]) -> list[AnyStr]:
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object, or raise FileNotFoundError or ValueError."""
    text = read_text(path)
    # also for numbers too long, or nesting too deep
    with naming(f"{path}: not valid JSON", (ValueError, RecursionError)):
        value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def parse_object(line: str | bytes) -> dict[str, Any]:
    """Parse a JSON object, or raise ValueError."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # also for numbers too long, or nesting too deep
        record = None
    if not isinstance(record, dict):
        shown = line if isinstance(line, str) else line.decode(errors="replace")
        raise ValueError(f"expected a JSON object, got {shown[:60]!r}")
    return record


def rewind_log(path: Path, step: int) -> None:
    """Truncate a log, if it exists, to the step from which a killed run resumes."""
    if path.is_file():
        with naming(path, KeyError):
            kept = [line for line in read_json_lines(path) if line["step"] <= step]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


def copy_whole(source: Path, goal: Path, without: Collection[str] = ()) -> None:
    """Copy a file or folder, if it exists, each file atomically, into a place that may exist."""
    if source.is_file():
        with replacing(goal) as temporary:
            shutil.copyfile(source, temporary)
    elif source.is_dir():
        for part in source.iterdir():
            if part.name not in without and part.suffix != ".partial":
                copy_whole(part, goal / part.name, without)


def check_suffix(path: str | Path) -> None:
    """Raise ValueError unless `diagd.data.video.save_frames` can write such a file."""
    if Path(path).suffix.lower() not in FRAME_SUFFIXES:
        raise ValueError(f"output must end in {', '.join(FRAME_SUFFIXES)}, got {path}")
