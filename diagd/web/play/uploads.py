"""Pictures from strangers: decoded in a locked-up child process, with limits on everything."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from diagd.data.video import resize

MAX_UPLOAD_BYTES = 16 * 2**20
MAX_UPLOAD_FRAMES = 900
MAX_UPLOAD_PIXELS = 3840 * 2160
MAX_SECONDS = 20.0
DECODER = Path(__file__).with_name("upload_decoder.py")


async def decode_upload(
    data: bytes,
    keep: int,
    height_px: int,
    width_px: int,
    max_seconds: float = MAX_SECONDS,
    decoder: Path = DECODER,
) -> Tensor:
    """Decode an image, or the last `keep` frames of a clip, and fit them to a size.

    Args:
        data: the file's bytes, at most MAX_UPLOAD_BYTES.
        decoder: the script that the child process runs.

    Returns:
        (T, height_px, width_px, 3) uint8.

    Raises:
        ValueError: too large, too slow, another format, or damaged.
    """
    if len(data) > MAX_UPLOAD_BYTES:
        raise ValueError(f"an upload may have {MAX_UPLOAD_BYTES // 2**20} MB, this one has more")
    here = Path.cwd()  # what lies in the current folder must not pass for a library
    found = [path for path in sys.path if path and Path(path).resolve() != here]
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        str(decoder),
        str(MAX_UPLOAD_FRAMES),
        str(keep),
        str(MAX_UPLOAD_PIXELS),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(found)},
    )
    try:
        out, complaint = await asyncio.wait_for(child.communicate(data), max_seconds)
    except TimeoutError:
        raise ValueError(f"decoding took longer than {max_seconds:g} seconds") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    if child.returncode == 2:
        raise ValueError(complaint.decode(errors="replace").strip()[:200])
    reason = complaint.decode(errors="replace").strip().rpartition("\n")[2]
    if reason.startswith(("ImportError", "ModuleNotFoundError")):
        raise ValueError(f"this server cannot decode pictures ({reason[:200]})")
    if child.returncode:
        raise ValueError("the file could not be decoded (it needed too much memory or time)")
    return await asyncio.to_thread(_fit, out, height_px, width_px)


def _fit(raw: bytes, height_px: int, width_px: int) -> Tensor:
    line, _, pixels = raw.partition(b"\n")
    shape = (*map(int, line.split()), 3)
    frames = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(shape)
    return torch.cat([resize(frame[None], height_px, width_px) for frame in frames])
