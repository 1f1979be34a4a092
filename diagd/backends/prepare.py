"""What runs a decoding step: our C++ kernels, PyTorch eager or compiled, or CUDA graphs."""

import logging
from typing import Literal, get_args

import torch

from diagd.backends.merged_linears import merge_linears
from diagd.backends.native.model import NativeModel
from diagd.decoding.runner import CausalModel, RunnerName
from diagd.models.transformer import Transformer

logger = logging.getLogger("diagd")
Backend = Literal["auto", "native", "eager", "compile", "cuda-graph"]


def prepare(
    model: Transformer, backend: Backend = "auto", int8: bool = False
) -> tuple[CausalModel, RunnerName, Backend]:
    """Bring a model into the form that a backend runs; the model given is used up.

    Args:
        backend: `auto` is `cuda-graph` on CUDA. On the CPU it is `native` (our kernels, built on
            first use by the C++ compiler at hand), or `eager`, with a warning, where that fails.
        int8: Round the weights to 8 bits, which only `native` can run.

    Returns:
        The model, the runner for `DecodingEngine`, and the backend that `auto` became.

    Raises:
        ValueError: An unknown backend, or one that cannot run this model here.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
    on_cpu = model.device.type == "cpu"
    if backend == "auto" and not on_cpu:
        backend = "cuda-graph"
    if backend == "cuda-graph" and on_cpu:
        raise ValueError("backend cuda-graph needs --device cuda")
    has_kernels = on_cpu and model.dtype in (torch.float32, torch.bfloat16)
    has_text = model.config.context_size > 0
    if backend == "native" and not has_kernels:
        raise ValueError(
            "backend native needs a model on the cpu in float32, bfloat16 or int8, "
            f"got {model.dtype} on {model.device}"
        )
    if backend == "native" or (backend == "auto" and has_kernels and not has_text):
        name = "bfloat16" if model.dtype == torch.bfloat16 else "float32"
        try:
            return NativeModel(model, "int8" if int8 else name, use_up=True), "eager", "native"
        except OSError as error:
            if backend == "native" or int8:
                raise ValueError(f"backend native: {error}") from None
            logger.warning("%s: decoding with PyTorch's kernels, which are slower", error)
    if int8:
        raise ValueError(f"int8 needs backend native, got {backend}")
    if backend == "auto":
        backend = "eager"
    pack = backend == "eager" and has_kernels and torch.backends.mkldnn.is_available()
    runner: RunnerName = "eager" if backend == "native" else backend
    return merge_linears(model, pack), runner, backend
