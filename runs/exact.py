"""Where the steps of exact decoding and its rivals go, on recorded clips with evaluate's seeds.

Writes exact.json (steps, tokens fed, ms, frames/s, tokens equal to raster's, runs of tokens
accepted) and exact_runs.png (runs by row and by entropy). It is written after every clip; a killed
run goes on with the next. Quality is `diagd evaluate`'s. Needs matplotlib (`pip install -e
'.[metrics]'`) and a machine that does nothing else.

    python runs/exact.py --clips work/maze/heldout --out work/exact
"""

import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import tyro
from rich.progress import track
from torch import Tensor

from diagd.backends.devices import DTypeName, dtype_of
from diagd.data.actions import split_actions
from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.strategies.exact import VerifiedStep, step_costs
from diagd.decoding.strategies.table import Exact, Strategy
from diagd.decoding.visibility import Seen
from diagd.evaluation.evaluate import choose_clips
from diagd.families.checkpoints import model_path
from diagd.families.clip_files import find_clips
from diagd.families.defaults import GenerationDefaults
from diagd.files import save_figure, write_json
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.prompts import seed_of
from diagd.system import cpu_name, fingerprint
from runs.rivals import RIVALS, Watched, check_draws, parse

SHOWN = "exact"  # the strategy in the picture


class Measured(NamedTuple):
    """A clip continued: by which engine, its (T, height, width) tokens, seconds, verified steps."""

    engine: DecodingEngine
    tokens: Tensor
    seconds: float
    verified: list[VerifiedStep]


@dataclass(frozen=True)
class Options:
    """Run every strategy on the same clips with the same seeds."""

    clips: Path  # folder of videos with actions, as diagd record writes them
    out: Path  # folder for exact.json and the picture
    model: str = "maze"
    strategy: tuple[str, ...] = (  # besides raster, named as in diagd evaluate
        "k=1 k=2 k=4 exact exact,lanes=16 exact,lanes=32 exact,lanes=64 exact,lanes=96",
        "jacobi,lanes=32 jacobi,lanes=96 tolerance=1.5 tolerance=3 tolerance=10",
        "sjd,lanes=96 mc-sjd,lanes=96 zipar=2 zipar=4 zipar=8 zipar-adaptive=2 zipar-adaptive=4",
    )
    interactive: tuple[str, ...] = ("exact",)  # get actions frame by frame as well
    num_clips: int = 64
    frames: int = 16
    context_frames: int = 4
    start: int = 0  # frame of the clip where its context begins
    temperature: float = GenerationDefaults.temperature  # 0 is greedy
    dtype: DTypeName = "float32"
    device: str = "cpu"
    seed: int = 0

    def todo(self) -> dict[str, tuple[Strategy, bool]]:
        """Return each strategy by its name in the report, and whether it gets frame by frame."""
        whole = {one.name: (one, False) for one in parsed("raster", *self.strategy)}
        stepped = parsed(*self.interactive)
        return whole | {f"{one.name}, frame by frame": (one, True) for one in stepped}

    def sampling(self) -> SamplingOptions:
        """Return how tokens are drawn."""
        top_p = GenerationDefaults.top_p if self.temperature else None
        return SamplingOptions(self.temperature, top_p=top_p)

    def settings(self) -> dict[str, Any]:
        """Return what the numbers of a clip depend on."""
        left_out = {"clips", "out", "num_clips"}
        given = {key: value for key, value in asdict(self).items() if key not in left_out}
        return json.loads(json.dumps(given | {"torch": torch.__version__}))


def parsed(*texts: str) -> list[Strategy]:
    return list(dict.fromkeys(parse(word) for text in texts for word in text.split()))


def main(options: Options) -> None:
    """Run what is missing, clip by clip, and draw."""
    todo = options.todo()
    greedy, dtype = options.temperature == 0, dtype_of(options.dtype)
    suffix = ("_greedy" if greedy else "") + ("" if dtype == torch.float32 else f"_{options.dtype}")
    path = options.out / f"exact{suffix}.json"
    report = start_report(path, options)
    names = choose_clips(options.clips, options.num_clips, options.seed)
    world = VideoGenerator.from_pretrained(
        options.model, options.device, dtype, int8=options.dtype == "int8"
    )
    for strategy, _ in todo.values():
        world.check(strategy, options.sampling())
        check_draws(strategy, options.temperature)
    for name in track([name for name in names if name not in report["clips"]]):
        add_clip(report, measure(world, options, todo, name, report), name, world)
        write_json(path, report, indent=1)
    if SHOWN in report["runs"]:
        draw_runs(report, path.with_name(f"{path.stem}_runs.png"))
    for name, row in report["strategies"].items():
        print(f"{name:22s}", *(f"{key} {value:.4g}" for key, value in row.items()), sep="  ")


def start_report(path: Path, options: Options) -> dict[str, Any]:
    """Return what was measured so far; refuse numbers of other settings."""
    device = cpu_name() if options.device == "cpu" else torch.cuda.get_device_name()
    new = {
        "settings": options.settings(),
        "weights": fingerprint(model_path(options.model)),
        "threads": torch.get_num_threads(),
        "device": device,
    }
    if not path.is_file():
        parts = ("milliseconds_by_lanes", "strategies", "totals", "runs")
        return {**new, "clips": [], **{part: {} for part in parts}}
    report = json.loads(path.read_text(encoding="utf-8"))
    for key, value in new.items():
        if report.setdefault(key, value) != value:  # older reports do not say of which weights
            raise ValueError(
                f"{path} was measured with another {key}: remove it, or choose another --out"
            )
    return report


def measure(
    world: VideoGenerator,
    options: Options,
    todo: dict[str, tuple[Strategy, bool]],
    name: str,
    report: dict[str, Any],
) -> dict[str, Measured]:
    """Continue a clip by every strategy."""
    given, length = options.context_frames, options.context_frames + options.frames
    file = find_clips(options.clips, world.vocabulary)[name]
    clip = file.read(length, options.start, size_px=world.frame_size_px)
    ids = world.action_ids(clip.actions, length, "frame")
    measured, model = {}, world.model
    for label, (strategy, frame_by_frame) in todo.items():
        world.model = Watched(model) if isinstance(strategy, RIVALS) else model
        engine = world.start(
            clip.frames[:given],
            context_actions=split_actions(clip.actions, given)[0],
            sampling=options.sampling(),
            seed=seed_of(name, options.seed),
        )
        if isinstance(strategy, Exact) and not report["milliseconds_by_lanes"]:
            costs = step_costs(engine.stream)
            report["milliseconds_by_lanes"] = {str(n): 1000 * s for n, s in costs.items()}
        stretch = 1 if frame_by_frame else options.frames
        started = time.perf_counter()
        frames: list[Tensor] = []
        verified: list[VerifiedStep] = []
        for first in range(given, length, stretch):
            actions = None if ids is None else ids[:, first : first + stretch]
            frames += [frame[0].cpu() for frame in engine.decode(strategy, actions, stretch)]
            verified += engine.stream.verified
        seconds = time.perf_counter() - started
        measured[label] = Measured(engine, torch.stack(frames), seconds, verified)
    world.model = model
    return measured


def add_clip(
    report: dict[str, Any], measured: dict[str, Measured], name: str, world: VideoGenerator
) -> None:
    """Add a clip to the report's totals, and put each strategy into numbers."""
    report["clips"].append(name)
    raster = measured["raster"].tokens
    for label, (engine, tokens, seconds, verified) in measured.items():
        same = tokens == raster
        numbers = {
            "steps": engine.stream.num_steps,
            "fed": engine.stream.num_fed,
            "seconds": seconds,
            "frames": len(tokens),
            "equal": same.float().mean().item(),
            "clips_equal": int(same.all()),
        }
        totals = report["totals"].setdefault(label, dict.fromkeys(numbers, 0))
        for key, number in numbers.items():
            totals[key] += number
        if verified:
            runs = report["runs"].setdefault(label, {"runs": {}, "by_row": {}, "by_entropy": {}})
            gained = Counter(one.num_accepted for one in verified)
            for gain, count in gained.items():
                runs["runs"][str(gain)] = runs["runs"].get(str(gain), 0) + count
            add_up(runs["by_row"], [(str(one.row), one.num_accepted) for one in verified])
            nats = entropies(engine, world) if label == SHOWN else torch.empty(0)
            waited = [one for one in verified if one.frame < len(nats)]
            bins = [str(int(nats[one.frame, one.row, one.column] * 2) / 2) for one in waited]
            add_up(runs["by_entropy"], zip(bins, (one.num_accepted for one in waited), strict=True))
    first, count = report["totals"]["raster"], len(report["clips"])
    for label, totals in report["totals"].items():
        report["strategies"][label] = {
            "steps_a_frame": totals["steps"] / totals["frames"],
            "fewer_steps": first["steps"] / totals["steps"],
            "fed_per_token": totals["fed"] / (totals["frames"] * raster[0].numel()),
            "ms_a_step": 1000 * totals["seconds"] / totals["steps"],
            "frames_per_second": totals["frames"] / totals["seconds"],
            "over_raster": first["seconds"] / totals["seconds"],
            "tokens_equal_to_raster": totals["equal"] / count,
            "clips_equal_to_raster": totals["clips_equal"] / count,
        }


def add_up(bins: dict[str, list[int]], gains: Iterable[tuple[str, int]]) -> None:
    """Count steps and the tokens they gained, bin by bin."""
    for name, gain in gains:
        steps, gained = bins.get(name, (0, 0))
        bins[name] = [steps + 1, gained + gain]


@torch.inference_mode()
def entropies(engine: DecodingEngine, world: VideoGenerator) -> Tensor:
    """Return the nats of uncertainty at each generated token: (T, height, width).

    Empty once frames were dropped, for then the model saw another context.
    """
    if engine.stream.num_dropped_frames:
        return torch.empty(0)
    length, tokens = engine.stream.num_used, engine.stream.tokens[:1, : engine.stream.num_used]
    cache = world.model.make_cache(1, length + 1)
    slots = torch.arange(length, device=tokens.device)
    seen = Seen(slots, slots, slots, slots)
    logits = world.model.forward(tokens, slots, slots, seen, cache).float()
    logits = logits[0, :-1, : world.tokenizer.codebook_size]
    logs = (logits / (engine.stream.sampling.temperature or 1.0)).log_softmax(-1)
    nats = -(logs.exp() * logs).sum(-1)[
        -engine.stream.num_generated * engine.stream.frame.one.slots_per_frame :
    ]
    visual = nats.view(engine.stream.num_generated, -1)[:, engine.stream.frame.num_action_tokens :]
    return visual.unflatten(1, (world.height, world.width)).cpu()


def draw_runs(report: dict[str, Any], path: Path) -> None:
    """Draw how many tokens a step gains: overall, by row and by entropy."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    shown = report["runs"][SHOWN]
    by_bin = [
        {float(name): gained / steps for name, (steps, gained) in shown[key].items()}
        for key in ("by_row", "by_entropy")
    ]
    runs = {float(gain): count for gain, count in shown["runs"].items()}
    labels = ("tokens gained in a step", "row waited for", "nats of the token waited for")
    whats = ("steps", "tokens gained", "tokens gained")
    for axis, label, what, bars in zip(axes, labels, whats, (runs, *by_bin), strict=True):
        axis.bar(list(bars), list(bars.values()), width=0.4 if label == labels[-1] else 0.8)
        axis.set(xlabel=label, ylabel=what)
        axis.grid(alpha=0.3)
    save_figure(figure, path)


if __name__ == "__main__":
    main(tyro.cli(Options))
