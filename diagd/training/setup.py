"""What a training run starts from: the model fitted to the data, its weights, its optimisers."""

import dataclasses
import time
from functools import cache
from typing import Literal

import torch

from diagd.data.actions import ActionVocabulary
from diagd.families.checkpoints import load_model, model_path
from diagd.families.own_format import TOKENIZER_FOLDER
from diagd.families.presets import PRESETS
from diagd.families.tokenizer_loading import load_tokenizer
from diagd.models.attention_init import aim_heads
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.tokenizers.shards import TokenClips, codebook_fingerprint
from diagd.tokenizers.vq import VQTokenizer
from diagd.training.options import OptimizerName


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
