"""The clips of a study: a folder with one sub-folder a system, and the same clip names in each.

pairs/raster/pair_000.mp4   pairs/raster/pair_000.jsonl   (the clip's actions, if it has any)
pairs/k=1/pair_000.mp4      pairs/k=1/pair_000.jsonl
"""

import hashlib
import io
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import torch
from av.bitstream import BitStreamFilterContext

from diagd.backends.names import Backend
from diagd.console import track
from diagd.data.actions import ActionCodec, idle_action, split_actions, write_actions
from diagd.data.video import read_video, write_video
from diagd.decoding.strategies.table import Strategy
from diagd.families.checkpoints import find_model
from diagd.families.clip_files import ClipFile, find_clips
from diagd.files import parse_object, read_json_object, read_lines, require_folder, write_json
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.world_folder import WorldSource, check_strategy, decide
from diagd.web.study.options import StudyOptions

PLAYABLE_CODECS = ("h264", "vp9", "av1")  # what browsers play in an mp4
HELD_FRAMES = (2, 6)  # how long an invented walk holds an action
QUESTIONS = {  # what is asked, and a hint
    "quality": ("Which video looks better?", "Sharper, with fewer smeared or broken parts."),
    "consistency": (
        "In which video is the motion more consistent?",
        "The camera moves smoothly, and things keep their shape and place.",
    ),
    "controllability": ("Which video follows the actions better?", "The actions are shown below."),
}
ClipActions = tuple[str, ...] | None  # that led to each frame; None where there is no jsonl file


@dataclass(frozen=True)
class StudyPairs:
    """The systems and clips that are compared, and the questions."""

    folder: Path  # holds a folder for every system
    comparisons: tuple[tuple[str, str], ...]  # two systems; "win": the first one is better
    clips: Mapping[str, ClipActions]  # every system has all of them, as `NAME.mp4`
    questions: tuple[str, ...]  # keys of `QUESTIONS`
    digest: str  # SHA-256 of all that raters get to see; answers belong to these very files


def find_pairs(
    folder: Path, compare: tuple[str, ...] = (), questions: tuple[str, ...] = ()
) -> StudyPairs:
    """Decode all clips compared, before anybody is asked; refuse what cannot be shown fairly."""
    inside = sorted(require_folder(folder, "folder of pairs").iterdir())
    found = {path.name: {clip.stem for clip in path.glob("*.mp4")} for path in inside}
    if len(systems := [system for system, names in found.items() if names]) < 2:
        raise ValueError(
            f"{folder} must hold two or more folders of mp4 clips, one for each system, "
            f"got {', '.join(systems) or 'none'}"
        )
    comparisons = _comparisons(compare, systems)
    first, *others = dict.fromkeys(system for pair in comparisons for system in pair)
    for system in others:
        if differing := found[first] ^ found[system]:
            name = min(differing)
            has, lacks = (first, system) if name in found[first] else (system, first)
            raise ValueError(f"clips need the same names: {has} has {name}.mp4, {lacks} has not")
    digest = hashlib.sha256()
    clips: dict[str, ClipActions] = {}
    for name in track(sorted(found[first]), "reading clips"):
        shown, clips[name] = _read_clip(folder / first / f"{name}.mp4", digest)
        for system in others:
            other, actions = _read_clip(folder / system / f"{name}.mp4", digest)
            if (other, actions) != (shown, clips[name]):
                raise ValueError(
                    f"{name}.mp4 must be alike in frames, size, rate and actions: "
                    f"{first} has {shown}, {system} has {other}"
                )
    without = [name for name, actions in clips.items() if actions is None]
    if "controllability" in questions and without:
        raise ValueError(f"controllability needs the actions of every clip: no {without[0]}.jsonl")
    asked = questions or tuple(q for q in QUESTIONS if q != "controllability" or not without)
    return StudyPairs(folder, comparisons, clips, asked, digest.hexdigest())


def _comparisons(compare: tuple[str, ...], systems: list[str]) -> tuple[tuple[str, str], ...]:
    if not compare:
        if len(systems) > 2:
            raise ValueError(f"choose with --compare A:B among {', '.join(systems)}")
        first, second = sorted(systems, key=lambda name: name == "raster")
        return ((first, second),)
    comparisons = []
    for pair in compare:
        first, _, second = pair.partition(":")
        if first == second or not {first, second} <= set(systems):
            known = f"two different ones of {', '.join(systems)}"
            raise ValueError(f"compare must look like A:B, {known}, got {pair!r}")
        if {first, second} in map(set, comparisons):
            raise ValueError(f"{first} and {second} are compared twice")
        comparisons.append((first, second))
    return tuple(comparisons)


def _read_clip(path: Path, digest: "hashlib._Hash") -> tuple[str, ClipActions]:
    """Return what a clip looks like, in words, and its actions; add all of it to the digest."""
    video, data = read_video(path), path.read_bytes()
    with av.open(io.BytesIO(data), "r", metadata_errors="replace") as container:
        codec = container.streams.video[0].codec_context.codec.canonical_name
    if codec not in PLAYABLE_CODECS:
        expected = ", ".join(PLAYABLE_CODECS)
        raise ValueError(f"{path} cannot be shown in browsers: expected {expected}, got {codec}")
    digest.update(data)
    num_frames, height_px, width_px = video.frames.shape[:3]
    actions = _read_actions(path.with_suffix(".jsonl"), num_frames)
    digest.update(repr(actions).encode())
    known = "no actions" if actions is None else f"actions {' '.join(actions)[:40]}"
    shown = f"{num_frames} frames of {height_px}x{width_px} at {float(video.fps):g} a second"
    return f"{shown}, {known}", actions


def _read_actions(path: Path, num_frames: int) -> ClipActions:
    """Read the names of `{"action": NAME}` lines, whatever model they are of."""
    if not path.is_file():
        return None
    try:
        lines = read_lines(path, "action file")
        actions = tuple(parse_object(line)["action"] for line in lines)
    except (ValueError, KeyError):
        actions = ()
    if len(actions) != num_frames or not all(isinstance(action, str) for action in actions):
        raise ValueError(f'{path}: expected {num_frames} lines {{"action": NAME}}, one a frame')
    return actions


def playable(path: Path) -> bytes:
    """Copy only the pictures of a clip into an mp4: no title, no date, no words of the encoder."""
    whole = io.BytesIO()
    given = io.BytesIO(path.read_bytes())  # FFmpeg takes the path `a:b/c.mp4` for an address
    with (
        av.open(given, "r", metadata_errors="replace") as source,
        av.open(whole, "w", format="mp4") as target,
    ):
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        copy.metadata.clear()
        is_h264 = stream.codec_context.codec.canonical_name == "h264"
        kept = "filter_units=remove_types=6" if is_h264 else "null"  # NAL units that hold words
        silent = BitStreamFilterContext(kept, stream, copy)
        for packet in source.demux(stream):
            if packet.dts is not None:
                for part in silent.filter(packet):
                    part.stream = copy
                    target.mux(part)
    return whole.getvalue()


def make_pairs(options: StudyOptions) -> list[str]:
    """Generate the clips that are missing, with seed + n for pair n; return the systems' names."""
    systems = options.parsed_systems()
    for _, model, strategy in systems:
        found = find_model(model)
        check_strategy(found, strategy)
    backends = _remember(options)
    for name, model, strategy in systems:  # the same on any machine
        world = VideoGenerator.from_pretrained(model, dtype="float32", backend=backends[name])
        for number in track(range(options.make), name):
            target = options.pairs / name / f"pair_{number:03d}.mp4"
            if not target.exists():
                _make_clip(options, world, strategy, number, target)
    return [name for name, *_ in systems]


def _remember(options: StudyOptions) -> dict[str, Backend]:
    """Write the options down; where there are pairs of others, but for their number, refuse.

    Returns the backend of each system, which timings chose when the pairs were begun.
    """
    made: dict[str, Any] = {
        **{name: getattr(options, name) for name in ("model", "frames", "context_frames", "seed")},
        "systems": list(options.strategy),
        "clips": options.clips and str(options.clips),
        "torch": str(torch.__version__),
    }
    path = options.pairs / "made.json"
    is_begun = path.is_file() and any(options.pairs.glob("*/pair_*.mp4"))
    known = read_json_object(path) if is_begun else made
    backends: dict[str, Backend] | None = known.pop("backends", None)
    if backends is None:
        systems, cpu = options.parsed_systems(), torch.device("cpu")
        backends = {name: decide(model, cpu, "float32", "auto")[1] for name, model, _ in systems}
    if known != made:
        raise ValueError(
            f"{options.pairs} holds pairs made with other options ({path}): choose another"
        )
    write_json(path, {**made, "backends": backends}, indent=1)
    return backends


def _make_clip(
    options: StudyOptions, world: VideoGenerator, strategy: Strategy, number: int, target: Path
) -> None:
    """Continue some frames of a clip by the actions that follow there, or the prompt by a walk."""
    codec, seen, length = world.vocabulary, options.context_frames, options.context_frames
    draw = random.Random(f"{options.seed}/{number}")
    prompts = [ClipFile("prompt", WorldSource(options.model).folder / "prompt.mp4", codec)]
    if options.clips:
        prompts = list(find_clips(options.clips, codec).values())
        length += options.frames
    prompt = prompts[number % len(prompts)]
    given = prompt.check(length)
    first = draw.randrange(given - length + 1) if options.clips else given - seen
    clip = prompt.read(length, first, size_px=world.frame_size_px)
    frames, actions = clip.frames[:seen], clip.actions
    if codec is not None and actions is not None and options.clips is None:
        actions += _walk(codec, options.frames, draw)
    between, coming = split_actions(actions, seen)
    generated = world.generate(
        world.read_prompt(frames, between),
        coming,
        options.frames,
        strategy=strategy,
        seed=options.seed + number,
    )
    if actions is not None:  # row 0 led to the first frame shown: nobody saw what from
        write_actions(target.with_suffix(".jsonl"), actions)
    write_video(target, torch.cat([frames, generated.frames]), float(clip.fps))


def _walk(codec: ActionCodec, length: int, draw: random.Random) -> list[str]:
    names = [name for name in codec.names if name != idle_action(codec)] or codec.names
    walk: list[str] = []
    while len(walk) < length:
        walk += [draw.choice(names)] * draw.randint(*HELD_FRAMES)
    return walk[:length]
