"""Read the weights of a PyTorch checkpoint without running anything in it.

A `.pt` or `.ckpt` file is a pickle, and a pickle can call any function. Here it may rebuild tensors
and ordered dicts. What checkpoints are known to hold besides (hyper-parameter records of Lightning
runs, numpy scalars, optimizer settings) becomes an inert `Record`; any other name ends the reading.
Tensors stay on disk until they are used (mmap).
"""

import pickle
import zipfile
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._utils import _rebuild_parameter, _rebuild_tensor_v2

from diagd.unpickling import UNPICKLING_ERRORS

_REBUILD = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): torch.Size,
}
_STORAGES = ("Float", "BFloat16", "Half", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")
_INERT = (
    "humanmodelling",
    "wham",
    "numpy",
    "pytorch_lightning",
    "lightning",
    "omegaconf",
    "_codecs",
    "argparse",
    "collections",
    "pathlib",
)


class Record:
    """What a pickled object of a foreign class was made of; none of the class's code runs.

    Attributes:
        arguments: what it was constructed with.
        state: its attributes, or whatever it kept as state.
    """

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the pickled object."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class RefusedPickleError(ValueError):
    """The file wants to run something that no checkpoint needs."""


class _Unpickler(pickle.Unpickler):
    """Looks names up in the tables above."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REBUILD:
            found = _REBUILD[module, name]
            if isinstance(found, type):
                return found
            return partial(found)  # a file may set attributes: not on torch's own functions
        if module == "torch" and name.removesuffix("Storage") in _STORAGES:
            return getattr(torch, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] in _INERT:
            return type(name, (Record,), {})
        raise RefusedPickleError(f"its pickle asks for {module}.{name}, which no checkpoint needs")


class _PickleModule:
    """The part of the `pickle` module that torch.load uses."""

    Unpickler = _Unpickler
    __name__ = "diagd.models.torch_files"


def read_torch_file(path: str | Path) -> dict[str, Any]:
    """Return what a checkpoint file holds: a dict, tensors mapped into memory.

    Raises:
        FileNotFoundError: No such file.
        ValueError: No checkpoint of torch.save (1.6 or later), truncated, TorchScript, or a pickle
            that asks for anything but data; nothing of it has run.
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
        # weights_only=True refuses the records of WHAM's checkpoints. Without it `_Unpickler`
        # decides what a name stands for: something of the tables above, or the reading ends.
        content = torch.load(
            path, "cpu", pickle_module=_PickleModule, weights_only=False, mmap=True
        )
    except RefusedPickleError as error:
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
