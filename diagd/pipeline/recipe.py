"""How a video is made, whatever it goes on from: what one prompt and many have in common."""

from dataclasses import dataclass, replace
from pathlib import Path

from diagd.backends.devices import DTypeChoice, choose_dtype, device_of, dtype_of
from diagd.backends.prepare import Backend
from diagd.decoding.layout import RowStart
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.strategies.diagonal import Diagonal
from diagd.decoding.strategies.exact.exact import Tolerant
from diagd.decoding.strategies.short_forms import strategy_of
from diagd.decoding.strategies.strategy import Strategy
from diagd.families.defaults import GenerationDefaults
from diagd.flags import FrameLag, RowLag
from diagd.pipeline.coming import asked_actions, one_a_frame, read_text, walk_actions
from diagd.pipeline.generated_video import GeneratedVideo
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.prompt_tokens import grids_of
from diagd.pipeline.prompts import Prompt


@dataclass(frozen=True)
class Recipe:
    """All that a video depends on beside its prompt; what is None is a default of the model."""

    model: str = "doom"  # the bundled model, our folder, or a Cosmos, WHAM or MineWorld checkpoint
    config: Path | None = None  # a released checkpoint's config, if not beside it
    tokenizer: Path | None = None  # tokenizer folder; TorchScript in it (Cosmos) runs: trust it
    context_frames: int | None = None  # frames of the prompt that the model sees
    # such as forward*8,left*4 (the last goes on), or a jsonl file; default: the clip's, or the
    # bundled walk
    actions: str | None = None
    text: str | None = None  # what the video shows, for models that read a text
    text_encoder: Path | None = None  # folder of the T5 that encodes the text
    text_embedding: Path | None = None  # a text encoded before (safetensors), instead of both
    frames: int | None = None  # frames to generate
    # how to decode: raster, k=2, k=1,d=14, exact, jacobi, sjd, zipar=4 ...; or in short:
    strategy: str | None = None
    row_lag: RowLag = None  # the paper's k: columns a row runs ahead of the next one
    # the paper's d: steps between frames; default: a frame starts when the last is whole
    frame_lag: FrameLag = None
    # what stands in for a predecessor that is not known yet; default temporal
    row_start: RowStart | None = None
    raster: bool = False  # next-token prediction, one token a step
    exact: bool = False  # what raster would write, token for token, in fewer steps
    tolerance: float = 1.0  # let drafts stay that are so many times too unlikely for --exact
    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None  # keep the k likeliest tokens
    top_p: float | None = None  # keep the likeliest tokens up to this mass
    seed: int = 0  # repeats a video exactly
    device: str = "cpu"  # cpu, cuda, cuda:1
    dtype: DTypeChoice = "auto"  # of the weights; auto: bfloat16 where the machine multiplies it
    # what runs the steps; auto is native on the CPU, on CUDA triton or, without it, cuda-graph
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        for name in ("frames", "context_frames"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.tolerance != 1 and not self.exact:
            raise ValueError("tolerance needs --exact")

    def decoding(self, defaults: GenerationDefaults, height: int) -> Strategy:
        """Return the strategy that the flags name, for frames of so many rows of tokens."""
        lags = self.row_lag, self.frame_lag, self.row_start
        strategy = strategy_of(self.strategy, *lags, raster=self.raster, exact=self.exact)
        if self.tolerance != 1:
            return Tolerant(self.tolerance)
        if self.strategy is None and isinstance(strategy, Diagonal):
            return defaults.strategy(height, *lags)
        return strategy

    def sampling(self, defaults: GenerationDefaults) -> SamplingOptions:
        """Return how tokens are drawn; greedy needs no truncation."""
        temperature = defaults.temperature if self.temperature is None else self.temperature
        if temperature == 0:
            return SamplingOptions(0.0, self.top_k, self.top_p)
        return SamplingOptions(
            temperature, self.top_k, defaults.top_p if self.top_p is None else self.top_p
        )


class PreparedWorld:
    """A world that was loaded as a recipe says, and goes on from prompts by it.

    Attributes:
        world: loaded from `folder`.
        strategy, sampling, num_frames: what the recipe says, or else the world's defaults.
        device, dtype: where its weights are, and of which type, resolved.

    Raises:
        FileNotFoundError, ValueError: something is missing or damaged (named), or does not fit.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.device = device_of(recipe.device)
        self.dtype = choose_dtype(recipe.dtype, self.device)
        self.world = world = VideoGenerator.from_pretrained(
            recipe.model,
            self.device,
            dtype_of(self.dtype),
            recipe.backend,
            int8=self.dtype == "int8",
            config=recipe.config,
            tokenizer=recipe.tokenizer,
        )
        assert world.source is not None
        self.folder = world.source.folder
        self.sampling = recipe.sampling(world.defaults)
        self.num_frames = recipe.frames or world.defaults.num_frames
        self.strategy = recipe.decoding(world.defaults, world.height)
        world.check(self.strategy, self.sampling)  # before anything ran in vain
        grids_of(self.num_frames, world.tokenizer.temporal_compression)
        self._notes: list[str] = []
        self._asked = asked_actions(recipe.actions, world.vocabulary, self.num_frames, self._notes)
        text = read_text(
            recipe.text, recipe.text_encoder, recipe.text_embedding, world.config.context_size
        )
        self._text = None if text is None else text.to(self.device)

    def read(self, path: Path | None = None) -> Prompt:
        """Read a prompt, by default the world's own, with one coming action for each frame.

        Raises:
            FileNotFoundError, ValueError: a file is missing or damaged, or does not fit.
        """
        prompt = self.world.prompts.read_file(
            path or self.folder / "prompt.mp4", self.recipe.context_frames, self.num_frames
        )
        coming, codec = prompt.coming_actions, self.world.vocabulary
        if self._asked is not None:
            coming = self._asked
        elif codec is not None:
            coming = coming or walk_actions(self.folder / "walk.jsonl", codec, self.num_frames)
            coming = one_a_frame(coming, self.num_frames)
        return replace(prompt, coming_actions=coming, notes=[*prompt.notes, *self._notes])

    def generate(
        self, prompt: Prompt, num_frames: int, strategy: Strategy, seed: int
    ) -> GeneratedVideo:
        """Go on from a prompt that was read here, for so many frames."""
        return self.world.generate(
            prompt.frames,
            prompt.coming_actions[:num_frames] if self.world.vocabulary else None,
            num_frames,
            strategy=strategy,
            context_actions=prompt.context_actions,
            sampling=self.sampling,
            seed=seed,
            text=self._text,
        )
