"""What a page needs to run the shaders beside the kernels of WebAssembly, as data.

The kernels tell which lanes a frame feeds (native/csrc/wasm/world.cpp); 8-bit matrices are taken
from their file, where they stand in blocks (native/weights.py).
"""

from typing import Any

import torch

from diagd.backends.webgpu.device import OWN, SHARED, UNIFORM, bytes_of
from diagd.backends.webgpu.shader import (
    TILES,
    check_shape,
    dispatches_of,
    row_floats,
    shader_of,
    weights_of,
)
from diagd.models.transformer import Transformer


def describe_shaders(model: Transformer, places: dict[str, int]) -> tuple[dict[str, Any], bytes]:
    """Return a description for webgpu.js, and the vectors of all weights, one behind the other.

    Args:
        places: where the matrix of each kind of dispatch begins in the world's file.

    Raises:
        ValueError: a model that the shaders cannot run.
    """
    config = model.config
    check_shape(config, torch.int8)
    vectors, weights = [], []
    for name, (matrix, vector) in weights_of(model, torch.int8).items():
        if name == "embed":  # bfloat16, a row for each id
            shape = list(matrix.shape)
        else:
            is_two = name.startswith("expand") and config.mlp == "swiglu"  # each padded to blocks
            shape = [4 * len(matrix), [matrix.shape[1] // 2] * 2 if is_two else [matrix.shape[1]]]
        weights.append([name, places[name], shape, len(vector)])
        vectors.append(vector)
    description = {
        "code": shader_of(config, torch.int8),
        "tiles": TILES,
        "uniform": UNIFORM,
        "bindings": [list(SHARED.values()), list(OWN.values())],
        "dispatches": dispatches_of(config),
        "weights": weights,
        "layers": config.num_layers,
        "row_floats": row_floats(config),
        "slot_floats": 2 * config.num_kv_heads * config.head_dim,
    }
    return description, bytes_of(torch.cat(vectors))
