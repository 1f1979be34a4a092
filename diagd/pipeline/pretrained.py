"""What a video generator is made of, read from disk: model, tokenizer, actions, defaults.

Our own folders hold all of it (see `diagd.families.own_format`). A released checkpoint is read as
it is; a tokenizer that is not with it is named by the user.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from diagd.backends.devices import DTypeChoice, dtype_of, multiplies_bfloat16
from diagd.backends.prepare import choose_dtype
from diagd.data.actions import ActionCodec
from diagd.families.checkpoints import build_model, find_model
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Checkpoint
from diagd.families.own_format import (
    ACTIONS_FILE,
    DEFAULTS_FILE,
    TOKENIZER_FOLDER,
    read_actions_file,
    save_tokenizer,
    write_actions_file,
    write_defaults,
)
from diagd.families.tokenizer_loading import load_tokenizer
from diagd.memory import check_memory
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.tokenizers.vq import VideoTokenizer, VQTokenizer


@dataclass(frozen=True)
class Parts:
    """The parts of a world model; `vocabulary` is None for a model without actions."""

    model: Transformer
    tokenizer: VideoTokenizer
    vocabulary: ActionCodec | None
    defaults: GenerationDefaults


def load_parts(
    name_or_path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | DTypeChoice = torch.float32,
    config: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> Parts:
    """Load a checkpoint with its tokenizer and actions, or a bundled model.

    Args:
        dtype: of the weights; by name, `auto` is the fastest on this machine.
        config: a config file to read instead of the one beside the weights.
        tokenizer: a tokenizer folder to use instead of the checkpoint's own. TorchScript is loaded,
            and so run, only from a folder named here.

    Raises:
        FileNotFoundError, ValueError: something is missing or damaged (named), or does not fit.
    """
    found, device = find_model(name_or_path, config), torch.device(device)
    shape, folder = found.config, found.path.parent
    if not isinstance(dtype, torch.dtype):
        dtype = dtype_of(choose_dtype(dtype, device, shape))
    video_tokenizer = _tokenizer(found, tokenizer)
    if video_tokenizer.codebook_size != shape.image_vocab_size:
        raise ValueError(
            f"{folder}: the model has {shape.image_vocab_size} visual ids, "
            f"its tokenizer {video_tokenizer.codebook_size} codes"
        )
    codec, num_ids = codec_of(found), shape.vocab_size - shape.image_vocab_size
    if codec and (codec.num_ids, codec.num_tokens) != (num_ids, shape.num_action_tokens):
        raise ValueError(
            f"{folder}: {ACTIONS_FILE} names {codec.num_ids} action ids and {codec.num_tokens} "
            f"tokens an action, the model has {num_ids} and {shape.num_action_tokens}"
        )
    if shape.prefix_length > shape.extra_embeddings:  # see `prefix_ids`
        raise ValueError(
            f"{folder}: the model begins with {shape.prefix_length} tokens, and has embeddings for "
            f"{shape.extra_embeddings}"
        )
    height_px, width_px = video_tokenizer.frame_size_px(shape.grid_height, shape.grid_width)
    check_memory(12 * height_px * width_px, f"{folder}: a frame of {height_px}x{width_px} pixels")
    if isinstance(video_tokenizer, VQTokenizer):
        video_tokenizer.painting = dtype if multiplies_bfloat16(device) else torch.float32
    defaults = found.family.defaults(found)
    return Parts(build_model(found, device, dtype), video_tokenizer.to(device), codec, defaults)


def save_parts(found: Checkpoint, target: Path, tokenizer: Path | None) -> list[str]:
    """Write what belongs to a checkpoint besides its weights into our folder; returns the names.

    Raises:
        FileNotFoundError, ValueError: the tokenizer is missing, damaged, or does not fit.
    """
    names = [DEFAULTS_FILE]
    if found.family.tokenizer is not None:  # else it stays where the user put it
        save_tokenizer(target, _tokenizer(found, tokenizer))
        names.append(f"{TOKENIZER_FOLDER}/")
    codec = codec_of(found)
    if codec is not None:
        write_actions_file(target / ACTIONS_FILE, codec)
        names.insert(0, ACTIONS_FILE)
    write_defaults(target, found.family.defaults(found))
    return names


def _tokenizer(found: Checkpoint, given: str | Path | None) -> VideoTokenizer:
    if given is not None:
        return load_tokenizer(given, allow_torchscript=True)
    tokenizer = found.family.tokenizer and found.family.tokenizer(found)
    if tokenizer is None:
        raise ValueError(
            f"{found.path}: its tokenizer is not with it: name the folder with --tokenizer"
        )
    return tokenizer


def codec_of(found: Checkpoint) -> ActionCodec | None:
    """Return the actions of a checkpoint, its family's or those in the file beside it."""
    if not found.config.num_action_tokens:
        return None
    return found.family.actions or read_actions_file(found.path.with_name(ACTIONS_FILE))


def prefix_ids(config: ModelConfig) -> Sequence[int]:
    """Return the ids before the first frame: those that follow the vocabulary (Cosmos' BOV)."""
    return range(config.vocab_size, config.vocab_size + config.prefix_length)
