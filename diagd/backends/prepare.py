"""The table of backends, and the choice among them: what runs the steps of a model here."""

import logging
from collections.abc import Callable
from functools import cache
from typing import get_args

import torch

from diagd.backends.int8_linears import int8_companion, round_linears
from diagd.backends.merged_linears import merge_linears
from diagd.backends.names import Backend
from diagd.backends.native.model import NativeModel
from diagd.backends.triton.kernels import load_kernels, why_not
from diagd.backends.triton.model import TritonModel
from diagd.decoding.runner import CausalModel, RunnerName
from diagd.models.transformer import Transformer

logger = logging.getLogger("diagd")


def prepare(
    model: Transformer, backend: Backend = "auto", int8: bool = False
) -> tuple[CausalModel, RunnerName, Backend]:
    """Bring a model into the form that a backend runs; the model given is used up.

    Args:
        backend: `auto` on CUDA is `triton` (captured steps, with our kernels), or `cuda-graph`
            (with PyTorch's) where there is no Triton for this GPU and model. On the CPU it is
            `native` (our kernels, prebuilt or built on first use by the C++ compiler at hand).
            Where our kernels are found not to work, it is PyTorch's, with a warning.
        int8: Round the weights to 8 bits, which on the CPU only `native` can run.

    Returns:
        The model, the runner for `DecodingEngine`, and the backend that `auto` became.

    Raises:
        ValueError: An unknown backend, or one that cannot run this model here.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
    name = _best(model) if backend == "auto" else backend
    runner, make = BACKENDS[name]
    on_cpu = model.device.type == "cpu"
    if int8 and on_cpu and make is not _native:
        raise ValueError(f"int8 needs backend native on the cpu, got {name}")
    try:
        return make(model, int8), runner, name
    except OSError as error:
        if backend != "auto" or (int8 and on_cpu):
            raise ValueError(f"backend {name}: {error}") from None
        instead: Backend = "eager" if on_cpu else "cuda-graph"
        _say_once(f"{error}: decoding with PyTorch's kernels (backend {instead})")
        return prepare(model, instead, int8)


@cache
def _say_once(warning: str) -> None:
    logger.warning("%s", warning)


def _best(model: Transformer) -> Backend:
    if model.device.type != "cpu":
        return "triton" if _why_no_triton(model) is None else "cuda-graph"
    beyond = model.config.context_size or model.config.position_table
    return "native" if _has_cpu_kernels(model) and not beyond else "eager"


def _has_cpu_kernels(model: Transformer) -> bool:
    """Tell whether our kernels, and oneDNN's for packed weights, are written for such numbers."""
    return model.device.type == "cpu" and model.dtype in (torch.float32, torch.bfloat16)


def _native(model: Transformer, int8: bool) -> CausalModel:
    if not _has_cpu_kernels(model):
        raise ValueError(
            "backend native needs a model on the cpu in float32, bfloat16 or int8, "
            f"got {model.dtype} on {model.device}"
        )
    name = "bfloat16" if model.dtype == torch.bfloat16 else "float32"
    return NativeModel(model, "int8" if int8 else name, use_up=True)


def _eager(model: Transformer, int8: bool) -> CausalModel:
    pack = _has_cpu_kernels(model) and torch.backends.mkldnn.is_available()
    return merge_linears(model, pack=True) if pack else _merged(model, int8)


def _merged(model: Transformer, int8: bool) -> Transformer:
    """Leave weights as PyTorch takes them; torch.compile packs by itself."""
    merge_linears(model, pack=False)
    return round_linears(model, int8_companion(model.device)) if int8 else model


def _captured(model: Transformer, int8: bool) -> CausalModel:
    if model.device.type == "cpu":
        raise ValueError("backend cuda-graph needs --device cuda")
    return _merged(model, int8)


def _triton(model: Transformer, int8: bool) -> CausalModel:
    reason = _why_no_triton(model)
    if reason is not None:
        raise OSError(reason)
    dtype = int8_companion(model.device) if int8 else model.dtype
    load_kernels(model.config, dtype, model.device)  # it may fail, and then the model is whole
    return TritonModel(_merged(model, int8))


def _why_no_triton(model: Transformer) -> str | None:
    return why_not(model.config, model.dtype, model.device)


# A backend's name (also in `Backend`), the runner that takes its steps, and what makes its model:
# ValueError where it cannot run this one, OSError where something is missing on this machine.
BACKENDS: dict[str, tuple[RunnerName, Callable[[Transformer, bool], CausalModel]]] = {
    "native": ("eager", _native),
    "eager": ("eager", _eager),
    "compile": ("compile", _merged),
    "cuda-graph": ("cuda-graph", _captured),
    "triton": ("cuda-graph", _triton),
    "compiled-graph": ("compiled-graph", _triton),
}
