"""A tiny preset, no plot, and options for runs of it."""

import pytest
import torch
from accelerate.state import AcceleratorState

from diagd.families.presets import PRESETS
from diagd.training import loop
from diagd.training.train import TrainOptions
from tests.training.runs import options_maker
from tests.worlds import model_config


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
    size = {"model": "mc-ar-tiny", "frames": 3, "steps": 12, "log_every": 2}
    return options_maker(TrainOptions, tmp_path, optimizer="adamw", **size)
