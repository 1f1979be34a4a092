"""A server that is visited again and again holds no more than at first (`runs/visits.py`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUNS = Path(__file__).parents[3] / "runs"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="NO MEMORY TEST: other systems count otherwise")
def test_memory_is_flat_over_short_visits_and_uploads(world, tmp_path):
    flags = ("--out", tmp_path, "--model", world, "--visits", "600", "--warm-up", "100")
    command = [sys.executable, RUNS / "visits.py", *flags]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["growth"] < 0.1
