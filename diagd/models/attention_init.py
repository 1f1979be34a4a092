"""Heads that know where to look before training: at neighbours in the frame and one frame back.

The biases of queries and keys alone make a rotary head attend to a fixed offset in (frame, row,
column), whatever the tokens are. Finding such heads is what a randomly started model spends its
first millions of tokens on (docs/log.md); training then bends them to the motion.
"""

import math

import torch

from diagd.models.rotary import rotary_frequencies_3d
from diagd.models.transformer import Transformer

# (frames, rows, columns) from the lane that looks to the token looked at, by layer and head. The
# lane at column j predicts column j + 1, so (-1, 0, 1) is the place it writes, one frame back.
OFFSETS = (
    ((-1, 0, 1), (-1, 0, -1), (-1, 0, 3), (0, -1, 1), (0, 0, -1)),
    ((-1, 0, 1), (-1, 1, 1), (-1, -1, 1), (0, -1, 0), (0, -1, 2)),
    ((-1, 0, 1), (-1, 0, 0), (-1, 0, 2), (-2, 0, 1), (0, -1, 1)),
    ((-1, 0, -2), (-1, 0, 4)),
)
_SHARPNESS = 6.0  # squared length of a bias in every rotary plane


@torch.no_grad()
def aim_heads(model: Transformer) -> Transformer:
    """Set the query and key biases of the first heads so that each looks at its place in OFFSETS.

    Args:
        model: With 3-D rotary positions, biases and as many key heads as query heads.

    Returns:
        The same model.

    Raises:
        ValueError: The model has no such heads.
    """
    config = model.config
    if config.position != "rope3d" or not config.bias or config.num_kv_heads != config.num_heads:
        raise ValueError(
            "aim_heads needs position='rope3d', bias=True and num_kv_heads=num_heads, got "
            f"{config.position!r}, {config.bias} and {config.num_kv_heads} of {config.num_heads}"
        )
    time, space = rotary_frequencies_3d(config)
    length = math.sqrt(_SHARPNESS)
    for layer, offsets in zip(model.model.blocks, OFFSETS, strict=False):
        queries = layer.self_attn.q_proj.bias.view(config.num_heads, 2, -1)
        keys = layer.self_attn.k_proj.bias.view(config.num_heads, 2, -1)
        for head, (frame, row, column) in enumerate(offsets[: config.num_heads]):
            angles = torch.cat([frame * time, row * space, column * space])
            keys[head, 0], keys[head, 1] = length, 0.0
            queries[head, 0], queries[head, 1] = length * angles.cos(), length * angles.sin()
    return model
