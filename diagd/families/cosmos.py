"""NVIDIA Cosmos-Predict1 autoregressive checkpoints: 4B and 12B, and 5B and 13B Video2World.

The file holds weights only. Sizes follow from their shapes; settings without a trace there (the
grid, YaRN) are those of the released models unless a config file with original field names is
given.

The video tokenizer consists of TorchScript networks around finite scalar quantisation. A code is
six numbers in [-1, 1], each with a few levels, and the codebook is the grid of all combinations, so
an id is a mixed-radix number without a table (arXiv:2309.15505; the levels are those of
Cosmos-Tokenize1-DV8x16x16): digit d of L levels is (d - L // 2) / (L // 2).
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from diagd.data.video import stretch
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Checkpoint, Family, Source, TokenizerFolder
from diagd.families.presets import COSMOS as PRESETS
from diagd.families.weights import META_NAMES, rename, sizes_of
from diagd.models.config import ModelConfig
from diagd.tokenizers import vq
from diagd.weight_files import load_torchscript

LEVELS = (8, 8, 8, 5, 5, 5)  # of the tokenizer's codes
TEMPORAL_COMPRESSION = 8  # frames per grid after the first
WINDOW = 33  # frames
WINDOW_GRIDS = 1 + (WINDOW - 1) // TEMPORAL_COMPRESSION
SCRIPTS = ("encoder.jit", "decoder.jit")
_4B, _12B = PRESETS["cosmos-4b"], PRESETS["cosmos-12b"]
_BLOCK = "model.layers.{i}."
_ATTENTION = {f"{letter}_proj": f"w{letter}" for letter in "qkvo"}
_ATTENTION |= {"q_norm": "q_norm", "k_norm": "k_norm"}
_SELF = {_BLOCK + f"self_attn.{a}": f"layers.{{i}}.attention.{b}" for a, b in _ATTENTION.items()}
_CROSS = {_BLOCK + "cross_attention_layernorm": "layers.{i}.cross_attention_norm"}
_CROSS |= {
    _BLOCK + f"cross_attn.{a}": f"layers.{{i}}.cross_attention.{b}" for a, b in _ATTENTION.items()
}
_EMBEDDING = "tok_embeddings.weight"
_CONTEXT_FRAMES = 1 + TEMPORAL_COMPRESSION  # two grids


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    side = source.side
    tensors = {name.removeprefix("model."): tensor for name, tensor in source.tensors.items()}
    has_text = "layers.0.cross_attention.wq.weight" in tensors
    modules = META_NAMES | _SELF | (_CROSS if has_text else {})
    weights = rename(tensors, modules)
    head_dim = len(tensors["layers.0.attention.q_norm.weight"])
    sizes = sizes_of(weights, len(tensors["layers.0.attention.wq.weight"]) // head_dim)
    shape = sizes["hidden_size"], sizes["num_layers"]
    released = {(p.hidden_size, p.num_layers): p for p in PRESETS.values()}.get(shape, _4B)
    released_shape = WINDOW_GRIDS, released.grid_height, released.grid_width
    frames, height, width = side.get("video_latent_shape") or released_shape
    has_yarn = side.get("apply_yarn", released.yarn_factor != 1)
    yarn_shape = side.get("original_latent_shape") or (released.yarn_frames, released.yarn_height)
    config = replace(
        released,
        **sizes,
        image_vocab_size=sizes["vocab_size"],
        max_positions=frames * height * width + has_text,
        grid_height=height,
        grid_width=width,
        prefix_length=int(has_text),
        norm_eps=float(side.get("norm_eps", released.norm_eps)),
        rope_theta=float(side.get("rope_theta", released.rope_theta)),
        yarn_factor=float(side.get("yarn_scale") or _12B.yarn_factor) if has_yarn else 1.0,
        yarn_frames=yarn_shape[0],
        yarn_height=yarn_shape[1],
        context_size=tensors["layers.0.cross_attention.wk.weight"].shape[1] if has_text else 0,
        position_table=bool(side.get("apply_abs_pos_emb", has_text)),
    )
    return config, weights


def _defaults(found: Checkpoint) -> GenerationDefaults:
    return GenerationDefaults(
        fps=25,
        context_frames=_CONTEXT_FRAMES,
        num_frames=WINDOW - _CONTEXT_FRAMES,
        row_lag=2 if found.config.num_layers <= _4B.num_layers else 1,
        overlap=True,
        top_p=0.7 if found.config.context_size else 0.8,
    )


def codes_to_indices(codes: Tensor) -> Tensor:
    """Convert codes to ids: (B, 6, ...) floating point -> (B, ...) int64 in [0, 64000)."""
    ids = torch.zeros_like(codes[:, 0], dtype=torch.int64)
    basis = 1  # the first digit is the least significant
    for values, levels in zip(codes.unbind(1), LEVELS, strict=True):
        half = levels // 2
        ids += (values.float() * half + half).round().to(torch.int64) * basis
        basis *= levels
    return ids


class CosmosTokenizer(vq.VideoTokenizer):
    """A causal video tokenizer: 16 x 16 pixels per token, 8 frames per grid after the first.

    T frames <-> 1 + (T - 1) / 8 grids within a window; a longer clip consists of whole windows and
    optionally a partial one: 66 frames <-> 10 grids, 67 <-> 11.
    """

    codebook_size = math.prod(LEVELS)
    compression = 16
    temporal_compression = TEMPORAL_COMPRESSION

    def __init__(self, encoder: Any, decoder: Any) -> None:
        # (1, 3, 33, H_px, W_px) in [-1, 1] -> (ids, codes), codes being (1, 6, 5, height, width)
        self.encoder = encoder
        self.decoder = decoder  # (1, 5, height, width) int64 -> (1, 3, 33, H_px, W_px)
        self.device, self.dtype = torch.device("cpu"), torch.float32

    @classmethod
    def from_jit(cls, folder: Path) -> Self:
        """Load the released files, which EXECUTES code in them: only load what you trust."""
        return cls(*(load_torchscript(folder / name) for name in SCRIPTS)).to("cpu")

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        self.device = torch.device(device)
        on_cpu = self.device.type == "cpu"  # pooling there does not support bfloat16
        self.dtype = dtype or (torch.float32 if on_cpu else torch.bfloat16)
        self.encoder.to(self.device, self.dtype)
        self.decoder.to(self.device, self.dtype)
        return self

    def fit_frames(self, frames: Tensor, height_px: int, width_px: int) -> Tensor:
        """Scale frames to cover a size and crop the centre, as Cosmos does, but rounded."""
        full_height, full_width = frames.shape[1:3]
        scale = max(width_px / full_width, height_px / full_height)
        size = math.ceil(scale * full_height), math.ceil(scale * full_width)
        top, left = round((size[0] - height_px) / 2), round((size[1] - width_px) / 2)
        rows, columns = slice(top, top + height_px), slice(left, left + width_px)
        chunks = frames.split(vq.BATCH_SIZE)
        return torch.cat([stretch(chunk, *size)[:, rows, columns] for chunk in chunks])

    @torch.inference_mode()
    def encode(self, frames: Tensor) -> Tensor:
        """(T, H_px, W_px, 3) uint8 RGB, sizes multiples of 16 -> (grids, height, width) int64."""
        rest = len(frames) % WINDOW
        if rest and (rest - 1) % self.temporal_compression:
            lengths = ", ".join(map(str, range(1, WINDOW, self.temporal_compression)))
            raise ValueError(
                f"clip must have {lengths} or {WINDOW} frames, or whole windows of {WINDOW} "
                f"and then as many, got {len(frames)}"
            )
        windows = [self._encode_window(window) for window in frames.split(WINDOW)]
        return torch.cat(windows).to(frames.device)

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        """(grids, height, width) ids -> (T, H_px, W_px, 3) uint8, rounded down like NVIDIA's."""
        windows = [self._decode_window(window) for window in tokens.split(WINDOW_GRIDS)]
        return torch.cat(windows).to(tokens.device)

    def _encode_window(self, frames: Tensor) -> Tensor:
        values = vq.normalise(_filled(frames, WINDOW).to(self.device)).to(self.dtype)
        answer = self.encoder(values.movedim(0, 1)[None])
        height, width = (size // self.compression for size in frames.shape[1:3])
        expected = 1, len(LEVELS), WINDOW_GRIDS, height, width
        codes = answer[1] if isinstance(answer, tuple) and len(answer) > 1 else answer
        if not isinstance(codes, Tensor) or codes.shape != expected:
            got = _describe(answer)
            raise ValueError(f"encoder must return (ids, codes {expected}), got {got}")
        return codes_to_indices(codes)[0, : 1 + (len(frames) - 1) // self.temporal_compression]

    def _decode_window(self, tokens: Tensor) -> Tensor:
        ids = _filled(tokens, WINDOW_GRIDS).to(self.device, torch.int64)
        values = self.decoder(ids[None])
        expected = 1, 3, WINDOW, *self.frame_size_px(*tokens.shape[1:])
        if not isinstance(values, Tensor) or values.shape != expected:
            raise ValueError(f"decoder must return {expected}, got {_describe(values)}")
        num_frames = 1 + (len(tokens) - 1) * self.temporal_compression
        levels = (values[0, :, :num_frames].float() * 0.5 + 0.5) * 255
        return vq.paint(levels.movedim(1, 0), "down")


def _filled(sequence: Tensor, length: int) -> Tensor:
    last = sequence[-1:].expand(length - len(sequence), *sequence.shape[1:])
    return torch.cat([sequence, last])


def _describe(answer: object) -> str:
    if isinstance(answer, tuple):
        return f"({', '.join(_describe(member) for member in answer)})"
    return str(tuple(answer.shape)) if isinstance(answer, Tensor) else type(answer).__name__


COSMOS = Family(
    name="Cosmos",
    licence="weights: NVIDIA Open Model License; code: Apache-2.0",
    files=("model.pt",),
    config_fields=frozenset({"dim", "n_layers"}),
    signature=(_EMBEDDING, "model." + _EMBEDDING),
    convert=_convert,
    tokenizer_folder=TokenizerFolder(CosmosTokenizer.from_jit, torchscript=SCRIPTS),
    defaults=_defaults,
)
