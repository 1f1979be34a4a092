"""Uploaded pictures and clips, decoded in a child process."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from diagd.data.video import resize

DECODER = Path(__file__).with_name("upload_decoder.py")
MAX_UPLOAD_BYTES = 16 * 2**20
MAX_UPLOAD_FRAMES = 900
MAX_UPLOAD_PIXELS = 3840 * 2160
MAX_SECONDS_OF_UPLOAD = 60.0
MAX_SECONDS_OF_DECODING = 20.0


async def decode_upload(
    data: bytes,
    keep: int,
    height_px: int,
    width_px: int,
    fps: float = 0,
    fit: Callable[..., Tensor] = resize,
) -> Tensor:
    """Decode an image, or the last `keep` of a clip's first frames, in a child process (`DECODER`).

    `fps`: read a clip of more frames a second at this rate. Returns (T, height_px, width_px, 3)
    uint8, scaled by `fit`; ValueError if it is slow, damaged or of another kind.
    """
    here = Path.cwd()  # what lies in the current folder must not pass for a library
    found = [path for path in sys.path if path and Path(path).resolve() != here]
    found.append(str(Path(__file__).parents[2]))  # diagd's own, if that is where it lies: the last
    limits, pipe = (MAX_UPLOAD_FRAMES, keep, MAX_UPLOAD_PIXELS, fps), asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(DECODER), *map(str, limits)),
        **dict.fromkeys(("stdin", "stdout", "stderr"), pipe),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(found)},
    )
    try:
        out, err = await asyncio.wait_for(child.communicate(data), MAX_SECONDS_OF_DECODING)
    except TimeoutError:
        raise ValueError(f"decoding took longer than {MAX_SECONDS_OF_DECODING:g} seconds") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    complaint = err.decode(errors="replace").strip()
    if child.returncode == 2:
        raise ValueError(complaint[:200])
    reason = complaint.rpartition("\n")[2]
    if reason.startswith(("ImportError", "ModuleNotFoundError")):
        raise ValueError(f"this server cannot decode pictures ({reason[:200]})")
    if child.returncode:
        raise ValueError("the file could not be decoded (it needed too much memory or time)")
    return await asyncio.to_thread(_fit, out, partial(fit, height_px=height_px, width_px=width_px))


def _fit(raw: bytes, fit: Callable[[Tensor], Tensor]) -> Tensor:
    line, _, pixels = raw.partition(b"\n")
    shape = (*map(int, line.split()), 3)
    frames = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(shape)
    return torch.cat([fit(frame[None]) for frame in frames])
