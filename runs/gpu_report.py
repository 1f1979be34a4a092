"""One report of what diagd does on your GPU: what it is, our tests there, a benchmark in pieces.

    make gpu-report                                              # after a kill, once more
    python runs/gpu_report.py --models mc-ar-1.2b cosmos-12b --device cuda:1
    python runs/gpu_report.py --device cpu --models doom --out rehearsal

Without a CUDA device it ends at once, with exit code 2; 1 says that some piece failed.

Writes REPORT.md and the lines it is made of, pieces.jsonl, anew after every piece, those that tell
most first. A piece is a process of its own and takes a minute or two: one that fails is told in a
line and stops no other. When time is over, or the script is killed, what is done stays; the next
run goes on there, and tries again what failed.
"""

import json
import signal
import subprocess
import sys
import textwrap
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, get_args

import tyro

from diagd.benchmark import doctor
from diagd.benchmark.bench import (
    CACHE_BYTES,
    MARK,
    after,
    config_of,
    disturbed_note,
)
from diagd.benchmark.steps import slot_bytes
from diagd.console import cell
from diagd.files import read_json_lines, write_text
from diagd.models.config import ModelConfig
from diagd.models.transformer import num_parameters
from diagd.system import git_commit, only_writer

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 80
SAMPLED_STEPS = 300  # of a run, evenly spread, where a frame has more than 1,000 tokens
LEAST_BESIDE = 2**30  # bytes that a model needs beside weights and cache, at the very least

Rows = Literal["triton", "int8", "cuda-graph", "hf", "exact", "compiled-graph"]
ROWS: dict[Rows, str] = {  # of `diagd bench`, beside raster
    "triton": "--backend triton --row-lag 1 2 --strategy k=1,d={height} --dtype auto",
    "int8": "--backend triton --row-lag 1 --dtype int8",
    "cuda-graph": "--backend cuda-graph --row-lag 1 --strategy k=1,d={height} --dtype auto",
    "hf": "--row-lag 1 --baseline hf --repeats 1 --dtype auto",
    "exact": "--row-lag 1 --strategy exact --dtype auto",
    "compiled-graph": "--backend compiled-graph --row-lag 1 --dtype auto",
}
# of `runs.players`: many at once, guided images, the first stage of hybrid models
_IMAGE = "--frames 1 --context-frames 0 --repeats 1"
_SAMPLE = f"{_IMAGE} --steps 200 --strategies raster k=1 k=2 --sequences 1"
SHARED: dict[str, str] = {
    "players of mc-ar-300m": "--model mc-ar-300m --sequences 1 8 32 64",
    "players of doom": "--model mc-ar-doom --sequences 1 8 32 64",
    "janus-pro-1b, guided": f"--model janus-pro-1b --guidance 5 --sequences 1 16 {_IMAGE}",
    "emu3, guided": f"--model emu3 --guidance 3 {_SAMPLE}",
    "stage of glm-image-9b": f"--model glm-image-9b {_SAMPLE}",
    "stage of emu3.5": f"--model emu3.5 --guidance 5 {_SAMPLE}",
}
WRITTEN: dict[str, str] = {  # of scripts that write a file
    "clients of serve": "runs.serve_load --parts closed --clients 1 16 --strategies k=1 "
    "--grid 24x24 --out {folder}",
    "glm-image-9b, hf": "runs.glm_stage --their-dtypes bfloat16 --out {folder}/stage.json",
}
VIDEOS = {  # frames to generate and frames to go on from; other models: bench's defaults
    "mc-ar-300m": (4, 1),
    "mc-ar-1.2b": (2, 1),
    "wham-1.6b": (2, 1),
    "cosmos-4b": (3, 2),
    "cosmos-12b": (3, 2),
}
COLUMNS = {
    "steps": "{steps}",
    "ms/step": "{ms_per_step:.2f}",
    "frames/s": "{frames_per_second:.2f}",
    "speedup": "{speedup:.1f}x",
    "efficiency": "{efficiency:.2f}",
    "of copy": "{bandwidth_share:.0%}",
    "capture s": "{capture_seconds:.1f}",
}
EXPLANATION = (
    "Random weights, greedy; times are medians; where a frame has more than 1,000 tokens, of "
    f"{SAMPLED_STEPS} steps spread over the video, but for exact. "
    "Speedup is over raster order in the same process; "
    "efficiency is the speedup divided by the cut in steps. Of copy: the bytes of weights and "
    "cache that a step has to read, by its time, as a share of what a plain copy moves on this "
    "machine. Captures of CUDA graphs come once and are apart. How many steps exact takes says "
    "nothing here: it follows how sure a model is."
)


@dataclass(frozen=True)
class Options:
    """Say what this GPU is, run the tests that need one, time every model, and write a report."""

    out: Path = ROOT / "docs/results/gpu"  # folder for REPORT.md and pieces.jsonl
    device: str = "cuda"  # cuda, cuda:1; with cpu, the script can be rehearsed
    # as in `diagd bench`
    models: tuple[str, ...] = ("mc-ar-300m", "doom", "cosmos-4b", "wham-1.6b")
    rows: tuple[Rows, ...] = get_args(Rows)  # a piece for each of every model
    shared: tuple[str, ...] = (
        *SHARED,
        *WRITTEN,
    )  # steps that many share, and other kinds of models
    tests: str = "tests/gpu"  # a file or folder: those marked gpu run; with "" none
    minutes: float = 3.0  # a piece that takes longer is stopped
    total_minutes: float = 12.0  # no piece is begun later


class Piece(NamedTuple):
    """What to measure, and why not to try, if there is a reason."""

    measure: Callable[[], dict[str, Any]]
    reason: str | None = None

    def outcome(self) -> dict[str, Any]:
        """Measure; returns the `document`, or why it was `skipped` or has `failed`."""
        if self.reason is not None:
            return {"skipped": self.reason}
        try:
            return {"document": self.measure()}
        except OSError as error:
            return {"failed": str(error)}


def main(options: Options) -> bool:
    """Measure what is not there yet; returns whether nothing failed.

    Raises:
        ValueError: no such device or model, or pieces that another machine or commit measured.
        OSError: the report cannot be written.
    """
    facts = machine(options.device)
    todo = pieces(options, facts)
    ends = time.monotonic() + 60 * options.total_minutes
    with only_writer(options.out):
        done = measured_before(options.out / "pieces.jsonl", facts)
        write(options.out, done)
        for number, (name, piece) in enumerate(todo.items(), start=1):
            if "document" not in done.get(name, {}):
                print(f"{number} of {len(todo)}: {name}", flush=True)
                is_late = time.monotonic() > ends
                done[name] = {"skipped": "time was over"} if is_late else piece.outcome()
                write(options.out, done)
    print(f"wrote {options.out / 'REPORT.md'}; its last lines say how to send it")
    return not any("failed" in done[name] for name in todo)


def pieces(options: Options, facts: dict[str, Any]) -> dict[str, Piece]:
    """Return what to measure, by name, those that tell most first.

    Raises:
        OSError: no such model.
    """
    sizes = {model: config_of(model) for model in options.models}
    todo = {"tests": Piece(partial(run_tests, options))} if options.tests else {}
    players = {name: Piece(partial(share, options, name)) for name in options.shared}
    for rows in options.rows:
        for model, config in sizes.items():
            reason = why_too_large(config, facts)
            if rows == "hf" and not config.is_llama:
                reason = "Hugging Face has no model like it"
            todo[f"{model}, {rows}"] = Piece(partial(bench, options, model, rows), reason)
        if rows == "int8":
            todo |= players
    todo |= players  # where they have no place yet
    return todo


def machine(device: str) -> dict[str, Any]:
    """Return what `diagd doctor` says of the machine, without paths, and the commit.

    Raises:
        ValueError: no such device.
    """
    found = doctor.main(doctor.DoctorOptions(device, seconds=0))
    commit, day = git_commit(), time.strftime("%Y-%m-%d")
    parts = {part: found[part] for part in ("machine", "gpu", "choices")}
    return {**parts, "commit": commit, "day": day}


def measured_before(path: Path, facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the pieces of a file, if there is one, and the machine as it is now.

    Raises:
        ValueError: another machine or commit measured them.
    """
    lines = read_json_lines(path) if path.is_file() else []
    pieces = {line.pop("piece"): line for line in lines}
    now = identity(facts)
    before = identity(pieces["machine"]["document"]) if pieces else now
    for name, value in now.items():
        if before[name] != value:
            raise ValueError(
                f"{path} was measured with {name} {before[name]}, here it is {value}: "
                "remove it, or choose another --out"
            )
    return {"machine": {"document": facts}} | {
        name: piece for name, piece in pieces.items() if name != "machine"
    }


def identity(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what must be the same for pieces to stand in one report."""
    device = (facts["gpu"] or {"name": facts["machine"]["processor"]})["name"]
    return {"device": device, "torch": facts["machine"]["torch"], "commit": facts["commit"]}


def why_too_large(config: ModelConfig, facts: dict[str, Any]) -> str | None:
    """Say why a model cannot fit the memory that is free; None where it may."""
    number_bytes = CACHE_BYTES[facts["choices"]["dtype"]["name"]]
    weights = num_parameters(config) * number_bytes
    needed = weights + slot_bytes(config, number_bytes) * config.max_positions + LEAST_BESIDE
    free = (facts["gpu"] or {}).get("memory_free_bytes", facts["machine"]["memory_available_bytes"])
    if needed <= free:
        return None
    return f"it needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"


def bench(options: Options, model: str, rows: Rows) -> dict[str, Any]:
    """Time rows of a model with random weights; returns the document of `diagd bench`.

    Raises:
        OSError: it fails; says why in a line.
    """
    config, flags = config_of(model), ["--model", model, "--random-weights"]
    flags += [] if rows == "hf" else ["--baseline", "none"]
    flags += ROWS[rows].format(height=config.grid_height).split()
    if model in VIDEOS:
        frames, context_frames = VIDEOS[model]
        frames = 1 if rows == "hf" else frames
        flags += ["--grid", f"{frames}x{config.grid_height}x{config.grid_width}"]
        flags += ["--context-frames", str(context_frames)]
    if config.tokens_per_frame > 1000 and rows not in (
        "exact",
        "hf",
    ):  # raster order would take minutes
        flags += ["--steps", str(SAMPLED_STEPS)]
    return document_of(options, "diagd", ["bench", *flags, "--json"])


def share(options: Options, name: str) -> dict[str, Any]:
    """Time what is in SHARED or WRITTEN; returns the document of the script.

    Raises:
        OSError: it fails; says why in a line.
    """
    if name in SHARED:
        return document_of(options, "runs.players", SHARED[name].split())
    with TemporaryDirectory() as folder:
        module, *flags = WRITTEN[name].format(folder=folder).split()
        run_module(options, module, flags)
        return json.loads(next(Path(folder).glob("*.json")).read_text())


def document_of(options: Options, module: str, flags: Sequence[str]) -> dict[str, Any]:
    """Run a module on the device; returns the document that it prints."""
    return json.loads(run_module(options, module, flags))


def run_module(options: Options, module: str, flags: Sequence[str]) -> str:
    """Run a module on the device; returns what it prints."""
    done = run_python(options, ["-m", module, *flags, "--device", options.device], ROOT)
    if done.returncode:
        raise OSError(reason_of(done))
    return done.stdout


def run_tests(options: Options) -> dict[str, Any]:
    """Run the tests marked gpu; returns how many did what, and which failed.

    Raises:
        OSError: they cannot be run.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        flags = ["-q", "-m", "gpu", "-c", str(ROOT / "pyproject.toml"), f"--junitxml={path}"]
        done = run_python(options, ["-m", "pytest", *flags, options.tests], ROOT)
        if not path.is_file():
            raise OSError(reason_of(done))
        suite = next(ET.parse(path).iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    return {
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed,
        "skipped": counts["skipped"],
        "seconds": float(suite.get("time", 0)),
        "failures": [
            "::".join(filter(None, (case.get("classname"), case.get("name"))))
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ],
    }


def run_python(
    options: Options, words: Sequence[str], folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments, and wait for it, but not for ever.

    Raises:
        OSError: it took too long.
    """
    command = [sys.executable, *words]
    text = {"text": True, "encoding": "utf-8", "errors": "replace"}
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, timeout=60 * options.minutes, **text
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"took more than {options.minutes:g} minutes") from None


def reason_of(done: subprocess.CompletedProcess[str]) -> str:
    """Say in a line why a process failed: its last words, without the name of the home folder."""
    if done.returncode < 0:
        return f"ended by {signal.Signals(-done.returncode).name}"
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    last = lines[-1].removeprefix("error: ") if lines else f"exit code {done.returncode}"
    return textwrap.shorten(last.replace(str(Path.home()), "~"), 300)


def write(folder: Path, pieces: dict[str, dict[str, Any]]) -> None:
    """Write what there is, as lines and as a report."""
    lines = (json.dumps({"piece": name} | piece) + "\n" for name, piece in pieces.items())
    write_text(folder / "pieces.jsonl", "".join(lines))
    write_text(folder / "REPORT.md", "\n".join(report(pieces)) + "\n")


def report(pieces: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of the report."""
    documents = {name: piece["document"] for name, piece in pieces.items() if "document" in piece}
    facts = documents.pop("machine")
    lines = [f"# diagd on {identity(facts)['device']}", "", *describe(facts)]
    if "tests" in documents:
        lines += ["", *describe_tests(documents.pop("tests"))]
    if documents:
        lines += ["", "## Benchmark", "", *wrapped(EXPLANATION)]
    shared = {name: documents.pop(name) for name in SHARED if name in documents}
    written = {name: documents.pop(name) for name in WRITTEN if name in documents}
    for model in dict.fromkeys(document["options"]["model"] for document in documents.values()):
        own = [d for d in documents.values() if d["options"]["model"] == model]
        lines += ["", *describe_model(own)]
    if shared:
        lines += ["", "## Many sequences in one step", ""]
        lines += wrapped("Frames a second are of all sequences together, and of each.")
    for name, document in shared.items():
        lines += ["", *describe_shared(name, document)]
    for name, document in written.items():
        header, *cells = document["rows"][0], *(row.values() for row in document["rows"])
        lines += ["", f"### {name}", "", *table(list(header), [shown(row) for row in cells])]
    missing = [
        f"- {name}: {outcome}: {piece[outcome]}"
        for name, piece in pieces.items()
        for outcome in ("skipped", "failed")
        if outcome in piece
    ]
    if missing:
        lines += ["", "## Not measured", "", *missing]
    lines += ["", "## How to send it to us", ""]
    return lines + wrapped(
        "Open an issue on the project's page, `GPU report:` and the name of your GPU as its title, "
        "and attach this file and `pieces.jsonl`, which lies beside it. Thank you!"
    )


def describe(facts: dict[str, Any]) -> list[str]:
    """Say what the machine is, and what of diagd runs on it."""
    found, chosen = facts["machine"], facts["choices"]
    texts = {
        "GPU": doctor.gpu_line(facts["gpu"]) if facts["gpu"] else "none: this is a rehearsal",
        "processor": f"{found['processor']}, {found['memory_bytes'] / 2**30:.1f} GiB",
        "versions": f"torch {found['torch']}, Python {found['python']}, {found['system']}",
        "diagd": f"commit {facts['commit'] or 'unknown'}, {facts['day']}",
        "backend": "{name}: {why}".format(**chosen["backend"]),
        "dtype": "{name}: {why}".format(**chosen["dtype"]),
    }
    return [
        line for name, text in texts.items() for line in wrapped(f"- {name}: {text}", indent="  ")
    ]


def describe_tests(tests: dict[str, Any]) -> list[str]:
    """Return the table of the tests marked gpu, and the names of failures."""
    names = ["passed", "failed", "skipped", "seconds"]
    lines = ["## Tests marked gpu", "", *table(names, [[tests[name] for name in names]])]
    return lines + [""] * bool(tests["failures"]) + [f"- {name}" for name in tests["failures"]]


def describe_model(documents: list[dict[str, Any]]) -> list[str]:
    """Return the table of a model, which several pieces measured."""
    first = documents[0]
    rows = [row for document in documents for row in document["rows"]]
    contexts = " or ".join(str(count) for count in sorted({row["context_frames"] for row in rows}))
    runs, grid = first["options"]["repeats"], "x".join(map(str, first["grid"]))
    speeds = [c["bytes_per_second"] / 1e9 for d in documents for c in d["ceilings"].values()]
    peak = max(document["peak_memory_bytes"] for document in documents) / 2**30
    attention = {f"{row['attention']} ({row['backend']})": None for row in rows}
    lines = [f"### {first['options']['model']}", ""]
    lines += wrapped(
        f"{first['parameters'] / 1e6:.0f}M parameters in {rows[0]['dtype']}; grid {grid} after "
        f"{contexts} frames; {runs} run{'s' * (runs > 1)}. A plain copy moved {min(speeds):.0f} to "
        f"{max(speeds):.0f} GB/s, read and written. Peak memory {peak:.1f} GiB. "
        f"Attention by {', '.join(attention)}."
    )
    cells, disturbed = [], []
    for row in rows:
        name = f"{row['backend']} {row['strategy']}{after(row, rows)}"
        disturbed += [name] * row["disturbed"]
        values = [cell(text, row) for text in COLUMNS.values()]
        cells.append([name + f" {MARK}" * row["disturbed"], *values])
    lines += ["", *table(["", *COLUMNS], cells)]
    return lines + (["", *wrapped(disturbed_note(disturbed))] if disturbed else [])


def describe_shared(name: str, document: dict[str, Any]) -> list[str]:
    """Return the table of steps that sequences share."""
    grid, scale = "x".join(map(str, document["grid"])), document["options"]["guidance"]
    text = f"{document['dtype']}, backend {document['backend']}, grid {grid}"
    text += "" if scale is None else f", guidance {scale:g}: two sequences each"
    header = ["at once", "strategy", "steps", "ms/step", "frames/s", "of each", "GiB"]
    cells = [
        [
            *(row["sequences"], row["strategy"], row["steps"], f"{row['ms_per_step']:.2f}"),
            *(f"{row[key]:.2f}" for key in ("frames_per_second", "frames_per_second_each")),
            f"{row['peak_memory_bytes'] / 2**30:.1f}",
        ]
        for row in document["rows"]
    ]
    return [f"### {name}", "", *wrapped(text + "."), "", *table(header, cells)]


def shown(values: Iterable[Any]) -> list[Any]:
    """Round numbers."""
    return [f"{value:.2f}" if isinstance(value, float) else value for value in values]


def table(header: list[str], rows: list[list[Any]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [header, ["-"] * len(header), *rows]
    return [f"| {' | '.join(map(str, line)).lstrip()} |" for line in lines]


def wrapped(text: str, indent: str = "") -> list[str]:
    """Break a text into lines; those after the first are indented."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


if __name__ == "__main__":
    try:
        sys.exit(0 if main(tyro.cli(Options, description=__doc__)) else 1)
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
