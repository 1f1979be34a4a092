"""What does training on wrong tokens do? Drift, exact decoding and the price of k=1, in one table.

    for one in "control" "uniform --corrupt 0.2" "samples --corrupt 0.2 --corrupt-with samples"; do
      set -- $one
      diagd finetune --init maze --tokens work/maze/tokens/train --out "work/errors/$1" "${@:2}" \\
        --strategy "raster k=1" --frames 8 --batch-size 1 \\
        --steps 1000 --optimizer adamw --learning-rate 1e-4 --warmup-steps 20
    done
    python runs/draft_errors.py --clips work/maze/heldout --models untouched=maze \\
      control=work/errors/control uniform=work/errors/uniform samples=work/errors/samples

Needs `pip install -e '.[metrics]'`. Each call goes on with the next clip, killed or not, until the
time is up, and ends with a table of the clips that all models have been through. docs/results keeps
the table, draft_errors.md.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

from diagd.data.actions import split_actions
from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.sampling import Draw, sample
from diagd.decoding.teacher_forcing import strategy_nll
from diagd.decoding.visibility import Seen
from diagd.evaluation.evaluate import choose_clips
from diagd.evaluation.results import Record, appending, pack, unpack
from diagd.families.checkpoints import model_path
from diagd.families.clip_files import Clip, find_clips
from diagd.files import read_json_lines, write_text
from diagd.metrics.frechet import frechet_distance
from diagd.metrics.quality import frame_features, psnr
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.prompts import seed_of
from diagd.system import fingerprint, provenance, settings_of
from diagd.training.options import parse_mixture

SPANS = (8, 16, 32, 48, 64)  # frames of a dream that are one column of the table, up to these


@dataclass(frozen=True)
class Options:
    """Measure models on the same clips with the same seeds."""

    clips: Path  # folder of videos with actions, as diagd record writes them
    models: tuple[str, ...]  # NAME=FOLDER; the others are compared with the first
    out: Path = Path("work/draft_errors")  # folder for draft_errors.jsonl and draft_errors.md
    num_clips: int = 32
    frames: int = 64  # of a clip, the context included
    context_frames: int = 4
    dreams: tuple[str, ...] = ("k=1",)  # strategies to dream by
    lanes: tuple[int, ...] = (32, 96)  # of exact decoding
    exact_frames: int = 4  # frames to decode exactly
    priced: tuple[str, ...] = ("raster", "k=1")  # strategies whose likelihood is measured
    priced_frames: int = 4  # frames of a clip to measure it on, of which the first is given
    changes: int = 8  # tokens of a frame that are changed, one at a time
    minutes: float = 50.0  # of this call
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.models or not all(name and path for name, _, path in self.parts):
            raise ValueError(f"models must look like NAME=FOLDER, got {' '.join(self.models)!r}")
        if not self.context_frames < self.frames:
            raise ValueError(f"frames must be above context_frames, got {self.frames}")

    @property
    def parts(self) -> list[tuple[str, str, str]]:
        """The names and folders of the models."""
        return [one.partition("=") for one in self.models]


def main(options: Options) -> None:
    """Measure clip by clip, model by model, until the time is up; write and print the table."""
    torch.set_num_threads(options.threads)
    end = time.monotonic() + 60 * options.minutes
    names = choose_clips(options.clips, options.num_clips, options.seed)
    path = options.out / "draft_errors.jsonl"
    worlds = {
        label: VideoGenerator.from_pretrained(folder, dtype="float32")
        for label, _, folder in options.parts
    }
    weights = {label: fingerprint(model_path(folder)) for label, _, folder in options.parts}
    with appending(path) as append:
        rows = read_rows(path, append, options, weights)
        done = {(row["model"], row["clip"]) for row in rows}
        for name in names:
            for label, world in worlds.items():
                if (label, name) not in done and time.monotonic() < end:
                    row = {"model": label, "weights": weights[label], "clip": name}
                    row |= measure(world, name, options)
                    append(row)
                    rows.append(row)
        text = table(rows, options)
        write_text(options.out / "draft_errors.md", text)
    print(text)


def read_rows(
    path: Path, append: Callable[[Record], None], options: Options, weights: dict[str, str]
) -> list[dict[str, Any]]:
    """Return what was measured of models with these weights; refuse rows of other settings.

    The first line says what all rows depend on. Older rows do not say of which weights they are.
    """
    settings = settings_of(options)
    for name in ("models", "num_clips", "minutes", "threads"):
        del settings[name]
    if not read_json_lines(path):
        append({"options": settings, **provenance(torch.device("cpu"))})
    first, *rows = read_json_lines(path)
    if first["options"] != settings:
        raise ValueError(f"{path} was measured with other options: remove it, or choose --out")
    return [
        row
        for row in rows
        if row["model"] in weights
        and row.get("weights", weights[row["model"]]) == weights[row["model"]]
    ]


@torch.inference_mode()
def measure(world: VideoGenerator, name: str, options: Options) -> dict[str, Any]:
    """Return all numbers of a clip."""
    given = options.context_frames
    file = find_clips(options.clips, world.vocabulary)[name]
    clip = file.read(options.frames, size_px=world.frame_size_px)
    ids = world.action_ids(clip.actions, options.frames, "frame")
    dreams = {
        strategy: world.tokenizer.decode(
            torch.cat(list(start(world, clip, name, options).decode(strategy, ids[:, given:])))
        ).cpu()
        for strategy in options.dreams
    }
    truth, before = clip.frames[given:], clip.frames[given - 1 : given]
    steps = {}
    for lanes in options.lanes:
        engine = start(world, clip, name, options)
        for _ in engine.decode(
            f"exact,lanes={lanes}", ids[:, given : given + options.exact_frames]
        ):
            pass
        steps[str(lanes)] = engine.stream.num_steps / options.exact_frames
    frames = options.priced_frames
    tokens = world.tokenizer.encode(clip.frames[:frames])[None]
    return {
        "psnr": {strategy: psnr(dream, truth).tolist() for strategy, dream in dreams.items()},
        "features": {
            label: pack(features(world, torch.cat([before, video])).numpy())
            for label, video in {**dreams, "truth": truth}.items()
        },
        "exact_steps": steps,
        "turned": sum(turned(start(world, clip, name, options), options)) / options.changes,
        "nll": {
            str(one): strategy_nll(world.model, tokens, ids[:, :frames], one).mean().item()
            for one in parse_mixture(options.priced)
        },
    }


def start(world: VideoGenerator, clip: Clip, name: str, options: Options) -> DecodingEngine:
    """Return an engine that has read the context of a clip."""
    given = options.context_frames
    return world.start(
        clip.frames[:given],
        context_actions=split_actions(clip.actions, given)[0],
        seed=seed_of(name, options.seed),
    )


def features(world: VideoGenerator, video: Tensor) -> Tensor:
    """Describe the frames after the first for the Frechet distance on the model's tokenizer."""
    tokenizer: Any = world.tokenizer
    return frame_features(torch.cat([tokenizer.latents(part) for part in video.split(8)]))


def turned(engine: DecodingEngine, options: Options) -> Iterator[int]:
    """Change tokens of the newest frame of a context, and count the draws that change with each.

    A token becomes what the model would else have drawn in its place. The later draws of its frame
    are made with the noise of their places, from all true tokens before them and from that one.
    """
    stream = engine.stream
    frame, width = stream.frame.grid.tokens_per_frame, stream.frame.grid.width
    length, model = stream.num_used, stream.model
    first = length - frame  # where the frame begins
    true = stream.tokens[:, :length].clone()
    places, slots = torch.arange(frame), torch.arange(length)
    cache = model.make_cache(1, length + 1)
    seeds = stream.batch.buffers.seeds[stream.first : stream.end]

    def logits_from(position: int, tokens: Tensor) -> Tensor:
        part = slots[position:]
        return model.forward(tokens[:, part], part, part, Seen(part, part, slots, slots), cache)

    def draw(logits: Tensor, where: Tensor, seeds: Tensor) -> Tensor:
        place = torch.zeros_like(where), where // width, where % width
        return sample(logits, Draw(stream.sampling, stream.ranges, seeds, *place))

    logits = logits_from(0, true)[:, first - 1 : -1]  # (1, frame, V), of the frame's tokens
    draws = draw(logits, places, seeds)
    generator = torch.Generator().manual_seed(options.seed)
    for place in torch.randperm(frame - 1, generator=generator)[: options.changes].tolist():
        others = logits[:, place : place + 1].clone()
        others[0, 0, true[0, first + place]] = -math.inf
        changed = true.clone()
        here = places[place : place + 1]
        changed[:, first + place] = draw(others, here, seeds + 1)[:, 0]
        after = draw(logits_from(first + place, changed)[:, :-1], places[place + 1 :], seeds)
        yield int((after != draws[:, place + 1 :]).sum())
        logits_from(first + place, true)  # the cache is as it was


def table(rows: list[dict[str, Any]], options: Options) -> str:
    """Return the means over clips as Markdown, with the standard error of what is paired."""
    labels = [label for label, _, _ in options.parts]
    by_label = {one: {row["clip"]: row for row in rows if row["model"] == one} for one in labels}
    clips = sorted(set.intersection(*(set(found) for found in by_label.values())))
    if not clips:
        return "No clip has been through all models yet.\n"
    found = {one: [rows_of[clip] for clip in clips] for one, rows_of in by_label.items()}
    lines = [f"{len(clips)} clips; ± is the standard error of the difference to {labels[0]}.", ""]
    lines += [f"| | {' | '.join(labels)} |", "|---|" + "---|" * len(labels)]
    length, begin = options.frames - options.context_frames, 0
    for end in (*(span for span in SPANS if span < length), length):
        for by in options.dreams:
            what = f"frames {begin + 1} to {end}, {by}"
            means = [[np.mean(row["psnr"][by][begin:end]) for row in found[one]] for one in labels]
            lines.append(f"| PSNR, {what} | {paired(means, 2)} |")
            cells = [f"{distance(found[one], by, begin, end):.3f}" for one in labels]
            lines.append(f"| TFD, {what} | {' | '.join(cells)} |")
        begin = end
    for lanes in options.lanes:
        steps = [[row["exact_steps"][str(lanes)] for row in found[one]] for one in labels]
        lines.append(f"| steps a frame, exact,lanes={lanes} | {paired(steps, 1)} |")
    draws = [[row["turned"] for row in found[one]] for one in labels]
    lines.append(f"| draws turned by a changed token | {paired(draws, 2)} |")
    for by in options.priced:
        costs = [[row["nll"][by] for row in found[one]] for one in labels]
        lines.append(f"| nats a token, {by} | {paired(costs, 4)} |")
    return "\n".join(lines) + "\n"


def paired(by_model: list[list[float]], digits: int) -> str:
    """Spell each model's mean over clips, and the standard error of its difference to the first."""
    values, cells = np.array(by_model), []
    for numbers in values:
        text = f"{numbers.mean():.{digits}f}"
        if len(cells) and len(numbers) > 1:
            error = (numbers - values[0]).std(ddof=1) / math.sqrt(len(numbers))
            text += f" ± {error:.{digits}f}"
        cells.append(text)
    return " | ".join(cells)


def distance(rows: list[dict[str, Any]], strategy: str, begin: int, end: int) -> float:
    """Return the Frechet distance of frames [begin, end) of all dreams to the true ones."""
    ours, theirs = (
        np.concatenate([unpack(row["features"][label])[begin:end] for row in rows])
        for label in (strategy, "truth")
    )
    return frechet_distance(ours, theirs)


if __name__ == "__main__":
    main(tyro.cli(Options))
