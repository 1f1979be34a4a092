"""Text as a text-to-video model reads it: the states of a T5 encoder, one vector a token.

Cosmos pads every prompt to 512 places, sets those behind the text to zero and lets all of them be
attended to; so does this module.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer, T5EncoderModel

from diagd.files import require_file, require_folder
from diagd.weight_files import read_weights

NUM_PLACES = 512


@torch.inference_mode()
def encode_text(text: str, folder: str | Path, num_places: int = NUM_PLACES) -> Tensor:
    """Encode a text with the T5 of a local folder (weights and tokenizer, as transformers saves).

    Returns:
        (1, num_places, size) float32, zero behind the text; a longer text is cut.
    """
    if not text.strip():
        raise ValueError("text must not be empty")
    folder = require_folder(folder, "text encoder folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        encoder = T5EncoderModel.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} holds no T5 encoder: {str(error).splitlines()[0]}") from None
    ids = tokenizer(text, truncation=True, max_length=num_places, return_tensors="pt").input_ids
    states = encoder(ids).last_hidden_state.float()
    padded = states.new_zeros(1, num_places, states.shape[2])
    padded[:, : states.shape[1]] = states
    return padded


def read_embedding(path: str | Path) -> Tensor:
    """Read a text encoded before: a safetensors file with one tensor (places, size) or (1, ...)."""
    tensors = list(read_weights(require_file(path, "text embedding")).values())
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    if len(tensors) != 1 or tensors[0].dim() < 2 or tensors[0].shape[:-2] not in ((), (1,)):
        raise ValueError(f"{path}: expected one tensor (places, size), got {shapes or 'none'}")
    return tensors[0].float().reshape(1, *tensors[0].shape[-2:])
