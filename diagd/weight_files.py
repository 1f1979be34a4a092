"""Weight files of any origin: safetensors, torch.save's, pickles of arrays, TorchScript.

Tensors are memory-mapped and written one at a time, so a checkpoint far larger than the memory can
be converted. No code in a file is run, except by `load_torchscript`. Sizes that a file claims
allocate nothing: pickles are scanned before they are read, tensors before they are copied.
"""

import io
import json
import math
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._utils import _rebuild_parameter, _rebuild_tensor_v2

from diagd.files import naming, replacing, require_file, utf8_path

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}

# Names of stored buffers that models compute themselves: rotary angles, causal masks (GPT-2 calls
# them bias), position ids, and states of TransformerEngine.
_COMPUTED = re.compile(
    r"(^|\.)(\w*inv_freq|(cos|sin)_cached|freqs_cis|position_ids|attn_mask|causal_mask|masked_bias"
    r"|(self_attn|attn|attention|crossattention)\.(bias|mask)|_extra_state)$"
)


Change = Callable[[str, Tensor], Tensor]  # of a weight, by its name; shapes stay


def unchanged(name: str, weight: Tensor) -> Tensor:
    return weight


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights in a safetensors file, or raise ValueError if it is not one."""
    damage = f"{path}: not a valid safetensors file"
    with naming(damage, SafetensorError), utf8_path(require_file(path)) as known:
        return _check_held(_weights_of(load_file(known)), path)


def _weights_of(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return the tensors of a file without buffers that a model computes, as transformers does."""
    return {
        name: value
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, Tensor) and not _COMPUTED.search(name)
    }


def check_storable(weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `write_weights` supports the types of the weights."""
    for name, weight in weights.items():
        if weight.dtype not in _DTYPES:
            known = ", ".join(map(str, _DTYPES))
            raise ValueError(f"{name} cannot be stored in {weight.dtype}, expected {known}")


def write_weights(path: Path, weights: Mapping[str, Tensor], change: Change = unchanged) -> None:
    """Write floating-point tensors in their own types, atomically, each changed while written."""
    check_storable(weights)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, weight in weights.items():
        place = [offset, offset + weight.nbytes]
        offset = place[1]
        dtype, shape = _DTYPES[weight.dtype], list(weight.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, weight in weights.items():
            plain = change(name, weight.detach()).to("cpu", weight.dtype).contiguous().reshape(-1)
            file.write(plain.view(torch.uint8).numpy().data)


# Raised by damaged pickles: those that Python documents, and those of mutated files: a foreign
# persistent id asserts, an extension code is a ValueError, a huge memo index a MemoryError.
UNPICKLING_ERRORS = (
    *(pickle.UnpicklingError, struct.error, zipfile.BadZipFile, AssertionError, AttributeError),
    *(EOFError, LookupError, MemoryError, OverflowError, RuntimeError, TypeError, ValueError),
)

# Names that a pickle may load: functions that rebuild tensors, storages and dtypes of torch, and
# classes of these packages, each replaced by a `Record`.
_REBUILD = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): torch.Size,
}
_STORAGES = ("Float", "BFloat16", "Half", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")
_INERT = (
    *("humanmodelling", "wham", "numpy", "pytorch_lightning", "lightning"),
    *("_codecs", "argparse", "collections", "pathlib"),
)
# Limits of a pickle: opcodes, each up to 1 KB, or 16 KB per class; memo entries; nested tuples,
# which Python hashes by recursion.
_MAX_OPCODES, _MAX_DEPTH = 2**20, 100
_MAX_OLD_BYTES = 2**26  # bytes of the pickles that begin a file of the old kind
_PICKLES = 5  # of such a file: three of its header, the object, and the storage keys
_MAX_SHARED = 4  # times that the data of a file may be referenced


class Record:
    """The state of a pickled object of a foreign class; none of the class's code runs."""

    state: Any = None
    arguments: tuple[Any, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class _RefusedFileError(ValueError):
    """The file is not a checkpoint, or loads something that no checkpoint needs."""


class _Function(partial[Any]):
    """A function that a file may call; its attributes may be set, but not torch's own."""

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("the pickle changes a function of torch")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (found := _found_in_torch(module, name)) is not None:
            return found if isinstance(found, type | torch.dtype) else _Function(found)
        if module.partition(".")[0] in _INERT:
            return type(name, (Record,), {})
        reason = "which checkpoints do not need"
        if name == "_rebuild_tensor_v3":
            reason = "for float8, which is supported in .safetensors only"
        shown = f"{module[:80]}.{name[:80]}"
        raise _RefusedFileError(
            f"refused: its pickle loads {shown}, {reason}; no code in it was run"
        )


def _found_in_torch(module: str, name: str) -> Any:
    if (module, name) in _REBUILD:
        return _REBUILD[module, name]
    found = getattr(torch, name, None) if module == "torch" else None
    is_storage = name.removesuffix("Storage") in _STORAGES
    return found if is_storage or isinstance(found, torch.dtype) else None


def _look_through(file: IO[bytes], only_torch: bool = False) -> None:
    """Reject a pickle whose reading would take far more memory or stack than its length.

    With `only_torch`, it may load only what rebuilds tensors: torch itself allows more, such as
    `bytearray`, which allocates any number of bytes.
    """
    stack, memo, marks = list[int](), dict[int, int](), list[int]()  # of nesting depths
    cost, mark = 0, pickletools.markobject
    program: Iterable[tuple[Any, Any, Any]] = cast(Any, pickletools.genops(file))
    for opcode, argument, _ in program:
        name, before = opcode.name, opcode.stack_before
        cost += 16 if name in ("GLOBAL", "STACK_GLOBAL", "INST") else 1
        if only_torch and name == "GLOBAL":
            module, _, wanted = argument.partition(" ")
            if _found_in_torch(module, wanted) is None:
                raise pickle.UnpicklingError
        taken = list[int]()
        if mark in before or (name == "POP" and marks[-1:] == [len(stack)]):
            at = marks.pop()
            taken, before = stack[at:], before[: before.index(mark)] if mark in before else []
            del stack[at:]
        taken += [stack.pop() for _ in before]
        depth = max(taken, default=0) + name.startswith(("TUPLE", "FROZENSET"))
        if name == "MARK":
            marks.append(len(stack))
        elif name.endswith("PUT") or name == "MEMOIZE":
            place, top = (argument, stack[-1]) if taken == [] else (len(memo), depth)
            cost, memo[place] = max(cost, place), top
        elif name.endswith("GET"):
            depth = memo.get(argument, 0)
        if name != "MARK":
            stack += [depth] * len(opcode.stack_after)
        if cost > _MAX_OPCODES or depth > _MAX_DEPTH:
            raise _RefusedFileError(
                f"refused: its pickle has more than {_MAX_OPCODES} opcodes or memo entries, or "
                f"over {_MAX_DEPTH} nested tuples, which checkpoints do not need"
            )


class _PickleModule:  # the part of `pickle` that torch.load uses
    Unpickler = _Unpickler


def read_torch_file(path: str | Path) -> dict[str, Any]:
    """Return the dict in a torch.save file, tensors memory-mapped; no code in it runs."""
    path = require_file(path)
    with path.open("rb") as file:
        is_archive = file.read(4) == b"PK\x03\x04"
    try:  # files before torch 1.6 are not archives; only plain tensors are read from them
        with utf8_path(path) as known, warnings.catch_warnings():
            # torch.save never writes other protocols
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
            content = _read_archive(known) if is_archive else _read_old(known)
    except _RefusedFileError as error:
        raise ValueError(f"{path}: {error}") from None
    except UNPICKLING_ERRORS as error:
        reason = "not a PyTorch checkpoint, or truncated"  # torch's advice is to run the file
        if is_archive:
            reason = f"damaged checkpoint: {(str(error) or type(error).__name__).splitlines()[0]}"
        raise ValueError(f"{path}: {reason}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a dict of tensors, got {type(content).__name__}")
    _check_held(tensors_of(content), path)
    return content


def _check_held(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Reject tensors that claim far more numbers than the file has: expanded, shared, no width."""
    held, claimed = path.stat().st_size, 0
    for tensor in tensors.values():
        claimed += tensor.element_size() * math.prod(max(size, 1) for size in tensor.shape)
    if claimed > _MAX_SHARED * held:
        raise ValueError(
            f"{path}: its tensors need {claimed} bytes, the file has {held}: expanded, or shared"
        )
    return tensors


def _read_old(path: Path) -> Any:
    with path.open("rb") as file:
        head = io.BytesIO(file.read(_MAX_OLD_BYTES))
    for _ in range(_PICKLES):
        _look_through(head, only_torch=True)
    return torch.load(path, "cpu", weights_only=True)


def read_arrays(path: str | Path) -> dict[str, Tensor]:
    """Return the NumPy arrays in nested dicts of a pickle, keyed `outer/inner`; no code runs.

    Raises ValueError unless all values are dicts or float arrays, and for a truncated file.
    """
    path, arrays = require_file(path), dict[str, Tensor]()
    try:
        content = io.BytesIO(path.read_bytes())
        _look_through(content)
        content.seek(0)
        inner = [("", _Unpickler(content).load())]
    except _RefusedFileError as error:
        raise ValueError(f"{path}: {error}") from None
    except UNPICKLING_ERRORS:
        raise ValueError(f"{path}: not a pickle of arrays, or truncated") from None
    seen = set[int]()
    while inner:
        place, node = inner.pop()
        if isinstance(node, dict) and id(node) not in seen:  # a dict may contain itself
            seen.add(id(node))
            inner += [(f"{place}/{key}" if place else str(key), part) for key, part in node.items()]
        elif (array := _array_of(node)) is not None:
            arrays[place] = array
        else:
            where = f" at {place}" if place else ""
            raise ValueError(f"{path}: expected dicts of NumPy's float arrays, got others{where}")
    return arrays


def _array_of(node: Any) -> Tensor | None:
    """Rebuild an array from its pickled state, in native byte order; None if it is not one."""
    match node:
        case Record(
            state=(_, tuple(shape), Record() as described, bool(columns_first), bytes(data))
        ):
            order = described.state[1:2] if isinstance(described.state, tuple) else ()
            kind = "".join(map(str, (*order, *described.arguments[:1])))  # dtype("f4") and "<"
            is_shape = len(shape) <= 8 and all(type(size) is int and size > 0 for size in shape)
            if not is_shape or not re.fullmatch("[<>]f[248]", kind):
                return None
            dtype = np.dtype(kind)
            if math.prod(shape) * dtype.itemsize != len(data):
                return None
            values = np.frombuffer(data, dtype).reshape(shape, order="F" if columns_first else "C")
            return torch.from_numpy(np.array(values, dtype.newbyteorder("="), order="C"))
    return None


def _read_archive(path: Path) -> Any:
    # torch.load runs programs; Python's zipfile and torch may disagree on an archive's names
    reader = torch._C.PyTorchFileReader(str(path))
    if "constants.pkl" in reader.get_all_records():
        raise _RefusedFileError("expected a checkpoint with weights, got a TorchScript program")
    _look_through(io.BytesIO(reader.get_record("data.pkl")))
    with zipfile.ZipFile(path) as archive:  # compressed data cannot be mapped
        if any(part.compress_type for part in archive.infolist()):
            raise _RefusedFileError("expected an uncompressed archive, got a compressed one")
    # weights_only=True rejects objects such as the hyper-parameters in Lightning's files. Without
    # it `_Unpickler` decides what every name loads, or stops.
    return torch.load(path, "cpu", pickle_module=_PickleModule, weights_only=False, mmap=True)


def write_torch_file(path: Path, content: dict[str, Any]) -> None:
    """Write a dict by torch.save, atomically."""
    with replacing(path) as temporary:
        try:
            torch.save(content, temporary)
        except RuntimeError as error:  # torch's error for a full disk
            raise OSError(f"{path} cannot be written: {error}") from error


def tensors_of(content: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, wrapped in a dict or not."""
    for key in ("state_dict", "model", "module"):
        if isinstance(content.get(key), dict):
            content = content[key]
    return _weights_of(content)


def tensors_under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, and remove it."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def rename_by(
    patterns: Iterable[tuple[str, str | Callable[[re.Match[str]], str]]],
    tensors: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Rename tensors: apply each `re.sub` pattern in turn."""
    renamed = dict[str, Tensor]()
    for name, tensor in tensors.items():
        for pattern, replacement in patterns:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Return the named tensors of a .safetensors file or a torch.save file."""
    if Path(path).suffix == ".safetensors":
        return read_weights(Path(path))
    return tensors_of(read_torch_file(path))


def load_torchscript(path: str | Path, device: torch.device | str = "cpu") -> Any:
    """Load a TorchScript program for inference. This EXECUTES code from the file."""
    try:
        with warnings.catch_warnings():  # deprecated, but released models use it
            warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
            return torch.jit.load(str(require_file(path)), map_location=device).eval()
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].partition(". This is an internal")[0]
        raise ValueError(f"{path}: not a TorchScript file (corrupt?): {reason}") from None


def name_tensors(problems: Mapping[str, list[str]]) -> str:
    """Format `2 missing tensors: a, b; 1 unknown tensor: c`, at most three names of each."""
    return "; ".join(
        f"{len(names)} {problem} tensor{'s' * (len(names) > 1)}: "
        + ", ".join(names[:3] + ["..."] * (len(names) > 3))
        for problem, names in problems.items()
        if names
    )


def check_fit(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    where: str | Path,
    described_by: str = "the config",
) -> None:
    """Raise ValueError unless weights have a model's names and shapes."""
    expected = model.state_dict()
    problems = {
        "missing": [name for name in expected if name not in weights],
        "unknown": [name for name in weights if name not in expected],
        "mis-shaped": [
            f"{name} (expected {tuple(tensor.shape)}, got {tuple(weights[name].shape)})"
            for name, tensor in expected.items()
            if name in weights and weights[name].shape != tensor.shape
        ],
        "non-float": [name for name in weights if not weights[name].is_floating_point()],
        # a pickle may expand a few numbers to any size
        "expanded, negated or sparse": [name for name in weights if not _is_plain(weights[name])],
    }
    if misfits := name_tensors(problems):
        raise ValueError(f"{where}: does not match {described_by}: {misfits}")


def _is_plain(weight: Tensor) -> bool:
    is_dense = weight.layout == torch.strided and not weight.is_neg()
    held = weight.untyped_storage().nbytes()
    return is_dense and weight.numel() * weight.element_size() <= held


def assign_weights(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    where: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    change: Change = unchanged,
) -> None:
    """Assign finite, fitting weights, each changed before it is cast, to a model on meta."""
    own = dict[str, Tensor]()
    for name, weight in weights.items():
        with naming(f"{where}: {name} in {weight.dtype} cannot be used", RuntimeError):
            own[name] = change(name, weight).to(device, dtype)
            # a single pass without allocation; NaN if any value is
            ends = torch.stack(own[name].aminmax()) if weight.numel() else own[name]
        if not ends.isfinite().all():
            raise ValueError(f"{where}: {name} holds NaN or infinity (in {dtype})")
    model.load_state_dict(own, assign=True)


def build_fitting(
    make: Callable[[], nn.Module],
    weights: Mapping[str, Tensor],
    where: str | Path,
    described_by: str = "the config",
) -> Any:
    """Build a model on the meta device and assign it matching weights in float32."""
    with torch.device("meta"):
        model = make()
    check_fit(model, weights, where, described_by)
    assign_weights(model, weights, where)
    return model
