"""Heads that know where to look before training: at neighbours in the frame and one frame back.

The biases of queries and keys alone make a rotary head attend to a fixed offset in (frame, row,
column), whatever the tokens are. Finding such heads is what a randomly started model spends its
first millions of tokens on (docs/log.md); training then bends them to the motion.
"""

import dataclasses
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from diagd.data.actions import ActionVocabulary, read_actions, write_actions
from diagd.data.video import read_video, video_length, write_video
from diagd.families.checkpoints import (
    ACTIONS_FILE,
    DEFAULTS_FILE,
    TOKENIZER_FOLDER,
    load_model,
    load_tokenizer,
    model_path,
    write_defaults,
)
from diagd.families.defaults import GenerationDefaults
from diagd.families.presets import PRESETS
from diagd.files import copy_whole
from diagd.models.config import ModelConfig
from diagd.models.rotary import rotary_frequencies_3d
from diagd.models.transformer import Transformer
from diagd.tokenizers.shards import STILL, TokenClips, codebook_fingerprint
from diagd.tokenizers.training import OF_TRAINING
from diagd.tokenizers.vq import VQTokenizer
from diagd.training.options import OptimizerName

# (frames, rows, columns) from the lane that looks to the token looked at, by layer and head. The
# lane at column j predicts column j + 1, so (-1, 0, 1) is the place it writes, one frame back.
OFFSETS = (
    ((-1, 0, 1), (-1, 0, -1), (-1, 0, 3), (0, -1, 1), (0, 0, -1)),
    ((-1, 0, 1), (-1, 1, 1), (-1, -1, 1), (0, -1, 0), (0, -1, 2)),
    ((-1, 0, 1), (-1, 0, 0), (-1, 0, 2), (-2, 0, 1), (0, -1, 1)),
    ((-1, 0, -2), (-1, 0, 4)),
)
_SHARPNESS = 6.0  # squared length of a bias in every rotary plane


@torch.no_grad()
def aim_heads(model: Transformer) -> Transformer:
    """Set the query and key biases of the first heads so that each looks at its place in OFFSETS.

    Args:
        model: With 3-D rotary positions, biases and as many key heads as query heads.

    Returns:
        The same model.

    Raises:
        ValueError: The model has no such heads.
    """
    config = model.config
    if config.position != "rope3d" or not config.bias or config.num_kv_heads != config.num_heads:
        raise ValueError(
            "aim_heads needs position='rope3d', bias=True and num_kv_heads=num_heads, got "
            f"{config.position!r}, {config.bias} and {config.num_kv_heads} of {config.num_heads}"
        )
    time, space = rotary_frequencies_3d(config)
    length = math.sqrt(_SHARPNESS)
    for layer, offsets in zip(model.model.blocks, OFFSETS, strict=False):
        queries = layer.self_attn.q_proj.bias.view(config.num_heads, 2, -1)
        keys = layer.self_attn.k_proj.bias.view(config.num_heads, 2, -1)
        for head, (frame, row, column) in enumerate(offsets[: config.num_heads]):
            angles = torch.cat([frame * time, row * space, column * space])
            keys[head, 0], keys[head, 1] = length, 0.0
            queries[head, 0], queries[head, 1] = length * angles.cos(), length * angles.sin()
    return model


PROMPT = "prompt.mp4"  # what is continued where nothing else is asked for
WALK = "walk.jsonl"  # and under which actions
SCENES_FOLDER = "scenes"
PARTS = (
    TOKENIZER_FOLDER,
    ACTIONS_FILE,
    DEFAULTS_FILE,
    PROMPT,
    "prompt.jsonl",
    WALK,
    SCENES_FOLDER,
)
NUM_SCENES = 5
SCENE_FRAMES = 4
WALK_FRAMES = 16
CRF = 4  # of H.264: what a world starts from should look as it was recorded


def copy_parts(source: Path, folder: Path) -> None:
    """Copy what makes a world of a model, so that every command takes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PARTS:
        copy_whole(source / name, folder / name, OF_TRAINING)


def next_steps(folder: Path, tokens: Path) -> str:
    """Say what to do with a model that has just been trained on tokens."""
    if not (folder / TOKENIZER_FOLDER).is_dir():
        return (
            f"{folder} has no tokenizer, since {tokens} has none: "
            "the folder that diagd tokenize writes has one"
        )
    return (
        f"next: diagd play --model {folder}, or diagd generate --model {folder}; "
        f"diagd tune --model {folder} --tokens {tokens} finds its fastest strategy"
    )


def write_starts(
    folder: Path,
    clips: Sequence[Path],
    vocabulary: ActionVocabulary,
    size_px: tuple[int, int] | None = None,
) -> int:
    """Write a prompt, the walk that goes on from it, scenes and generation defaults.

    Args:
        folder: where to.
        clips: held-out videos, with their actions beside them unless nobody ever acts (`STILL`).
        vocabulary: the actions; written as well.
        size_px: height and width that frames are fitted to; default: as stored.

    Returns:
        How many scenes there are.
    """
    scenes = folder / SCENES_FOLDER
    shutil.rmtree(scenes, ignore_errors=True)
    scenes.mkdir(parents=True)
    vocabulary.save(folder / ACTIONS_FILE)
    for number, (path, share) in enumerate(_places(clips)):
        length, fps = video_length(path)
        given = min(SCENE_FRAMES, length)
        start = round(share * (length - given))
        goal = scenes / f"{path.stem}_{start:04d}.mp4" if number else folder / PROMPT
        actions = write_start(goal, path, start, vocabulary, size_px)
        if not number:
            write_actions(folder / WALK, actions[start + given :][:WALK_FRAMES] or actions)
            write_defaults(folder, GenerationDefaults(fps=float(fps), context_frames=given))
    return len(list(scenes.glob("*.mp4")))


def write_start(
    goal: Path,
    clip: Path,
    start: int,
    vocabulary: ActionVocabulary,
    size_px: tuple[int, int] | None = None,
) -> list[str]:
    """Write up to `SCENE_FRAMES` of a clip, and their actions beside them, as a place to start.

    Args:
        goal: the video to write.
        clip: the recorded video.
        start: the first of its frames.
        vocabulary: its actions.
        size_px: as in `write_starts`.

    Returns:
        All actions of the clip.
    """
    length, fps = video_length(clip)
    given = min(SCENE_FRAMES, length)
    video = read_video(clip, given, start=start, size_px=size_px)
    write_video(goal, video.frames, fps, CRF)
    actions = _actions(clip, vocabulary, length)
    write_actions(goal.with_suffix(".jsonl"), actions[start : start + given])
    return actions


def _places(clips: Sequence[Path]) -> Iterator[tuple[Path, float]]:
    """Spread the prompt and the scenes over the clips, and over the length of each."""
    count = NUM_SCENES + 1
    rounds = -(-count // len(clips))
    for number in range(count):
        path = clips[number % len(clips) if rounds > 1 else number * len(clips) // count]
        yield path, (number // len(clips) + 1) / (rounds + 1)


def _actions(path: Path, vocabulary: ActionVocabulary, num_frames: int) -> list[str]:
    if vocabulary == STILL:
        return [STILL.names[0]] * num_frames
    return read_actions(path.with_suffix(".jsonl"), vocabulary, num_frames)


def same_kind(clips: TokenClips, other: TokenClips) -> bool:
    """Say whether one model fits both: same grid, codebook and actions."""
    return (
        clips.tokens.shape[2:] == other.tokens.shape[2:]
        and clips.codebook_size == other.codebook_size
        and clips.codebook == other.codebook
        and clips.action_names == other.action_names
    )


def check_fit(model: str, config: ModelConfig, clips: TokenClips) -> None:
    """Raise ValueError unless a model, of that name or folder, was made for the clips' tokens."""
    names = ()
    if config.num_action_tokens:
        names = ActionVocabulary.load(model_path(model) / "actions.json").names
    for what, of_model, of_clips in (
        ("grid", (config.grid_height, config.grid_width), tuple(clips.tokens.shape[2:])),
        ("number of visual ids", config.image_vocab_size, clips.codebook_size),
        ("number of action tokens a frame", config.num_action_tokens, 1),
        ("actions", names, clips.action_names),
    ):
        if of_model != of_clips:
            raise ValueError(
                f"the clips do not fit {model}: {what} is {of_clips}, the model's {of_model}"
            )
    check_tokenizer(model, clips)


def check_tokenizer(model: str, clips: TokenClips) -> None:
    """Raise ValueError if a model brings a tokenizer, and the clips are tokens of another one."""
    folder = model_path(model) / TOKENIZER_FOLDER
    if not folder.is_dir() or not clips.codebook:
        return
    tokenizer = load_tokenizer(folder)
    if isinstance(tokenizer, VQTokenizer) and codebook_fingerprint(tokenizer) != clips.codebook:
        raise ValueError(
            f"the clips do not fit {model}: they are tokens of another tokenizer than its own"
        )


def fit_config(preset: str, clips: TokenClips, frames: int) -> ModelConfig:
    """Fit a preset to the data: its grid, its vocabulary, a context of so many frames."""
    grid_height, grid_width = clips.tokens.shape[2:]
    return dataclasses.replace(
        PRESETS[preset],
        vocab_size=clips.codebook_size + len(clips.action_names),
        image_vocab_size=clips.codebook_size,
        grid_height=grid_height,
        grid_width=grid_width,
        num_action_tokens=1,
        max_positions=frames * (grid_height * grid_width + 1) - 1,
    )


def start_model(config: ModelConfig, seed: int, init: str | None = None) -> Transformer:
    """Return random weights, with heads aimed where positions allow it, or those of a checkpoint.

    Args:
        init: Checkpoint folder; its context may be of another length.

    Raises:
        ValueError: The checkpoint is a model of another shape or vocabulary.
    """
    model = Transformer.random(config, seed=seed)
    if init is None:
        return aim_heads(model) if config.bias and config.position == "rope3d" else model
    source = load_model(init)
    if dataclasses.replace(source.config, max_positions=config.max_positions) != config:
        raise ValueError(f"init: {init} is a model of another shape or vocabulary")
    model.load_state_dict(source.state_dict())
    return model


@cache
def faster_precision() -> Literal["bf16", "no"]:
    """Measure in which type matrices are multiplied faster here, in a few milliseconds."""
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    seconds: dict[torch.dtype, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.zeros(512, 512, dtype=dtype)
        for _ in range(4):  # of which the first ones prepare
            started = time.perf_counter()
            torch.matmul(matrix, matrix)
            took = time.perf_counter() - started
            seconds[dtype] = min(took, seconds.get(dtype, took))
    return "bf16" if seconds[torch.bfloat16] < seconds[torch.float32] else "no"


def make_optimizers(
    model: Transformer, name: OptimizerName, learning_rate: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Make AdamW for all weights, or Muon for the blocks' matrices and AdamW for the others."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizers: list[torch.optim.Optimizer] = []
    if name == "muon":
        blocks = [p for p in model.model.layers.parameters() if p.ndim == 2]
        in_blocks = {id(p) for p in blocks}
        matrices = [p for p in matrices if id(p) not in in_blocks]
        optimizers.append(
            torch.optim.Muon(
                blocks,
                lr=learning_rate,
                weight_decay=weight_decay,
                adjust_lr_fn="match_rms_adamw",  # so that AdamW's learning rate serves both
            )
        )
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizers.append(
        torch.optim.AdamW(groups, learning_rate, (0.9, 0.95), weight_decay=weight_decay)
    )
    return optimizers
