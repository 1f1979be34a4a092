"""What is compared: the paper's protocols, and the seed of a clip."""

import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Protocol:
    """How long clips are and how many (arXiv:2503.14070, section 4.1.2)."""

    num_clips: int
    frames: int  # of a clip, the given ones included
    context_frames: int  # given
    fps: float | None = None  # that clips should have


PROTOCOLS = {
    "cosmos": Protocol(100, 33, 9),  # RealEstate10K at 640x1024
    "wham": Protocol(100, 100, 10, fps=10),
    "mc-ar": Protocol(100, 16, 1),  # VPT
}


def seed_of(clip: str, seed: int) -> int:
    """Return a clip's seed: the same under every strategy and whatever other clips there are."""
    return (zlib.crc32(clip.encode()) + seed) % 2**31
