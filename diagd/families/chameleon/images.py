"""Chameleon, Anole and Lumina-mGPT (arXiv:2405.09818, 2407.06135, 2408.02657): images from text.

A LLaMA with LayerNorms on each head's queries and keys reads and writes one vocabulary. Here it
writes images alone: an image id is the number of its code, and any id of the vocabulary stands
behind all columns of the logits, at `vocab_size` + its own number. Lumina-mGPT, which has images of
any size, ends each row of codes in a token; `grid_height` and `grid_width` in its config.json say
another size than 48 x 48 codes, which are 768 pixels.

Folders are those of transformers (`ChameleonForConditionalGeneration`). They have no decoder of
images: that is in Meta's `vqgan.ckpt`, which belongs into their folder `tokenizer`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diagd.families.defaults import GenerationDefaults, image_defaults
from diagd.families.family import Checkpoint, Family, Source, TextFolder
from diagd.families.presets import CHAMELEON as PRESETS
from diagd.families.weights import llama_fields
from diagd.files import read_json_object
from diagd.models.config import ModelConfig
from diagd.tokenizers.text import TextIds, TextPrompts, ids_of, read_words, text_ids
from diagd.tokenizers.vq import VQTokenizer, read_vqgan
from diagd.weight_files import read_tensors

DEFAULT = PRESETS["chameleon-7b"]  # what a config leaves out is as it is there
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LEFT_OUT = "model.vqmodel.", "action_head."  # pixels, and what RynnVLA-002 would do
_IMAGE, _DIGITS = "IMGIMG", str.maketrans("ABCDEFGHIJ", "0123456789")
_ROW_END, TURN_END = "<reserved08799>", "<reserved08706>"
_IMAGE_START, IMAGE_END, _SIZES = "<racm3:break>", "<eoss>", 8800
_PICTURE_SCALE = 1.2  # of guidance by a picture
SIGNATURE = ("model.layers.0.self_attn.q_norm.bias",)
_LUMINA = "z_loss_weight"  # a field of Lumina-mGPT's config class alone
_LUMINA_SIDE, _PATCH_PX = 48, 16


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    side, has_row_ends = source.side, _LUMINA in source.side
    pixels = side.get("vq_config") or {}
    halvings = len(pixels.get("channel_multiplier", (1, 1, 2, 2, 4))) - 1
    num_rows = int(pixels.get("resolution", 512)) // 2**halvings
    height, width = grid_of(side, _LUMINA_SIDE) if has_row_ends else (num_rows, num_rows)
    images = visual_ids(side["vocabulary_map"], has_row_ends)
    whole = range(len(source.tensors[_EMBEDDING]))
    return build_decoder(
        source, images, [], whole, grid_height=height, grid_width=width + has_row_ends
    )


def build_decoder(
    source: Source, visual: list[int], actions: list[int], fed: Sequence[int], **fields: Any
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return config and weights of a decoder of some ids of Chameleon's vocabulary, in this order.

    Those of `visual` and `actions` have columns in the logits; others are `fed` alone.
    """
    if source.side.get("swin_norm"):
        raise ValueError("swin_norm must be false: a block of the 30B model is not known here")
    weights = {
        name: tensor.flatten() if "_norm." in name else tensor
        for name, tensor in source.tensors.items()
        if not name.startswith(_LEFT_OUT)
    }
    table, predicted = weights[_EMBEDDING], torch.tensor([*visual, *actions])
    weights[_HEAD] = weights.get(_HEAD, table)[predicted]  # tied, it is the table
    weights[_EMBEDDING] = torch.cat([table[predicted], table[torch.tensor(fed)]])
    fields |= llama_fields(weights, source.side, DEFAULT)
    if fields["norm_eps"] != DEFAULT.norm_eps:  # else the norms of heads would differ
        raise ValueError(f"rms_norm_eps must be {DEFAULT.norm_eps}, got {fields['norm_eps']}")
    config = ModelConfig(**fields, image_vocab_size=len(visual), qk_norm=True, head_norm=True)
    return config, weights


def grid_of(side: Mapping[str, Any], default: int) -> tuple[int, int]:
    height, width = (int(side.get(f"grid_{name}", default)) for name in ("height", "width"))
    if height % 2 or width % 2:
        raise ValueError(f"grid_height and grid_width must be even, got {height} and {width}")
    return height, width


def size_names(height: int, width: int) -> list[str]:
    """Return the names of image start, height and width, which stand before such an image."""
    return [_IMAGE_START, *(f"<reserved{_SIZES + side // 2:05d}>" for side in (height, width))]


def visual_ids(vocabulary: Mapping[str, int], has_row_ends: bool) -> list[int]:
    """Return the id of each code, of which 207 is called IMGIMGCAHZ; then that of row ends."""
    ids = {
        int(name.removeprefix(_IMAGE).removesuffix("Z").translate(_DIGITS)): number
        for name, number in vocabulary.items()
        if name.startswith(_IMAGE)
    }
    if not ids or sorted(ids) != list(range(len(ids))):
        raise ValueError(f"vocabulary_map must name image ids 0, 1, ..., got {len(ids)} of them")
    row_end = [vocabulary[_ROW_END]] if has_row_ends else []
    return [*(ids[code] for code in range(len(ids))), *row_end]


def pixel_tokenizer(found: Checkpoint) -> VQTokenizer:
    if not (path := found.path.parent / "tokenizer" / "vqgan.ckpt").is_file():
        raise ValueError(
            f"{found.path}: holds no decoder of images: put vqgan.ckpt of Meta's release into "
            f"{path.parent}, or name a folder with --tokenizer"
        )
    return read_vqgan(read_tensors(path), path)


class ChameleonPrompts(TextPrompts):
    """BOS, a text and the image start; without a text, the other two. A picture stands behind BOS.

    Lumina-mGPT is asked in a sentence, which a token ends, and reads the size of the image behind
    the image start; without a text, there is no BOS either.
    """

    def __init__(self, folder: Path, found: Checkpoint) -> None:
        config, side = found.config, read_json_object(folder / "config.json")
        self.words, self.first = read_words(folder, side), config.vocab_size
        names = [getattr(self.words, "boi_token", _IMAGE_START)]
        self.sentence, turn_end = "{}", list[str]()
        self.before = [self.words.bos_token_id]
        if _LUMINA in side:
            height, width = config.grid_height, config.grid_width - 1
            names += size_names(height, width)[1:]
            size, turn_end = f"{width * _PATCH_PX}x{height * _PATCH_PX}", [TURN_END]
            self.sentence = f"Generate an image of {size} according to the following prompt:\n{{}}"
            self.before = []
        self.turn_end, self.start = ids_of(self.words, turn_end), ids_of(self.words, names)
        self.takes_pictures = not turn_end  # Lumina-mGPT's stand elsewhere

    def __call__(self, text: str) -> TextIds:
        said = text_ids(self.words, self.sentence.format(text))
        prompt = torch.tensor([[*said, *self.turn_end, *self.start]])
        unconditional = torch.tensor([[*self.before, *self.start]])
        return TextIds(self.first + prompt, self.first + unconditional)

    def with_pictures(self, pictures: Tensor, text: str) -> TextIds:
        said, count = self(text), len(pictures)
        end = self.first + torch.tensor([ids_of(self.words, [IMAGE_END])])
        parts = said.unconditional[:, 1:], pictures.flatten(1), end
        seen = torch.cat([part.expand(count, -1) for part in parts], 1)
        prompt, picture = (
            torch.cat([row[:, :1].expand(count, -1), seen, row[:, 1:].expand(count, -1)], 1)
            for row in (said.prompt, said.unconditional)
        )
        return said._replace(prompt=prompt, picture=picture, picture_scale=_PICTURE_SCALE)


def _defaults(found: Checkpoint) -> GenerationDefaults:
    if _LUMINA in found.source.side:
        return image_defaults(top_k=2000, top_p=None, guidance=4.0, row_ends=True, keep_frames=0)
    return image_defaults(temperature=0.7, guidance=3.0, keep_frames=0)


CHAMELEON = Family(
    name="Chameleon",
    licence="Chameleon Research License: research only; Anole and Lumina-mGPT: the same",
    signature=SIGNATURE,
    convert=_convert,
    tokenizer=pixel_tokenizer,
    text=TextFolder(("chameleon",), ChameleonPrompts),
    defaults=_defaults,
)
