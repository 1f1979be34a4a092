"""A step compiled whole, with our kernels in it, for a GPU that is not there: few launches."""

import json
import os
import subprocess
import sys

import pytest

from runs.gpu_estimates import MOST_LAUNCHES
from tests.backends.triton.interpreter import triton

assert triton


@pytest.mark.parametrize(
    ("preset", "lanes", "slots", "capability"),
    [
        ("mc-ar-300m", 14, 1024, 90),
        ("wham-1.6b", 18, 5120, 80),
        ("cosmos-4b", 65, 12800, 120),
    ],
)
def test_a_fused_step_takes_few_launches(preset, lanes, slots, capability):
    """In a process of its own, which pretends to have a GPU as long as it lives."""
    settings = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    numbers = map(str, (lanes, slots, capability))
    command = [sys.executable, "-m", "tests.backends.triton.fusing", preset, *numbers]
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum(found["launches"].values()) <= MOST_LAUNCHES[preset], found
    assert found["compiled"] > 0
