"""Load the parts of a world from its folder, ours or a released checkpoint, and save them."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from diagd.backends.devices import dtype_of, multiplies_bfloat16
from diagd.backends.names import Backend, DTypeChoice, DTypeName
from diagd.backends.prepare import choose_backend, choose_dtype
from diagd.data.actions import ActionCodec
from diagd.decoding.schedule import TokenGrid, check_learnt
from diagd.decoding.strategies.table import Strategy
from diagd.families import checkpoints
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Checkpoint
from diagd.files import copy_whole, read_json_lines, write_text
from diagd.models.transformer import Transformer, shape_of
from diagd.system import check_memory
from diagd.tokenizers.text import TextPrompts
from diagd.tokenizers.vq import RowEnds, TwoCameras, VideoTokenizer, VQTokenizer
from diagd.weight_files import check_storable


class Parts(NamedTuple):
    """The parts of a world model; `vocabulary` and `text` are None for a model without."""

    model: Transformer
    tokenizer: VideoTokenizer
    vocabulary: ActionCodec | None
    defaults: GenerationDefaults
    text: TextPrompts | None
    int8: bool  # whether to quantize the weights


def load_parts(
    name_or_path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | DTypeChoice = torch.float32,
    config: str | Path | None = None,
    tokenizer: str | Path | None = None,
    adapter: str | Path | None = None,
) -> Parts:
    """Load a checkpoint with its tokenizer and actions, or a bundled model.

    A `config` file or a `tokenizer` folder replaces the checkpoint's own; an `adapter` is merged.
    TorchScript is loaded, and therefore run, only from a folder named here.
    """
    found = checkpoints.find_model(name_or_path, config, adapter)
    device = torch.device(device)
    shape, folder = found.config, found.path.parent
    read, defaults = _tokenizer(found, tokenizer), found.defaults
    video_tokenizer = wrap_tokenizer(found, read)
    if video_tokenizer.codebook_size != shape.image_vocab_size:
        raise ValueError(
            f"{folder}: the model has {shape.image_vocab_size} visual ids, "
            f"but its tokenizer {video_tokenizer.codebook_size} codes"
        )
    codec, num_ids = codec_of(found), shape.vocab_size - shape.image_vocab_size
    if codec and (codec.num_ids, codec.num_tokens) != (num_ids, shape.num_action_tokens):
        raise ValueError(
            f"{folder}: {checkpoints.ACTIONS_FILE} names {codec.num_ids} action ids and "
            f"{codec.num_tokens} tokens per action, the model has {num_ids} and "
            f"{shape.num_action_tokens}"
        )
    if shape.prefix_length > shape.extra_embeddings:  # after the vocabulary
        raise ValueError(
            f"{folder}: prefix_length is {shape.prefix_length}, but there are only "
            f"{shape.extra_embeddings} extra embeddings"
        )
    height_px, width_px = video_tokenizer.frame_size_px(shape.grid_height, shape.grid_width)
    check_memory(12 * height_px * width_px, f"{folder}: a frame of {height_px}x{width_px} pixels")
    int8 = False
    if not isinstance(dtype, torch.dtype):  # timed with a model of this shape, now known to fit
        chosen = choose_dtype(dtype, device, shape)
        dtype, int8 = dtype_of(chosen), chosen == "int8"
    if isinstance(read, VQTokenizer):
        read.painting = dtype if multiplies_bfloat16(device) else torch.float32
    text, model = checkpoints.load_text(found), checkpoints.build_model(found, device, dtype)
    return Parts(model, video_tokenizer.to(device), codec, defaults, text, int8)


def wrap_tokenizer(found: Checkpoint, tokenizer: VideoTokenizer) -> VideoTokenizer:
    """Add what a model's grids have beside a tokenizer's codes: row ends, two cameras."""
    if found.defaults.row_ends:
        tokenizer = RowEnds(tokenizer)
    return TwoCameras(tokenizer) if found.config.num_seam_tokens else tokenizer


def decide(
    name_or_path: str | Path,
    device: torch.device,
    dtype: DTypeChoice,
    backend: Backend,
    config: str | Path | None = None,
) -> tuple[DTypeName, Backend]:
    """Resolve dtype and backend, which may be `auto`, for a model on this machine.

    `auto` follows timings, which may differ between calls: distributed runs call this once.
    """
    shape = checkpoints.find_model(name_or_path, config).config
    chosen = choose_dtype(dtype, device, shape)
    return chosen, choose_backend(backend, device, chosen, shape)


def save_checkpoint(found: Checkpoint, target: Path, tokenizer: str | Path | None) -> list[str]:
    """Write a checkpoint to a folder of ours; return the parts besides config and weights."""
    if found.family.text and found.family.text.encoder:
        raise ValueError(f"{found.path}: cannot be converted: its text encoder is stored elsewhere")
    check_storable(found.weights)
    names = save_parts(found, target, tokenizer)
    checkpoints.write_checkpoint(target, found.config, found.weights, found.merge)
    return names


def save_parts(found: Checkpoint, target: Path, tokenizer: str | Path | None = None) -> list[str]:
    """Write what a checkpoint has besides config and weights to a folder of ours."""
    names = [checkpoints.DEFAULTS_FILE]
    if (stored := _stored_tokenizer(found, tokenizer)) is not None:
        checkpoints.save_tokenizer(target, stored)
        names.append(f"{checkpoints.TOKENIZER_FOLDER}/")
    if codec := codec_of(found):
        checkpoints.write_actions_file(target / checkpoints.ACTIONS_FILE, codec)
        names.insert(0, checkpoints.ACTIONS_FILE)
    if checkpoints.save_text(found, target):
        names.append(f"{checkpoints.TEXT_FOLDER}/")
    checkpoints.write_defaults(target, found.defaults)
    return names


def _stored_tokenizer(found: Checkpoint, given: str | Path | None) -> VideoTokenizer | None:
    """Return the tokenizer to copy; None if it stays where the user put it."""
    is_ours = found.family is checkpoints.OWN
    is_apart = is_ours and not found.path.with_name(checkpoints.TOKENIZER_FOLDER).is_dir()
    if found.family.tokenizer is None or (is_apart and given is None):
        return None
    tokenizer = _tokenizer(found, given)
    return tokenizer if hasattr(tokenizer, "save_pretrained") or not is_apart else None


def _tokenizer(found: Checkpoint, given: str | Path | None) -> VideoTokenizer:
    if given is not None:
        return checkpoints.load_tokenizer(given, allow_torchscript=True)
    return checkpoints.tokenizer_of(found)


def check_strategy(found: Checkpoint, strategy: Strategy) -> None:
    """Raise ValueError if a strategy cannot decode a model's frames; reads no weights."""
    grid = TokenGrid(1, found.config.grid_height, found.config.grid_width)
    strategy.check(grid)
    if strategy.has_schedule:
        check_learnt(strategy.schedule(grid), shape_of(found.config, torch.device("meta")).stand_in)


def codec_of(found: Checkpoint) -> ActionCodec | None:
    """Return the actions of a checkpoint, from its family or its actions file."""
    if not found.config.num_action_tokens:
        return None
    family, path = found.family, found.path.with_name(checkpoints.ACTIONS_FILE)
    if family.name_actions and not path.is_file():
        return family.name_actions(found)
    return family.actions or checkpoints.read_actions_file(path)


CARD_FILE, LOG_FILE, CURVE_FILE = "README.md", "log.jsonl", "loss.png"
# Optional files of a world: where videos start, and its training log.
STARTS = ("prompt.mp4", "prompt.jsonl", "walk.jsonl", "scenes")
EXTRAS = (*STARTS, LOG_FILE, CURVE_FILE, CARD_FILE)


@dataclass(frozen=True)
class WorldSource:
    """The arguments of `load_parts` that loaded a world."""

    name_or_path: str | Path
    config: str | Path | None = None
    tokenizer: str | Path | None = None
    adapter: str | Path | None = None

    @cached_property
    def folder(self) -> Path:  # with its prompt and scenes; may be downloaded from the Hub
        path = checkpoints.base_path(self.name_or_path)
        return path if path.is_dir() else path.parent


def save_world(
    source: WorldSource | None, target: Path, size_px: tuple[int, int], name: str | None = None
) -> None:
    """Copy a world to a folder of ours, weights bit for bit; other files there are kept.

    TorchScript tokenizers (Cosmos) are not copied. A world without a model card gets one, with
    `name` as the argument of `from_pretrained`.
    """
    if source is None:
        raise ValueError("world cannot be saved: it was not loaded by from_pretrained")
    found = checkpoints.find_model(source.name_or_path, source.config, source.adapter)
    if target.resolve() == (folder := found.path.parent).resolve():
        raise ValueError(f"{target} is where the world was loaded from: choose another folder")
    save_checkpoint(found, target, source.tokenizer)
    for extra in EXTRAS:
        copy_whole(folder / extra, target / extra)
    if not (target / CARD_FILE).exists():
        write_text(target / CARD_FILE, _card(found, target, size_px, name or str(target)))


def _card(found: Checkpoint, folder: Path, size_px: tuple[int, int], name: str) -> str:
    """Format a model card: the world, its training if there is a log, and how to use it."""
    config, codec, defaults = found.config, codec_of(found), found.defaults
    weights = sum(weight.numel() for weight in found.weights.values())
    dtype = str(next(iter(found.weights.values())).dtype).removeprefix("torch.")
    size, names = "x".join(map(str, size_px)), codec.names if codec else []
    if defaults.context_frames:
        what = f"the actions {', '.join(names)}" if names else "no actions"
        about = f"Continues video of {size} pixels at {defaults.fps:g} frames/s, given {what}."
        given = '"clip.mp4"' + (f', "{names[-1]}*{defaults.num_frames}"' if names else "")
        made, file = "video", "dream.mp4"
    else:
        what = f"{names[0]} ... {names[-2]}" if names else "texts"  # the last class is empty
        about, made, file = f"Generates images of {size} pixels from {what}.", "image", "dream.png"
        given = f'actions="{names[0]}"' if names else 'text="a red house"'
    rows = {
        "transformer": f"{config.num_layers} layers, hidden size {config.hidden_size}, "
        f"{weights / 1e6:.2f}M weights in {dtype}",
        "frame": f"{config.grid_height}x{config.grid_width} tokens of "
        f"{config.image_vocab_size:,} codes",
        "context": f"{config.max_positions:,} tokens",
    }
    log = folder / LOG_FILE
    lines = read_json_lines(log) if log.is_file() else []  # a killed run may not have written any
    last = {key: value for line in lines for key, value in line.items() if value is not None}
    if "step" in last:
        rows["training"] = f"{last['step']:,} steps"
        for key, what in (("loss", "loss"), ("validation_loss", "held-out loss")):
            if key in last:
                rows["training"] += f", {what} {last[key]:.3f} nats per token"
    if found.family.licence:
        rows["licence"] = found.family.licence
    table = "\n".join(f"| {what} | {said} |" for what, said in rows.items())
    curve = f"\n![Loss]({CURVE_FILE})\n" if (folder / CURVE_FILE).is_file() else ""
    return f"""---
library_name: diagd
tags: [world-model, autoregressive-{made}]
---

# {name.rpartition("/")[2]}

{about}

```python
import diagd

world = diagd.VideoGenerator.from_pretrained("{name}")
{made} = world.generate({given})
{made}.save("{file}")
```

| | |
|---|---|
{table}
{curve}"""
