"""Flags that several commands share."""

import re
import tempfile
from pathlib import Path
from typing import Annotated

import tyro
from tyro.constructors import PrimitiveConstructorSpec

RowLag = Annotated[int | None, tyro.conf.arg(aliases=["-k"])]
RowLags = Annotated[tuple[int, ...], tyro.conf.arg(aliases=["-k"])]
FrameLag = Annotated[int | None, tyro.conf.arg(aliases=["-d"])]


def _writable(path: Path) -> Path:
    """Return a path, unless nothing can be written there: to be told before hours of work.

    Raises:
        OSError: always that, which tyro does not fold into a box that breaks long paths.
    """
    folder = path
    while not folder.exists():
        folder = folder.parent
    if folder != path and not folder.is_dir():
        raise OSError(f"{path} cannot be written: {folder} is a file")
    try:
        with tempfile.TemporaryFile(dir=folder if folder.is_dir() else folder.parent):
            return path
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror})") from None


def _folder(path: Path) -> Path:
    if _writable(path).is_file():
        raise OSError(f"{path} is a file, expected a folder")
    return path


def output_file(path: Path) -> Path:
    """Return a path, unless no file can be written there.

    Raises:
        OSError: it is a folder, or lies in none, or in one that takes no files.
    """
    if path.is_dir():
        raise OSError(f"{path} is a folder, expected a file name")
    _writable(path)
    if not path.parent.is_dir():
        raise OSError(f"output folder does not exist: {path.parent}")
    return path


def _device(words: list[str]) -> str:
    """Return the name of a device, which may be missing here: only PyTorch knows that."""
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", words[0]):
        raise ValueError(f"device must look like cpu, cuda or cuda:0, got {words[0]!r}")
    return words[0]


def _path(read):
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda words: read(Path(words[0])),
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda path: [str(path)],
    )


# Where a command writes: refused at once, with the flag's name, if that is impossible.
OutputFolder = Annotated[Path, _path(_folder)]
OutputFile = Annotated[Path, _path(output_file)]
Device = Annotated[
    str,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="STR",
        instance_from_str=_device,
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda name: [name],
    ),
]
