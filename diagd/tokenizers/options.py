"""Options of the training of a frame tokenizer."""

import math
from dataclasses import dataclass
from pathlib import Path

from diagd.checks import check_at_least, check_values, parse_size

DEFAULT_MINUTES = 5.0


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """Options of the training of a tokenizer, and of its frames."""

    steps: int | None = None  # optimizer steps that the tokenizer is trained for
    minutes: float | None = None  # minutes that it is trained for; default 5, or --steps
    batch: int = 8  # frames a step
    learning_rate: float = 1e-3  # peak; linear warm-up, then a cosine to zero
    decoder_only: bool = False  # leave encoder and codebook alone: tokens stay the same
    seed: int = 0  # of the weights and of the order of frames
    threads: int = 2  # workers, each with its share of the batch
    device: str = "cpu"  # cpu or cuda
    clips: Path  # folder of clips: NAME.mp4, with NAME.jsonl where there are actions
    size: str | None = None  # crop and scale frames to this height and width: 64x96
    init: Path | None = None  # tokenizer to start training from, instead of from scratch
    patch: int | None = None  # pixels a token is high and wide; default: 8, or what divides frames
    codes: int = 1024  # codebook size, from scratch
    frame_stride: int = 4  # train and measure on every n-th frame; all of them lie in memory
    checkpoint_s: float = 60.0  # seconds between checkpoints

    def __post_init__(self) -> None:
        check_at_least(self, steps=1, batch=1, threads=1, codes=1, frame_stride=1, patch=1)
        check_values(
            self,
            ("minutes", self.minutes is None or 0 < self.minutes < math.inf, "above 0"),
            ("batch", self.batch % self.threads == 0, f"a multiple of threads={self.threads}"),
            ("learning_rate", self.learning_rate > 0, "above 0"),
            ("seed", self.seed >= 0, "0 or more"),
            ("device", self.device in ("cpu", "cuda"), "cpu or cuda"),
        )
        if self.patch is not None and self.init is not None:
            raise ValueError("patch is that of the tokenizer where init names one: leave it out")
        size_px = self.size_px
        if size_px and (min(size_px) < 10 or size_px[0] % 2 or size_px[1] % 2):  # as videos need
            raise ValueError(
                f"size must be height x width in pixels, even and at least 10: 64x96; "
                f"got {self.size}"
            )
        if self.device == "cuda":
            import torch  # to be refused before hours of work, where CUDA is asked for

            if not torch.cuda.is_available():
                raise ValueError("device 'cuda' is not available here, use cpu")

    def share_done(self, step: int, seconds: float) -> float:
        """Return how much of the training is over, 1 at its end: by steps, time, or the nearer."""
        minutes = self.minutes or (None if self.steps else DEFAULT_MINUTES)
        by_steps = step / self.steps if self.steps else 0.0
        return max(by_steps, seconds / (60 * minutes) if minutes else 0.0)

    @property
    def size_px(self) -> tuple[int, int] | None:
        """Height and width that frames are fitted to; None: as stored."""
        return parse_size(self.size)
