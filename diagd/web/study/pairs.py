"""The clips of a study: a folder with one sub-folder a system, and the same clip names in each.

    pairs/raster/pair_000.mp4   pairs/raster/pair_000.jsonl   (the clip's actions, if it has any)
    pairs/k=1/pair_000.mp4      pairs/k=1/pair_000.jsonl

Everything is decoded once before anybody is asked, so a damaged clip is found at the door.
"""

import hashlib
import io
import json
import random
from dataclasses import dataclass
from pathlib import Path

import av
import torch
from av.bitstream import BitStreamFilterContext
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

PLAYABLE_CODECS = ("h264", "vp9", "av1")  # what browsers play in an mp4
QUESTIONS = {
    "quality": (
        "Which video looks better?",
        "Sharper, with fewer smeared or broken parts.",
    ),
    "consistency": (
        "In which video is the motion more consistent?",
        "The camera moves smoothly, and things keep their shape and place.",
    ),
    "controllability": (
        "Which video follows the actions better?",
        "The actions are shown below.",
    ),
}


@dataclass(frozen=True)
class Clip:
    """What the two videos of a pair have in common.

    Attributes:
        name: the file name without its suffix.
        num_frames: frames of the video.
        size_px: height and width.
        fps: frames a second.
        actions: one a frame, the action that led to it; None where there is no jsonl file.
    """

    name: str
    num_frames: int
    size_px: tuple[int, int]
    fps: float
    actions: tuple[str, ...] | None


@dataclass(frozen=True)
class StudyPairs:
    """What is compared, and what is asked.

    Attributes:
        folder: holds a folder for every system.
        comparisons: names of two systems each; "win" means that the first one is better.
        clips: every system has all of them.
        questions: keys of `QUESTIONS`.
        digest: SHA-256 of all that raters get to see; answers belong to these very files.
    """

    folder: Path
    comparisons: tuple[tuple[str, str], ...]
    clips: tuple[Clip, ...]
    questions: tuple[str, ...]
    digest: str

    def path(self, system: str, clip: str) -> Path:
        """Return where a system's version of a clip lies."""
        return self.folder / system / f"{clip}.mp4"


def find_pairs(
    folder: Path, compare: tuple[str, ...] = (), questions: tuple[str, ...] = ()
) -> StudyPairs:
    """Read and check all clips of the systems compared.

    Args:
        compare: `A:B` each; may be left out if there are two systems (then diagonal before raster).
        questions: keys of `QUESTIONS`; default: all that apply, controllability if all clips have
            actions.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: nothing to compare, clips that do not belong together or cannot be shown.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"folder of pairs not found: {folder}")
    systems = sorted(path.name for path in folder.iterdir() if any(path.glob("*.mp4")))
    if len(systems) < 2:
        raise ValueError(
            f"{folder} must hold two or more folders of mp4 clips, one for each system, "
            f"got {len(systems)}{': ' + systems[0] if systems else ''}"
        )
    comparisons = _comparisons(compare, systems)
    compared = list(dict.fromkeys(system for pair in comparisons for system in pair))
    names = _clip_names(folder, compared)
    digest = hashlib.sha256()
    clips = []
    for name in track(names, "reading clips"):
        versions = [_read_clip(folder / system / f"{name}.mp4", digest) for system in compared]
        for system, version in zip(compared, versions, strict=True):
            if version != versions[0]:
                raise ValueError(
                    f"{name}.mp4 must be alike in frames, size, rate and actions: {compared[0]} "
                    f"has {_described(versions[0])}, {system} has {_described(version)}"
                )
        clips.append(versions[0])
    without = [clip.name for clip in clips if clip.actions is None]
    if "controllability" in questions and without:
        raise ValueError(f"controllability needs the actions of every clip: no {without[0]}.jsonl")
    asked = questions or tuple(q for q in QUESTIONS if q != "controllability" or not without)
    return StudyPairs(folder, comparisons, tuple(clips), asked, digest.hexdigest())


def playable(path: Path) -> bytes:
    """Return a clip as an mp4 of only its pictures: no title, no date, no words of the encoder."""
    whole = io.BytesIO()
    with av.open(str(path)) as source, av.open(whole, "w", format="mp4") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        copy.metadata.clear()
        silent = None
        if stream.codec_context.codec.canonical_name == "h264":  # NAL units of type 6 hold words
            silent = BitStreamFilterContext("filter_units=remove_types=6", stream, copy)
        for packet in source.demux(stream):
            if packet.dts is not None:
                for kept in silent.filter(packet) if silent else [packet]:
                    kept.stream = copy
                    target.mux(kept)
    return whole.getvalue()


def _comparisons(compare: tuple[str, ...], systems: list[str]) -> tuple[tuple[str, str], ...]:
    if not compare:
        if len(systems) > 2:
            raise ValueError(f"choose with --compare A:B among {', '.join(systems)}")
        first, second = sorted(systems, key=lambda name: (name == "raster", name))
        return ((first, second),)
    comparisons = []
    for pair in compare:
        first, _, second = pair.partition(":")
        unknown = [name for name in (first, second) if name not in systems]
        if unknown or first == second:
            raise ValueError(
                f"compare must look like A:B, two different ones of {', '.join(systems)}, "
                f"got {pair!r}"
            )
        if {first, second} in [set(earlier) for earlier in comparisons]:
            raise ValueError(f"{first} and {second} are compared twice")
        comparisons.append((first, second))
    return tuple(comparisons)


def _clip_names(folder: Path, systems: list[str]) -> list[str]:
    first, *others = systems
    names = {path.stem for path in (folder / first).glob("*.mp4")}
    for system in others:
        theirs = {path.stem for path in (folder / system).glob("*.mp4")}
        for has, lacks, missing in (
            (first, system, names - theirs),
            (system, first, theirs - names),
        ):
            if missing:
                raise ValueError(
                    f"clips must have the same names: {has} has {min(missing)}.mp4, {lacks} has not"
                )
    return sorted(names)


def _read_clip(path: Path, digest: "hashlib._Hash") -> Clip:
    video = read_video(path)
    with av.open(str(path)) as container:
        codec = container.streams.video[0].codec_context.codec.canonical_name
    if codec not in PLAYABLE_CODECS:
        raise ValueError(
            f"{path} cannot be shown in browsers: "
            f"expected {', '.join(PLAYABLE_CODECS)}, got {codec}"
        )
    digest.update(path.read_bytes())
    num_frames, height_px, width_px = video.frames.shape[:3]
    actions = _read_actions(path.with_suffix(".jsonl"), num_frames)
    digest.update(repr(actions).encode())
    return Clip(path.stem, num_frames, (height_px, width_px), float(video.fps), actions)


def _read_actions(path: Path, num_frames: int) -> tuple[str, ...] | None:
    """Read the words of `{"action": NAME}` lines; which words there are is the model's affair."""
    if not path.is_file():
        return None
    try:
        actions = tuple(
            json.loads(line)["action"] for line in path.read_text(encoding="utf-8").splitlines()
        )
    except (ValueError, KeyError, TypeError):
        actions = ()
    if len(actions) != num_frames or not all(isinstance(action, str) for action in actions):
        raise ValueError(f'{path}: expected {num_frames} lines {{"action": NAME}}, one a frame')
    return actions


def _described(clip: Clip) -> str:
    height_px, width_px = clip.size_px
    actions = "no actions" if clip.actions is None else f"actions {' '.join(clip.actions)[:40]}"
    return f"{clip.num_frames} frames of {height_px}x{width_px} at {clip.fps:g} a second, {actions}"


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
