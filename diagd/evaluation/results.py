"""results.jsonl: one line for each run and each clip, appended whole, read back without torch.

A run line says how the lines after it came about: options, commit, device, versions, model files.

    {"kind": "run", "run": 0, "settings": {...}, "models": {...}, "commit": ..., "device": ...}
    {"kind": "clip", "run": 0, "model": "doom", "strategy": "k=1", "clip": "clip_7", "seed": ...,
     "quality": {"psnr": [one a frame]}, "features": {"tfd": {...}}, "stats": {...},
     "tokens": {...}, "promise": "no", "video": ...}

Lines of a strategy (`raster`, `k=1`, `exact`: see `diagd.decoding.strategies.table`) hold its
tokens as well. In its place may stand a baseline: `truth` (features only), `reconstruction` (by the
tokenizer), `copy` (of the last context frame).
"""

import base64
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diagd.decoding.strategies.table import refuse_removed
from diagd.files import append_line, encoded, naming, read_json_lines, require_file
from diagd.system import only_writer, refuse_other_run

RESULTS_FILE = "results.jsonl"
LIKELIHOOD_FILE = "teacher_forced.jsonl"
IMAGES_FILE = "images.jsonl"
RASTER, CHANCE = "raster", "chance"
BASELINES = ("truth", "reconstruction", "copy")
REVISIT_BASELINES = ("reconstruction", CHANCE)

# what lines have, beside their kind
OF_CLIPS = "run", "model", "strategy", "clip", "video"
OF_RUNS = (
    *("run", "mode", "settings", "metrics", "models", "clips", "tokenizer", "options"),
    *("commit", "device", "torch", "threads", "python"),
)

Record = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """The run lines and the clip lines of results.jsonl, in order."""

    runs: list[Record]
    clips: list[Record]


def key_of(record: Record) -> tuple[str, str, str]:
    """Return the unique key of a clip line: (model, strategy, clip)."""
    return record["model"], record["strategy"], record["clip"]


def file_name(text: str) -> str:
    """Make any label, strategy or clip a file name."""
    return re.sub(r"[^\w.,=+-]+", "_", text).lstrip(".") or "_"


def unique_name(text: str) -> str:
    """Make a label, strategy or clip a file name that no other one has."""
    if (name := file_name(text)) == text:
        return text
    return f"{name}-{zlib.crc32(encoded(text)):08x}"


def video_path(model: str, strategy: str, clip: str) -> str:
    """Return where a video lies, relative to the folder of results."""
    return f"videos/{unique_name(model)}/{unique_name(strategy)}/{unique_name(clip)}.mp4"


def read_results(path: Path) -> Results:
    """Read the lines of this version; a last one that a killed run left torn is passed over."""
    require_file(path, "results")
    results = Results([], [])
    seen: set[tuple[str, str, str]] = set()
    for number, record in enumerate(read_json_lines(path), start=1):
        is_run = record.get("kind") == "run"
        if missing := [name for name in (OF_RUNS if is_run else OF_CLIPS) if name not in record]:
            said = f"expected a line of diagd evaluate of this version, with {missing[0]!r}"
            raise ValueError(f"{path}:{number}: {said}")
        if is_run:
            results.runs.append(record)
            continue
        with naming(f"{path}:{number}"):
            refuse_removed(record["strategy"])
        key = key_of(record)
        if not any(record["model"] in run["models"] for run in results.runs):
            raise ValueError(f"{path}:{number}: the line of its run is missing")
        if key in seen:
            raise ValueError(f"{path}:{number}: {' '.join(key)} is there twice")
        seen.add(key)
        results.clips.append(record)
    return results


def check_same(path: Path, before: Results, run: Record) -> None:
    """Raise ValueError if earlier lines were measured otherwise than this run would measure."""
    measured = {record["clip"] for record in before.clips}
    for earlier in before.runs:
        models = earlier["models"].keys() & run["models"].keys()
        clips = measured & earlier["clips"].keys() & run["clips"].keys()
        then, now = (
            {f"model {label}": one["models"][label] for label in sorted(models)}
            | {f"clip {name}": one["clips"][name] for name in sorted(clips)}
            | {key: one[key] for key in ("mode", "tokenizer", "metrics")}
            | one["settings"]
            for one in (earlier, run)
        )
        refuse_other_run(f"{path} was measured with", then, now)


@contextmanager
def appending(path: Path) -> Iterator[Callable[[Record], None]]:
    """Yield a function, for one writer at a time, that appends a line, whole or not at all."""
    with only_writer(path.parent, path.name):
        with path.open("ab") as file:  # a line that a killed run left unfinished is cut off
            whole = path.read_bytes().rpartition(b"\n")[0].rstrip(b"\n")  # so are blank ones
            file.truncate(len(whole) + bool(whole))
        yield lambda record: append_line(path, json.dumps(record, allow_nan=False))


def pack(values: NDArray[Any]) -> Record:
    """Turn an array into JSON: its shape, and little-endian float32, int16 or int32 in base64."""
    kind = "float32" if values.dtype.kind == "f" else "int16"
    if kind == "int16" and values.size and np.abs(values).max() >= 2**15:
        kind = "int32"
    data = np.ascontiguousarray(values, dtype=np.dtype(kind).newbyteorder("<"))
    return {"shape": list(data.shape), kind: base64.b64encode(data.tobytes()).decode()}


def unpack(packed: Record) -> NDArray[Any]:
    (kind,) = packed.keys() - {"shape"}
    data = np.frombuffer(base64.b64decode(packed[kind]), np.dtype(kind).newbyteorder("<"))
    return data.reshape(packed["shape"]).astype(kind)
