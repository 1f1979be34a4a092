"""What a world model generated: pixels to look at, tokens to count with, and what it took."""

import base64
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from diagd.data.saving import save_frames
from diagd.decoding.generate_tokens import GenerationStats


@dataclass(frozen=True, repr=False)
class GeneratedVideo:
    """What a world model generated; in a notebook it plays.

    Attributes:
        frames: (T, H_px, W_px, 3) uint8 RGB, the generated frames only.
        tokens: (T, height, width) int64.
        stats: what decoding took, of the whole batch where there was one; tokenizing is not in it.
        fps: frames per second, the prompt's or else the model's.
    """

    frames: Tensor
    tokens: Tensor
    stats: GenerationStats
    fps: float

    def save(self, path: str | Path) -> None:
        """Write the frames as .mp4, .gif or .webp, or side by side as .png (see `save_frames`).

        Args:
            path: its suffix says which; the file is whole or not there.

        Raises:
            ValueError: another suffix.
        """
        save_frames(path, self.frames, self.fps)

    def __repr__(self) -> str:
        """Say in one line what it is."""
        num_frames, height_px, width_px, _ = self.frames.shape
        return (
            f"GeneratedVideo({num_frames} frames of {height_px}x{width_px} px, {self.fps:g} fps, "
            f"{self.stats.num_steps} steps in {self.stats.seconds:.2f} s)"
        )

    def _repr_html_(self) -> str:
        """Play in a notebook: the video itself is in the page, which needs no file beside it."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "video.mp4")
            self.save(path)
            data = base64.b64encode(path.read_bytes()).decode()
        return (
            f'<video width="{2 * self.frames.shape[2]}" controls autoplay loop muted '
            f'src="data:video/mp4;base64,{data}"></video>'
        )
