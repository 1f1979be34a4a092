"""A tokenizer that works before training: PCA of patches, written into a VQModel.

The network starts as a linear code of patches: the first convolution projects a patch on its
principal components, the decoder's last one reconstructs it, residual blocks add nothing yet, and
the codebook is k-means of the projections. On Doom frames, with patches of 8x8 pixels, this alone
reaches 30 dB, so no training time is spent on finding it.

Two non-linear layers must be undone, before each last convolution. SiLU is undone by storing every
component as a pair of opposite channels, because silu(x) - silu(-x) = x. Group norm is kept from
rescaling frames by a pair of large constant channels in every group, which fix its variance.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from diagd.tokenizers.vq import normalise, vq_model_class

PATCH_PX = 8
PATCHES_PX = range(4, 17)  # candidates of `choose_patch`
TOKENS = range(48, 401)  # tokens per frame, if there is a choice
GROUP = 16  # channels of a norm group: six pairs, one pair of constants, two free channels
PAIRS = 6
CONSTANT = 10.0  # far above the components' scale of about 1
MAX_COMPONENTS = 48  # of a patch; 24 hold 98% of the variance of Doom's (dev/LOG.md)
MAX_FRAMES = 1024  # frames to take patches from
MAX_PATCHES = 200_000  # patches for k-means
Affine = tuple[Tensor, Tensor]  # a matrix and an offset
LATENT_SCALE = 12.0  # makes the commitment as steep as the reconstruction loss


def choose_patch(height_px: int, width_px: int) -> int:
    """Choose the height and width of a token in pixels: near 8, for 48 to 400 tokens per frame.

    Frames too small for 48 tokens get the smallest patch that divides both sides.
    """
    tokens = {
        patch: height_px * width_px // patch**2
        for patch in PATCHES_PX
        if not height_px % patch and not width_px % patch
    }
    if fitting := [patch for patch, count in tokens.items() if count in TOKENS]:
        return min(fitting, key=lambda patch: (abs(patch - PATCH_PX), patch))
    if small := [patch for patch, count in tokens.items() if count < TOKENS.start]:
        return min(small)
    scale = min(1.0, (TOKENS.stop * PATCH_PX**2 / (height_px * width_px)) ** 0.5)
    sides = [max(int(side * scale) // PATCH_PX, 2) * PATCH_PX for side in (height_px, width_px)]
    raise ValueError(
        f"frames are {height_px}x{width_px} px (height x width), but no patch of 4 to 16 px gives "
        f"at most {TOKENS.stop - 1} tokens: use a size such as --size {sides[0]}x{sides[1]}"
    )


def linear_tokenizer_model(
    frames: Tensor, codes: int, seed: int, width: int = 128, patch_px: int = PATCH_PX
) -> Any:
    """Build a VQModel that starts as the linear code of frames (F, H_px, W_px, 3) uint8.

    `width`, a multiple of 16, is the number of channels; 128 gives 2.6 million weights.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(frames), generator=generator)[:MAX_FRAMES]
    folded = functional.pixel_unshuffle(normalise(frames[rows]), patch_px)
    patches = folded.movedim(1, -1).flatten(0, -2)  # (patches, 3 * patch_px**2)
    size = min(MAX_COMPONENTS, PAIRS * (width // GROUP))
    vq_model = vq_model_class()  # before seeding: an import might draw random numbers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = vq_model(
            in_channels=patches.shape[1],
            out_channels=patches.shape[1],
            down_block_types=("DownEncoderBlock2D",),
            up_block_types=("UpDecoderBlock2D",),
            block_out_channels=(width,),
            latent_channels=size,
            vq_embed_dim=size,
            num_vq_embeddings=codes,
            norm_num_groups=width // GROUP,
            mid_block_add_attention=False,
        )
    mean = patches.mean(dim=0)
    covariance = (patches - mean).T @ (patches - mean) / len(patches)
    variances, directions = torch.linalg.eigh(covariance)
    scale = variances.sum().sqrt().clamp(min=1e-3)
    directions = directions[:, -size:].flip(1)  # (3 * patch_px**2, size), strongest first
    project, compose = directions.T / scale, directions * scale
    identity = torch.eye(size)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".conv2." in name:  # the last convolution of a residual block
                weight.zero_()
        for layer in (model.quant_conv, model.post_quant_conv):
            layer.weight.copy_(identity[:, :, None, None])
            layer.bias.zero_()
        deviations = variances[-size:].flip(0).clamp(min=0).sqrt() / scale
        model.decoder.conv_in.weight.div_(LATENT_SCALE)
        zeros, scaled = torch.zeros(size), identity * LATENT_SCALE
        _make_linear(model.encoder, deviations, (project, -project @ mean), (scaled, zeros))
        _make_linear(model.decoder, deviations, (identity / LATENT_SCALE, zeros), (compose, mean))
        some = patches[torch.randperm(len(patches), generator=generator)[:MAX_PATCHES]]
        vectors = (some - mean) @ project.T * LATENT_SCALE
        model.quantize.embedding.weight.copy_(k_means(vectors, codes, generator))
    return model


def _make_linear(side: Any, deviations: Tensor, first: Affine, last: Affine) -> None:
    """Make an encoder or decoder compute last(first(x)) per patch.

    Residual blocks see the components, first(x), divided by their `deviations`.
    """
    (matrix, offset), (last_matrix, last_offset) = first, last
    numbers = torch.arange(len(matrix))
    plus = GROUP * (numbers // PAIRS) + 2 * (numbers % PAIRS)
    constants = torch.arange(2 * PAIRS, side.conv_in.weight.shape[0], GROUP)
    group_deviation = CONSTANT * (2 / GROUP) ** 0.5
    weight, bias = side.conv_in.weight, side.conv_in.bias
    for channels, sign in ((plus, 1), (plus + 1, -1)):
        weight[channels] = 0
        weight[channels, :, 1, 1] = sign * matrix
        bias[channels] = sign * offset
    for channels, sign in ((constants, 1), (constants + 1, -1)):
        weight[channels] = 0
        bias[channels] = sign * CONSTANT
    for name, module in side.named_modules():
        if name.endswith(("norm1", "conv_norm_out")):  # the layers that read pairs and constants
            module.weight.fill_(group_deviation)
            module.weight[torch.cat([constants, constants + 1])] = 0
            if name.endswith("norm1"):
                for channels in (plus, plus + 1):
                    module.weight[channels] = group_deviation / deviations.clamp(min=0.02)
    weight = side.conv_out.weight.zero_()
    weight[:, plus, 1, 1] = last_matrix
    weight[:, plus + 1, 1, 1] = -last_matrix
    side.conv_out.bias.copy_(last_offset)


def k_means(vectors: Tensor, codes: int, generator: torch.Generator, rounds: int = 10) -> Tensor:
    """Find `codes` centres of (n, C) vectors by Lloyd's algorithm from random vectors."""
    centres = vectors[torch.randint(len(vectors), (codes,), generator=generator)]
    for _ in range(rounds):
        half_norms = centres.square().sum(dim=1) / 2
        ids = torch.cat([(half_norms - v @ centres.T).argmin(1) for v in vectors.split(8192)])
        counts = torch.bincount(ids, minlength=codes)
        sums = torch.zeros_like(centres).index_add_(0, ids, vectors)
        fresh = vectors[torch.randint(len(vectors), (codes,), generator=generator)]
        centres = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), fresh)
    return centres
