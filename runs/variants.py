"""Time the prebuilt kernels of this platform's wheel, each as if the machine had no better ones.

    make wheels
    python runs/variants.py --wheel dist/*manylinux*x86_64.whl --out docs/results

Each variant is timed beside PyTorch's kernels in one run, and what the compiler at hand builds is
timed like another variant, `built`. Leave the machine alone.
"""

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import tyro

from diagd.backends.native.library import BUILT, PREBUILT, prebuilt_here
from diagd.files import write_json
from diagd.system import provenance, settings_of

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Options:
    """Time every variant that this processor runs."""

    wheel: Path  # of this platform
    out: Path  # folder for variants.json
    model: str = "maze"
    repeats: int = 3


def main(options: Options) -> None:
    """Write variants.json: milliseconds a step by variant, number type, backend and strategy."""
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as scratch:
        zipfile.ZipFile(options.wheel).extractall(scratch)
        inside = Path(scratch) / PREBUILT.relative_to(ROOT)
        kernels = {path.stem: path.read_bytes() for path in inside.iterdir()}
        names = [*prebuilt_here(folder=inside), BUILT]
        for name in names:
            for path in inside.iterdir():
                path.unlink()
            if name != BUILT:
                (inside / f"{name}.so").write_bytes(kernels[name])
            # a compiler's kernels would be taken where they are faster, so none is in reach
            path = os.environ["PATH"] if name == BUILT else scratch
            (Path(scratch) / "ziglang.py").write_text("raise SystemExit('not to be used')")
            found = bench(options, Path(scratch), path)
            rows += [{"variant": name, **row} for row in found]
            print(name, *found, sep="\n", file=sys.stderr)
    told = {"options": settings_of(options), **provenance(torch.device("cpu"))}
    write_json(options.out / "variants.json", {**told, "rows": rows}, indent=1)


def bench(options: Options, package: Path, path: str) -> list[dict[str, Any]]:
    """Time a package's kernels and PyTorch's, in turns, in a process of its own."""
    command = [sys.executable, "-m", "diagd", "bench", "--model", options.model, "-k", "1"]
    command += ["--dtype", "float32", "bfloat16", "--backend", "native", "eager"]
    command += ["--baseline", "none", "--context-frames", "1", "--json"]
    done = subprocess.run(
        [*command, "--repeats", str(options.repeats)],
        check=True,
        stdout=subprocess.PIPE,
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package), "PATH": path},
    )
    shown = ("dtype", "backend", "strategy", "ms_per_step", "disturbed")
    return [{key: row[key] for key in shown} for row in json.loads(done.stdout)["rows"]]


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
