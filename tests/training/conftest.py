"""A tiny preset, no plot, and options for runs of it."""

import pytest
import torch
from accelerate.state import AcceleratorState

from diagd.families.presets import PRESETS
from diagd.training import loop
from diagd.training.pretraining import TrainOptions
from tests.worlds import clips_of, model_config, write_shard


@pytest.fixture(autouse=True)
def lone_process(monkeypatch):
    """A preset of these tests, no plot (it takes long), a process in which nobody has trained."""
    monkeypatch.setitem(PRESETS, "mc-ar-tiny", model_config())
    monkeypatch.setattr(loop, "plot_loss", lambda folder: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def options(tmp_path):
    """Return a function that makes options for a run of twelve steps on one tiny shard."""
    tokens = write_shard(tmp_path / "tokens", clips_of())

    def make(out="run", **changes):
        plain = {
            "tokens": tokens,
            "out": tmp_path / out,
            "model": "mc-ar-tiny",
            "frames": 3,
            "steps": 12,
            "batch_size": 2,
            "learning_rate": 1e-2,
            "optimizer": "adamw",
            "warmup_steps": 2,
            "precision": "no",
            "compile": False,
            "log_every": 2,
        }
        return TrainOptions(**{**plain, **changes})

    return make
