"""Compare strategies on recorded clips: quality, speed, steps, agreement with raster.

Every clip is continued from its first frames under its recorded actions, by each model with each
strategy and the same seed. Raster, the tokenizer's reconstruction and a copy of the last given
frame are always in. A killed run goes on where it was; `diagd report` turns results.jsonl into a
page.

    diagd evaluate --clips work/doom/heldout --num-clips 64 --out work/study
"""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from diagd.backends.devices import DTypeChoice, device_of
from diagd.backends.prepare import Backend, choose_dtype
from diagd.console import make_console, progress
from diagd.data.video import write_video
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.strategies.diagonal import Scheduled
from diagd.decoding.strategies.strategy import Conditions, Strategy
from diagd.decoding.strategies.table import parse_strategies
from diagd.evaluation.captions import metric_notes
from diagd.evaluation.drift import DRIFT_FRAMES, drift_notes, print_drift, summarize_drift
from diagd.evaluation.likelihood_gap import (
    LIKELIHOOD_FILE,
    measure_likelihood,
    print_likelihood,
    summarize_likelihood,
)
from diagd.evaluation.measure import ClipMeter, Outcome, Settings, Task
from diagd.evaluation.named_clips import choose_clips, fingerprint_clips
from diagd.evaluation.print_summary import print_summary
from diagd.evaluation.protocol import PROTOCOLS
from diagd.evaluation.results import (
    BASELINES,
    RASTER,
    RESULTS_FILE,
    ResultsWriter,
    check_same,
    key_of,
    read_results,
    video_path,
)
from diagd.evaluation.revisit import (
    REVISIT_BASELINES,
    print_revisit,
    revisit_notes,
    summarize_revisit,
)
from diagd.evaluation.summary import summarize
from diagd.families.checkpoints import model_path
from diagd.families.defaults import GenerationDefaults
from diagd.flags import OutputFolder
from diagd.metrics.fvd import MIN_FRAMES, Preprocessing
from diagd.provenance import fingerprint, provenance
from diagd.workers import Pool, do_tasks

Models = Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--model"])]


@dataclass(frozen=True)
class EvaluateOptions:
    """Continue recorded clips by every model with every strategy, and compare with the truth.

    Strategies: k=2, k=1,d=24, k=1/spatial, zipar=4, zipar-adaptive=4, exact, jacobi, tolerance=1.5,
    sjd, mc-sjd; the last five also with lanes, such as exact,lanes=32.
    """

    clips: Path  # folder of videos, with a jsonl of actions beside each for models that take any
    out: OutputFolder  # folder for results.jsonl; a run that was killed goes on from here
    models: Models = ("doom",)  # bundled names or folders; label=folder names one in the tables
    tokenizer: Path | None = None  # folder, if not with the model; TorchScript in it (Cosmos) runs
    strategy: tuple[str, ...] = ("k=4", "k=2", "k=1")  # how to decode, after raster
    # the paper's clips and lengths, where the next flags leave them open
    protocol: Literal["cosmos", "wham", "mc-ar"] = "mc-ar"
    num_clips: int | None = None  # clips, drawn at random from the folder by the seed
    frames: int | None = None  # frames of a clip, the given ones included
    context_frames: int | None = None  # given frames
    fps: float | None = None  # frame rate of the clips; default: the protocol's, or any
    start: int = 0  # first frame taken of each clip
    temperature: float = GenerationDefaults.temperature  # 0 is greedy
    top_k: int | None = None  # keep the k likeliest tokens
    top_p: float | None = GenerationDefaults.top_p  # keep the likeliest tokens up to this mass
    seed: int = 0  # of the choice of clips and of sampling; a clip's seed is one for all strategies
    device: str = "cpu"  # cpu, cuda, cuda:1
    dtype: DTypeChoice = "float32"  # of the weights
    backend: Backend = "auto"  # what runs the steps
    lpips_backbone: Path | None = None  # torchvision's alexnet or vgg16 weights; none: no LPIPS
    lpips_heads: Path | None = None  # the authors' alex.pth or vgg.pth; default: torchmetrics' copy
    fvd_detector: Path | None = None  # StyleGAN-V's i3d_torchscript.pt: runs its code; none: no FVD
    fvd_resize: Preprocessing = "crop"  # how frames become 224 x 224 px (see metrics/fvd.py)
    teacher_forced: bool = False  # generate nothing: the likelihood of the true frames instead
    # dream on when a clip is over, by default 256 frames, and show by eights how frames change
    drift: bool = Settings.drift
    # turn away for so many frames, stand still for one and turn back: is the picture there again?
    revisit: int | None = Settings.revisit
    revisit_actions: tuple[str, str] = Settings.revisit_actions  # that undo each other
    save_videos: bool = False  # keep what was generated, for strips and videos in the report
    workers: int = Pool.size  # processes that share the work (Ray); 1 is this one alone
    worker_cpus: float = Pool.cpus  # CPU share of each
    worker_gpus: float = Pool.gpus  # GPU share of each
    # of a Ray cluster that sees the same folders, such as ray://head:10001; default: one here
    address: str | None = None

    def __post_init__(self) -> None:
        for name, value, lowest in (
            ("num_clips", self.length("num_clips"), 1),
            ("context_frames", self.length("context_frames"), 1),
            ("frames", self.length("frames"), self.length("context_frames") + 1),
            ("start", self.start, 0),
        ):
            if value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value}")
        generated = self.length("frames") - self.length("context_frames")
        if self.fvd_detector is not None and generated < MIN_FRAMES:
            raise ValueError(f"FVD needs {MIN_FRAMES} or more generated frames, got {generated}")
        if self.lpips_heads is not None and self.lpips_backbone is None:
            raise ValueError("lpips_heads needs lpips_backbone as well")
        if self.teacher_forced and not self.pool().is_this_process:
            raise ValueError("teacher_forced runs in this process: leave --workers out")
        if self.revisit is not None and self.revisit < 1:
            raise ValueError(f"revisit must be at least 1, got {self.revisit}")
        if self.revisit and self.frames is not None:
            raise ValueError("revisit says how many frames there are: leave frames out")
        asked = [name for name in ("drift", "revisit", "teacher_forced") if getattr(self, name)]
        if len(asked) > 1:
            raise ValueError(f"one thing at a time: leave all but one of {', '.join(asked)} out")
        if (self.drift or self.revisit) and self.fvd_detector is not None:
            raise ValueError(f"{asked[0]} is measured frame by frame: leave fvd_detector out")
        for strategy in self.strategies():
            if self.teacher_forced and not isinstance(strategy, Scheduled):
                raise ValueError(f"teacher_forced compares schedules: leave {strategy} out")
            strategy.check(Conditions(self.temperature))
        self.labelled_models()
        self.pool()

    def pool(self) -> Pool:
        """Return who does the work."""
        return Pool(self.workers, self.worker_cpus, self.worker_gpus, self.address)

    def length(self, name: Literal["num_clips", "frames", "context_frames"]) -> int:
        """Return a number that was given, or else the protocol's."""
        given = getattr(self, name)
        if name == "frames" and given is None and (self.drift or self.revisit):
            coming = 2 * self.revisit + 1 if self.revisit else DRIFT_FRAMES
            return self.length("context_frames") + coming
        return getattr(PROTOCOLS[self.protocol], name) if given is None else given

    def methods(self) -> list[str]:
        """Return what every clip is measured under, in order, each once."""
        baselines = REVISIT_BASELINES if self.revisit else BASELINES
        return [*baselines, *(strategy.name for strategy in self.strategies())]

    def strategies(self) -> list[Strategy]:
        """Return raster and the other strategies, each once."""
        return parse_strategies((RASTER, *self.strategy))

    def labelled_models(self) -> dict[str, str]:
        """Return name or folder of each model by its label."""
        pairs = [model.rpartition("=")[::2] for model in self.models]
        labels = {label or name: name for label, name in pairs}
        if not labels or len(labels) < len(pairs):
            raise ValueError(f"models must be distinct and at least one, got {self.models}")
        return labels

    def settings(self) -> Settings:
        """Return what workers need to know."""
        truncation = (self.top_k, self.top_p) if self.temperature else (None, None)
        return Settings(
            models=self.labelled_models(),
            clips=self.clips,
            start=self.start,
            context_frames=self.length("context_frames"),
            num_frames=self.length("frames"),
            fps=PROTOCOLS[self.protocol].fps if self.fps is None else self.fps,
            sampling=SamplingOptions(self.temperature, *truncation),
            seed=self.seed,
            tokenizer=self.tokenizer,
            device=self.device,
            dtype=choose_dtype(self.dtype, device_of(self.device)),
            backend=self.backend,
            lpips_backbone=self.lpips_backbone,
            lpips_heads=self.lpips_heads,
            fvd_detector=self.fvd_detector,
            fvd_resize=self.fvd_resize,
            drift=self.drift,
            revisit=self.revisit,
            revisit_actions=self.revisit_actions,
        )


def main(options: EvaluateOptions) -> dict[str, Any]:
    """Measure what is not there yet, then print the table."""
    console = make_console()
    settings = options.settings()
    device = device_of(options.device)
    fingerprints = {label: fingerprint(model_path(name)) for label, name in settings.models.items()}
    clips = choose_clips(options.clips, options.length("num_clips"), options.seed)
    tasks = [
        Task(model, method, clip)
        for model in settings.models
        for clip in clips
        for method in options.methods()
    ]
    meter = ClipMeter(settings, options.save_videos)
    pool = options.pool()
    if pool.is_this_process:  # else others load the models
        for label in reversed(settings.models):  # the first one stays loaded
            meter.check(label, options.strategies(), clips)
    run = {
        "kind": "run",
        "settings": json.loads(json.dumps(asdict(settings), default=str)),
        "metrics": meter.provenance,
        "models": fingerprints,
        "clips": fingerprint_clips(options.clips, clips),
        "tokenizer": options.tokenizer and fingerprint(options.tokenizer),
        "options": json.loads(json.dumps(asdict(options), default=str)),
        **provenance(device),
    }
    if options.teacher_forced:
        forced = [task for task in tasks if task.method not in BASELINES]
        gaps = summarize_likelihood(measure_likelihood(meter, forced, options.out, run))
        print_likelihood(gaps, console)
        return {"results": str(options.out / LIKELIHOOD_FILE), "rows": gaps}
    path = options.out / RESULTS_FILE
    with ResultsWriter(path) as writer:
        before = read_results(path)
        check_same(path, before, run)
        done = before.done()
        missing = [task for task in tasks if tuple(task) not in done]
        if missing:
            run["run"] = len(before.runs)
            writer.append(run)
            make = partial(ClipMeter, settings, options.save_videos)
            outcomes = do_tasks(missing, (lambda: meter) if pool.is_this_process else make, pool)
            with progress("clips x methods", len(tasks), len(tasks) - len(missing)) as job:
                for _, outcome in outcomes:
                    if isinstance(outcome, ValueError):
                        raise outcome
                    _keep(options, outcome, writer, run["run"])
                    job.advance()
    results = read_results(path)
    if options.drift:
        rows = summarize_drift(results)
        print_drift(rows, console)
        notes = drift_notes(results, rows)
    elif options.revisit:
        rows = summarize_revisit(results)
        print_revisit(rows, console)
        notes = revisit_notes(results)
    else:
        rows = summarize(results)
        print_summary(rows, console)
        notes = metric_notes(results, rows)
    for note in notes:
        console.print(note)
    return {"results": str(path), "measured": len(missing), "notes": notes, "rows": rows}


def _keep(options: EvaluateOptions, outcome: Outcome, writer: ResultsWriter, run: int) -> None:
    """Write the video, then the line that speaks of it."""
    record = outcome.record
    video = None
    if options.save_videos:
        video = video_path(*key_of(record))
        write_video(options.out / video, outcome.frames, record["fps"])
    writer.append({**record, "run": run, "video": video})
