"""A child process that decodes one upload: FFmpeg is large, and reads what strangers send.

    python upload_decoder.py MAX_FRAMES KEEP MAX_PIXELS FPS < clip > frames

By the time they do, it may open no file and no socket and has a limit on CPU time and, on Linux,
memory; on Windows only its parent's clock runs. It writes a line, `T H_px W_px`, then the last KEEP
of the first MAX_FRAMES frames as RGB bytes, read at FPS if there are more a second; for a bad
upload, a line on stderr and exit code 2.
"""

import io
import os
import sys
from collections import deque
from itertools import takewhile

import av

from diagd.data.frames import Pixels, opened

CPU_SECONDS = 20
MEMORY_BYTES = 3 * 2**30  # of address space, libraries included
DOT = (  # a PNG of one pixel
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00:~\x9bU"
    b"\x00\x00\x00\nIDATx\x9cc`\x00\x00\x00\x02\x00\x01H\xaf\xa4q\x00\x00\x00\x00IEND\xaeB`\x82"
)
SIGNATURES = (  # bytes at an offset -> FFmpeg's name of the container, which names no other file
    (4, b"ftyp", "mov"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
)


def container_of(data: bytes) -> str:
    """Return FFmpeg's name of a container we accept, or raise ValueError."""
    for offset, signature, name in SIGNATURES:
        if data[offset : offset + len(signature)] == signature:
            return name
    raise ValueError(
        "expected a PNG, JPEG, WebP or BMP image, or the like, or a GIF, mp4, mov, webm or mkv "
        "clip, got another kind, or a damaged file"
    )


def decode(
    data: bytes, max_frames: int, keep: int, max_pixels: int, fps: float | None = None
) -> list[Pixels]:
    """Decode at most `max_frames` frames and return the last `keep`, or raise ValueError."""
    with opened(io.BytesIO(data), "the file", max_pixels, container_of) as shown:
        numbers = shown.times.numbers(shown.times.slower(fps) if fps else None)
        first = takewhile(lambda number: number < max_frames, numbers)
        return list(shown.frames(deque(first, maxlen=keep)))


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


def main() -> None:
    max_frames, keep, max_pixels = map(int, sys.argv[1:4])
    data = sys.stdin.buffer.read()
    decode(DOT, 1, 1, 2**16)  # Pillow and PyAV import some of their modules only now
    with av.open(io.BytesIO(DOT), "r", format="png_pipe") as container:
        next(container.decode(video=0)).to_ndarray(format="rgb24")
    lock_up()
    try:
        frames = decode(data, max_frames, keep, max_pixels, float(sys.argv[4]))
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    height_px, width_px = frames[0].shape[:2]
    sys.stdout.buffer.write(f"{len(frames)} {height_px} {width_px}\n".encode())
    for frame in frames:
        sys.stdout.buffer.write(frame.tobytes())


if __name__ == "__main__":
    main()
