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
    """Where a model runs, and its weight type."""

    device: Device = "cpu"  # run on cpu, cuda or cuda:1
    # weight type; auto: the faster of float32 and bfloat16 here; fastest: int8 as well
    dtype: DTypeChoice = "auto"
    # execution backend; auto: native on the CPU, on CUDA triton or, without it, cuda-graph
    backend: Backend = "auto"


@dataclass(frozen=True, kw_only=True)
class AdapterFlag:
    """An adapter of the model."""

    adapter: Path | None = None  # folder of diagd finetune --lora, trained on this model


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Sampling of tokens; None is the model's default."""

    temperature: float | None = None  # sampling temperature; 0: greedy
    top_k: int | None = None  # keep the k most likely tokens
    top_p: float | None = None  # keep the most likely tokens up to this mass
    seed: int = 0  # random seed; the same seed repeats a video exactly

    def sampling(self, defaults: GenerationDefaults) -> SamplingOptions:
        temperature = defaults.temperature if self.temperature is None else self.temperature
        top_k, top_p = self.top_k, self.top_p
        if temperature:  # greedy decoding truncates nothing
            top_k = defaults.top_k if top_k is None else top_k
            top_p = defaults.top_p if top_p is None else top_p
        return SamplingOptions(temperature, top_k, top_p)


@dataclass(frozen=True, kw_only=True)
class DecodingFlags:
    """Decoding strategy; None is the model's default."""

    # decoding strategy: raster, k=2, k=1,d=14, k=1/predecessor, exact, zipar=4 ...; or -k and -d:
    strategy: str | None = None
    row_lag: RowLag = None  # the paper's k: columns by which a row is ahead of the next
    # the paper's d: steps between frames; default: a frame starts when the last is complete
    frame_lag: FrameLag = None

    def decoding(self, defaults: GenerationDefaults, height: int) -> Strategy:
        """Return the strategy that the flags name, for frames of `height` rows of tokens."""
        if self.strategy is None:
            return defaults.strategy(height, self.row_lag, self.frame_lag)
        if lags := [n for n in ("row_lag", "frame_lag") if getattr(self, n) is not None]:
            raise ValueError(f"strategy and {lags[0]} exclude each other: give one")
        return parse_strategy(self.strategy)


ONE_VIDEO = ("prompt", "images", "compare", "raster_frames")
MANY_VIDEOS = ("batch_size", "workers", "worker_cpus", "worker_gpus", "address")


@dataclass(frozen=True)
class GenerateOptions(DecodingFlags, SamplingFlags, MachineFlags, AdapterFlag, Pool):
    """Generate a video from a prompt clip and actions, and write it as mp4 with a contact sheet.

    Flags not given take the model's own values: the bundled one generates 16 frames after 4, with
    row_lag 1 at temperature 1 and top-p 0.98.

    With --prompts, each prompt gets a video in the folder --out; failed prompts are listed at the
    end, with exit code 1.
    """

    model: str = "doom"  # bundled model, our folder or released checkpoint (docs/models.md)
    config: Path | None = None  # config of a released checkpoint, if not beside it
    tokenizer: Path | None = None  # tokenizer folder, to be trusted: TorchScript in it is executed
    # a video or gif (its last frames are continued), picture, or npz; default: the bundled clip
    prompt: Annotated[Path | None, tyro.conf.arg(aliases=["--image"])] = None
    context_frames: int | None = None  # number of prompt frames in the context
    # actions, such as forward*8,left*4 (the last one repeats), or a jsonl file; default: the
    # clip's, or the bundled walk
    actions: str | None = None
    # guidance scale; 1: none; default: the model's own
    guidance: float | None = None
    text: str | None = None  # description of the image or video, for models with text input
    text_encoder: Path | None = None  # folder of the T5 text encoder (Cosmos)
    text_embedding: Path | None = None  # encoded text (safetensors), instead of the above
    # of an image by GLM-Image or MammothModa2: HEIGHTxWIDTH pixels, multiples of 32
    size: str | None = None
    frames: int | None = None  # number of frames to generate
    images: int = 1  # number of images to generate, with seeds --seed, --seed + 1, ...
    # .mp4, .gif or .webp, with a contact sheet as .png; or .png, the sheet alone, or the image of
    # an image model; default: dream.mp4, for an image model dream.png. With --prompts, the folder
    # for their videos, NAME.mp4 with NAME.json; a killed run resumes there
    out: Annotated[Path | None, tyro.conf.arg(aliases=["--output"])] = None
    compare: bool = False  # decode in raster order as well; the video shows both (raster left)
    raster_frames: int | None = None  # frames to time in raster order; default: 2 (Cosmos: 0)
    # folder of prompts, instead of --prompt; each has its own seed, from its name and --seed
    prompts: Path | None = None
    batch_size: int = 4  # number of prompts decoded at once

    def __post_init__(self) -> None:
        bounds = dict.fromkeys(("frames", "context_frames", "images", "batch_size"), 1)
        check_at_least(self, **bounds, raster_frames=0, guidance=0)
        strategy = self.decoding(GenerationDefaults(), 1)
        strategy.check()
        self.sampling(GenerationDefaults())
        if self.compare and strategy == Raster():
            raise ValueError("compare needs a strategy other than raster")
        is_many = self.prompts is not None
        for name in ONE_VIDEO if is_many else MANY_VIDEOS:
            if getattr(self, name) != getattr(GenerateOptions, name):
                kind = "be left out with" if is_many else "be given with"
                raise ValueError(f"{name} must {kind} --prompts")
        if is_many and (self.out is None or self.out.suffix.lower() in FRAME_SUFFIXES):
            got = "" if self.out is None else f", got {self.out}"
            raise ValueError(f"out must be a folder for the videos of --prompts{got}")
        if self.out is not None:
            (output_folder if is_many else _video_file)(self.out)
        super().__post_init__()


def _video_file(path: Path) -> None:
    output_file(path)
    if not path.suffix:
        raise ValueError(f"out must be a file without --prompts: for one video {path}.mp4")
    check_suffix(path)


@dataclass(frozen=True)
class PlanOptions(DecodingFlags):
    """Count the steps of a strategy's schedule, by default k=1, without a model."""

    grid: str  # frames x rows x columns of tokens, such as 3x40x64
    # with --json also the lanes of each step, for engines that run them (docs/hybrid.md)
    lanes: bool = False
    before: str | None = None  # rows x columns of another grid right before it, such as 16x16


@dataclass(frozen=True)
class ConvertOptions(AdapterFlag):
    """Convert a released checkpoint of any family to our folder format.

    All commands read that folder; Cosmos tokenizers are not copied: give them with `--tokenizer`.
    """

    # file or folder of the released checkpoint
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    # folder to write
    target: Annotated[OutputFolder, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    config: Path | None = None  # config in the original field names, if not beside the checkpoint
    tokenizer: Path | None = None  # tokenizer folder to copy (MineWorld's vae, a diffusers VQModel)
    force: bool = False  # overwrite an existing checkpoint
