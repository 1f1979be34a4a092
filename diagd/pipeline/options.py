"""Groups of flags that several commands share, and the options of `generate`, `plan` and `convert`.

A command's options inherit the groups that it needs; all flags stay flat.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from diagd.backends.names import Backend, DTypeChoice
from diagd.checks import check_at_least
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.strategies.table import Raster, Strategy, parse_strategy
from diagd.families.defaults import GenerationDefaults
from diagd.files import FRAME_SUFFIXES, check_suffix
from diagd.flags import Device, FrameLag, OutputFolder, RowLag, output_file, output_folder
from diagd.workers import Pool


@dataclass(frozen=True, kw_only=True)
class MachineFlags:
    """Where a model runs, and in which numbers."""

    device: Device = "cpu"  # cpu, cuda, cuda:1
    # of the weights; auto: float32 or bfloat16, what is faster here; fastest: or int8
    dtype: DTypeChoice = "auto"
    # what runs the steps; auto is native on the CPU, on CUDA triton or, without it, cuda-graph
    backend: Backend = "auto"


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Sampling of tokens; None is the model's default."""

    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None  # keep the k likeliest tokens
    top_p: float | None = None  # keep the likeliest tokens up to this mass
    seed: int = 0  # repeats a video exactly

    def sampling(self, defaults: GenerationDefaults) -> SamplingOptions:
        temperature = defaults.temperature if self.temperature is None else self.temperature
        top_k, top_p = self.top_k, self.top_p
        if temperature:  # greedy decoding truncates nothing
            top_k = defaults.top_k if top_k is None else top_k
            top_p = defaults.top_p if top_p is None else top_p
        return SamplingOptions(temperature, top_k, top_p)


@dataclass(frozen=True, kw_only=True)
class DecodingFlags:
    """The strategy of decoding; None is the model's default."""

    # how to decode: raster, k=2, k=1,d=14, k=1/predecessor, exact, zipar=4 ...; or in short:
    strategy: str | None = None
    row_lag: RowLag = None  # the paper's k: columns a row runs ahead of the next one
    # the paper's d: steps between frames; default: a frame starts when the last is whole
    frame_lag: FrameLag = None

    def decoding(self, defaults: GenerationDefaults, height: int) -> Strategy:
        """Return the strategy that the flags name, for frames of `height` rows of tokens."""
        if self.strategy is None:
            return defaults.strategy(height, self.row_lag, self.frame_lag)
        if lags := [n for n in ("row_lag", "frame_lag") if getattr(self, n) is not None]:
            raise ValueError(f"one strategy at a time, got strategy and {lags[0]}")
        return parse_strategy(self.strategy)


ONE_VIDEO = ("prompt", "images", "compare", "raster_frames")
MANY_VIDEOS = ("batch_size", "workers", "worker_cpus", "worker_gpus", "address")


@dataclass(frozen=True)
class GenerateOptions(DecodingFlags, SamplingFlags, MachineFlags, Pool):
    """Generate a video from a prompt clip and actions, and write it as mp4 with a contact sheet.

    Anything not given takes the model's own default: of the bundled one, 16 frames after 4 with
    row_lag 1 at temperature 1 and top-p 0.98.

    With --prompts, each of many prompts has a video in the folder --out; unreadable ones are listed
    at the end; exit code 1.
    """

    model: str = "doom"  # a bundled model, our folder, a released checkpoint (docs/models.md)
    config: Path | None = None  # a released checkpoint's config, if not beside it
    tokenizer: Path | None = None  # tokenizer folder; TorchScript in it runs: trust it
    # any video or gif (its last frames are continued), picture, or npz; default: the bundled clip
    prompt: Annotated[Path | None, tyro.conf.arg(aliases=["--image"])] = None
    context_frames: int | None = None  # frames of the prompt that the model sees
    # such as forward*8,left*4 (the last goes on), or a jsonl file; default: the clip's, or the
    # bundled walk
    actions: str | None = None
    # how closely an image keeps to its class or text; 1 is no guidance
    guidance: float | None = None
    text: str | None = None  # what the image or video shows, for models that read a text
    text_encoder: Path | None = None  # folder of the T5 that encodes the text (Cosmos)
    text_embedding: Path | None = None  # a text encoded before (safetensors), instead of both
    frames: int | None = None  # frames to generate
    images: int = 1  # of a model of images: so many at once, under seeds from --seed on
    # .mp4, .gif or .webp, with a contact sheet beside it as .png; or .png, the sheet alone, or the
    # image of a model of images; default: dream.mp4, of such a model dream.png. With --prompts, the
    # folder for their videos, NAME.mp4 with NAME.json; a killed run resumes from here
    out: Annotated[Path | None, tyro.conf.arg(aliases=["--output"])] = None
    compare: bool = False  # run raster as well; the video shows both side by side (raster left)
    raster_frames: int | None = None  # timed in raster order for the table; default 2, Cosmos 0
    # instead of --prompt: a folder of them; each has its own seed, made of its name and --seed
    prompts: Path | None = None
    batch_size: int = 4  # of these prompts, decoded at once

    def __post_init__(self) -> None:
        bounds = dict.fromkeys(("frames", "context_frames", "images", "batch_size"), 1)
        check_at_least(self, **bounds, raster_frames=0, guidance=0)
        strategy = self.decoding(GenerationDefaults(), 1)
        strategy.check()
        self.sampling(GenerationDefaults())
        if self.compare and strategy == Raster():
            raise ValueError("compare already runs raster; leave it out")
        is_many = self.prompts is not None
        for name in ONE_VIDEO if is_many else MANY_VIDEOS:
            if getattr(self, name) != getattr(GenerateOptions, name):
                kind = "one video, not" if is_many else "many videos: it needs"
                raise ValueError(f"{name} is for {kind} --prompts")
        if is_many and (self.out is None or self.out.suffix.lower() in FRAME_SUFFIXES):
            got = "" if self.out is None else f", got {self.out}"
            raise ValueError(f"prompts need --out, a folder for their videos{got}")
        if self.out is not None:
            (output_folder if is_many else _video_file)(self.out)
        super().__post_init__()


def _video_file(path: Path) -> None:
    output_file(path)
    if not path.suffix:
        raise ValueError(f"out may be a folder with --prompts only; one video goes to {path}.mp4")
    check_suffix(path)


@dataclass(frozen=True)
class PlanOptions(DecodingFlags):
    """Count the steps of a strategy's schedule, by default of k=1, without a model."""

    grid: str  # frames x rows x columns of tokens, such as 3x40x64


@dataclass(frozen=True)
class ConvertOptions:
    """Convert a released checkpoint of any family into our folder.

    Every command takes it; of Cosmos the tokenizer stays apart: name it with `--tokenizer`.
    """

    # file or folder of the released checkpoint
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    # folder to write
    target: Annotated[OutputFolder, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    config: Path | None = None  # config in the original field names, if not beside the checkpoint
    tokenizer: Path | None = None  # tokenizer folder to copy (MineWorld's vae, a diffusers VQModel)
    force: bool = False  # overwrite a checkpoint that is already there
