"""Size a run to the time there is: measure how fast this machine trains, choose by one rule.

The rule: the largest model that sees at least 3 tokens for each of its weights. Tokens that are
read again teach less: n passes over the same data are worth 1 + 15 * (1 - exp(-(n - 1) / 15))
passes over new data (arXiv:2305.16264), and after 40 passes a run ends even if there is time left.

diagd train --tokens tokens --out world --minutes 20
diagd train --tokens tokens/train --validation tokens/heldout --out world
"""

import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from diagd.console import make_console, waiting
from diagd.data.video import contact_sheet, write_image
from diagd.decoding.generate_tokens import generate_tokens
from diagd.decoding.schedule import TokenGrid
from diagd.families.checkpoints import TOKENIZER_FOLDER
from diagd.families.defaults import GenerationDefaults
from diagd.families.presets import WORLD_SIZES
from diagd.files import read_json_lines, write_json
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.pipeline.prompts import prompt_tokens
from diagd.tokenizers.shards import TokenClips
from diagd.tokenizers.vq import VideoTokenizer, VQTokenizer
from diagd.training.loop import Look, TrainingRun, draw_batch, plot_dreams, read_clips, windows
from diagd.training.mixture import MixtureLoss, corruption_of, views_of
from diagd.training.options import MixtureOptions, TrainOptions
from diagd.training.setup import (
    check_tokenizer,
    copy_parts,
    faster_precision,
    fit_config,
    make_optimizers,
    next_steps,
    start_model,
)

TOKENS_A_WEIGHT = 3.0
WORTH_OF_PASSES = 15.0
MOST_PASSES = 40
USEFUL_PASSES = 8  # beyond them, more clips would teach more than more time
PLAN_FILE = "plan.json"
PROBED = ("mc-ar-128x3", "mc-ar-256x5")
PROBE_STEPS = 3
PROBE_SHARE = 0.1  # of the time, at most, but for a step that is under way


@dataclass(frozen=True)
class RunPlan:
    """What a run in a given time comes to.

    Attributes:
        model: name of a preset.
        weights: of the model.
        sized: whether the model was chosen, not named.
        steps: where the run ends even if there is time left.
        tokens: about as many are read.
        data_tokens: so many there are to read.
    """

    model: str
    weights: int
    sized: bool
    steps: int
    tokens: float
    data_tokens: int

    @property
    def passes(self) -> float:
        """How often every clip is read."""
        return self.tokens / self.data_tokens

    @property
    def worth(self) -> float:
        """How many new tokens would teach as much."""
        again = max(self.passes - 1, 0.0)
        worth = 1 + WORTH_OF_PASSES * (1 - math.exp(-again / WORTH_OF_PASSES))
        return self.data_tokens * min(self.passes, worth)

    def describe(self, seconds: float) -> str:
        """Say in a few lines what to expect of a run that has so many seconds left."""
        ends = datetime.now() + timedelta(seconds=seconds)
        model = f"{self.model}, {_count(self.weights)} weights"
        if self.sized:
            model += f": as large as {TOKENS_A_WEIGHT:g} tokens a weight allow, or the smallest"
        lines = [
            model,
            f"until {ends:%H:%M} at the latest: about {_count(self.tokens)} tokens, "
            f"{self.passes:.1f} passes over the {_count(self.data_tokens)} of the clips "
            "(the bundled world: 8.3M weights, 29M tokens, 1.3 passes)",
        ]
        if self.passes >= MOST_PASSES:
            lines.append(f"it ends after {MOST_PASSES} passes: further ones teach next to nothing")
        if self.passes > USEFUL_PASSES:
            lines.append("more clips would teach it more than more time")
        return "\n".join(lines)


def plan_run(options: MixtureOptions, clips: TokenClips, model: str | None) -> RunPlan:
    """Choose a model for the time, or take the one named; the plan of a killed run is kept.

    Raises:
        ValueError: several processes, of which only one would be measured.
    """
    path = options.out / PLAN_FILE
    if path.is_file():
        plan = RunPlan(**json.loads(path.read_text(encoding="utf-8")))
        return plan if model is None else replace(plan, model=model)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if model is None and processes > 1:
        raise ValueError("a model is sized on one process: with several, name it by --model")
    assert options.seconds is not None
    started, costs = time.monotonic(), list[tuple[int, float]]()
    with waiting("measuring how fast this machine trains"):
        for name in PROBED if model is None else [model]:
            left = PROBE_SHARE * options.seconds - (time.monotonic() - started)
            if not costs or left > 0:
                costs.append(_probe(options, clips, name, left))
    if len(costs) == 1:  # a step that took that long is all arithmetic: it grows with the weights
        costs.insert(0, (0, 0.0))
    seconds_left = options.seconds - (time.monotonic() - started)
    data_tokens = len(clips.tokens) * clips.tokens.shape[1] * (clips.tokens[0, 0].numel() + 1)
    step = processes * options.batch_of(clips) * options.length_of(clips)
    steps = math.ceil(MOST_PASSES * data_tokens / step)
    most = min(options.steps or steps, steps) * step
    plan = None
    for name in WORLD_SIZES if model is None else [model]:
        weights = num_weights(fit_config(name, clips, options.frames_held))
        seconds = _seconds_per_token(costs, weights) / processes
        tokens = min(seconds_left / seconds, most)
        larger = RunPlan(name, weights, model is None, steps, tokens, data_tokens)
        if plan is None or larger.worth >= TOKENS_A_WEIGHT * weights:
            plan = larger
    assert plan is not None
    write_json(path, asdict(plan))
    return plan


def num_weights(config: ModelConfig) -> int:
    """Count the weights of a model; makes none."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in Transformer(config).parameters())


def _probe(
    options: MixtureOptions, clips: TokenClips, model: str, limit: float
) -> tuple[int, float]:
    """Train a model for some steps; return its weights, and the seconds a token takes.

    Args:
        limit: seconds after which no other step begins.
    """
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = fit_config(model, clips, options.frames_held)
    probe = Transformer.random(config, 0, device)
    views = views_of(options, config.grid_height, config.grid_width)
    wrong = corruption_of(options, clips.codebook_size)
    loss_of = MixtureLoss(replace(options, compile=False), views, device, wrong)
    optimizers = make_optimizers(probe, options.optimizer, options.learning_rate, 0.0)
    precision = faster_precision() if options.precision == "auto" else options.precision
    times: list[float] = []
    for step in range(1 + PROBE_STEPS):  # the first one prepares
        started = time.monotonic()
        tokens = draw_batch(clips, options.frames, options.batch_of(clips), step).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(probe, tokens, step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss.item()
        times.append((time.monotonic() - started) / tokens.numel())
        if time.monotonic() - began > limit:
            break
    taken = statistics.median(times[1:] or times)
    return sum(weight.numel() for weight in probe.parameters()), taken


def _seconds_per_token(costs: Sequence[tuple[int, float]], weights: int) -> float:
    """Extrapolate along the line through what was measured: a fixed part, and one by weights."""
    (few, fast), (many, slow) = costs[0], costs[-1]
    slope = max(slow - fast, 0.0) / (many - few) if many > few else 0.0
    return max(fast + slope * (weights - few), 0.5 * fast)


def _count(number: float) -> str:
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.0f}k"


PICTURE = "dreams.png"
STRATEGY = "k=1"  # as the page decodes


class DreamStrip:
    """The same few held-out frames, gone on from again and again.

    Args:
        folder: where `dreams.png` appears, and the strips it is made of, in `dreams/`.
        held_out: clips that the model does not learn from.
        tokenizer: paints them.
        frames: how many frames a strip has. Given are a quarter of them, or of what the model's
            context holds.
    """

    def __init__(
        self, folder: Path, held_out: TokenClips, tokenizer: VideoTokenizer, frames: int
    ) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.tokens, self.actions = windows(held_out, 1, frames)
        self.num_codes = held_out.codebook_size

    def add(self, model: Transformer, step: int) -> None:
        """Dream, and draw the strips of all stages up to this step."""
        strips = self.folder / "dreams"
        strips.mkdir(exist_ok=True)
        self._write(strips / "truth.png", self.tokens[0])
        self._write(strips / _name(step), self._dream(model))
        stages = sorted(path for path in strips.glob("step_*.png") if path.name <= _name(step))
        rows = {"truth": strips / "truth.png"}
        rows |= {f"step {int(path.stem.removeprefix('step_'))}": path for path in stages}
        plot_dreams(self.folder / PICTURE, rows, self._num_given(model))

    def _dream(self, model: Transformer) -> Tensor:
        """Return the given frames and the dreamt ones, (frames, height, width) int64."""
        num_given, (_, frames, height, width) = self._num_given(model), self.tokens.shape
        given = self.tokens[0, :num_given]
        defaults = GenerationDefaults()
        out = generate_tokens(
            model,
            prompt_tokens((), given, self.actions[:, 1:num_given]).to(model.device),
            STRATEGY,
            self.actions[:, num_given:].to(model.device),
            context_frames=num_given,
            sampling=defaults.sampling(None, (0, self.num_codes)),
            grid=TokenGrid(frames - num_given, height, width),
        )
        return torch.cat([given, out.tokens[0].cpu()])

    def _num_given(self, model: Transformer) -> int:
        return max(1, min(self.tokens.shape[1], model.config.frames_held) // 4)

    def _write(self, path: Path, tokens: Tensor) -> None:
        write_image(path, contact_sheet(self.tokenizer.decode(tokens), columns=len(tokens)))


def _name(step: int) -> str:
    return f"step_{step:08d}.png"


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
