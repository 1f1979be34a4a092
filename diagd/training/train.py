"""`diagd train` and `diagd finetune`: train a world, or adapt a model to diagonal schedules.

`diagd train` sizes a model to the training time: the largest that sees at least 3 tokens for each
of its weights, at this machine's measured speed. Repeated tokens teach less: n passes over the
same data are worth 1 + 15 * (1 - exp(-(n - 1) / 15)) passes over new data (arXiv:2305.16264), and a
run ends after 40 passes even if there is time left.

`diagd finetune` trains briefly under the visibility of diagonals, which a model trained in raster
order has not seen (arXiv:2503.14070, section 3.3; `diagd.decoding.teacher_forcing`).

diagd train --tokens tokens --out world --minutes 20
diagd train --tokens tokens/train --validation tokens/heldout --out world
diagd finetune --init doom --tokens tokens/train --out doom-any
diagd finetune --init doom --tokens tokens --out doom-k1 --strategy "k=1"
diagd finetune --init Janus-Pro-1B --images pictures --out janus-k1
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from shlex import quote
from time import monotonic
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console
from torch import Tensor

from diagd.console import duration, make_console, waiting
from diagd.data.video import contact_sheet, write_image
from diagd.decoding.generate_tokens import generate_tokens
from diagd.decoding.schedule import FrameFormat, TokenGrid
from diagd.extras import require
from diagd.families.adapters import weights_sha256
from diagd.families.checkpoints import (
    TOKENIZER_FOLDER,
    build_model,
    find_model,
    model_path,
    refuse_adapter,
)
from diagd.families.defaults import GenerationDefaults
from diagd.families.presets import WORLD_SIZES
from diagd.files import naming, read_json_lines, read_json_object, save_figure, write_json
from diagd.models.transformer import Transformer, num_parameters
from diagd.pipeline.prompts import prompt_tokens
from diagd.pipeline.world_folder import save_parts
from diagd.tokenizers.shards import TokenClips
from diagd.tokenizers.vq import VideoTokenizer, VQTokenizer
from diagd.training import setup
from diagd.training.adapters import AdapterFolder, attach
from diagd.training.corpus import copy_parts
from diagd.training.images import read_images
from diagd.training.loop import Look, TrainingRun, check_out, decide_precision, read_clips
from diagd.training.memory import plan_memory
from diagd.training.mixture import MixtureLoss
from diagd.training.options import FinetuneOptions, RunOptions, TrainOptions
from diagd.training.sequences import Data, TokenImages, draw_batch, windows

DEFAULT_MODEL = "mc-ar-doom"  # for a given number of steps, with no time to size a model to
TOKENS_A_WEIGHT = 3.0
WORTH_OF_PASSES = 15.0
MAX_PASSES = 40
USEFUL_PASSES = 8  # with more passes, more clips help more than more time
PLAN_FILE = "plan.json"
PROBED = ("mc-ar-128x3", "mc-ar-256x5")
PROBE_STEPS = 3
PROBE_SHARE = 0.1  # maximum share of the time, except for a step in progress
RISE = 0.02  # nats per token by which a held-out loss has clearly risen
PICTURE = "dreams.png"
STRATEGY = "k=1"  # of dreams, as in the web page


def pretrain(options: TrainOptions) -> dict[str, Any]:
    """Train a world to the end, from the latest checkpoint if there is one; report the losses."""
    clips, held_out = read_clips(options := decide_precision(options))
    setup.check_tokenizer(str(options.tokens.absolute()), clips)
    told = ""
    if options.init is not None and options.model is None:
        options = replace(options, model=setup.size_of(options.init, clips, options))
    if options.more_minutes is not None:
        plan = read_plan(options)
        options = replace(options, model=options.model or (plan and plan.model))
    elif options.seconds is not None:
        plan = plan_run(options, clips)
        steps = min(options.steps or plan.steps, plan.steps)
        seconds = max(options.seconds - plan.spent, 1.0)
        told, minutes = plan.describe(seconds), seconds / 60
        options = replace(options, model=plan.model, minutes=minutes, hours=None, steps=steps)
    name = options.model or DEFAULT_MODEL
    config = setup.fit_config(name, clips, options.frames_held, options.sliding_frames)
    model = setup.start_model(config, options.seed, options.init)
    if options.init is not None:
        setup.check_tokenizer(options.init, clips)
    copy = partial(copy_parts, options.tokens)
    return _train("train", options, clips, held_out, model, copy, told)


def finetune(options: FinetuneOptions) -> dict[str, Any]:
    """Finetune to the last step, from the latest checkpoint if there is one; report the losses."""
    if options.lora:
        require("--lora", "peft")
    refuse_adapter("init", options.init)
    check_out(options := decide_precision(options))
    found = find_model(options.init)
    clips, held_out = read_images(options, found) if options.images else read_clips(options)
    sizes = options.batch_of(clips), options.length_of(clips)
    options, memory = plan_memory(found.config, options, *sizes)
    is_rounded = options.is_adapter and options.precision == "bf16"
    stored = {weight.dtype for weight in found.weights.values()}
    dtype = torch.bfloat16 if is_rounded and stored == {torch.bfloat16} else torch.float32
    slid = replace(found, config=setup.slide(found.config, options.sliding_frames))
    model = build_model(slid, "cpu", dtype)
    if isinstance(clips, TokenClips):
        setup.check_fit(options.init, model.config, clips)
    held, max_frames = options.frames_held, model.config.frames_held
    if options.window is not None and not model.relative_positions:
        raise ValueError(
            f"window must be left out: {options.init} has absolute positions, so frames must "
            f"fit into its context of {max_frames}"
        )
    if held > max_frames:
        name = "window" if options.window else "frames"
        raise ValueError(
            f"{name} must be at most {max_frames}, the context of {options.init}, got {held}; "
            f"with --window {max_frames} there may be more frames"
        )
    folder, parts = None, partial(copy_parts, model_path(options.init))
    told = f"{memory}; time: known after the first steps"
    if isinstance(clips, TokenImages):
        parts = partial(save_parts, found)
        shown = f"{len(clips.tokens)} pictures, {clips.drop:.0%} of the time without what they show"
        told = f"{shown}\n{told}"
    model.model.recomputes = bool(options.recompute)
    if options.is_adapter:
        attach(model, options, torch.bfloat16 if is_rounded else torch.float32)
        folder = AdapterFolder(options, weights_sha256(found.weights))
    return _train("finetune", options, clips, held_out, model, parts, told, folder)


def _train(
    command: str,
    options: RunOptions,
    clips: Data,
    held_out: Data | None,
    model: Transformer,
    write_parts: Callable[[Path], object],
    plan: str = "",
    adapter: AdapterFolder | None = None,
) -> dict[str, Any]:
    """Train from the start, or from the latest checkpoint, to the end; report the losses.

    The folder becomes a world, with the parts of another one, or that of the `adapter`, and a
    record of the run in COMMAND.json. The plan is printed at the start.
    """
    purpose, folder, tokens = options.purpose(), options.out, options.token_folder
    base = {} if adapter is None else {"base": adapter.base_sha256}
    run = TrainingRun(options, clips, model, {command: purpose, **base}, adapter)
    if adapter is not None and held_out is not None:
        adapter.before = run.validate(held_out, adapter.of_base)["validation_loss_by_strategy"]
    is_main = run.accelerator.is_main_process
    run.resume()  # creates files, so only after the lags have been checked
    if is_main:
        # later the user may have changed them, such as by `tune --make-default`
        if adapter is None and not run.step:
            write_parts(folder)
        write_json(folder / f"{command}.json", {**purpose, "options": asdict(options)})
    console = make_console(is_main)
    if introduction := _state_of(run, command) if run.step else plan:
        console.print(introduction)
    look = None
    if isinstance(held_out, TokenClips) and command == "train":
        look = _look(run, held_out, console)
    run.train(look)
    prices = {} if held_out is None else run.validate(held_out)
    if is_main:
        _warn_of_clips_learnt_by_heart(run.log_file, console)
        if adapter is not None:
            adapter.describe(prices.get("validation_loss_by_strategy"))
    if adapter is not None:
        world = f"--model {quote(adapter.options.init)} --adapter {quote(str(folder))}"
        plays = "" if options.is_of_images else f"diagd play {world}, or "
        console.print(f"next: {plays}diagd generate {world}")
    elif options.is_of_images:
        console.print(f"next: diagd generate --model {quote(str(folder))}")
    elif (folder / TOKENIZER_FOLDER).is_dir():
        world = quote(str(folder))
        console.print(
            f"next: diagd play --model {world}, or diagd generate --model {world}; "
            f"diagd tune --model {world} --tokens {quote(str(tokens))} finds its fastest strategy"
        )
    else:
        console.print(
            f"{folder} has no tokenizer, as {tokens} has none: "
            "use the folder that diagd tokenize writes"
        )
    return {"steps": run.step} | prices


def _state_of(run: TrainingRun, command: str) -> str:
    """Describe a run that was started before: what is left of it, or how to extend it."""
    if run.share_done >= 1:
        return (
            f"{run.options.out} is finished, after {run.step} steps in {duration(run.seconds)}; to "
            f"train longer, run the same diagd {command} with --more-minutes 10 instead of "
            "--minutes, --hours and --steps"
        )
    budget = run.options.seconds
    left = f", {duration(budget - run.seconds)} left" if budget else ""
    return f"resuming after step {run.step}{left}"


def _look(run: TrainingRun, held_out: TokenClips, console: Console) -> Look:
    """Measure the held-out loss, and draw a strip if there is a tokenizer and one process."""
    strip, folder, out = None, run.options.token_folder / TOKENIZER_FOLDER, run.options.out
    if folder.is_dir() and run.accelerator.num_processes == 1:
        tokenizer = VQTokenizer.from_pretrained(folder)
        strip = DreamStrip(out, held_out, tokenizer, run.options.frames)
    pictures = f"{out}/loss.png" + ("" if strip is None else f" and {out}/{PICTURE}")
    console.print(f"progress: {pictures}")

    def look() -> dict[str, Any]:
        if strip is not None:
            strip.add(run.accelerator.unwrap_model(run.model), run.step)
        return run.validate(held_out)

    return look


def _warn_of_clips_learnt_by_heart(log: Path, console: Console) -> None:
    key = "validation_loss"
    looks = [(line[key], line["step"]) for line in read_json_lines(log) if key in line]
    best, step = min(looks, default=(math.inf, 0))
    if looks and looks[-1][0] > best + RISE:
        console.print(
            f"the held-out loss was {best:.3f} at step {step} and is {looks[-1][0]:.3f} now: "
            "record more clips or train for less time"
        )


@dataclass(frozen=True)
class RunPlan:
    """Model and amount of data of a run of a given time."""

    model: str  # preset
    weights: int
    sized: bool  # the model was sized, not given
    steps: int  # limit of the run, even if there is time left
    tokens: float  # approximate number of tokens read
    data_tokens: int  # in all clips
    spent: float = 0.0  # seconds spent on planning; stored, as a resumed run has less left

    @property
    def passes(self) -> float:
        return self.tokens / self.data_tokens

    @property
    def worth(self) -> float:
        """Number of new tokens of the same value."""
        again = max(self.passes - 1, 0.0)
        worth = 1 + WORTH_OF_PASSES * (1 - math.exp(-again / WORTH_OF_PASSES))
        return self.data_tokens * min(self.passes, worth)

    def describe(self, seconds: float) -> str:
        """Describe in a few lines a run with `seconds` left."""
        ends = datetime.now() + timedelta(seconds=seconds)
        model = f"{self.model}, {_count(self.weights)} weights"
        if self.sized:
            model += f": the largest with {TOKENS_A_WEIGHT:g} tokens per weight, or the smallest"
        lines = [
            model,
            f"ends by {ends:%H:%M}: about {_count(self.tokens)} tokens, "
            f"{self.passes:.1f} passes over the {_count(self.data_tokens)} of the clips "
            "(the bundled `maze`: 8.3M weights, 29M tokens, 1.3 passes)",
        ]
        if self.passes >= MAX_PASSES:
            lines.append(f"it ends after {MAX_PASSES} passes: more have almost no effect")
        if self.passes > USEFUL_PASSES:
            lines.append("more clips would help more than more time")
        return "\n".join(lines)


def plan_run(options: TrainOptions, clips: TokenClips) -> RunPlan:
    """Choose a model for the time unless one is given; a killed run's plan is kept."""
    model = options.model
    if (plan := read_plan(options)) and model in (None, plan.model):
        return plan
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if model is None and processes > 1:
        raise ValueError("model must be given for several processes: it is sized by a single one")
    assert options.seconds is not None
    began, started, costs = monotonic(), time.monotonic(), list[tuple[int, float]]()
    with waiting("measuring how fast this machine trains"):
        for name in PROBED if model is None else [model]:
            left = PROBE_SHARE * options.seconds - (time.monotonic() - started)
            if not costs or left > 0:
                costs.append(_probe(options, clips, name, left))
    if len(costs) == 1:  # such a long step is all arithmetic, proportional to the weights
        costs.insert(0, (0, 0.0))
    # several processes need one budget, but measured for different times
    spent = 0.0 if "WORLD_SIZE" in os.environ else monotonic() - began
    seconds_left = max(options.seconds - spent, 1.0)
    data_tokens = clips.tokens.shape[:2].numel() * clips.slots_per_frame
    tokens_per_step = processes * options.batch_of(clips) * options.length_of(clips)
    steps = math.ceil(MAX_PASSES * data_tokens / tokens_per_step)
    max_tokens = min(options.steps or steps, steps) * tokens_per_step
    plans: list[RunPlan] = []
    for name in WORLD_SIZES if model is None else [model]:
        weights = num_parameters(setup.fit_config(name, clips, options.frames_held))
        tokens = min(seconds_left * processes / _seconds_per_token(costs, weights), max_tokens)
        plans.append(RunPlan(name, weights, model is None, steps, tokens, data_tokens, spent))
    affordable = [plan for plan in plans if plan.worth >= TOKENS_A_WEIGHT * plan.weights]
    plan = [*plans[:1], *affordable][-1]
    if os.environ.get("RANK", "0") == "0":  # other processes measured other values
        write_json(options.out / PLAN_FILE, asdict(plan))
    return plan


def read_plan(options: TrainOptions) -> RunPlan | None:
    """Return the plan that a run was started with, if any."""
    if not (path := options.out / PLAN_FILE).is_file():
        return None
    with naming(f"{path}: from another version, delete it", TypeError):
        return RunPlan(**read_json_object(path))


def _probe(options: RunOptions, clips: TokenClips, model: str, limit: float) -> tuple[int, float]:
    """Train some steps, starting none after `limit` seconds; return weights, and s per token."""
    began = time.monotonic()
    gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # all processes measure at once
    device = torch.device(gpu if torch.cuda.is_available() else "cpu")
    config = setup.fit_config(model, clips, options.frames_held, options.sliding_frames)
    probe = Transformer.random(config, 0, device)
    loss_of = MixtureLoss(replace(options, compile=False), config, device)
    optimizers = setup.make_optimizers(probe, options)
    rounds = setup.choose_precision(options.precision) == "bf16"
    times: list[float] = []
    for step in range(1 + PROBE_STEPS):  # the first step is a warm-up
        started = time.monotonic()
        tokens = draw_batch(clips, options.frames, options.batch_of(clips), step).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=rounds):
            loss = loss_of(probe, tokens, step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss.item()
        times.append((time.monotonic() - started) / tokens.numel())
        if time.monotonic() - began > limit:
            break
    return num_parameters(config), statistics.median(times[1:] or times)


def _seconds_per_token(costs: Sequence[tuple[int, float]], weights: int) -> float:
    """Extrapolate linearly: a fixed part, and one proportional to the weights."""
    (few, fast), (many, slow) = costs[0], costs[-1]
    slope = max(slow - fast, 0.0) / (many - few) if many > few else 0.0
    return max(fast + slope * (weights - few), 0.5 * fast)


def _count(number: float) -> str:
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.0f}k"


class DreamStrip:
    """The same few held-out frames, continued after every stage of a run.

    The folder gets `dreams.png`, and its strips in `dreams/`. A quarter of the frames in a strip,
    or of those that the model's context holds, is given.
    """

    def __init__(
        self, folder: Path, held_out: TokenClips, tokenizer: VideoTokenizer, frames: int
    ) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.tokens, self.actions = windows(held_out, 1, frames)
        self.num_codes = held_out.codebook_size

    def add(self, model: Transformer, step: int) -> None:
        """Generate, and draw the strips of all stages up to this step."""
        strips = self.folder / "dreams"
        rows, newest = {"truth": strips / "truth.png"}, strips / f"step_{step:08d}.png"
        for path, tokens in ((rows["truth"], self.tokens[0]), (newest, self._dream(model))):
            write_image(path, contact_sheet(self.tokenizer.decode(tokens), columns=len(tokens)))
        for path in sorted(strips.glob("step_*.png")):
            if path <= newest:
                rows[f"step {int(path.stem.removeprefix('step_'))}"] = path
        plot_dreams(self.folder / PICTURE, rows, self._num_given(model))

    def _dream(self, model: Transformer) -> Tensor:
        """Return given and generated frames, (frames, height, width) int64."""
        num_given, (_, frames, height, width) = self._num_given(model), self.tokens.shape
        given = self.tokens[0, :num_given]
        frame = FrameFormat(height, width, self.actions.shape[2])
        prompt = prompt_tokens((), given, self.actions[:, :num_given], frame)
        out = generate_tokens(
            model,
            prompt.to(model.device),
            STRATEGY,
            self.actions[:, num_given:].to(model.device),
            context_frames=num_given,
            sampling=GenerationDefaults().sampling(None, (0, self.num_codes)),
            grid=TokenGrid(frames - num_given, height, width),
        )
        return torch.cat([given, out.tokens[0].cpu()])

    def _num_given(self, model: Transformer) -> int:
        return max(1, min(self.tokens.shape[1], model.config.frames_held) // 4)


def plot_dreams(path: Path, rows: Mapping[str, Path], num_given: int) -> None:
    """Draw strips of frames, each a picture file with a label, below each other."""
    pictures = {label: imread(picture) for label, picture in rows.items()}
    height, width = next(iter(pictures.values())).shape[:2]
    figure = Figure(figsize=(9, 0.4 + len(rows) * 8 * height / width), layout="constrained")
    axes = figure.subplots(len(rows), squeeze=False)
    for axis, (label, picture) in zip(axes[:, 0], pictures.items(), strict=True):
        axis.imshow(picture, interpolation="nearest")
        axis.set(xticks=[], yticks=[])
        axis.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    axes[0, 0].set_title(f"frames given: {num_given}; the others are generated", fontsize=9)
    save_figure(figure, path)
