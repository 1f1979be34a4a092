"""Janus and Janus-Pro (arXiv:2410.13848, 2501.17811): text to image, as a video of one frame.

A LLaMA takes text ids and image ids, and a head with a hidden layer predicts image ids only. Here
images come first: an image id is unchanged, and a text id comes after all columns of the logits, at
`vocab_size` + its own number. Image ids pass through small vectors and an aligner, which become
rows of the embedding table. The encoder of input pictures (a SigLIP) is dropped.

Folders are those of transformers (`JanusForConditionalGeneration`), or DeepSeek's own.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from diagd.checks import brief
from diagd.families.defaults import image_defaults
from diagd.families.family import Checkpoint, Family, Source, TextFolder
from diagd.families.presets import JANUS as PRESETS
from diagd.families.weights import count_layers, llama_fields
from diagd.models.config import ModelConfig
from diagd.tokenizers.text import TextIds, TextPrompts, ids_of, read_words, text_ids
from diagd.tokenizers.vq import VQTokenizer, read_vqgan
from diagd.weight_files import rename_by, tensors_under

# DeepSeek's names, and those of transformers.
_RENAMED = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^gen_vision_model\.", "model.vqmodel."),
    (r"^gen_embed\.", "model.generation_embeddings."),
    (r"^gen_aligner\.layers\.0\.", "model.generation_aligner.fc1."),
    (r"^gen_aligner\.layers\.2\.", "model.generation_aligner.hidden_layers.0."),
    (r"^gen_head\.output_mlp_projector\.", "model.generation_head.proj_out."),
    (r"^gen_head\.", "model.generation_head."),
)
_EMBEDDING = "model.embed_tokens.weight"


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    tensors, side = rename_by(_RENAMED, source.tensors), source.side
    if not (text := side.get("text_config") or side.get("language_config")):
        raise ValueError("expected a config.json with text_config beside it")
    text = {"max_position_embeddings": 2048} | text  # a config omits transformers' defaults
    if (activation := (side.get("vq_config") or {}).get("hidden_act", "gelu")) != "gelu":
        raise ValueError(f"hidden_act of vq_config must be gelu, got {brief(activation)}")
    language = tensors_under("model.language_model.", tensors)
    weights = {f"model.{name}": tensor for name, tensor in language.items()}
    table, codes = weights[_EMBEDDING], _code_embeddings(tensors)
    weights[_EMBEDDING] = torch.cat([codes.to(table.dtype), table])
    head = (r"^proj_out\.", "head_proj."), (r"^vision_head\.", "lm_head.")
    weights |= rename_by(head, tensors_under("model.generation_head.", tensors))
    vision = side.get("vision_config") or {}
    num_rows = int(vision.get("image_size", 384)) // int(vision.get("patch_size", 16))
    config = ModelConfig(
        **llama_fields(weights, text, PRESETS["janus-pro-7b"]),
        image_vocab_size=len(codes),
        grid_height=num_rows,
        grid_width=num_rows,
    )
    return config, weights


def _code_embeddings(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the aligner's output for the vector of each image id: (codes, hidden_size)."""
    aligner = tensors_under("model.generation_aligner.", tensors)
    layers = [f"hidden_layers.{i}" for i in range(count_layers(aligner, "hidden_layers."))]
    rows = tensors["model.generation_embeddings.weight"].float()
    for place, layer in enumerate(("fc1", *layers)):
        rows = functional.gelu(rows) if place else rows
        weight, bias = (aligner[f"{layer}.{kind}"].float() for kind in ("weight", "bias"))
        rows = functional.linear(rows, weight, bias)
    return rows


def _tokenizer(found: Checkpoint) -> VQTokenizer:
    tensors = tensors_under("model.vqmodel.", rename_by(_RENAMED, found.source.tensors))
    return read_vqgan(tensors, found.path, by_direction=True)


class JanusPrompts(TextPrompts):
    """A user's text, then the image start; without a text, padding between BOS and image start."""

    def __init__(self, folder: Path, found: Checkpoint) -> None:
        self.words, self.first = read_words(folder), found.config.vocab_size
        self.start = getattr(self.words, "boi_token", "<begin_of_image>")
        _, self.padding = ids_of(self.words, [self.start, self.words.pad_token])

    def __call__(self, text: str) -> TextIds:
        said = f"<|User|>: {text}\n\n<|Assistant|>:"  # DeepSeek's folders have no template
        if self.words.chat_template:
            chat = [{"role": "user", "content": [{"type": "text", "text": text}]}]
            said = self.words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt = torch.tensor([text_ids(self.words, said + self.start)])
        unconditional = prompt.clone()
        unconditional[:, 1:-1] = self.padding
        return TextIds(self.first + prompt, self.first + unconditional)


JANUS = Family(
    name="Janus",
    licence="code: MIT; weights: DeepSeek Model License",
    config_fields=frozenset({"text_config", "language_config"}),
    signature=("model.generation_embeddings.weight", "gen_embed.weight"),
    convert=_convert,
    tokenizer=_tokenizer,
    text=TextFolder(("janus", "multi_modality"), JanusPrompts),
    defaults=lambda found: image_defaults(top_p=None, guidance=5.0, keep_frames=0),
)
