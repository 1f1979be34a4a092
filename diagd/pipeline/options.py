"""What `diagd generate` and `diagd convert` are told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from diagd.backends.names import Backend, DTypeChoice
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.schedule import RowStart
from diagd.decoding.strategies.short_forms import strategy_of
from diagd.decoding.strategies.strategy import Conditions, Diagonal, Raster, Strategy, Tolerant
from diagd.families.defaults import GenerationDefaults
from diagd.files import check_suffix
from diagd.flags import Device, FrameLag, OutputFile, OutputFolder, RowLag
from diagd.workers import Pool


@dataclass(frozen=True)
class Recipe:
    """All that a video depends on beside its prompt; what is None is a default of the model."""

    model: str = "doom"  # a bundled model, our folder, a released checkpoint (docs/models.md)
    config: Path | None = None  # a released checkpoint's config, if not beside it
    tokenizer: Path | None = None  # tokenizer folder; TorchScript in it runs: trust it
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
    device: Device = "cpu"  # cpu, cuda, cuda:1
    dtype: DTypeChoice = "auto"  # of the weights; auto: float32 or bfloat16, what is faster here
    # what runs the steps; auto is native on the CPU, on CUDA triton or, without it, cuda-graph
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        for name in ("frames", "context_frames"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.tolerance != 1 and not self.exact:
            raise ValueError("tolerance needs --exact")
        sampling = self.sampling(GenerationDefaults())
        self.decoding(GenerationDefaults(), 1).check(Conditions(sampling.temperature))

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


@dataclass(frozen=True)
class GenerateOptions(Recipe):
    """Generate a video from a prompt clip and actions, and write it as mp4 with a contact sheet.

    What is not given is a default of the model: of the bundled one, 16 frames after 4 with
    row_lag 1 at temperature 1 and top-p 0.9.

    With --prompts, each of many prompts has a video in the folder --out; those that cannot be read
    are told at the end, and make the exit code 1.
    """

    # any video or gif (its last frames are continued), picture, or npz; default: the bundled clip
    prompt: Path | None = None
    # .mp4, .gif or .webp, with a contact sheet beside it as .png; or .png, the sheet alone
    output: OutputFile = Path("dream.mp4")
    compare: bool = False  # run raster as well; the video shows both side by side (raster left)
    raster_frames: int | None = None  # timed in raster order for the table; default 2, Cosmos 0
    # instead of --prompt: a folder of them; each has its own seed, made of its name and --seed
    prompts: Path | None = None
    # folder for their videos, NAME.mp4 with NAME.json; a run that was killed goes on from here
    out: OutputFolder | None = None
    workers: int = Pool.size  # processes that share the prompts (Ray); 1 is this one alone
    worker_cpus: float = Pool.cpus  # CPU share of each
    worker_gpus: float = Pool.gpus  # GPU share of each
    # of a Ray cluster that sees the same folders, such as ray://head:10001; default: one here
    address: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.raster_frames is not None and self.raster_frames < 0:
            raise ValueError(f"raster_frames must be at least 0, got {self.raster_frames}")
        check_suffix(self.output)
        if self.compare and self.decoding(GenerationDefaults(), 1) == Raster():
            raise ValueError("compare already runs raster; leave it out")
        alone = ("prompt", "output", "compare", "raster_frames")
        many = ("out", "workers", "worker_cpus", "worker_gpus", "address")
        is_many = self.prompts is not None
        for name in alone if is_many else many:
            if getattr(self, name) != getattr(GenerateOptions, name):
                kind = "one video, not" if is_many else "many videos: it needs"
                hint = "; one video goes to --output" if name == "out" else ""
                raise ValueError(f"{name} is for {kind} --prompts{hint}")
        if is_many and self.out is None:
            raise ValueError("prompts need --out, a folder for their videos")
        self.pool()

    def pool(self) -> Pool:
        """Return who goes on from the prompts."""
        return Pool(self.workers, self.worker_cpus, self.worker_gpus, self.address)


@dataclass(frozen=True)
class ConvertOptions:
    """Convert a released checkpoint (docs/models.md) into our folder.

    Every command takes it; a tokenizer in TorchScript stays apart: name it with `--tokenizer`.
    """

    # file or folder of the released checkpoint
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    # folder to write
    target: Annotated[OutputFolder, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    config: Path | None = None  # config in the original field names, if not beside the checkpoint
    tokenizer: Path | None = None  # folder to copy it from, if not with the checkpoint
    force: bool = False  # overwrite a checkpoint that is already there
