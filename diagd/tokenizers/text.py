"""Text as a text-to-video model reads it: the states of a T5 encoder, one vector a token.

Cosmos pads every prompt to 512 places, sets those behind the text to zero and lets all of them be
attended to; so does this module.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional

from diagd.files import require_file, require_folder
from diagd.weight_files import read_weights

NUM_PLACES = 512


def encode_text(text: str, folder: str | Path, num_places: int = NUM_PLACES) -> Tensor:
    """Encode a text as `text_states`: (1, num_places, size) float32, zero behind the text."""
    states = text_states(text, folder, num_places)
    return functional.pad(states, (0, 0, 0, num_places - len(states)))[None]


@torch.inference_mode()
def text_states(text: str, folder: str | Path, max_tokens: int) -> Tensor:
    """Encode a text with the T5 of a local folder (weights and tokenizer, as transformers saves).

    Returns:
        (tokens, size) float32; a text longer than `max_tokens` is cut.
    """
    from transformers import AutoTokenizer, T5EncoderModel  # slow to import

    if not text.strip():
        raise ValueError("text must not be empty")
    folder = require_folder(folder, "text encoder folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        encoder = T5EncoderModel.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} holds no T5 encoder: {str(error).splitlines()[0]}") from None
    ids = tokenizer(text, truncation=True, max_length=max_tokens, return_tensors="pt").input_ids
    return encoder(ids).last_hidden_state[0].float()


def read_embedding(path: str | Path) -> Tensor:
    """Read a text encoded before: a safetensors file with one tensor (places, size) or (1, ...)."""
    tensors = list(read_weights(require_file(path, "text embedding")).values())
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    if len(tensors) != 1 or tensors[0].dim() < 2 or tensors[0].shape[:-2] not in ((), (1,)):
        raise ValueError(f"{path}: expected one tensor (places, size), got {shapes or 'none'}")
    return tensors[0].float().reshape(1, *tensors[0].shape[-2:])
