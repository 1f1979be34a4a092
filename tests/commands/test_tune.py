import json

import pytest

from diagd.commands.tune import main
from diagd.training.tuning import TuneOptions
from tests.worlds import clips_of, write_shard, write_shard_model


@pytest.fixture
def options(tmp_path):
    """Return a function that makes options for a tiny model and its clips."""
    model = str(write_shard_model(tmp_path / "model"))
    tokens = write_shard(tmp_path / "tokens", clips_of())
    plain = {"model": model, "tokens": tokens, "clips": 3, "frames": 4, "row_lag": (1, 2)}
    return lambda **changes: TuneOptions(**{**plain, **changes})


def test_a_folder_gets_the_numbers_and_the_plots(options, tmp_path, capfd):
    document = main(options(out=tmp_path / "out", by=("row", "column"), row_start=("temporal",)))
    assert json.loads((tmp_path / "out" / "tune.json").read_text()) == json.loads(
        json.dumps(document)
    )
    pictures = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert pictures == ["tune.png", "tune_column.png", "tune_row.png"]
    printed = capfd.readouterr().out
    assert "nats above raster by row" in printed
    assert "by frame" not in printed


def test_the_command_prints_its_document(options, command):
    run = options()
    flags = ("--clips", 2, "--frames", 3, "-k", 1, "--row-start", "temporal")
    outcome = command("tune", "--tokens", run.tokens, "--model", run.model, *flags, "--json")
    assert outcome.code == 0, outcome.err
    assert [row["name"] for row in outcome.document["rows"]] == ["raster", "k=1"]
    flags = ("--clips", 2, "--frames", 3, "--strategy", "k=1", "k=2,d=2/spatial")
    named = command("tune", "--tokens", run.tokens, "--model", run.model, *flags)
    assert named.code == 0
    assert "k=2,d=2/spatial" in named.said
