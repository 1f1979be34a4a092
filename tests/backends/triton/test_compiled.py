"""The kernels are machine code for GPUs from A100 to RTX 5090, and nothing of them spills."""

import json
import os
import subprocess
import sys

import pytest

from tests.backends.triton.interpreter import triton

SHARED = {"80": 163, "89": 99, "90": 227, "120": 99}  # KiB that a program may have, by capability
CASES = 7 * 3 + 5  # steps with three kernels each, and draws

assert triton


@pytest.mark.parametrize("capability", SHARED)
def test_kernels_compile_without_spills(capability):
    """In a process of its own, for here the interpreter may have taken the kernels."""
    settings = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.triton.compiling", capability]
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == CASES
    for row in rows:
        assert row["spilled_bytes"] == 0, row
        assert row["shared_bytes"] <= SHARED[capability] << 10, row
        assert row["registers"] <= 255, row
