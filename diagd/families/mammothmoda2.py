"""MammothModa2 (arXiv:2511.18262), its first stage: text to the tokens of an image.

Preview is a Qwen2.5-VL, Dev a Qwen3-VL, each with tables and heads of its own for what is drawn,
and, in the layers that `moe_type` names, a second MLP for those ids. Ours begin with them: the
codes, the end of a row, which is given and not drawn, and the rest; then come the words, which are
input only. All three rotary positions of a token are its place, so plain ones do.

Its pixels are those of a diffusion transformer, which diagd does not run: it reads hidden states of
one causal pass (`diagd.FirstStage`). `grid_height` and `grid_width` in config.json set another
default size than 32 x 32 tokens.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diagd.checks import brief
from diagd.families.defaults import GenerationDefaults, image_defaults
from diagd.families.family import Checkpoint, Family, HandOver, Source, TextFolder
from diagd.families.presets import MAMMOTHMODA2 as PRESETS
from diagd.families.weights import llama_fields, with_biases
from diagd.files import naming, read_json_object, read_lines, require_file
from diagd.models.config import ModelConfig
from diagd.tokenizers.text import TextIds, TextPrompts, ids_of, load_words, read_ranks
from diagd.tokenizers.vq import VideoTokenizer
from diagd.weight_files import tensors_under

_DECODER = "llm_model.model.language_model."
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SHAPES = {  # by model_type of llm_config
    "mammothmoda2_qwen2_5_vl": PRESETS["mammothmoda2-preview"],
    "mammothmoda2_qwen3_vl": PRESETS["mammothmoda2-dev"],
}
_DRAWING = "t2i_generation_config.json"
_SIDE_PX = 32  # of a token, in the makers' examples
_LAYERS = {False: (-1,), True: (-2, -5, -8, -11, -14, -17)}  # of Preview; of Dev, unless it says
_MIN_KEPT = 3  # ids out of which its makers draw at least
# In order, behind the words of the text tokenizer; then those of its second table, and of a file
_NAMES = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>"),
    *("</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", *(f"<|extra_{i}|>" for i in range(181))),
    *(f"<|extra_margin_{i}|>" for i in range(218)),
)
_ROW_END, _IMAGE_END = "<|endofline|>", "<|image end|>"
_DRAWN = (_ROW_END, "<|endoffile|>", "<|gen_placeholder|>", "<|useless token|>", "<|beginoftext|>")
_RANKS, _VISION_NAMES = "mammothu.tiktoken", "mammothu_vision_tokens.txt"
_NUM_UNGUIDED = 10  # last tokens of a prompt, which are the unconditional one
_REQUEST = "<|im_start|>system\nYou are a helpful image generator.<|im_end|>\n<|im_start|>user\n"


class _Ids(NamedTuple):
    """Ids of the makers."""

    first: int  # of the second table
    row_end: int
    codes: range

    @property
    def image_end(self) -> int:
        return self.codes[0] - 1

    def ours(self, num_drawn: int, num_words: int) -> Tensor:
        """Return the id of the makers of each of ours, (num_drawn + num_words,) int64."""
        visual = torch.tensor([*self.codes, self.row_end]) - self.first
        rest = torch.ones(num_drawn, dtype=torch.bool)
        rest[visual] = False
        drawn = torch.cat([visual, rest.nonzero()[:, 0]]) + self.first
        return torch.cat([drawn, torch.arange(num_words)])


def _drawing(folder: Path) -> Mapping[str, Any]:
    return read_json_object(path) if (path := folder / _DRAWING).is_file() else {}


def _text_of(side: Mapping[str, Any]) -> dict[str, Any]:
    llm = side.get("llm_config") or {}
    return {**llm, **(llm.get("text_config") or {})}


def _ids_of(source: Source, num_drawn: int, num_words: int) -> _Ids:
    given = _drawing(source.path.parent)
    names = "eol_token_id", "visual_token_start_id", "visual_token_end_id"
    usual = zip(names, (152064, 152072, 168456), strict=True)
    row_end, start, end = (int(given.get(name, default)) for name, default in usual)
    first = int(_text_of(source.side).get("gen_vocab_start_index") or row_end)
    if not num_words <= first <= row_end < start - 1 < end - 1 < first + num_drawn:
        raise ValueError(
            f"expected ids in the order words, row end, codes, got {num_words} words, "
            f"{num_drawn} ids from {first} on, row end {row_end} and codes {start} to {end - 1}"
        )
    return _Ids(first, row_end, range(start, end))


def _layers(moe_type: Any, num_layers: int) -> tuple[int, ...]:
    """Return the layers with a second MLP that a config names, such as `ffn-18:36`."""
    if not (found := re.fullmatch(r"ffn(?:-(\d{1,4}):(\d{1,4}))?", str(moe_type), re.ASCII)):
        raise ValueError(f"moe_type must be ffn or such as ffn-14:28, got {brief(moe_type)}")
    return tuple(range(num_layers)[int(found[1] or 0) : int(found[2] or num_layers)])


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    side, text = source.side, _text_of(source.side)
    kind = (side.get("llm_config") or {}).get("model_type")
    if kind not in list(_SHAPES):
        known = " or ".join(_SHAPES)
        raise ValueError(f"model_type of llm_config must be {known}, got {brief(kind)}")
    usual = _SHAPES[kind]
    theirs = tensors_under(_DECODER, source.tensors)
    weights = {
        f"model.{name.replace('.gen_mlp.', '.visual_mlp.')}": tensor
        for name, tensor in theirs.items()
        if name != "gen_embed_tokens.weight"
    }
    words, drawn = weights[_EMBEDDING], theirs["gen_embed_tokens.weight"]
    ids = _ids_of(source, len(drawn), len(words))
    order = ids.ours(len(drawn), 0) - ids.first
    weights[_EMBEDDING] = torch.cat([drawn[order], words])
    weights[_HEAD] = source.tensors["llm_model.gen_head.weight"][order]
    # with one position in all three places, sections and their order make no difference
    rope = {k: value for k, value in (text.get("rope_scaling") or {}).items() if value != "mrope"}
    said = {"rope_theta": usual.rope_theta, **text, "rope_scaling": rope}
    fields = llama_fields(weights, said, usual)
    fields["bias"] = usual.bias
    layers = _layers(text.get("moe_type", "ffn"), fields["num_layers"])
    config = ModelConfig(
        **fields,
        image_vocab_size=len(ids.codes) + 1,
        grid_height=int(side.get("grid_height", usual.grid_height)),
        grid_width=int(side.get("grid_width", usual.grid_width - 1)) + 1,
        qk_norm=usual.qk_norm,
        visual_mlp_layers=layers,
    )
    return config, with_biases(weights) if usual.bias else weights


def _known_ids(found: Checkpoint) -> tuple[_Ids, Tensor]:
    """Return the ids of the makers, and the one of each of ours."""
    sizes = found.config.vocab_size, found.config.extra_embeddings
    ids = _ids_of(found.source, *sizes)
    return ids, ids.ours(*sizes)


def _hand_over(found: Checkpoint) -> HandOver:
    (ids, theirs), is_dev = _known_ids(found), found.config.qk_norm
    end = int((theirs == ids.image_end).nonzero())
    layers = (is_dev and found.source.side.get("gen_condition_layers")) or _LAYERS[is_dev]
    return HandOver(theirs, end, tuple(map(int, layers)), _SIDE_PX)


def _no_tokenizer(found: Checkpoint) -> VideoTokenizer | None:
    raise ValueError(
        "a diffusion transformer paints what it writes, which diagd does not run: diagd generate "
        "writes the tokens, and diagd.FirstStage hands them over (docs/hybrid.md)"
    )


def _defaults(found: Checkpoint) -> GenerationDefaults:
    """Return the settings of the makers' file; what it omits is as in transformers' class.

    But for drawing itself: their command makes four images of a text, so they are not greedy.
    """
    path = found.path.parent / _DRAWING
    given = _drawing(path.parent)
    with naming(path, (ValueError, TypeError)):
        if (penalty := given.get("repetition_penalty") or 1.0) != 1.0:
            raise ValueError(f"repetition_penalty must be 1, which is none, got {brief(penalty)}")
        temperature, top_k, top_p = (
            usual if (value := given.get(name)) is None else value
            for name, usual in (("temperature", 1.0), ("top_k", 50), ("top_p", 1.0))
        )
        return image_defaults(
            temperature=temperature if given.get("do_sample", True) else 0.0,
            top_k=max(_MIN_KEPT, top_k) if top_k else None,
            top_p=top_p if top_p < 1 else None,
            guidance=7.0,
            row_ends=True,
        )


class MammothModa2Prompts(TextPrompts):
    """A request that holds the text, then start and size of the image; or its last ids alone."""

    def __init__(self, folder: Path, found: Checkpoint) -> None:
        (ids, theirs), config = _known_ids(found), found.config
        self.words = _read_words(folder, ids.first)
        if (named := ids_of(self.words, [_ROW_END, _IMAGE_END])) != [ids.row_end, ids.image_end]:
            raise ValueError(
                f"{_ROW_END} and {_IMAGE_END} must be {ids.row_end} and {ids.image_end}, "
                f"got {named[0]} and {named[1]} (of another model?)"
            )
        self.ours = torch.full((int(theirs.max()) + 1,), -1)
        self.ours[theirs] = torch.arange(len(theirs))
        size = f"{config.grid_width - 1}*{config.grid_height}"
        self.behind = f"<|im_end|>\n<|im_start|>assistant\n<|image start|>{size}<|image token|>"

    def __call__(self, text: str) -> TextIds:
        said = f"{_REQUEST}{text}{self.behind}"
        theirs = torch.tensor([self.words(said, add_special_tokens=False).input_ids])
        if int(theirs.max()) >= len(self.ours) or (self.ours[theirs] < 0).any():
            raise ValueError(f"text has tokens without an embedding: {brief(text)}")
        return TextIds(self.ours[theirs], self.ours[theirs[:, -_NUM_UNGUIDED:]])


def _read_words(folder: Path, first: int) -> Any:
    if (folder / "tokenizer.json").is_file():
        return load_words(folder)
    ranks, names = folder / _RANKS, folder / _VISION_NAMES
    require_file(ranks, "text tokenizer (tokenizer.json, or its makers')")
    vision = [name.strip() for name in read_lines(names, "names of its visual tokens")]
    return read_ranks(ranks, first - len(_NAMES), [*_NAMES, *_DRAWN, *filter(None, vision)])


MAMMOTHMODA2 = Family(
    name="MammothModa2",
    licence="code and weights: Apache-2.0",
    signature=("llm_model.gen_head.weight",),
    convert=_convert,
    tokenizer=_no_tokenizer,
    text=TextFolder(("mammothmoda2",), MammothModa2Prompts, file="config.json"),
    hand_over=_hand_over,
    defaults=_defaults,
)
