"""results.jsonl: one line for each run and each clip, appended whole, read back without torch.

A run line says how the lines after it came about: options, commit, device, versions, model files.

    {"kind": "run", "run": 0, "settings": {...}, "models": {...}, "commit": ..., "device": ...}
    {"kind": "clip", "run": 0, "model": "doom", "method": "k=1", "clip": "clip_7", "seed": ...,
     "quality": {"psnr": [one a frame]}, "features": {"tfd": {...}}, "stats": {...},
     "tokens": {...}, "lossless": "no", "video": ...}

A method is a strategy (`raster`, `k=1`, `exact`: see `diagd.decoding.strategies.table`), whose
lines hold its tokens as well, or a baseline: `truth` (features only), `reconstruction` (by the
tokenizer), `copy` (of the last context frame).
"""

import base64
import json
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diagd.files import append_line, read_json_lines
from diagd.system import only_writer

RESULTS_FILE = "results.jsonl"
BASELINES = ("truth", "reconstruction", "copy")
RASTER = "raster"
_MAY_DIFFER = {"models", "clips", "lpips_backbone", "lpips_heads", "fvd_detector"}  # paths

Record = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """What results.jsonl holds: its run lines and its clip lines, in order."""

    runs: list[Record]
    clips: list[Record]

    def done(self) -> set[tuple[str, str, str]]:
        """Return (model, method, clip) of every clip line."""
        return {key_of(record) for record in self.clips}


def key_of(record: Record) -> tuple[str, str, str]:
    """Return what makes a clip line unique: (model, method, clip)."""
    return record["model"], record["method"], record["clip"]


def file_name(text: str) -> str:
    """Make any label, method or clip a file name."""
    return re.sub(r"[^\w.,=+-]+", "_", text).lstrip(".") or "_"


def video_path(model: str, method: str, clip: str) -> str:
    """Return where a video lies, relative to the folder of results."""
    return "/".join(("videos", file_name(model), file_name(method), f"{file_name(clip)}.mp4"))


def read_results(path: Path) -> Results:
    """Read a file; a last line that a killed run left unfinished is passed over.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is no JSON of ours, or a clip that is there twice.
    """
    if not path.is_file():
        raise FileNotFoundError(f"results not found: {path}")
    results = Results([], [])
    seen: set[tuple[str, str, str]] = set()
    for number, record in enumerate(read_json_lines(path), start=1):
        try:
            if record["kind"] == "run":
                results.runs.append(record)
                continue
            key = key_of(record)
        except KeyError:
            raise ValueError(f"{path}:{number}: expected a line of diagd evaluate") from None
        if key in seen:
            raise ValueError(f"{path}:{number}: {' '.join(key)} is there twice")
        seen.add(key)
        results.clips.append(record)
    return results


def check_same(path: Path, before: Results, run: Record) -> None:
    """Raise ValueError if earlier lines were measured otherwise than this run would measure."""
    for earlier in before.runs:
        for label, sha256 in earlier["models"].items():
            if run["models"].get(label, sha256) != sha256:
                raise ValueError(
                    f"{path}: model {label} has other weights now than when it was measured; "
                    "give it another label or choose another --out"
                )
        for clip, found in earlier.get("clips", {}).items():  # older runs do not say
            if run["clips"].get(clip, found) != found:
                raise ValueError(
                    f"{path}: {clip} is another clip now than when it was measured; "
                    "choose another --out"
                )
        if earlier.get("tokenizer", run["tokenizer"]) != run["tokenizer"]:
            raise ValueError(f"{path} was measured with another tokenizer; choose another --out")
        if earlier["metrics"] != run["metrics"]:
            raise ValueError(f"{path} was measured with other metric weights; choose another --out")
        for name, value in earlier["settings"].items():
            now = run["settings"].get(name)
            if name not in _MAY_DIFFER and now != value:
                raise ValueError(
                    f"{path} was measured with {name}={value}, now {now}; choose another --out"
                )


class ResultsWriter:
    """Append lines to a file of results, one process at a time, each whole or not at all.

    Opening cuts off a line that a killed run left unfinished.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, new or not.

        Raises:
            ValueError: another process is writing to it.
        """
        with ExitStack() as opened:
            opened.enter_context(only_writer(path.parent, path.name))
            with path.open("ab") as file:
                file.truncate(path.read_bytes().rfind(b"\n") + 1)
            self._path, self._opened = path, opened.pop_all()

    def append(self, record: Record) -> None:
        """Write one line and wait until it is on the disk."""
        append_line(self._path, json.dumps(record, allow_nan=False))

    def __enter__(self) -> "ResultsWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.close()


def pack(values: NDArray[Any]) -> Record:
    """Turn an array into JSON: its shape, and little-endian numbers in base64.

    Floats become float32; integers int16 where all fit, else int32.
    """
    kind = "float32" if values.dtype.kind == "f" else "int16"
    if kind == "int16" and values.size and np.abs(values).max() >= 2**15:
        kind = "int32"
    data = np.ascontiguousarray(values, dtype=np.dtype(kind).newbyteorder("<"))
    return {"shape": list(data.shape), kind: base64.b64encode(data.tobytes()).decode()}


def unpack(packed: Record) -> NDArray[Any]:
    """Undo `pack`."""
    (kind,) = packed.keys() - {"shape"}
    data = np.frombuffer(base64.b64decode(packed[kind]), np.dtype(kind).newbyteorder("<"))
    return data.reshape(packed["shape"]).astype(kind)
