"""A child process that decodes one upload: FFmpeg is large, and reads what strangers send.

    python upload_decoder.py MAX_FRAMES KEEP MAX_PIXELS < clip > frames

By the time they do, it may open no file and no socket and has a limit on CPU time and, on Linux,
memory; on Windows only its parent's clock runs. It writes a line, `T H_px W_px`, then the last KEEP
frames as RGB bytes; for a bad upload, a line on stderr and exit code 2.
"""

import io
import os
import sys
from collections import deque
from itertools import islice

import av
import numpy as np
from av.error import FFmpegError

CPU_SECONDS = 20
MEMORY_BYTES = 3 * 2**30  # of address space, libraries included
DOT = (  # a PNG of one pixel
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00:~\x9bU"
    b"\x00\x00\x00\nIDATx\x9cc`\x00\x00\x00\x02\x00\x01H\xaf\xa4q\x00\x00\x00\x00IEND\xaeB`\x82"
)
SIGNATURES = (  # bytes at an offset -> FFmpeg's name of the container, which names no other file
    (0, b"\x89PNG\r\n\x1a\n", "png_pipe"),
    (0, b"\xff\xd8\xff", "jpeg_pipe"),
    (8, b"WEBP", "webp_pipe"),
    (0, b"BM", "bmp_pipe"),
    (4, b"ftyp", "mov"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
)


def container_of(data: bytes) -> str:
    """Return FFmpeg's name of a container we accept, or raise ValueError."""
    for offset, signature, name in SIGNATURES:
        if data[offset : offset + len(signature)] == signature:
            return name
    raise ValueError("expected a PNG, JPEG, WebP or BMP image, or an mp4, mov, webm or mkv clip")


def decode(data: bytes, max_frames: int, keep: int, max_pixels: int) -> list[np.ndarray]:
    """Decode at most `max_frames` frames and return the last `keep`, or raise ValueError."""
    frames: deque[np.ndarray] = deque(maxlen=keep)
    try:
        with av.open(io.BytesIO(data), "r", format=container_of(data)) as container:
            if not container.streams.video:
                raise ValueError("the file holds no picture")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise ValueError("the clip's codec is not known here")
            _check_size(stream.codec_context.width, stream.codec_context.height, max_pixels)
            stream.codec_context.options = {"max_pixels": str(max_pixels), "threads": "1"}
            for frame in islice(container.decode(stream), max_frames):
                _check_size(frame.width, frame.height, max_pixels)
                pixels = frame.to_ndarray(format="rgb24")
                frames.append(np.rot90(pixels, round(frame.rotation / 90)))  # upright
    except (FFmpegError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"the file is damaged: {reason}") from None
    if not frames:
        raise ValueError("the file holds no picture")
    if len({frame.shape for frame in frames}) > 1:
        raise ValueError("the clip changes its size on the way")
    return list(frames)


def lock_up() -> None:
    """Give up what decoding does not need; descriptors that are open stay open."""
    if sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    if sys.platform == "linux":  # macOS refuses a limit below what its libraries reserve
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    os.nice(10)  # those who play go first


def _check_size(width_px: int, height_px: int, max_pixels: int) -> None:
    if width_px * height_px > max_pixels:
        raise ValueError(
            f"the picture may have {max_pixels / 1e6:.0f} megapixels, it has {height_px}x{width_px}"
        )


def main() -> None:
    limits = [int(argument) for argument in sys.argv[1:]]
    data = sys.stdin.buffer.read()
    decode(DOT, 1, 1, 2**16)  # PyAV imports some of its modules only now
    lock_up()
    try:
        frames = decode(data, *limits)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    height_px, width_px = frames[0].shape[:2]
    sys.stdout.buffer.write(f"{len(frames)} {height_px} {width_px}\n".encode())
    for frame in frames:
        sys.stdout.buffer.write(np.ascontiguousarray(frame).tobytes())


if __name__ == "__main__":
    main()
