"""The image tokenizer of WHAM: two vision transformers with a codebook of unit vectors between.

A picture is cut into patches; the encoder turns each into a short vector, whose direction picks the
id (arXiv:2110.04627, as in Microsoft's WHAM, doi:10.1038/s41586-025-08600-3). Attention is
bidirectional over the whole picture; positions are learned, so the size of a picture is fixed.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional

NORM_EPS = 1e-5
MLP_RATIO = 4


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
        """Raise ValueError unless all are positive integers and the heads fill the width."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} must be a positive integer, got {value!r}")
        if self.hidden_size % self.head_dim:
            raise ValueError(
                f"head_dim must divide hidden_size={self.hidden_size}, got {self.head_dim}"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches, which is the token grid."""
        return -(-self.height_px // self.patch_size), -(-self.width_px // self.patch_size)


class ViTVQGAN(nn.Module):
    """Encoder, codebook and decoder."""

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
        rows, columns = config.grid
        below = rows * config.patch_size - config.height_px
        right = columns * config.patch_size - config.width_px
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
        rows, columns = config.grid
        size = config.hidden_size
        self.input_proj = nn.Linear(in_size, size)
        self.positions = nn.Embedding(rows * columns, size)
        self.blocks = nn.ModuleList(Block(size, config.head_dim) for _ in range(config.num_layers))
        self.output_norm = nn.LayerNorm(size, NORM_EPS)
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
        self.attention_norm = nn.LayerNorm(size, NORM_EPS, bias=False)
        self.qkv_proj = nn.Linear(size, 3 * size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)
        self.mlp_norm = nn.LayerNorm(size, NORM_EPS, bias=False)
        self.up_proj = nn.Linear(size, MLP_RATIO * size, bias=False)
        self.down_proj = nn.Linear(MLP_RATIO * size, size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        qkv = self.qkv_proj(self.attention_norm(states)).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, N, head_dim) each
        mixed = functional.scaled_dot_product_attention(query, key, value)
        states = states + self.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.up_proj(self.mlp_norm(states)), approximate="tanh")
        return states + self.down_proj(hidden)


def empty_vit_vqgan(config: ViTVQGANConfig) -> ViTVQGAN:
    """Build the network without memory for its weights, to be loaded with `assign=True`."""
    with torch.device("meta"):
        return ViTVQGAN(config)
