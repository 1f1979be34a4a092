"""From a folder of clips, or a LeRobot dataset, to one folder for `diagd train`.

It holds token shards of the training clips (`train/`) and the held-out ones (`heldout/`), and the
parts of a world: tokenizer, actions, generation defaults, a prompt and start scenes.

diagd tokenize --clips clips --out tokens
diagd tokenize --clips more_clips --tokenizer tokens/tokenizer --out more
diagd tokenize --lerobot dataset --camera top --size 64x96 --out tokens
"""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from diagd.backends.devices import device_of
from diagd.console import make_console, track
from diagd.data.actions import write_actions
from diagd.data.lerobot import read_lerobot
from diagd.data.vectors import OwnActions, load_actions
from diagd.data.video import read_video, video_length, write_video
from diagd.families.checkpoints import ACTIONS_FILE, DEFAULTS_FILE, TOKENIZER_FOLDER, write_defaults
from diagd.families.clip_files import find_films
from diagd.families.defaults import GenerationDefaults
from diagd.files import copy_whole
from diagd.pipeline.world_folder import STARTS
from diagd.tokenizers.linear_init import choose_patch
from diagd.tokenizers.shards import actions_of, clip_actions, write_shards
from diagd.tokenizers.vq import VQTokenizer
from diagd.training.options import TokenizeOptions
from diagd.training.tokenizer import OF_TRAINING, load_frames, measure_tokenizer, prepare_tokenizer

POOR_PSNR = 28.0  # dB; blurry, in pictures of games
CLIPS_FOLDER = "clips"  # of the episodes of a LeRobot dataset, in --out
MAX_PIECE = 64  # maximum frames per piece of a clip
MAX_LEFT_OUT = 0.1  # share of the frames that may be dropped with short clips
NUM_SCENES = 5
SCENE_FRAMES = 4
WALK_FRAMES = 16
CRF = 4  # of H.264: start scenes should look as recorded
Clip = TypeVar("Clip")
Size = tuple[int, int] | None  # (height_px, width_px) to fit frames to; None: as stored


def tokenize(options: TokenizeOptions) -> dict[str, Any]:
    """Split the clips, train or load a tokenizer, write shards and the parts of a world.

    Nothing is written if clips, actions or a tokenizer are missing or do not match. Returns the
    quality measured on held-out clips, and counts of clips, frames per piece and scenes.
    """
    device = device_of(options.device)
    robot = options.lerobot and read_lerobot(
        options.lerobot, options.camera, options.vectors, options.every, options.bins
    )
    if robot:
        lengths = robot.lengths(options.out / CLIPS_FOLDER)
        clips, others, vocabulary = sorted(lengths), list[Path](), robot.codec
        films = list(dict.fromkeys(episode.film for episode in robot.episodes))
    else:
        clips = films = find_films(options.recorded)
        others = find_films(options.heldout) if options.heldout else []
        given = load_actions(options.actions) if options.actions else None
        vocabulary = actions_of([*clips, *others], given)
        lengths = {path: video_length(path)[0] for path in (*clips, *others)}
        for path, length in lengths.items():
            clip_actions(path, vocabulary, length)
    piece = piece_length(list(lengths.values()))
    clips, others = ([path for path in p if lengths[path] >= piece] for p in (clips, others))
    if options.heldout is None:
        clips, others = split_clips(clips, options.heldout_share)
    parts = {"train": clips, "heldout": others}
    for name, paths in parts.items():
        if not paths:
            raise ValueError(
                f"{name}: expected a clip of at least {piece} frames, the length of a piece: "
                "record another one"
            )
    height, width, patch = _check_sizes(options, films if robot else [*clips, *others])
    if robot:
        written = robot.write(options.out / CLIPS_FOLDER, options.size_px)
        for _ in track(written, "reading episodes", len(lengths)):
            pass
    console = make_console()
    left_out = len(lengths) - len(clips) - len(others)
    console.print(
        f"{len(clips)} training clips, {len(others)} held out, "
        f"in pieces of {piece} frames"
        + (f"; {left_out} shorter ones are skipped" if left_out else "")
        + f"; actions: {', '.join(vocabulary.names)}\n"
        f"frames of {height}x{width} px are {height // patch}x{width // patch} tokens "
        f"of {patch}x{patch} px (height x width)"
    )
    tokenizer = prepare_tokenizer(options, clips).to(device)
    report: dict[str, Any] = measure_tokenizer(tokenizer, load_frames(others, options))
    console.print(
        f"the tokenizer reconstructs held-out frames at {report['psnr']} dB (PSNR) with "
        f"{report['codes_used']} of {tokenizer.codebook_size} codes, and no generated frame can "
        "exceed that"
    )
    if advice := advise(report["psnr"], report["codes_used"] / tokenizer.codebook_size, patch):
        console.print(advice)
    for name, paths in parts.items():
        shards = options.out / name
        write_shards(tokenizer, paths, shards, vocabulary, piece, options.size_px, options.threads)
    if options.tokenizer is not None:  # after the shards, which reject another tokenizer
        copy_whole(options.tokenizer, options.out / TOKENIZER_FOLDER, OF_TRAINING)
    scenes = write_starts(options.out, others, vocabulary, options.size_px)
    console.print(f"next: diagd train --tokens {quote(str(options.out))} --out world")
    counts = {name: len(paths) for name, paths in parts.items()}
    return {"clips": counts, "frames_per_clip": piece, "scenes": scenes, **report}


def _check_sizes(options: TokenizeOptions, paths: Sequence[Path]) -> tuple[int, int, int]:
    """Return height, width and patch in pixels; ValueError unless all frames match."""
    height, width = options.size_px or read_video(paths[0], 1).frames.shape[1:3]
    for path in paths if options.size_px is None else ():
        if (size := read_video(path, 1).frames.shape[1:3]) != (height, width):
            raise ValueError(
                f"{path}: expected frames of {height}x{width} px as in {paths[0].name}, "
                f"got {size[0]}x{size[1]} px: give --size to resize them"
            )
    if applied := options.tokenizer or options.init:
        patch = VQTokenizer.from_pretrained(applied).compression
    else:
        patch = options.patch or choose_patch(height, width)
    if any(side % patch or side % 2 for side in (height, width)):  # videos have even sides
        raise ValueError(
            f"frame height and width must be even, and multiples of {patch} px, "
            f"got {height}x{width}: give --size"
        )
    return height, width, patch


def advise(psnr: float, codes_used: float, patch: int) -> str | None:
    """Format advice for a tokenizer of poor quality; None if it is good."""
    if psnr >= POOR_PSNR:
        return None
    codes = (
        "--codes 4096 (four times the codes gain about 1 dB)"
        if codes_used > 0.5
        else "longer training (--minutes 20) and clips of more places, as most codes are unused"
    )
    smaller = f"--patch {patch // 2} (sharper, but four times the tokens), " if patch > 4 else ""
    return (
        f"that is poor: the bundled worlds have 29 to 34 dB. Before training a model on it, try "
        f"{smaller}{codes}; each needs a new folder --out"
    )


def split_clips(clips: Sequence[Clip], share: float) -> tuple[list[Clip], list[Clip]]:
    """Split clips into training and held-out clips.

    Every n-th clip by name is held out, so that the split is stable when clips are appended; of a
    few clips the last one is held out, and of a single one none.
    """
    every = round(1 / share)
    held_out = list(clips[every - 1 :: every] or clips[1:][-1:])
    apart = set(held_out)
    return [clip for clip in clips if clip not in apart], held_out


def piece_length(lengths: Sequence[int]) -> int:
    """Choose the frames of a piece: at most 64, with at most a tenth of all in shorter clips."""
    dropped = 0
    for length in sorted(lengths):
        dropped += length
        if dropped > MAX_LEFT_OUT * sum(lengths):
            return min(length, MAX_PIECE)
    raise ValueError("clips must be at least one, got none")


def copy_parts(source: Path, folder: Path) -> None:
    """Copy the parts of a world beside a model, so that every command accepts the folder."""
    for name in (TOKENIZER_FOLDER, ACTIONS_FILE, DEFAULTS_FILE, *STARTS):
        copy_whole(source / name, folder / name, OF_TRAINING)


def write_starts(folder: Path, clips: Sequence[Path], vocabulary: OwnActions, size_px: Size) -> int:
    """Write a prompt, a walk that continues it, scenes, actions and generation defaults.

    All are cut from held-out clips; returns the number of scenes.
    """
    scenes = folder / "scenes"
    for old in scenes.glob("*_[0-9][0-9][0-9][0-9].*"):  # others are the user's
        old.unlink()
    vocabulary.save(folder / ACTIONS_FILE)
    count = NUM_SCENES + 1  # spaced over the clips, and over the length of each
    rounds = -(-count // len(clips))
    for number in range(count):
        path = clips[number % len(clips) if rounds > 1 else number * len(clips) // count]
        length, fps = video_length(path)
        given = min(SCENE_FRAMES, length)
        start = round((number // len(clips) + 1) / (rounds + 1) * (length - given))
        goal = scenes / f"{path.stem}_{start:04d}.mp4" if number else folder / "prompt.mp4"
        actions = write_start(goal, path, start, vocabulary, size_px)
        if not number:
            write_actions(folder / "walk.jsonl", actions[start + given :][:WALK_FRAMES] or actions)
            write_defaults(folder, GenerationDefaults(fps=float(fps), context_frames=given))
    return len(list(scenes.glob("*.mp4")))


def write_start(
    goal: Path, clip: Path, start: int, vocabulary: OwnActions, size_px: Size = None
) -> list[str]:
    """Write up to `SCENE_FRAMES` of a clip with their actions; return all actions of the clip."""
    video = read_video(clip, SCENE_FRAMES, start=start, size_px=size_px)
    write_video(goal, video.frames, video.fps, CRF)
    actions = clip_actions(clip, vocabulary, video_length(clip)[0])
    write_actions(goal.with_suffix(".jsonl"), actions[start : start + len(video.frames)])
    return actions
