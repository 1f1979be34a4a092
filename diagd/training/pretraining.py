"""Pretraining: prediction of tokens in any order over interleaved frames and actions.

Optimisation defaults are those of the bundled world. Those of the paper (arXiv:2503.14070,
appendix) are `--optimizer adamw --learning-rate 3e-4 --warmup-steps 10000 --steps 100000`.
"""

from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console

from diagd.console import make_console
from diagd.families.own_format import TOKENIZER_FOLDER
from diagd.files import read_json_lines, write_json
from diagd.tokenizers.shards import TokenClips
from diagd.tokenizers.vq import VQTokenizer
from diagd.training.dreams import PICTURE, DreamStrip
from diagd.training.loop import Look, TrainingRun, read_clips
from diagd.training.mixture import MixtureLoss, corruption_of, views_of
from diagd.training.options import TrainOptions
from diagd.training.setup import check_tokenizer, fit_config, start_model
from diagd.training.sizing import plan_run
from diagd.training.world_parts import copy_parts, next_steps

DEFAULT_MODEL = "mc-ar-doom"
HELD_OUT_LOSS = "validation_loss"
RECORD_FILE = "train.json"
RISE = 0.02  # nats a token by which a held-out loss has clearly risen


def pretrain(options: TrainOptions) -> dict[str, Any]:
    """Train to the end, from the newest checkpoint if there is one."""
    clips, held_out = read_clips(options)
    plan, started = None, monotonic()
    if options.seconds is not None:
        plan = plan_run(options, clips, options.model)
        steps = min(options.steps or plan.steps, plan.steps)
        minutes = max(options.seconds - (monotonic() - started), 1.0) / 60
        options = replace(options, model=plan.model, minutes=minutes, hours=None, steps=steps)
    config = fit_config(options.model or DEFAULT_MODEL, clips, options.frames_held)
    model = start_model(config, options.seed, options.init)
    if options.init is not None:
        check_tokenizer(options.init, clips)
    views = views_of(options, config.grid_height, config.grid_width)
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
    wrong = corruption_of(options, clips.codebook_size, run.accelerator.process_index)
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
