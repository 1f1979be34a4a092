"""Options for quick runs, readers of what they wrote, and a way to kill one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from diagd.training.loop import TrainingRun
from tests.worlds import clips_of, write_shard


def options_maker(kind: type[Any], folder: Path, **plain: Any) -> Callable[..., Any]:
    """Return a function that makes options for quick runs on one tiny shard, in a folder."""
    plain |= {"tokens": write_shard(folder / "tokens", clips_of()), "compile": False}
    plain |= {"batch_size": 2, "learning_rate": 1e-2, "warmup_steps": 2, "precision": "no"}
    return lambda out="run", **changes: kind(**{"out": folder / out, **plain, **changes})


def log_of(out: Path) -> list[dict[str, Any]]:
    """Read the log without the speeds, which no two runs share."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert all(line.pop("tokens_per_second") > 0 for line in lines)
    return lines


def weights_of(out: Path) -> dict[str, Tensor]:
    return load_file(out / "model.safetensors")


def assert_same_run(out: Path, other: Path) -> None:
    assert log_of(out) == log_of(other)
    ours, theirs = weights_of(out), weights_of(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def run_killed(train: Callable[[Any], object], options: Any, steps: int) -> None:
    """Train, and die, as if killed, in the step after `steps` steps."""
    original = TrainingRun.take_step

    def step(self):
        if self.step == steps:
            raise KeyboardInterrupt
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "take_step", step)
        with pytest.raises(KeyboardInterrupt):
            train(options)
