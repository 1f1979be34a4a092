"""The table of backends, and the choice of the one that runs a model's steps here.

On the CPU the choice is measured: the first use of a model's shape times the candidates for about a
second and stores the result in the kernel cache for a day, unless the machine was busy.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from filelock import FileLock

from diagd.backends.devices import dtype_of, multiplies_bfloat16
from diagd.backends.linears import can_pack, int8_companion, merge_linears, round_linears
from diagd.backends.names import Backend, DTypeChoice, DTypeName
from diagd.backends.native.library import cache_folder, find_or_make, load_library
from diagd.backends.native.model import NativeModel
from diagd.backends.native.weights import has_kernels
from diagd.backends.replay import Captured, Compiled
from diagd.backends.step_times import REFERENCE, StepTimes, shape_to_time, time_steps
from diagd.backends.triton.model import TritonModel, check_kernels, why_not, why_not_on
from diagd.backends.webgpu.model import WebGPUModel
from diagd.decoding.model import CausalModel
from diagd.files import write_json
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.threads import Neighbours, follow_free_cores, threads_when_idle

logger = logging.getLogger("diagd")


def prepare(
    model: Transformer, backend: Backend = "auto", int8: bool = False
) -> tuple[CausalModel, Backend]:
    """Convert a model for a backend; consumes the model.

    Args:
        backend: `auto` on CUDA is `triton`, or `cuda-graph` if Triton does not support this GPU and
            model; on the CPU the faster of `native` and `eager`, see `time_candidates`. If our
            kernels fail, it is PyTorch's, with a warning.
        int8: quantize the weights to 8 bits, on the CPU for `native` and `webgpu` only.

    Returns:
        The model, and the backend that `auto` resolved to.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
    name = _best(model, int8) if backend == "auto" else backend
    on_cpu = model.device.type == "cpu"
    if int8 and on_cpu and name not in ("native", "webgpu"):
        raise ValueError(f"int8 needs backend native or webgpu on the cpu, got {name}")
    try:
        return BACKENDS[name](model, int8), name
    except OSError as error:
        if backend != "auto" or (int8 and on_cpu):
            raise ValueError(f"backend {name}: {error}") from None
        instead: Backend = "eager" if on_cpu else "cuda-graph"
        _say_once(f"{error}: decoding with PyTorch's kernels (backend {instead})")
        return prepare(model, instead, int8)


_say_once = cache(logger.warning)


class Candidate(NamedTuple):  # for a model's steps on this CPU
    backend: Backend
    dtype: DTypeName
    times: StepTimes


_CANDIDATES: dict[Backend, tuple[DTypeName, ...]] = {
    "native": ("float32", "bfloat16", "int8"),
    "eager": ("float32", "bfloat16"),  # last, as its threads spin (`step_times.py`)
}
ROUNDING_PAYS = 0.9  # a less exact type must take at most this share of the time
NATIVE_DTYPES = torch.float32, torch.bfloat16  # weight types of our kernels
BUSY_SHARE = 0.3  # of the processor, used by others, above which timings are not kept
KEPT_S = 86_400.0  # seconds that timings are kept


@cache
def time_candidates(config: ModelConfig) -> list[Candidate]:
    """Return the backends for a model's shape on the CPU, timed now or on first use.

    Times are of two layers, or of the bundled world's if the model is large; they are stored for
    these kernels, torch version, threads and limits. If several processes start at the same time,
    one measures and the others wait for it.
    """
    shape = shape_to_time(config)
    path = _times_file(shape)
    lock = FileLock(path.with_name(".steps.lock"))
    with suppress(OSError):  # if nothing can be stored, the next process measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        kept = _read_times(path)
        if kept and time.time() - path.stat().st_mtime < KEPT_S:
            return kept
        neighbours = Neighbours()
        found = _time_candidates(shape)
        if neighbours.share() > BUSY_SHARE:
            return kept or found
        with suppress(OSError):
            write_json(path, found)
        return found
    finally:
        lock.release()


def time_again(config: ModelConfig) -> None:
    """Make the next `time_candidates` of a shape measure again, in this and other processes."""
    with suppress(OSError):  # missing, or another user's
        os.utime(_times_file(shape_to_time(config)), (0, 0))
    time_candidates.cache_clear()


def _read_times(path: Path) -> list[Candidate]:
    with suppress(OSError, ValueError):  # missing or damaged
        kept = json.loads(path.read_text(encoding="utf-8"))
        return [Candidate(backend, dtype, StepTimes(*times)) for backend, dtype, times in kept]
    return []


def _time_candidates(shape: ModelConfig) -> list[Candidate]:
    follow_free_cores()
    found: list[Candidate] = []
    for backend, dtypes in _CANDIDATES.items():
        models: dict[DTypeName, CausalModel] = {}
        for dtype in dtypes:
            model = Transformer.random(shape, dtype=dtype_of(dtype))
            try:
                models[dtype] = prepare(model, backend, dtype == "int8")[0]
            except ValueError as error:
                logger.debug("%s", error)
        times = time_steps(shape, models)
        found += [Candidate(backend, dtype, times[dtype]) for dtype in models]
    return found


def choose_dtype(
    name: DTypeChoice, device: torch.device, config: ModelConfig = REFERENCE
) -> DTypeName:
    """Return the weight type for a name.

    `auto` is bfloat16 if the GPU multiplies it or it is faster on the CPU, else float32; `fastest`
    may also be int8 on the CPU.
    """
    if name not in ("auto", "fastest"):
        return name
    if device.type != "cpu":
        return "bfloat16" if multiplies_bfloat16(device) else "float32"
    costs: dict[DTypeName, float] = dict.fromkeys(("float32", "bfloat16", "int8"), float("inf"))
    for backend, dtype, times in time_candidates(config):
        if backend == "eager" or has_kernels(config):
            costs[dtype] = min(costs[dtype], times.cost)
    if name == "auto":
        del costs["int8"]
    chosen: DTypeName = "float32"
    for dtype, cost in costs.items():  # from the most exact one
        chosen = dtype if cost < ROUNDING_PAYS * costs[chosen] else chosen
    return chosen


def choose_backend(
    name: Backend, device: torch.device, dtype: str, config: ModelConfig = REFERENCE
) -> Backend:
    """Return the backend of `auto` for weights of a type, shared by all processes of a run.

    It stays `auto` on a GPU, and on a CPU if our kernels fail.
    """
    if name != "auto" or device.type != "cpu":
        return name
    if not has_kernels(config):
        return "eager"
    found = [one for one in time_candidates(config) if one.dtype == dtype]
    if all(one.backend != "native" for one in found):
        return "auto"
    return min(found, key=lambda one: one.times.cost).backend


def _times_file(shape: ModelConfig) -> Path:
    return cache_folder() / f"steps-{_digest_of(shape)}.json"


def _digest_of(shape: ModelConfig) -> str:
    try:
        load_library()  # a failure is remembered
        kernels = find_or_make().name
    except OSError as error:
        kernels = str(error)
    limits = [os.environ.get(name) for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")]
    parts = kernels, torch.__version__, threads_when_idle(), limits, shape
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _best(model: Transformer, int8: bool) -> Backend:
    if model.device.type != "cpu":
        return "triton" if why_not(model) is None else "cuda-graph"
    if model.dtype not in NATIVE_DTYPES:
        return "eager"
    name = "int8" if int8 else str(model.dtype).removeprefix("torch.")
    chosen = choose_backend("auto", model.device, name, model.config)
    return "native" if chosen == "auto" else chosen  # it fails with the reason


def _native(model: Transformer, int8: bool) -> CausalModel:
    if model.device.type != "cpu" or model.dtype not in NATIVE_DTYPES:
        raise ValueError(
            "backend native needs a model on the cpu in float32, bfloat16 or int8, "
            f"got {model.dtype} on {model.device}"
        )
    name = "bfloat16" if model.dtype == torch.bfloat16 else "float32"
    return NativeModel(model, "int8" if int8 else name, use_up=True)


def _eager(model: Transformer, int8: bool) -> CausalModel:
    return merge_linears(model, pack=True) if can_pack(model) else _merged(model, int8)


def _merged(model: Transformer, int8: bool) -> Transformer:
    merge_linears(model, pack=False)
    return round_linears(model, int8_companion(model.device)) if int8 else model


def _with_kernels(model: Transformer, int8: bool) -> TritonModel:
    if (reason := why_not(model)) is not None:
        raise OSError(reason)
    dtype = int8_companion(model.device) if int8 else model.dtype
    check_kernels(model.config, dtype, model.device, int8)  # if it fails, the model is unchanged
    return TritonModel(_merged(model, int8))


def _compiled(model: Transformer, int8: bool) -> Captured[Transformer]:
    if (reason := why_not_on(model.device)) is not None:  # Inductor writes Triton
        raise OSError(reason)
    return Captured(_merged(model, int8), compiled=True)


# A backend's name (also in `Backend`), and a function that makes its model: ValueError if it does
# not support the model, OSError if something is missing on this machine.
BACKENDS: dict[str, Callable[[Transformer, bool], CausalModel]] = {
    "native": _native,
    "eager": _eager,
    "compile": lambda model, int8: Compiled(_merged(model, int8)),
    "cuda-graph": lambda model, int8: Captured(_merged(model, int8)),
    "triton": lambda model, int8: Captured(_with_kernels(model, int8)),
    "compiled-graph": _compiled,
    "webgpu": WebGPUModel,
}
