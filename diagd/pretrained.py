"""What a video generator is made of, read from disk: model, tokenizer, action codec."""

from dataclasses import dataclass
from pathlib import Path

import torch

from diagd.data.actions import ActionCodec, ActionVocabulary
from diagd.data.tokenizers import VideoTokenizer, VQTokenizer
from diagd.models.checkpoints import load_model, model_path
from diagd.models.transformer import Transformer


@dataclass(frozen=True)
class Parts:
    """The parts of a world model; `vocabulary` is None for a model without actions."""

    model: Transformer
    tokenizer: VideoTokenizer
    vocabulary: ActionCodec | None


def load_parts(
    name_or_path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Parts:
    """Load a checkpoint folder with its tokenizer and actions, or a bundled model.

    Raises:
        FileNotFoundError, ValueError: something is missing or damaged (named), or does not fit.
    """
    folder = model_path(name_or_path)
    tokenizer = VQTokenizer.from_pretrained(folder / "tokenizer")
    model = load_model(folder, device=device, dtype=dtype)
    config = model.config
    if tokenizer.codebook_size != config.image_vocab_size:
        raise ValueError(
            f"{folder}: the model has {config.image_vocab_size} visual ids, "
            f"its tokenizer {tokenizer.codebook_size} codes"
        )
    vocabulary = None
    if config.num_action_tokens:
        vocabulary = ActionVocabulary.load(folder / "actions.json")
        if config.num_action_tokens != 1 or vocabulary.num_ids != (
            config.vocab_size - config.image_vocab_size
        ):
            raise ValueError(
                f"{folder}: actions.json names {vocabulary.num_ids} actions of one token, "
                f"the model has {config.vocab_size - config.image_vocab_size} action ids and "
                f"{config.num_action_tokens} tokens an action"
            )
    return Parts(model, tokenizer.to(device), vocabulary)
