"""Damaged files of every format, and settings of a world of any value: they are read or refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from diagd.pipeline.world_folder import load_parts
from tests.attack.mutations import FORMATS, attempt
from tests.worlds import write_world

pytestmark = pytest.mark.slow

MUTATIONS = 300
ANYTHING: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\u2028", [], {}, [[]], [None], [1], ["x"], {"x": 1}),
    *([2**40] * 3, -1, 0, 1, 2, 3, 2**28, 2**31, 2**64, 10**29, 10**400, 0.5, 1e-30, 1e300),
    *(float("inf"), float("nan")),
)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_files_are_read_or_refused_in_a_line(kind: str, seed: int) -> None:
    command = [sys.executable, "-m", "tests.attack.mutations", kind, str(seed), str(MUTATIONS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-2000:]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer/config.json", "actions.json", "generation.json"]
)
def test_settings_of_a_world_are_of_any_value(name: str, tmp_path: Path) -> None:
    world = write_world(tmp_path / "world")
    defaults = {"fps": 8, "top_k": 5, "decoding": "k=1", "remember": 3, "overlap": True}
    (world / "generation.json").write_text(json.dumps(defaults))
    path = world / name
    fields = json.loads(path.read_text())
    read = []
    for key in fields:
        for value in ANYTHING:
            path.write_text(json.dumps({**fields, key: value}))
            print(key, value)
            read.append(attempt(lambda world: load_parts(world, "cpu", torch.float32), world))
    assert False in read
