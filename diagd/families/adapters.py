"""Adapters: low-rank changes of a frozen base's weights, and an embedding for row starts.

An adapter is a folder: `adapter.safetensors` with tensors under peft's names, and `adapter.json`
with the base and its hash, strategies and prices. It is merged while a model is loaded, in float32
and before rounding, so that every backend runs it at no cost.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diagd.families.family import Checkpoint
from diagd.files import MISFITS, naming, read_json_object, require_folder
from diagd.models.config import ModelConfig
from diagd.weight_files import read_weights

ADAPTER_FILE, TENSORS_FILE = "adapter.json", "adapter.safetensors"
DOWN, UP = ".lora_A.weight", ".lora_B.weight"  # of a product: (rank, inputs) and (outputs, rank)
STAND_IN = "stand_in"  # the embedding, (hidden_size,)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def adapted(found: Checkpoint, folder: str | Path) -> Checkpoint:
    """Return a checkpoint with an adapter; its products are merged when weights are loaded.

    ValueError, naming the folder, if it is damaged or was trained on another base.
    """
    folder = require_folder(folder, "adapter folder")
    about, tensors = read_json_object(folder / ADAPTER_FILE), read_weights(folder / TENSORS_FILE)
    with naming(f"{folder}: not an adapter of diagd finetune", MISFITS):
        base, known = str(about["base"]), str(about["base_sha256"])
        rank, scale, decoding = int(about["rank"]), float(about["scale"]), about["decoding"]
    if (own := weights_sha256(found.weights)) != known:
        raise ValueError(
            f"{folder}: its base is {base} with weights of SHA-256 {known[:12]}, "
            f"{found.path} has {own[:12]}"
        )
    factors = {name: tensor.float() for name, tensor in tensors.items()}
    row = factors.pop(STAND_IN, None)
    config, weights = found.config, found.weights
    with naming(f"{folder}: does not fit its base"):
        _check_factors(factors, weights, rank)
        if row is not None:
            config, weights = config_with_stand_in(config), _with_row(found, row)
    merge = partial(_merge, factors, scale)
    return replace(found, config=config, weights=weights, merge=merge, decoding=decoding)


def _check_factors(factors: Mapping[str, Tensor], weights: Mapping[str, Tensor], rank: int) -> None:
    modules = {name.removesuffix(end) for name in factors for end in (DOWN, UP)}
    for module in sorted({name for name in modules if not name.endswith((DOWN, UP))}):
        weight = weights.get(f"{module}.weight", torch.empty(0, 0))
        expected = [(rank, weight.shape[-1]), (weight.shape[0], rank)]
        given = [tuple(factors.get(module + end, torch.empty(0)).shape) for end in (DOWN, UP)]
        if given != expected:
            raise ValueError(f"{module} expected factors {expected}, got {given}")


def _merge(factors: Mapping[str, Tensor], scale: float, name: str, weight: Tensor) -> Tensor:
    """Return a base's weight with the product of its factors, in float32; others unchanged."""
    module = name.removesuffix(".weight")
    if (down := factors.get(module + DOWN)) is None:
        return weight
    return weight.float().addmm(factors[module + UP], down, alpha=scale)


def config_with_stand_in(config: ModelConfig) -> ModelConfig:
    """Return the config of a base with one more embedding; the output layer is no longer tied."""
    if config.stand_in:
        raise ValueError("the base has a learnt stand-in already")
    extra = config.extra_embeddings + 1
    return replace(config, stand_in=True, extra_embeddings=extra, tie_embeddings=False)


def _with_row(found: Checkpoint, row: Tensor) -> dict[str, Tensor]:
    table = found.weights[EMBEDDING]
    if row.shape != table[0].shape:
        raise ValueError(f"{STAND_IN} expected {tuple(table[0].shape)}, got {tuple(row.shape)}")
    head = {HEAD: table} if found.config.tie_embeddings else {}
    return found.weights | {EMBEDDING: torch.cat([table, row[None].to(table.dtype)])} | head


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of weights under our names: of the hashes of all tensors, sorted."""

    def digest(name: str) -> bytes:
        weight = weights[name].contiguous()
        head = f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode()
        return hashlib.sha256(head + hashlib.sha256(_bytes_of(weight)).digest()).digest()

    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        return hashlib.sha256(b"".join(pool.map(digest, sorted(weights)))).hexdigest()


def _bytes_of(weight: Tensor) -> Any:
    return weight.reshape(-1).view(torch.uint8).numpy().data
