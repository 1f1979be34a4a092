"""runs/bench_gpu.sh with a `diagd` that only says how it was called, and fails where it is told."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "runs" / "bench_gpu.sh"
NAMES = ["mc-ar-300m", "mc-ar-1.2b", "wham-1.6b", "cosmos-4b", "cosmos-12b"]
DIAGD = """#!/usr/bin/env bash
echo "$@" >> called
case " $* " in *" --model $BROKEN "*) echo '{"half'; exit 1 ;; esac
echo "{\\"flags\\": \\"$*\\"}"
"""


@pytest.fixture
def bench(tmp_path):
    """Run the script on some pieces; returns its exit code, and the pieces that it has timed."""
    for name in ("runs", "bin", "docs/results"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "runs")
    for name, text in (("diagd", DIAGD), ("python", "#!/usr/bin/env bash\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(*pieces, broken=""):
        (tmp_path / "called").unlink(missing_ok=True)
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", str(tmp_path / "runs" / "bench_gpu.sh"), *pieces],
            env={**os.environ, "PATH": path, "BROKEN": broken},
            capture_output=True,
            text=True,
        )
        called = tmp_path / "called"
        lines = called.read_text().splitlines() if called.exists() else []
        return done, [name for line in lines for name in NAMES if f"--model {name} " in line]

    return run


@pytest.fixture
def results(tmp_path):
    return tmp_path / "docs" / "results" / "bench_gpu.jsonl"


def models(results):
    flags = [json.loads(line)["flags"].split() for line in results.read_text().splitlines()]
    return [words[words.index("--model") + 1] for words in flags]


def test_pieces_that_are_there_are_not_timed_again(bench, results):
    done, timed = bench("wham-1.6b")
    assert (done.returncode, timed, models(results)) == (0, ["wham-1.6b"], ["wham-1.6b"])
    done, timed = bench()
    assert (done.returncode, timed) == (0, [name for name in NAMES if name != "wham-1.6b"])
    assert models(results) == NAMES
    assert bench()[1] == []
    assert bench("wham-1.6b")[1] == ["wham-1.6b"]  # asked for by name


def test_a_piece_that_fails_stops_no_other_and_leaves_nothing(bench, results):
    done, timed = bench(broken="mc-ar-1.2b")
    assert (done.returncode, timed) == (1, NAMES)
    assert done.stderr == "error: failed: mc-ar-1.2b\n"
    assert models(results) == [name for name in NAMES if name != "mc-ar-1.2b"]
    assert bench()[1] == ["mc-ar-1.2b"]
    assert models(results) == NAMES


def test_where_all_fail_there_are_no_results(bench, results):
    assert bench("cosmos-4b", broken="cosmos-4b")[0].returncode == 1
    assert not results.exists()


def test_an_unknown_piece_is_refused_before_any_work(bench):
    done, timed = bench("cosmos-4b", "cosmos-5b")
    assert (done.returncode, timed) == (2, [])
    assert done.stderr == f"error: a piece is one of {' '.join(NAMES)}, got cosmos-5b\n"
