"""Weight files of anybody's making: safetensors, files of torch.save, TorchScript.

Tensors are mapped into memory and written one at a time, so a checkpoint far larger than the memory
can be converted. Nothing in a file is run, except by `load_torchscript`, which says so.
"""

import json
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch._utils import _rebuild_parameter, _rebuild_tensor_v2

from diagd.files import replacing

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16"}
_DTYPES |= {torch.bfloat16: "BF16"}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or raise ValueError where it is none."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: file not found")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a valid safetensors file: {error}") from None


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write floating-point tensors, in their own types, under the path only when all are there."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, weight in weights.items():
        end = offset + weight.numel() * weight.element_size()
        header[name] = {
            "dtype": _DTYPES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in weights.values():
            plain = weight.detach().cpu().contiguous().reshape(-1)
            file.write(plain.view(torch.uint8).numpy().data)


# Raised by damaged pickles: what Python's documentation names, and what mutated files led to: a
# foreign persistent id asserts, an extension code is a ValueError, a huge memo index a MemoryError.
UNPICKLING_ERRORS = (
    *(pickle.UnpicklingError, struct.error, zipfile.BadZipFile, AssertionError, AttributeError),
    *(EOFError, LookupError, MemoryError, OverflowError, RuntimeError, TypeError, ValueError),
)

# What a pickle may ask for: functions that rebuild tensors, storages and dtypes of torch, and
# classes of these packages, for which a `Record` stands.
_REBUILD = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): torch.Size,
}
_STORAGES = ("Float", "BFloat16", "Half", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")
_INERT = (
    *("humanmodelling", "wham", "numpy", "pytorch_lightning", "lightning", "omegaconf"),
    *("_codecs", "argparse", "collections", "pathlib"),
)


class Record:
    """The state of a pickled object of a foreign class; none of the class's code runs."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        """Ignore the arguments of the pickled object."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the pickled object."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class _RefusedPickleError(ValueError):
    """The file asks for something that no checkpoint needs."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REBUILD:
            found = _REBUILD[module, name]
            # a file may set attributes: not on torch's own functions
            return found if isinstance(found, type) else partial(found)
        if module == "torch" and (
            name.removesuffix("Storage") in _STORAGES
            or isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return getattr(torch, name)
        if module.partition(".")[0] in _INERT:
            return type(name, (Record,), {})
        raise _RefusedPickleError(f"its pickle asks for {module}.{name}, which no checkpoint needs")


class _PickleModule:
    """The part of the `pickle` module that torch.load uses."""

    Unpickler = _Unpickler


def read_torch_file(path: str | Path) -> dict[str, Any]:
    """Return the dict in a file of torch.save (1.6 or later), tensors mapped into memory.

    A pickle that asks for anything but data is refused, and nothing of it has run.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: file not found")
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except UNPICKLING_ERRORS:
        raise ValueError(f"{path}: no PyTorch checkpoint, or a truncated one") from None
    if any(name.endswith("/constants.pkl") for name in names):
        raise ValueError(f"{path}: a TorchScript program, expected a checkpoint with weights")
    try:
        # weights_only=True refuses objects such as the hyper-parameters of Lightning's checkpoints.
        # Without it `_Unpickler` decides what every name stands for, or ends the reading.
        content = torch.load(
            path, "cpu", pickle_module=_PickleModule, weights_only=False, mmap=True
        )
    except _RefusedPickleError as error:
        raise ValueError(f"{path}: refused: {error}; nothing of it has run") from None
    except UNPICKLING_ERRORS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: damaged checkpoint: {reason}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a dict of tensors, got {type(content).__name__}")
    return content


def tensors_of(content: dict[str, Any]) -> dict[str, Tensor]:
    """Return the named tensors of a checkpoint, whether or not they are wrapped in a dict."""
    for key in ("state_dict", "model"):
        if isinstance(content.get(key), dict):
            content = content[key]
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}


def load_torchscript(path: str | Path, device: torch.device | str = "cpu") -> Any:
    """Load the program in a file for inference. This EXECUTES code that the file contains."""
    try:
        with warnings.catch_warnings():  # it is deprecated; what was released stays
            warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
            return torch.jit.load(str(path), map_location=device).eval()
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].partition(". This is an internal")[0]
        raise ValueError(f"{path} is no TorchScript file (corrupt?): {reason}") from None


def as_finite(
    weight: Tensor,
    where: str | Path,
    name: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Convert and move a weight, which must be finite; errors name `where` it is from.

    The check is one pass and allocates nothing.
    """
    try:
        numbers = weight.to(device, dtype)
        ends = torch.stack(numbers.aminmax()) if numbers.numel() else numbers  # NaN where any is
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{where}: {name} in {weight.dtype} cannot be used: {reason}") from None
    if not ends.isfinite().all():
        raise ValueError(f"{where}: {name} holds NaN or infinity (in {dtype})")
    return numbers
