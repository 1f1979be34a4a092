"""runs/fsdp.yaml on CPUs: a sharded model, in one process or two, trains as a whole one does."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import (
    _validate_launch_command,
    launch_command_parser,
    prepare_multi_gpu_env,
)
from accelerate.state import AcceleratorState
from torch import distributed
from torch.distributed.fsdp import FSDPModule

from diagd.data.video import write_image
from diagd.training.loop import TrainingRun
from diagd.training.options import FinetuneOptions
from diagd.training.train import finetune, pretrain
from tests.families.llamagen.folders import write_llamagen
from tests.processes import kill
from tests.training import sharded
from tests.training.runs import assert_same_run, log_of, run_killed, weights_of
from tests.worlds import clips_of, smooth_frames, write_shard, write_shard_model

RECIPE = Path(__file__).parents[2] / "runs" / "fsdp.yaml"


@pytest.fixture
def shard(monkeypatch, tmp_path):
    """Return a function after which this process is a group of one, launched by runs/fsdp.yaml."""
    flags = ["--config_file", str(RECIPE), "--num_processes", "2", "script"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(flags))
    recipe = prepare_multi_gpu_env(arguments)

    def begin():
        for name in recipe.keys() - os.environ.keys():
            if "FSDP" in name:
                monkeypatch.setenv(name, recipe[name])
        monkeypatch.setattr(AcceleratorState, "__init__", sharded.with_plugin)
        AcceleratorState._reset_state(reset_partial_state=True)
        meeting = (tmp_path / "meeting").as_uri()
        distributed.init_process_group("gloo", meeting, rank=0, world_size=1)

    yield begin
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def parts(monkeypatch):
    """Return the types of the models that are trained and of the blocks in them."""
    seen = []
    original = TrainingRun.take_step

    def look(self):
        model = self.model
        seen.append([isinstance(part, FSDPModule) for part in (model, *model.model.layers)])
        return original(self)

    monkeypatch.setattr(TrainingRun, "take_step", look)
    return seen


def test_a_sharded_model_trains_as_a_whole_one_does_over_a_kill(options, shard, parts, tmp_path):
    held_out = write_shard(tmp_path / "heldout", clips_of(seed=5))
    short = {"steps": 6, "save_minutes": 0.0, "validation": held_out}
    whole = options("whole", **short)
    report = pretrain(whole)
    assert parts == [[False] * 3] * whole.steps
    shard()
    parts.clear()
    killed = options("killed", **short)
    run_killed(pretrain, killed, 3)
    assert pretrain(killed) == report
    assert parts == [[True] * 3] * (whole.steps + 1)  # that which was killed, twice
    assert_same_run(killed.out, whole.out)
    assert any((killed.out / "training").glob("*/pytorch_model_fsdp_0"))


def test_images_are_learnt_by_a_sharded_model(shard, parts, tmp_path):
    model = write_llamagen(tmp_path / "model")
    folder = tmp_path / "pictures" / "7"
    folder.mkdir(parents=True)
    for number in range(3):
        write_image(folder / f"{number}.png", smooth_frames(1, 32, 40, seed=number)[0])
    quick = {"steps": 4, "batch_size": 2, "compile": False, "precision": "no", "optimizer": "adamw"}
    quick |= {"init": str(model), "images": folder.parent, "log_every": 1}
    whole, split = (FinetuneOptions(out=tmp_path / name, **quick) for name in ("whole", "split"))
    report = finetune(whole)
    shard()
    parts.clear()
    assert finetune(split) == report
    assert all(is_sharded[0] for is_sharded in parts)
    assert_same_run(split.out, whole.out)


def test_a_gradient_that_is_not_finite_is_seen_in_a_sharded_model(options, shard, monkeypatch):
    shard()
    original = TrainingRun.take_step

    def step(self):
        loss = self.loss
        self.loss = lambda *given: loss(*given) * (torch.nan if self.step == 4 else 1)
        value, self.loss = original(self), loss
        return value

    monkeypatch.setattr(TrainingRun, "take_step", step)
    with pytest.raises(ValueError, match="training diverged between steps 5 and 6: loss nan"):
        pretrain(options())


def test_muon_is_refused_for_a_sharded_model(options, shard):
    shard()
    with pytest.raises(ValueError, match="optimizer must be adamw for a sharded model, got mu"):
        pretrain(options(optimizer="muon"))
    assert not options().out.exists()


@pytest.mark.slow
def test_two_processes_that_hold_half_each_follow_the_curve_of_one_over_a_kill(
    tmp_path, command, spawn
):
    tokens = write_shard(tmp_path / "tokens", clips_of())
    start = write_shard_model(tmp_path / "model")
    training = ("--steps", 40, "--warmup-steps", 2, "--learning-rate", 0.01, "--frames", 4)
    exactly = ("--precision", "no", "--no-compile", "--strategy", "raster k=1")
    often = ("--log-every", 1, "--save-minutes", 0)
    flags = ("--init", start, "--tokens", tokens, "--optimizer", "adamw")
    flags = (*flags, *training, *exactly, *often)
    one, two = tmp_path / "one", tmp_path / "two"
    assert command("finetune", *flags, "--batch-size", 4, "--out", one).code == 0

    launch = ("-m", "accelerate.commands.launch", "--config_file", RECIPE, "--num_processes", 2)
    halves = (sharded.__file__, "finetune", *flags, "--batch-size", 2, "--out", two)
    arguments = (*launch, "--mixed_precision", "no", "--main_process_port", 0, *halves)
    on_cpus = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    killed = spawn(*arguments, **on_cpus)
    deadline = time.monotonic() + 600
    while not (two / "training" / "run.json").is_file():
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kill(killed)
    assert len((two / "log.jsonl").read_text().splitlines()) < 40
    went_on = spawn(*arguments, **on_cpus)
    _, err = went_on.communicate(timeout=600)
    assert went_on.returncode == 0, err

    losses = [[line["loss"] for line in log_of(out)] for out in (two, one)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert json.loads((two / "training" / "run.json").read_text())["step"] == 40
    for name, weight in weights_of(one).items():
        torch.testing.assert_close(weights_of(two)[name], weight, atol=1e-2, rtol=0)
    pieces = list((two / "training").glob("*/pytorch_model_fsdp_0/*.distcp"))
    assert len(pieces) == 2
