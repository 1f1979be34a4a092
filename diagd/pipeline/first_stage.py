"""The first stage of a hybrid model, in our own decoder: a text becomes the tokens of a picture.

Its second stage, a diffusion transformer, is not run here. It reads hidden states, which are those
of one causal pass over the finished sequence: how the tokens were written plays no part.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from diagd.backends.devices import device_of, dtype_of
from diagd.backends.names import Backend, DTypeChoice
from diagd.backends.prepare import choose_dtype, prepare
from diagd.checks import read_size, whole
from diagd.console import progress, waiting
from diagd.decoding.generate_tokens import GenerationStats, generate_grids
from diagd.decoding.model import CausalModel
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.strategies.table import Strategy, as_strategy
from diagd.families.checkpoints import build_model, find_model, load_text
from diagd.families.defaults import visual_ranges
from diagd.families.family import Checkpoint, HandOver
from diagd.files import write_bytes
from diagd.models.guidance import GuidedModel
from diagd.models.transformer import Transformer
from diagd.pipeline.options import GenerateOptions
from diagd.pipeline.pictures import (
    check_text,
    numbered,
    refuse_others,
    report_pictures,
    text_of,
)
from diagd.tokenizers.text import TextPrompts


@dataclass(frozen=True)
class WrittenPicture:
    """The tokens of a picture that a first stage wrote.

    Attributes:
        tokens: (height, width) int64, codes without the ends of rows.
        sequence: (N,) int64, in the makers' ids all that the second stage reads hidden states of:
            the prompt, rows of codes, each with its end, and the image end.
        stats: what decoding took, of all pictures made at once.
    """

    tokens: Tensor
    sequence: Tensor
    stats: GenerationStats


def _hand_over_of(found: Checkpoint) -> HandOver:
    if (make := found.family.hand_over) is None:
        raise ValueError(f"{found.path}: {found.family.name} is no first stage of a hybrid model")
    return make(found)


def of_size(found: Checkpoint, side_px: int, size_px: tuple[int, int]) -> Checkpoint:
    """Return a checkpoint for pictures of another size, or raise ValueError if it has none such."""
    for name, size in zip(("height", "width"), size_px, strict=True):
        if whole(size, name) < side_px or size % side_px:
            raise ValueError(f"{name} must be a multiple of {side_px} pixels, got {size}")
    height, width = (size // side_px for size in size_px)
    if (taken := height * (width + 1)) >= (held := found.config.max_positions):
        raise ValueError(
            f"a picture of {size_px[0]}x{size_px[1]} pixels takes {taken} tokens, the context "
            f"holds {held} with the text"
        )
    return replace(found, config=replace(found.config, grid_height=height, grid_width=width + 1))


class FirstStage:
    """A model that writes a picture's tokens, which a diffusion transformer paints: MammothModa2.

    Args:
        found: its checkpoint.
        model: its decoder.
        steps: the same, prepared for a backend.
        how: names of the weight type and the backend.
    """

    def __init__(self, found: Checkpoint, model: Transformer, steps: CausalModel, how: str) -> None:
        self.found, self.model, self.steps, self.how = found, model, steps, how
        self.defaults, self.hand_over = found.defaults, _hand_over_of(found)
        self._of_size = lru_cache(8)(self._read_text)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | DTypeChoice = "auto",
        backend: Backend = "auto",
        config: str | Path | None = None,
    ) -> "FirstStage":
        """Load the folder of a release, or `user/name` on the Hugging Face Hub.

        The arguments are those of `VideoGenerator.from_pretrained`.

        Raises:
            FileNotFoundError, ValueError: something is missing or damaged, or another model's.
        """
        return cls._load(find_model(name_or_path, config), device, dtype, backend)

    @classmethod
    def _load(
        cls,
        found: Checkpoint,
        device: torch.device | str,
        dtype: torch.dtype | DTypeChoice,
        backend: Backend,
    ) -> "FirstStage":
        _hand_over_of(found)
        device, name = device_of(str(device)), str(dtype).removeprefix("torch.")
        if name == "fastest" and backend not in ("auto", "native"):
            name = "auto"  # only our kernels are timed in int8
        known: Any = name
        chosen = choose_dtype(known, device, found.config)
        model = build_model(found, device, dtype_of(chosen))
        steps, used = prepare(model, backend, chosen == "int8")
        return cls(found, model, steps, f"{chosen}, {used}")

    def _read_text(self, size_px: tuple[int, int]) -> tuple[Checkpoint, TextPrompts]:
        found = of_size(self.found, self.hand_over.side_px, size_px)
        if (text := load_text(found)) is None:
            raise ValueError(f"{found.path}: it has no text tokenizer")
        return found, text

    def generate(
        self,
        text: str | list[str],
        size_px: tuple[int, int] = (1024, 1024),
        *,
        strategy: Strategy | str = "k=1",
        sampling: SamplingOptions | None = None,
        seed: int | list[int] = 0,
        guidance: float | None = None,
        on_grid: Callable[[int], object] | None = None,
    ) -> list[WrittenPicture]:
        """Write the tokens of a picture of each text, all of them at once.

        Args:
            text: what the picture shows.
            size_px: height and width, multiples of 32: a token stands for 32 x 32 pixels.
            strategy: how to decode, by name (see `diagd.decoding.strategies`) or as a value.
            sampling: how codes are drawn; default: as the release says.
            seed: picture b has seed + b, or its own.
            guidance: scale; 1: none; default: the makers'.
            on_grid: called with how many pictures are whole, whenever there are more.

        Raises:
            ValueError: a text or a size that the model does not read.
        """
        texts, (found, prompts) = [text] if isinstance(text, str) else text, self._of_size(size_px)
        for one in texts:
            check_text(one, self.found.family.name)
        said, model = [prompts(one) for one in texts], self.steps
        scale = self.defaults.guidance if guidance is None else guidance
        if scale != 1:
            others = [one.unconditional[0] for one in said]
            model = GuidedModel(model, others, [one.prompt.shape[1] for one in said], scale)
        out = generate_grids(
            model,
            [one.prompt[0] for one in said],
            [[found.config.frame]] * len(said),
            as_strategy(strategy),
            self.defaults.sampling(sampling, visual_ranges(self.defaults, found.config)),
            seed,
            on_grid=on_grid,
        )
        end, made = torch.tensor([self.hand_over.end]), list[WrittenPicture]()
        for one, (grid,) in zip(said, out.tokens, strict=True):
            sequence = self.hand_over.their_ids[
                torch.cat([one.prompt[0], grid.cpu().flatten(), end])
            ]
            made.append(WrittenPicture(grid[:, :-1].contiguous(), sequence, out.stats))
        return made

    def hidden_states(self, sequence: Tensor) -> Tensor:
        """Return what the second stage reads, (B, N, hidden_size), by one causal pass.

        The last hidden states (Preview), or the mean of those that the config names (Dev). The
        text's are those of ids below, the image's of ids in the makers' second table; nothing that
        decoding left is used. After the C++ kernels the checkpoint is read again. The negative
        prompt goes through it in the same way.

        Args:
            sequence: (B, N) or (N,) int64 of the makers' ids, such as `WrittenPicture.sequence`.
        """
        theirs = self.hand_over.their_ids
        sequence = torch.atleast_2d(sequence).cpu()
        order = theirs.argsort()
        places = torch.searchsorted(theirs[order], sequence).clamp(max=len(theirs) - 1)
        ours = order[places]
        if not torch.equal(theirs[ours], sequence):
            unknown = int(sequence[theirs[ours] != sequence][0])
            raise ValueError(f"sequence must hold ids of the model, got {unknown}")
        if not all(one.numel() for one in self.model.parameters()):  # our kernels have used it up
            dtype = self.model.model.embed_tokens.weight.dtype
            self.model = build_model(self.found, self.model.device, dtype)
        return self.model.hidden_states(ours.to(self.model.device), self.hand_over.layers)


# what `diagd generate` takes for a first stage
FLAGS = {
    *("model", "config", "text", "size", "images", "out", "seed", "device", "dtype", "backend"),
    *("guidance", "strategy", "row_lag", "temperature", "top_k", "top_p"),
}


def write_tokens(options: GenerateOptions, found: Checkpoint) -> dict[str, Any]:
    """Write the tokens of pictures as options say, and print what it took."""
    hand_over, name, defaults = _hand_over_of(found), found.family.name, found.defaults
    refuse_others(options, FLAGS, name)
    text = text_of(options, name)
    height, width = found.config.grid_height, found.config.grid_width - 1
    size_px = height * hand_over.side_px, width * hand_over.side_px
    if options.size is not None:
        size_px = read_size(options.size, "size", "1024x1024")
    sized = of_size(found, hand_over.side_px, size_px)
    strategy = options.decoding(defaults, sized.config.grid_height)
    strategy.check(sized.config.frame.grid)
    load_text(sized)  # before the weights
    with waiting(f"loading {options.model}"):
        stage = FirstStage._load(found, options.device, options.dtype, options.backend)
    with progress(f"generating {options.images} pictures, {strategy}", options.images) as job:
        made = stage.generate(
            [text] * options.images,
            size_px,
            strategy=strategy,
            sampling=options.sampling(defaults),
            seed=options.seed,
            guidance=options.guidance,
            on_grid=job.reach,
        )
    paths = numbered(options.out or Path("dream"), len(made), ".safetensors")
    for path, one in zip(paths, made, strict=True):
        write_bytes(path, save({"tokens": one.tokens, "sequence": one.sequence}))
    note = f"{name}'s diffusion transformer is not run, so tokens are written"
    stats = {"num_tokens": sized.config.tokens_per_frame * len(made), **asdict(made[0].stats)}
    return report_pictures(options, strategy, stats, stage.how, paths, note)
