"""WHAM's clips: npz files of `images` (T, 3, H_px, W_px) uint8 and `actions` (T, 16), at 10 fps.

They are read a row at a time (a minute of gameplay is 100 MB, a prompt is 1 MB), and nothing is
unpickled: files with Python objects in them are refused.
"""

import contextlib
import lzma
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Checkpoint, Family, RecordingFormat, TokenizerFolder
from diagd.families.wham.presets import PRESETS, WHAMActions, actions_of_rows
from diagd.families.wham.tokenizer import WHAM_KIND, WHAMTokenizer, wham_tokenizer_from_weights
from diagd.families.wham.weights import RELEASED, frame_size_px, head_size

NPZ_FPS = Fraction(10)  # the files do not say


def npz_length(path: str | Path) -> int:
    """Return the number of frames.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is damaged, or its images have another shape or dtype.
    """
    with _open_images(path) as images:
        return images.shape[0]


def npz_frames(path: str | Path, numbers: Iterable[int]) -> Iterator[Tensor]:
    """Yield the frames of ascending numbers, each (H_px, W_px, 3) uint8 RGB.

    Raises:
        FileNotFoundError, ValueError: see `npz_length`.
    """
    with _open_images(path) as images:
        for row in images.rows(numbers):
            yield torch.from_numpy(row).movedim(0, -1).contiguous()


def npz_actions(path: str | Path) -> list[str]:
    """Return the words of the actions; row t was done at frame t, and leads to frame t + 1.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is damaged, or its actions have another shape or are out of range.
    """
    with open_array(path, "actions") as stored:
        rows = list(stored.rows(range(stored.shape[0]))) if stored.shape else []
    try:
        return actions_of_rows(rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


@dataclass(frozen=True)
class StoredArray:
    """An array inside an opened npz file.

    Attributes:
        shape: of the whole array; rows lie along the first axis.
        dtype: of its numbers, never object.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    _file: IO[bytes]
    _where: str

    def rows(self, numbers: Iterable[int]) -> Iterator[NDArray]:
        """Yield rows of ascending numbers, each of shape `shape[1:]`; one is in memory at a time.

        Raises:
            ValueError: the file ends before a row does.
        """
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        start = self._file.tell()
        for number in numbers:
            self._file.seek(start + number * size)
            data = bytearray(self._file.read(size))
            if len(data) < size:
                raise ValueError(f"{self._where} is truncated: no row {number}")
            yield np.frombuffer(data, self.dtype).reshape(self.shape[1:])


@contextlib.contextmanager
def open_array(path: str | Path, name: str) -> Iterator[StoredArray]:
    """Open one array of an npz file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is no npz file, has no such array, is damaged or needs unpickling.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"clip not found: {path}")
    damaged = f"{path} cannot be read as npz (corrupt or truncated)"
    try:
        with zipfile.ZipFile(path) as archive:
            names = [member.removesuffix(".npy") for member in archive.namelist()]
            if name not in names:
                found = ", ".join(map(repr, names)) or "nothing"
                raise ValueError(f"{path} holds no array {name!r}, found: {found}")
            with archive.open(f"{name}.npy") as file:
                shape, dtype = _read_header(file, f"{path}: {name}")
                stored = archive.getinfo(f"{name}.npy").file_size - file.tell()
                if stored != math.prod(shape) * dtype.itemsize:
                    raise ValueError(f"{damaged}: {name} has not the size that it says")
                yield StoredArray(shape, dtype, file, f"{path}: {name}")
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        raise ValueError(f"{damaged}: {error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{damaged}: names of its arrays are no text") from None
    except (NotImplementedError, RuntimeError) as error:  # what zipfile says of odd archives
        raise ValueError(f"{path} cannot be read as npz: {error}") from None


def _read_header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype]:
    """Read the header of an npy file: shape and dtype of what follows."""
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        version = np.lib.format.read_magic(file)
        shape, column_major, dtype = readers[version](file)
    except (ValueError, KeyError):
        raise ValueError(f"{where} is no npy array (corrupt or truncated)") from None
    if dtype.hasobject:
        raise ValueError(f"{where} holds Python objects, which are never unpickled")
    if column_major and len(shape) > 1:
        raise ValueError(f"{where} is stored column by column; save it in C order")
    return shape, dtype


@contextlib.contextmanager
def _open_images(path: str | Path) -> Iterator[StoredArray]:
    with open_array(path, "images") as images:
        shape = images.shape
        if images.dtype != np.uint8 or len(shape) != 4 or shape[1] != 3 or min(shape) == 0:
            raise ValueError(
                f"{path}: images must be (T, 3, H_px, W_px) uint8, got {images.dtype} {shape}"
            )
        yield images


def _tokenizer(found: Checkpoint) -> WHAMTokenizer:
    """Take the image tokenizer out of the checkpoint."""
    height_px, width_px = frame_size_px(found.source)
    return wham_tokenizer_from_weights(
        found.source.tensors, height_px, width_px, head_size(found.source)
    )


def _defaults(found: Checkpoint) -> GenerationDefaults:
    """Say what WHAM's own loop does: a full context drops its oldest frame before each new one."""
    config = found.config
    held = config.max_positions // (config.tokens_per_frame + config.num_action_tokens) - 1
    held = max(1, held)  # a frame that does not fit is refused where it is asked for
    return GenerationDefaults(
        fps=float(NPZ_FPS),
        context_frames=held,
        num_frames=10,
        temperature=0.9,
        top_p=None,
        exclusive_top_p=True,
        keep_frames=held,
        first_id=1,
    )


WHAM = Family(
    name="WHAM",
    licence="Microsoft Research License: research without revenue only, no redistribution",
    released=RELEASED,
    tokenizer=_tokenizer,
    tokenizer_folder=TokenizerFolder(WHAMTokenizer.from_pretrained, kind=WHAM_KIND),
    actions=WHAMActions(),
    recordings=RecordingFormat(
        suffix=".npz",
        rows="leaving",
        length=lambda path: (npz_length(path), NPZ_FPS),
        frames=npz_frames,
        actions=npz_actions,
    ),
    defaults=_defaults,
    presets=PRESETS,
)
