"""Pretraining: prediction of tokens in any order over interleaved frames and actions.

Optimisation defaults are those of the bundled world. Those of the paper (arXiv:2503.14070,
appendix) are `--optimizer adamw --learning-rate 3e-4 --warmup-steps 10000 --steps 100000`.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from diagd.console import make_console
from diagd.families.own_format import TOKENIZER_FOLDER
from diagd.families.presets import PRESETS
from diagd.files import read_json_lines, write_json
from diagd.tokenizers.shards import TokenClips
from diagd.tokenizers.vq import VQTokenizer
from diagd.training.dreams import PICTURE, DreamStrip
from diagd.training.loop import Look, TrainingRun, read_clips
from diagd.training.mixture import MixtureLoss, MixtureOptions
from diagd.training.setup import OptimizerName, check_tokenizer, fit_config, start_model
from diagd.training.sizing import plan_run
from diagd.training.world_parts import copy_parts, next_steps

DEFAULT_MINUTES = 20.0
DEFAULT_MODEL = "mc-ar-doom"
HELD_OUT_LOSS = "validation_loss"
RECORD_FILE = "train.json"
RISE = 0.02  # nats a token by which a held-out loss has clearly risen


@dataclass(frozen=True, kw_only=True)
class TrainOptions(MixtureOptions):
    """Train a world model on what `diagd tokenize` wrote; the result is a folder to play.

    Without --steps it takes 20 minutes, and a model that fits the time.
    """

    # preset, such as mc-ar-128x3, mc-ar-320x6, mc-ar-42m; default: sized to the time
    model: str | None = None
    init: str | None = None  # checkpoint folder to take the weights from, instead of random ones
    # peak; decays along a cosine to a tenth. Give mc-ar-42m and up 3e-4
    learning_rate: float = 3e-3
    # muon for the blocks' matrices and adamw for the rest, or adamw for all
    optimizer: OptimizerName = "muon"
    # one is drawn for each step, with weights: raster k=1:2 k=1,d=14; a world is played under k=1
    strategies: tuple[str, ...] = ("raster", "k=1")
    context_frames: int = 0  # frames at the start, in raster order, that are not learnt

    def __post_init__(self) -> None:
        choices = [name for name in PRESETS if name.startswith("mc-ar")]
        if self.model is not None and self.model not in choices:
            raise ValueError(f"model must be one of {', '.join(choices)}, got {self.model!r}")
        super().__post_init__()

    @property
    def seconds(self) -> float | None:
        """How long to train at most; None: as long as the steps take."""
        given = super().seconds
        return 60 * DEFAULT_MINUTES if given is None and self.steps is None else given


def pretrain(options: TrainOptions) -> dict[str, Any]:
    """Train to the end, from the newest checkpoint if there is one."""
    clips, held_out = read_clips(options)
    plan = None
    if options.seconds is not None:
        plan = plan_run(options, clips, options.model)
        steps = min(options.steps or plan.steps, plan.steps)
        minutes = options.seconds / 60
        options = replace(options, model=plan.model, minutes=minutes, hours=None, steps=steps)
    config = fit_config(options.model or DEFAULT_MODEL, clips, options.frames_held)
    model = start_model(config, options.seed, options.init)
    if options.init is not None:
        check_tokenizer(options.init, clips)
    views = options.views(config.grid_height, config.grid_width)
    run = TrainingRun(options, clips, model, {"train": options.purpose()})
    run.resume()
    is_main = run.accelerator.is_main_process
    if is_main:
        copy_parts(options.tokens, options.out)
        write_json(options.out / RECORD_FILE, {**options.purpose(), "options": asdict(options)})
    console = make_console(is_main)
    if run.step:
        console.print(f"going on after step {run.step}")
    elif plan is not None and options.seconds is not None:
        console.print(plan.describe(options.seconds))
    wrong = options.corruption(clips.codebook_size, run.accelerator.process_index)
    loss, look = MixtureLoss(options, views, run.accelerator.device, wrong), None
    if held_out is not None:
        look = _look(run, held_out, loss)
        console.print(f"how it goes: {options.out}/loss.png and {options.out}/{PICTURE}")
    run.train(loss, look)
    report: dict[str, Any] = {"steps": run.step}
    if held_out is not None:
        report |= loss.validate(run, held_out)
        if is_main:
            _warn(run.log_file, console)
    console.print(next_steps(options.out, options.tokens))
    return report


def _look(run: TrainingRun, held_out: TokenClips, loss: MixtureLoss) -> Look:
    """Return what is done at each stage: the held-out loss, and a strip where one can be painted.

    A model that is spread over several processes paints none.
    """
    strip, folder = None, run.options.tokens / TOKENIZER_FOLDER
    if folder.is_dir() and run.accelerator.num_processes == 1:
        tokenizer = VQTokenizer.from_pretrained(folder)
        strip = DreamStrip(run.options.out, held_out, tokenizer, run.options.frames)

    def look() -> dict[str, Any]:
        if strip is not None:
            strip.add(run.accelerator.unwrap_model(run.model), run.step)
        return loss.validate(run, held_out)

    return look


def _warn(log: Path, console: Console) -> None:
    """Say so if the held-out loss has risen again: clips are learnt by heart."""
    looks = [line for line in read_json_lines(log) if HELD_OUT_LOSS in line]
    if not looks:
        return
    best, last = min(looks, key=lambda line: line[HELD_OUT_LOSS]), looks[-1]
    if last[HELD_OUT_LOSS] > best[HELD_OUT_LOSS] + RISE:
        console.print(
            f"the held-out loss was {best[HELD_OUT_LOSS]:.3f} at step {best['step']} and is "
            f"{last[HELD_OUT_LOSS]:.3f} now: record more clips, or train for less time"
        )
