import pytest
import torch
from accelerate.state import AcceleratorState

from diagd.families.presets import PRESETS
from diagd.training import loop
from tests.worlds import clips_of, model_config, write_shard


@pytest.fixture
def flags(monkeypatch, tmp_path):
    """Flags of a run of two steps on one tiny shard, without a plot, which takes long."""
    monkeypatch.setitem(PRESETS, "mc-ar-tiny", model_config())
    monkeypatch.setattr(loop, "plot_loss", lambda folder: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    AcceleratorState._reset_state(reset_partial_state=True)
    tokens = write_shard(tmp_path / "tokens", clips_of())
    return (
        *("--tokens", tokens, "--out", tmp_path / "run", "--model", "mc-ar-tiny"),
        *("--frames", 3, "--steps", 2, "--batch-size", 2, "--warmup-steps", 1),
        *("--precision", "no", "--no-compile"),
    )


def test_the_command_trains_and_reports(flags, command, tmp_path):
    outcome = command("train", *flags, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document == {"steps": 2}
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_the_command_refuses_what_is_no_training_data(flags, command, tmp_path):
    (tmp_path / "empty").mkdir()
    outcome = command("train", *flags, "--tokens", tmp_path / "empty")
    outcome.assert_refused(r"no token shards \(shard_\*\.safetensors\) in .*empty")
    shard = tmp_path / "tokens" / "shard_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-20])
    command("train", *flags).assert_refused(r"shard_00000\.safetensors is no token shard")
    assert not (tmp_path / "run").exists()


def test_the_command_refuses_an_output_that_is_a_file(flags, command, tmp_path):
    (tmp_path / "run").write_text("")
    command("train", *flags).assert_refused(r"run")
