"""Token clips: safetensors shards for training.

`shard_00000.safetensors` holds `tokens` (num_clips, T, height, width) and `actions` (num_clips, T),
of vectors (num_clips, T, axes), with the clips' names, the codebook size and the action names or
axes as metadata. Clips are cut into pieces of one length. `num_shards.txt` holds the expected
number of shards.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from diagd.console import progress
from diagd.data.actions import ActionVocabulary, read_actions
from diagd.data.captioned import Captioned
from diagd.data.vectors import OwnActions, VectorActions, load_actions
from diagd.data.video import one_thread_workers, read_video
from diagd.files import (
    naming,
    parse_object,
    read_lines,
    utf8_path,
    write_bytes,
    write_text,
)
from diagd.system import clip_fingerprint
from diagd.tokenizers.vq import VideoTokenizer, VQTokenizer

COUNT_NAME = "num_shards.txt"
Item = TypeVar("Item")
STILL = ActionVocabulary(("none",))  # action of every frame of clips without action files


@dataclass(frozen=True)
class TokenClips:
    """Clips, or pieces of clips, of one length and grid."""

    tokens: Tensor  # (num_clips, T, height, width) int16 or int32, ids in [0, codebook_size)
    # (num_clips, T) int16, indices into `action_names`; of vectors (num_clips, T, axes), their ids.
    # Row t led to frame t
    actions: Tensor
    codebook_size: int  # number of visual ids
    action_names: tuple[str, ...]
    codebook: str = ""  # fingerprint of the tokenizer's codes
    vectors: VectorActions | None = None

    @property
    def size(self) -> str:
        _, frames, height, width = self.tokens.shape
        return f"{frames} frames of {height}x{width} tokens"

    @property
    def codec(self) -> OwnActions:
        return self.vectors or ActionVocabulary(self.action_names)

    @property
    def kind(self) -> tuple[object, ...]:
        """Grid, codebook and actions, which all clips of a model share."""
        return self.tokens.shape[2:], self.codebook_size, self.codebook, self.codec

    @property
    def slots_per_frame(self) -> int:
        """Tokens of a frame and of the action before it."""
        return self.tokens[0, 0].numel() + self.codec.num_tokens

    def ids_of_actions(self, indices: Tensor, times: Tensor) -> Tensor:
        """Return the model's ids of the actions of clips (B, 1) at times (B, T): (B, T, tokens)."""
        actions = self.actions[indices, times].long() + self.codebook_size
        return actions.view(*actions.shape[:2], self.codec.num_tokens)


def actions_of(paths: Sequence[Path], vocabulary: OwnActions | None = None) -> OwnActions:
    """Return the actions of videos (NAME.jsonl), which all videos have or none.

    Their order is the vocabulary's, else that of `actions.json` beside the clips, else by name with
    `none` first. Vectors have such a file.
    """
    files = [path.with_suffix(".jsonl") for path in paths]
    missing = [path for path in files if not path.is_file()]
    if len(missing) == len(files):
        return STILL
    if missing:
        raise FileNotFoundError(f"action file not found (other clips have one): {missing[0]}")
    if vocabulary is not None:
        return vocabulary
    if (beside := files[0].with_name("actions.json")).is_file():
        return load_actions(beside)
    names = {"none"}
    for path in files:
        for line in read_lines(path, "action file"):
            with contextlib.suppress(ValueError, KeyError):  # reported by read_actions
                names.add(str(parse_object(line)["action"]))
    return ActionVocabulary(tuple(sorted(names, key=lambda name: (name != "none", name))))


def clip_actions(path: Path, vocabulary: OwnActions, num_frames: int) -> list[str]:
    """Read the actions of a clip; there is no file if the vocabulary is only `none`."""
    if vocabulary == STILL:
        return [*STILL.names] * num_frames
    return read_actions(path.with_suffix(".jsonl"), vocabulary, num_frames)


def write_shards(
    tokenizer: VQTokenizer,
    paths: Sequence[Path],
    folder: Path,
    vocabulary: OwnActions,
    piece: int | None = None,
    size_px: tuple[int, int] | None = None,
    threads: int = 2,
    clips_per_shard: int = 64,
) -> None:
    """Encode clips and their actions into the shards that do not exist yet.

    Frames are fitted to a size, if given, and clips cut into pieces, none longer than a clip; by
    default all clips have one length.
    """

    is_vectors = isinstance(vocabulary, VectorActions)
    dtype = _dtype_of(tokenizer)

    # (pieces, T, height, width), and (pieces, T) or (pieces, T, axes)
    def encode(path: Path) -> tuple[Tensor, Tensor]:
        tokens = tokenizer.encode(read_video(path, size_px=size_px).frames).to(dtype)
        names = clip_actions(path, vocabulary, len(tokens))
        ids = torch.tensor([vocabulary.tokens_of(name) for name in names], dtype=torch.int16)
        actions = ids if is_vectors else ids[:, 0]
        length = piece or len(tokens)
        last = len(tokens) - length  # may overlap, so that every frame is in a piece
        starts = torch.tensor([*range(0, last, length), last])
        times = starts[:, None] + torch.arange(length)
        return tokens[times], actions[times]

    def identify(path: Path) -> tuple[str, str]:
        return path.stem, clip_fingerprint(path)

    common = {"action_names": json.dumps(vocabulary.names), "cut": json.dumps([piece, size_px])}
    common |= {"vectors": json.dumps(asdict(vocabulary))} if is_vectors else {}
    groups = [paths[k : k + clips_per_shard] for k in range(0, len(paths), clips_per_shard)]
    _fill_shards("clips", tokenizer, groups, folder, encode, identify, threads, **common)


def write_image_shards(
    tokenizer: VideoTokenizer,
    pictures: Sequence[Captioned],
    folder: Path,
    size_px: tuple[int, int],
    threads: int = 2,
) -> None:
    """Encode pictures, fitted to a size, into the shards that do not exist yet.

    Processes of one launch share the shards, and wait for all of them.
    """

    def encode(one: Captioned) -> tuple[Tensor, Tensor]:
        frame = one.read()
        if 2 * min(frame.shape[0] / size_px[0], frame.shape[1] / size_px[1]) < 1:
            wanted, given = ("x".join(map(str, size)) for size in (size_px, frame.shape[:2]))
            raise ValueError(
                f"{one.where}: expected at least half of the model's {wanted} pixels, got {given}"
            )
        frames = tokenizer.fit_frames(frame[None], *size_px)
        return tokenizer.encode(frames)[None].to(_dtype_of(tokenizer)), still

    def identify(one: Captioned) -> tuple[str, str]:
        return Path(one.where).name, one.content

    still = torch.zeros(1, 1, dtype=torch.int16)
    common = {"action_names": json.dumps(STILL.names), "cut": json.dumps([1, size_px])}
    groups = [pictures[k : k + 256] for k in range(0, len(pictures), 256)]
    _fill_shards("pictures", tokenizer, groups, folder, encode, identify, threads, **common)


def _dtype_of(tokenizer: VideoTokenizer) -> torch.dtype:
    return torch.int16 if tokenizer.codebook_size <= 2**15 else torch.int32


def _fill_shards(
    what: str,
    tokenizer: VideoTokenizer,
    groups: Sequence[Sequence[Item]],
    folder: Path,
    encode: Callable[[Item], tuple[Tensor, Tensor]],
    identify: Callable[[Item], tuple[str, str]],
    threads: int,
    **common: str,
) -> None:
    """Write the shards, one for each group, that do not exist yet; check those that do.

    Args:
        encode: tokens and actions of an item.
        identify: its name, and a fingerprint of its content.
        common: metadata of all shards.
    """
    shards = [folder / f"shard_{number:05d}.safetensors" for number in range(len(groups))]
    count = sum(map(len, groups))
    if surplus := sorted(set(folder.glob("shard_*.safetensors")) - set(shards)):
        raise ValueError(f"{surplus[0]}: not of these {count} {what}, use another folder")
    common["codebook"] = codebook_fingerprint(tokenizer)
    common |= {name: str(getattr(tokenizer, name)) for name in ("codebook_size", "compression")}
    rank, processes = (int(os.environ.get(*one)) for one in (("RANK", 0), ("WORLD_SIZE", 1)))
    with progress(f"tokenizing {what}", count) as job, one_thread_workers(threads) as pool:
        for number, (shard, group) in enumerate(zip(shards, groups, strict=True)):
            names, content = zip(*map(identify, group), strict=True)
            metadata = common | {"clips": json.dumps(names), "content": json.dumps(content)}
            if not shard.is_file() and number % processes == rank:
                tokens, actions = zip(*pool.map(encode, group), strict=True)
                write_text(folder / COUNT_NAME, f"{len(shards)}\n")
                tensors = {"tokens": torch.cat(tokens), "actions": torch.cat(actions)}
                write_bytes(shard, save(tensors, metadata))
            elif shard.is_file() and _read_shard(shard)[1] != metadata:
                raise ValueError(
                    f"{shard}: made from other {what}, actions or another tokenizer (or by an old "
                    "version): delete it or use another folder"
                )
            job.advance(len(group))
    while not all(shard.is_file() for shard in shards):  # of the other processes
        time.sleep(0.1)


def codebook_fingerprint(tokenizer: Any) -> str:
    """Return a hex digest of a tokenizer's codes, or of its weights, independent of their dtype."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a wrapper's
    is_own = isinstance(tokenizer, VQTokenizer)
    tensors = [tokenizer.codebook] if is_own else tokenizer.model.state_dict().values()
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().half().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def part_of(folder: Path, part: Literal["train", "heldout"]) -> Path:
    """Return the folder of a part's shards: inside a folder of `diagd tokenize`, or itself."""
    return folder / part if (folder / part).is_dir() else folder


def read_shards(folder: str | Path) -> TokenClips:
    """Read all shards of a folder; ValueError unless they are complete and match."""
    if not (paths := sorted(Path(folder).glob("shard_*.safetensors"))):
        raise FileNotFoundError(
            f"no token shards (shard_*.safetensors) in {folder}: run diagd tokenize on clips"
        )
    count = Path(folder) / COUNT_NAME  # other tools do not write it
    wanted = count.read_text(encoding="utf-8").strip() if count.is_file() else str(len(paths))
    if wanted != str(len(paths)):
        raise ValueError(
            f"{folder} has {len(paths)} of {wanted[:9]} shards: run the same diagd tokenize again "
            "to complete it"
        )
    parts = [_read_shard(path)[0] for path in paths]
    first = parts[0]
    for path, part in zip(paths, parts, strict=True):
        for what, expected, found in (
            ("codebook_size ", first.codebook_size, part.codebook_size),
            ("codebook ", first.codebook, part.codebook),
            ("action_names ", first.action_names, part.action_names),
            ("axes of ", first.vectors, part.vectors),
            ("", first.size, part.size),
        ):
            if found != expected:
                raise ValueError(
                    f"{path}: expected {what}{expected} as in {paths[0].name}, got {found}"
                )
    tokens = torch.cat([part.tokens for part in parts])
    return replace(first, tokens=tokens, actions=torch.cat([part.actions for part in parts]))


def _read_shard(path: Path) -> tuple[TokenClips, dict[str, str]]:
    damage = SafetensorError, KeyError, RecursionError, ValueError
    with naming(f"{path}: not a token shard (corrupt?)", damage):
        with utf8_path(path) as known, safe_open(known, "pt") as file:
            metadata = file.metadata() or {}
            tokens, actions = file.get_tensor("tokens"), file.get_tensor("actions")
        names = json.loads(metadata["action_names"])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"expected a list of names, got {metadata['action_names'][:60]}")
        num_ids = int(metadata["codebook_size"])
        axes = metadata.get("vectors")
        vectors = None if axes is None else VectorActions.parse(parse_object(axes))
    shape, acted = tuple(tokens.shape), tuple(actions.shape)
    if len(shape) != 4 or not tokens.numel():
        raise ValueError(f"{path}: tokens must be (clips, T, height, width), got {shape}")
    if acted != (wanted := (*shape[:2], *([vectors.num_tokens] if vectors else []))):
        raise ValueError(f"{path}: actions must be {wanted} as the tokens, got {acted}")
    num_actions = vectors.num_ids if vectors else len(names)
    for what, ids, bound, shown in (
        ("tokens", tokens, num_ids, f"codebook_size={num_ids}"),
        ("actions", actions, num_actions, str(num_actions)),
    ):
        if ids.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
            got = f"got {ids.dtype}"
            raise ValueError(f"{path}: {what} must be signed integers or uint8, {got}")
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= bound:
            raise ValueError(f"{path}: {what} must be in [0, {shown}), got {low} to {high}")
    codebook = metadata.get("codebook", "")
    return TokenClips(tokens, actions, num_ids, tuple(names), codebook, vectors), metadata
