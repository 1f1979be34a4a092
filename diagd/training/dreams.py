"""What a model in training dreams: a strip of frames at each stage, under the true ones."""

from pathlib import Path

import torch
from torch import Tensor

from diagd.data.video import contact_sheet, write_image
from diagd.decoding.generate_tokens import generate_tokens
from diagd.decoding.schedule import TokenGrid
from diagd.families.defaults import GenerationDefaults
from diagd.models.transformer import Transformer
from diagd.pipeline.prompt_tokens import prompt_tokens
from diagd.tokenizers.shards import TokenClips
from diagd.tokenizers.vq import VideoTokenizer
from diagd.training.curves import plot_dreams
from diagd.training.sequences import windows

PICTURE = "dreams.png"
STRATEGY = "k=1"  # as the page decodes


class DreamStrip:
    """The same few held-out frames, gone on from again and again.

    Args:
        folder: where `dreams.png` appears, and the strips it is made of, in `dreams/`.
        held_out: clips that the model does not learn from.
        tokenizer: paints them.
        frames: how many frames a strip has. Given are a quarter of them, or of what the model's
            context holds.
    """

    def __init__(
        self, folder: Path, held_out: TokenClips, tokenizer: VideoTokenizer, frames: int
    ) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.tokens, self.actions = windows(held_out, 1, frames)
        self.num_codes = held_out.codebook_size

    def add(self, model: Transformer, step: int) -> None:
        """Dream, and draw the strips of all stages up to this step."""
        strips = self.folder / "dreams"
        strips.mkdir(exist_ok=True)
        self._write(strips / "truth.png", self.tokens[0])
        self._write(strips / _name(step), self._dream(model))
        stages = sorted(path for path in strips.glob("step_*.png") if path.name <= _name(step))
        rows = {"truth": strips / "truth.png"}
        rows |= {f"step {int(path.stem.removeprefix('step_'))}": path for path in stages}
        plot_dreams(self.folder / PICTURE, rows, self._num_given(model))

    def _dream(self, model: Transformer) -> Tensor:
        """Return the given frames and the dreamt ones, (frames, height, width) int64."""
        num_given, (_, frames, height, width) = self._num_given(model), self.tokens.shape
        given = self.tokens[0, :num_given]
        defaults = GenerationDefaults()
        out = generate_tokens(
            model,
            prompt_tokens((), given, self.actions[:, 1:num_given]).to(model.device),
            STRATEGY,
            self.actions[:, num_given:].to(model.device),
            context_frames=num_given,
            sampling=defaults.sampling(None, (0, self.num_codes)),
            grid=TokenGrid(frames - num_given, height, width),
        )
        return torch.cat([given, out.tokens[0].cpu()])

    def _num_given(self, model: Transformer) -> int:
        return max(1, min(self.tokens.shape[1], model.config.frames_held) // 4)

    def _write(self, path: Path, tokens: Tensor) -> None:
        write_image(path, contact_sheet(self.tokenizer.decode(tokens), columns=len(tokens)))


def _name(step: int) -> str:
    return f"step_{step:08d}.png"
