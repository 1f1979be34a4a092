"""What is compared: the paper's protocols."""

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
