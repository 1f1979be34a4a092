"""Clips as tokens: safetensors shards that training reads.

`shard_00000.safetensors` holds `tokens` (num_clips, T, height, width) and `actions` (num_clips, T),
with the clips' names, the codebook size and the action names as metadata. Clips of any length are
cut into pieces of one. A shard appears under its name only when it is whole, so writing goes on
where it was killed; `num_shards.txt` says how many there will be.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from diagd.console import progress
from diagd.data.actions import ActionVocabulary, read_actions
from diagd.data.video import one_thread_workers, read_video
from diagd.files import write_bytes, write_text
from diagd.system import clip_fingerprint
from diagd.tokenizers.vq import VQTokenizer

COUNT_NAME = "num_shards.txt"
STILL = ActionVocabulary(("none",))  # what clips without action files do in every frame


@dataclass(frozen=True)
class TokenClips:
    """Clips, or pieces of clips, of one length and grid.

    Attributes:
        tokens: (num_clips, T, height, width) int16 or int32, ids in [0, codebook_size).
        actions: (num_clips, T) int16, places in `action_names`; row t led to frame t.
        codebook_size: number of visual ids.
        action_names: what the action ids mean.
        codebook: fingerprint of the tokenizer's codes.
    """

    tokens: Tensor
    actions: Tensor
    codebook_size: int
    action_names: tuple[str, ...]
    codebook: str = ""


def actions_of(
    paths: Sequence[Path], vocabulary: ActionVocabulary | None = None
) -> ActionVocabulary:
    """Decide what action ids of clips mean.

    Args:
        paths: videos; either all have actions, NAME.jsonl, or none.
        vocabulary: the order wanted; else `actions.json` beside the clips, else the names that
            occur, `none` first.

    Raises:
        FileNotFoundError: some clips have actions and others do not.
        ValueError: an action file is corrupt.
    """
    files = [path.with_suffix(".jsonl") for path in paths]
    missing = [path for path in files if not path.is_file()]
    if len(missing) == len(files):
        return STILL
    if missing:
        raise FileNotFoundError(f"action file not found (other clips have one): {missing[0]}")
    if vocabulary is not None:
        return vocabulary
    beside = files[0].with_name("actions.json")
    if beside.is_file():
        return ActionVocabulary.load(beside)
    names = {"none"}
    for line in (
        line
        for path in files
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
    ):
        # told by read_actions
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            names.add(str(json.loads(line)["action"]))
    return ActionVocabulary(tuple(sorted(names, key=lambda name: (name != "none", name))))


def cut(length: int, piece: int) -> list[int]:
    """Return where pieces of a clip start, so that every frame is in one; the last may overlap."""
    return [*range(0, length - piece, piece), length - piece]


def write_shards(
    tokenizer: VQTokenizer,
    paths: Sequence[Path],
    folder: Path,
    vocabulary: ActionVocabulary,
    clips_per_shard: int = 64,
    threads: int = 2,
    piece: int | None = None,
    size_px: tuple[int, int] | None = None,
) -> int:
    """Encode clips, and the actions in the jsonl file beside each; keeps the shards already there.

    Args:
        paths: videos of one size, and of one length unless `piece` says how to cut them.
        vocabulary: what action ids mean, from `actions_of`.
        piece: frames of the pieces that clips are cut into, none longer than a clip.
        size_px: height and width that frames are fitted to; default: as stored.

    Returns:
        How many shards were written now.

    Raises:
        FileNotFoundError: a video or an action file is missing.
        ValueError: clips of different lengths or sizes, a corrupt file, or shards of other clips
            or of another tokenizer in the folder.
    """
    groups = [paths[k : k + clips_per_shard] for k in range(0, len(paths), clips_per_shard)]
    shards = [folder / f"shard_{number:05d}.safetensors" for number in range(len(groups))]
    surplus = sorted(set(folder.glob("shard_*.safetensors")) - set(shards))
    if surplus:
        raise ValueError(f"{surplus[0]} is not of these {len(paths)} clips: use another folder")
    written, shape = 0, None
    encode = partial(_encode_clip, tokenizer, vocabulary, piece, size_px)
    with progress("tokenizing clips", len(paths)) as job, one_thread_workers(threads) as pool:
        for shard, group in zip(shards, groups, strict=True):
            metadata = _metadata(tokenizer, group, vocabulary, piece, size_px)
            if shard.is_file():
                clips, found = _read_shard(shard)
                if found != metadata:
                    raise ValueError(
                        f"{shard} is of other clips, actions or another tokenizer (or from before "
                        "this was noted): delete it or use another folder"
                    )
                shape = clips.tokens.shape[1:]
            else:
                tokens, actions = _join(group, list(pool.map(encode, group)), shape)
                tokens = tokens.to(_dtype(tokenizer))
                write_text(folder / COUNT_NAME, f"{len(shards)}\n")
                write_bytes(shard, save({"tokens": tokens, "actions": actions}, metadata))
                written, shape = written + 1, tokens.shape[1:]
            job.advance(len(group))
    return written


def _encode_clip(
    tokenizer: VQTokenizer,
    vocabulary: ActionVocabulary,
    piece: int | None,
    size_px: tuple[int, int] | None,
    path: Path,
) -> tuple[Tensor, Tensor]:
    """Encode the pieces of a clip: (pieces, T, height, width) and (pieces, T)."""
    tokens = tokenizer.encode(read_video(path, size_px=size_px).frames)
    actions = torch.zeros(len(tokens), dtype=torch.int16)
    if vocabulary != STILL:
        taken = read_actions(path.with_suffix(".jsonl"), vocabulary, len(tokens))
        actions = torch.tensor([vocabulary.id_of(action) for action in taken], dtype=torch.int16)
    starts = cut(len(tokens), piece or len(tokens))
    times = torch.tensor(starts)[:, None] + torch.arange(piece or len(tokens))
    return tokens[times], actions[times]


def _join(
    paths: Sequence[Path], clips: list[tuple[Tensor, Tensor]], shape: torch.Size | None
) -> tuple[Tensor, Tensor]:
    """Join the pieces of the clips of a shard, which must be of one shape (T, height, width)."""
    expected = shape or clips[0][0].shape[1:]
    for path, (tokens, _) in zip(paths, clips, strict=True):
        if tokens.shape[1:] != expected:
            raise ValueError(
                f"{path}: expected {_describe(expected)} as in clips before it, "
                f"got {_describe(tokens.shape[1:])}"
            )
    tokens, actions = zip(*clips, strict=True)
    return torch.cat(tokens), torch.cat(actions)


def _dtype(tokenizer: VQTokenizer) -> torch.dtype:
    return torch.int16 if tokenizer.codebook_size <= 2**15 else torch.int32


def part_of(folder: Path, part: Literal["train", "heldout"]) -> Path:
    """Return the folder of a part's shards: below what `diagd tokenize` wrote, or the folder."""
    return folder / part if (folder / part).is_dir() else folder


def read_shards(folder: str | Path) -> TokenClips:
    """Read all shards of a folder.

    Raises:
        FileNotFoundError: no shards in the folder.
        ValueError: a corrupt shard, missing ones, or shards that do not belong together.
    """
    paths = sorted(Path(folder).glob("shard_*.safetensors"))
    if not paths:
        raise FileNotFoundError(
            f"no token shards (shard_*.safetensors) in {folder}: diagd tokenize makes them of clips"
        )
    count = Path(folder) / COUNT_NAME  # shards of other makers have none
    wanted = count.read_text(encoding="utf-8").strip() if count.is_file() else str(len(paths))
    if wanted != str(len(paths)):
        raise ValueError(
            f"{folder} has {len(paths)} of {wanted[:9]} shards: run the same diagd tokenize again, "
            "which goes on"
        )
    parts = [_read_shard(path)[0] for path in paths]
    first = parts[0]
    for path, part in zip(paths, parts, strict=True):
        for name in ("codebook_size", "codebook", "action_names"):
            if getattr(part, name) != getattr(first, name):
                raise ValueError(
                    f"{path}: expected {name} {getattr(first, name)} as in {paths[0].name}, "
                    f"got {getattr(part, name)}"
                )
        if part.tokens.shape[1:] != first.tokens.shape[1:]:
            raise ValueError(
                f"{path}: expected {_describe(first.tokens.shape[1:])} as in {paths[0].name}, "
                f"got {_describe(part.tokens.shape[1:])}"
            )
    return TokenClips(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.actions for part in parts]),
        first.codebook_size,
        first.action_names,
        first.codebook,
    )


def _read_shard(path: Path) -> tuple[TokenClips, dict[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tokens, actions = file.get_tensor("tokens"), file.get_tensor("actions")
        clips = TokenClips(
            tokens,
            actions,
            int(metadata["codebook_size"]),
            _names(metadata["action_names"]),
            metadata.get("codebook", ""),
        )
    except (SafetensorError, KeyError, RecursionError, ValueError) as error:
        raise ValueError(f"{path} is no token shard (corrupt?): {error}") from None
    if tokens.dim() != 4 or not tokens.numel():
        raise ValueError(
            f"{path}: tokens must be (clips, T, height, width), got {tuple(tokens.shape)}"
        )
    low, high = (int(bound) for bound in tokens.aminmax())
    if low < 0 or high >= clips.codebook_size:
        raise ValueError(
            f"{path}: tokens must be in [0, codebook_size={clips.codebook_size}), "
            f"got {low} to {high}"
        )
    if actions.shape != tokens.shape[:2]:
        raise ValueError(
            f"{path}: actions must be {tuple(tokens.shape[:2])} as the tokens, "
            f"got {tuple(actions.shape)}"
        )
    low, high = (int(bound) for bound in actions.aminmax())
    if low < 0 or high >= len(clips.action_names):
        raise ValueError(
            f"{path}: actions must be in [0, {len(clips.action_names)}), got {low} to {high}"
        )
    return clips, metadata


def _names(text: str) -> tuple[str, ...]:
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"expected a list of names, got {text[:60]}")
    return tuple(names)


def _metadata(
    tokenizer: VQTokenizer,
    paths: Sequence[Path],
    vocabulary: ActionVocabulary,
    piece: int | None,
    size_px: tuple[int, int] | None,
) -> dict[str, str]:
    return {
        "clips": json.dumps([path.stem for path in paths]),
        "content": json.dumps([clip_fingerprint(path) for path in paths]),
        "codebook": codebook_fingerprint(tokenizer),
        "codebook_size": str(tokenizer.codebook_size),
        "compression": str(tokenizer.compression),
        "cut": json.dumps([piece, size_px]),
        "action_names": json.dumps(list(vocabulary.names)),
    }


def codebook_fingerprint(tokenizer: VQTokenizer) -> str:
    """Return hex digits that stand for a tokenizer's codes, in whatever type they are held."""
    codebook = tokenizer.codebook.detach().half().cpu().numpy().tobytes()
    return hashlib.sha256(codebook).hexdigest()[:16]


def _describe(shape: Sequence[int]) -> str:
    """Say `64 frames of 14x24 tokens`."""
    return f"{shape[0]} frames of {shape[1]}x{shape[2]} tokens"
