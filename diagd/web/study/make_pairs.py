"""Generate the pairs of a study: every system continues the same frames, with the same seed.

A system is written `raster` or `k=2`, or with a checkpoint of its own, `k=1@work/finetuned`, which
is called `k=1-finetuned`. Systems share prompts, actions and noise; only decoding differs.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diagd.console import track
from diagd.data.actions import read_actions, split_actions, write_actions
from diagd.data.video import read_video, resize, write_video
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.strategy import Conditions, Strategy
from diagd.families.checkpoints import find_model, model_path
from diagd.files import write_json
from diagd.pipeline.generator import VideoGenerator
from diagd.web.study.options import MakeOptions, parse_systems

HELD_FRAMES = (2, 6)  # how long an invented walk holds an action


@dataclass(frozen=True)
class PairStart:
    """What all systems are given: (m, H_px, W_px, 3) uint8 frames; an action for every frame."""

    frames: Tensor
    fps: float
    actions: list[str] | None


def make_pairs(folder: Path, options: MakeOptions) -> list[str]:
    """Generate clips into a folder of pairs; clips that are there already are kept.

    Returns:
        The names of the systems.

    Raises:
        FileNotFoundError: no such prompt clips or model.
        ValueError: options that do not fit, or a folder made with others.
    """
    systems = parse_systems(options.systems, options.model)
    names = [name for name, _, _ in systems]
    for _, model, strategy in systems:
        found = find_model(model)
        grid = TokenGrid(1, found.config.grid_height, found.config.grid_width)
        strategy.check(Conditions(found.family.defaults(found).temperature, grid))
    _remember(folder, options)
    for name, model, strategy in systems:
        _make_system(folder / name, model, strategy, options)
    return names


def _make_system(folder: Path, model: str, strategy: Strategy, options: MakeOptions) -> None:
    world = VideoGenerator.from_pretrained(model)
    starts = _prompt_paths(options)
    folder.mkdir(exist_ok=True)
    for number in track(range(options.num_pairs), folder.name):
        target = folder / f"pair_{number:03d}.mp4"
        if not target.exists():
            start = _pair_start(world, starts[number % len(starts)], number, options)
            _make_clip(world, start, strategy, number, options, target)


def _remember(folder: Path, options: MakeOptions) -> None:
    """Write down with which options clips are made; others, but for more, would mix two studies."""
    given = {**vars(options), "clips": str(options.clips) if options.clips else None}
    del given["num_pairs"]
    made = json.loads(json.dumps({**given, "torch": torch.__version__}))
    path = folder / "made.json"
    if path.is_file() and json.loads(path.read_text(encoding="utf-8")) != made:
        raise ValueError(f"{folder} holds pairs made with other options ({path}): choose another")
    write_json(path, made, indent=1)


def _prompt_paths(options: MakeOptions) -> list[Path]:
    if options.clips is None:
        return [model_path(options.model) / "prompt.mp4"]
    if not options.clips.is_dir():
        raise FileNotFoundError(f"folder of prompt clips not found: {options.clips}")
    paths = sorted(options.clips.glob("*.mp4"))
    if not paths:
        raise ValueError(f"{options.clips} holds no mp4 clips")
    return paths


def _pair_start(world: VideoGenerator, path: Path, number: int, options: MakeOptions) -> PairStart:
    """Take context frames, and actions for them and for the frames to generate."""
    draw = random.Random(f"{options.seed}/{number}")
    video = read_video(path)
    frames = resize(video.frames, *world.frame_size_px)
    codec, seen = world.vocabulary, options.context_frames
    taken = None
    if codec is not None:
        taken = read_actions(path.with_suffix(".jsonl"), codec, len(frames))
    if options.clips is None:
        if len(frames) < seen:
            raise ValueError(f"the prompt has {len(frames)} frames, fewer than {seen}")
        frames = frames[-seen:]
        if codec is not None and taken is not None:
            taken = taken[-seen:] + _walk(codec.names, options.frames, draw)
    else:
        length = seen + options.frames
        if len(frames) < length:
            raise ValueError(f"{path} has {len(frames)} frames, fewer than {length}")
        first = draw.randrange(len(frames) - length + 1)
        frames = frames[first : first + seen]
        taken = taken and taken[first : first + length]
    return PairStart(frames, float(video.fps), taken)


def _walk(names: tuple[str, ...], length: int, draw: random.Random) -> list[str]:
    """Invent actions, each held for a few frames; the first name, doing nothing, is left out."""
    walk: list[str] = []
    while len(walk) < length:
        walk += [draw.choice(names[1:] or names)] * draw.randint(*HELD_FRAMES)
    return walk[:length]


def _make_clip(
    world: VideoGenerator,
    start: PairStart,
    strategy: Strategy,
    number: int,
    options: MakeOptions,
    target: Path,
) -> None:
    between, coming = split_actions(start.actions, len(start.frames))
    video = world.generate(
        start.frames,
        coming,
        options.frames,
        context_actions=between,
        strategy=strategy,
        seed=options.seed + number,
    )
    if start.actions is not None:  # row 0 led to the first frame shown: nobody saw what from
        write_actions(target.with_suffix(".jsonl"), start.actions)
    write_video(target, torch.cat([start.frames, video.frames]), start.fps)
