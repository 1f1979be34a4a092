"""WHAM's image tokenizer: two vision transformers with a codebook of unit vectors between.

A picture is cut into patches; the encoder turns each into a short vector, whose direction picks the
id (arXiv:2110.04627, as in Microsoft's WHAM, doi:10.1038/s41586-025-08600-3). Attention is
bidirectional over the whole picture; positions are learned, so the size of a picture is fixed.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from diagd.checks import brief
from diagd.families.weights import count_layers, rename
from diagd.files import naming, read_json_object
from diagd.tokenizers import vq
from diagd.weight_files import build_fitting, read_weights, tensors_under

TOKENIZER_PREFIX = "context_encoders.images."  # of its weights in WHAM's checkpoints
HEAD_SIZE = 64  # unless overridden
WHAM_KIND = "wham-vit-vqgan"
_NORM_EPS = 1e-5
_MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)  # of ImageNet, RGB in [0, 1]
_DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
_SIDE_MODULES = {
    "input_proj": "proj1",
    "positions": "pos_embeds",
    "blocks.{i}.attention_norm": "vit.{i}.ln_1",
    "blocks.{i}.qkv_proj": "vit.{i}.attn.c_attn",
    "blocks.{i}.o_proj": "vit.{i}.attn.c_proj",
    "blocks.{i}.mlp_norm": "vit.{i}.ln_2",
    "blocks.{i}.up_proj": "vit.{i}.mlp.c_fc",
    "blocks.{i}.down_proj": "vit.{i}.mlp.c_proj",
    "output_norm": "output_ln",
    "output_proj": "output_proj",
}
_TOKENIZER_MODULES = {"codebook": "vq_vae._embedding"}
_TOKENIZER_MODULES |= {
    f"{side}.{ours}": f"{side}.{theirs}"
    for side in ("encoder", "decoder")
    for ours, theirs in _SIDE_MODULES.items()
}
_LEFT_OUT = r"\.attn_mask$|^(patch_gan|target_patchgan|lpips_model)\."  # the latter for training


@dataclass(frozen=True)
class ViTVQGANConfig:
    """Sizes of the network. A picture that is no multiple of the patches is padded."""

    height_px: int
    width_px: int
    patch_size: int
    hidden_size: int
    num_layers: int  # of the encoder, and of the decoder
    head_dim: int
    code_dim: int
    codebook_size: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {brief(value)}")
        size, head_dim = self.hidden_size, self.head_dim
        if size % head_dim:
            raise ValueError(f"head_dim must divide hidden_size={size}, got {head_dim}")

    @property
    def grid(self) -> tuple[int, int]:  # rows and columns of tokens
        return -(-self.height_px // self.patch_size), -(-self.width_px // self.patch_size)


class ViTVQGAN(nn.Module):
    def __init__(self, config: ViTVQGANConfig) -> None:
        super().__init__()
        self.config = config
        patch = 3 * config.patch_size**2
        self.encoder = VisionTransformer(config, patch, config.code_dim)
        self.codebook = nn.Embedding(config.codebook_size, config.code_dim)
        self.decoder = VisionTransformer(config, config.code_dim, patch)

    def latents(self, pictures: Tensor) -> Tensor:
        """Encode to unit vectors: (B, 3, height_px, width_px) float -> (B, rows, columns, C)."""
        config = self.config
        right, below = -config.width_px % config.patch_size, -config.height_px % config.patch_size
        padded = functional.pad(pictures, (0, right, 0, below))
        patches = functional.pixel_unshuffle(padded, config.patch_size)  # (B, 3 * p * p, rows, ..)
        vectors = self.encoder(patches.flatten(2).mT)
        return functional.normalize(vectors, dim=-1).unflatten(1, config.grid)

    def nearest(self, latents: Tensor) -> Tensor:
        """Find the codes of the closest direction: (B, rows, columns, C) -> (B, rows, columns)."""
        return (latents @ functional.normalize(self.codebook.weight, dim=-1).T).argmax(dim=-1)

    def pixels(self, ids: Tensor) -> Tensor:
        """Decode: (B, rows, columns) int64 -> (B, 3, height_px, width_px) float."""
        config = self.config
        codes = functional.normalize(self.codebook(ids.flatten(1)), dim=-1)
        patches = self.decoder(codes).mT.unflatten(2, config.grid)
        pictures = functional.pixel_shuffle(patches, config.patch_size)
        return pictures[:, :, : config.height_px, : config.width_px]


class VisionTransformer(nn.Module):
    """A stack of blocks between two projections: (B, N, in_size) -> (B, N, out_size)."""

    def __init__(self, config: ViTVQGANConfig, in_size: int, out_size: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_proj = nn.Linear(in_size, size)
        self.positions = nn.Embedding(math.prod(config.grid), size)
        self.blocks = nn.ModuleList(Block(size, config.head_dim) for _ in range(config.num_layers))
        self.output_norm = nn.LayerNorm(size, _NORM_EPS)
        self.output_proj = nn.Linear(size, out_size)

    def forward(self, inputs: Tensor) -> Tensor:
        states = self.input_proj(inputs) + self.positions.weight
        for block in self.blocks:
            states = block(states)
        return self.output_proj(self.output_norm(states))


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to what came in; no biases."""

    def __init__(self, size: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attention_norm = nn.LayerNorm(size, _NORM_EPS, bias=False)
        self.qkv_proj = nn.Linear(size, 3 * size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)
        self.mlp_norm = nn.LayerNorm(size, _NORM_EPS, bias=False)
        self.up_proj = nn.Linear(size, 4 * size, bias=False)
        self.down_proj = nn.Linear(4 * size, size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        qkv = self.qkv_proj(self.attention_norm(states)).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, N, head_dim) each
        mixed = functional.scaled_dot_product_attention(query, key, value)
        states = states + self.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.up_proj(self.mlp_norm(states)), approximate="tanh")
        return states + self.down_proj(hidden)


class WHAMTokenizer(vq.FrameTokenizer):
    """A frame-by-frame `VideoTokenizer` for frames of one size."""

    weights_name = "model.safetensors"

    def __init__(self, model: ViTVQGAN) -> None:
        super().__init__(model)
        self.codebook_size, self.compression = model.config.codebook_size, model.config.patch_size

    def frame_size_px(self, height: int, width: int) -> tuple[int, int]:
        """Return the pixels of a frame, or raise ValueError for another grid than the model's."""
        config = self.model.config
        if (height, width) != config.grid:
            rows, columns = config.grid
            raise ValueError(f"a frame must be {rows}x{columns} tokens, got {height}x{width}")
        return config.height_px, config.width_px

    def _encode(self, frames: Tensor) -> Tensor:
        values = frames.movedim(-1, 1).float() / 255
        pictures = (values - _MEAN.to(values.device)) / _DEVIATION.to(values.device)
        return self.model.nearest(self.model.latents(pictures))

    def _decode(self, tokens: Tensor) -> Tensor:
        pictures = self.model.pixels(tokens.long())
        values = pictures * _DEVIATION.to(tokens.device) + _MEAN.to(tokens.device)
        return vq.paint(values * 255, "down")

    def _config(self) -> Mapping[str, object]:
        return {"kind": WHAM_KIND} | asdict(self.model.config)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "WHAMTokenizer":
        config_path, weights_path = Path(folder) / vq.CONFIG_NAME, Path(folder) / cls.weights_name
        values = read_json_object(config_path)
        values.pop("kind", None)
        with naming(f"{config_path} describes no {WHAM_KIND}", (TypeError, ValueError)):
            config = ViTVQGANConfig(**values)
        weights = read_weights(weights_path)
        if config.num_layers > len(weights):  # which would be built one by one
            raise ValueError(
                f"{config_path}: num_layers must be at most the {len(weights)} tensors of "
                f"{weights_path}, got {config.num_layers}"
            )
        return cls(build_fitting(lambda: ViTVQGAN(config), weights, weights_path))


def wham_tokenizer_from_weights(
    weights: Mapping[str, Tensor], height_px: int, width_px: int, head_size: int
) -> WHAMTokenizer:
    """Extract the tokenizer of a WHAM checkpoint, or of its part under `TOKENIZER_PREFIX`."""
    where = "the WHAM tokenizer"
    found = tensors_under(TOKENIZER_PREFIX, weights) or weights
    matrices = ["encoder.proj1.weight", "encoder.pos_embeds.weight", "vq_vae._embedding.weight"]
    if bad := [name for name in matrices if name not in found or found[name].dim() != 2]:
        raise ValueError(f"{where} has no matrix {bad[0]}")
    shapes = [found[name].shape for name in matrices]
    (hidden_size, patch), (num_positions, _), (codebook_size, code_dim) = shapes
    patch_px, num_layers = math.isqrt(patch // 3), count_layers(found, "encoder.vit.")
    config = ViTVQGANConfig(
        height_px, width_px, patch_px, hidden_size, num_layers, head_size, code_dim, codebook_size
    )
    rows, columns = config.grid
    if rows * columns != num_positions:
        raise ValueError(
            f"{where} has {num_positions} positions, but frames of {height_px}x{width_px} px have "
            f"{rows}x{columns} patches of {patch_px}x{patch_px} px"
        )
    with naming(where):
        renamed = rename(found, _TOKENIZER_MODULES, _LEFT_OUT)
    described_by = "its patches, positions and codebook"
    return WHAMTokenizer(build_fitting(lambda: ViTVQGAN(config), renamed, where, described_by))
