import ast
import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from diagd.families.checkpoints import find_model, load_model, write_defaults
from diagd.families.defaults import GenerationDefaults
from diagd.training.sequences import windows
from diagd.training.tuning import TuneOptions, main
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
    assert document.keys() > {"commit", "device", "threads", "torch"}
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


def test_the_answer_names_the_command_that_uses_it(options, capfd):
    run = options(tolerance=99.0, strategy=("k=2",), row_lag=())
    document = main(run)
    assert document["choice"]["name"] == "k=2"
    told = capfd.readouterr().out
    assert [line.split()[0] for line in told.split("\n") if line.endswith(" *")] == ["k=2"]
    told = " ".join(told.split())
    assert f"next: diagd play --model {run.model} --strategy k=2; diagd tune with" in told
    assert not (Path(run.model) / "generation.json").exists()


def test_the_answer_becomes_the_default_of_a_folder_and_keeps_the_others(options, capfd):
    run = options(tolerance=99.0, strategy=("k=2/predecessor",), row_lag=(), make_default=True)
    write_defaults(Path(run.model), GenerationDefaults(fps=12.0))
    main(run)
    defaults = find_model(run.model).family.defaults(find_model(run.model))
    assert (defaults.fps, defaults.decoding) == (12.0, "k=2/predecessor")
    assert defaults.strategy(14).name == "k=2/predecessor"
    assert defaults.strategy(14, row_lag=4).name == "k=4"  # what is asked for comes first
    assert "which now decodes so by default" in " ".join(capfd.readouterr().out.split())


def test_the_bundled_world_stays_as_it_is(options):
    with pytest.raises(ValueError, match="make_default needs your own model folder, got doom"):
        options(model="doom", make_default=True)


def test_the_held_out_part_of_a_folder_of_tokens_is_judged_by(options, tmp_path):
    (tmp_path / "corpus").mkdir()
    write_shard(tmp_path / "corpus" / "train", clips_of(seed=1))
    held_out = write_shard(tmp_path / "corpus" / "heldout", clips_of(num_clips=2, seed=2))
    whole, part = (
        main(options(tokens=tokens, clips=None)) for tokens in (tmp_path / "corpus", held_out)
    )
    for row in (*whole["rows"], *part["rows"]):
        assert row.pop("frames_per_second") > 0
    assert whole["rows"] == part["rows"]
    assert whole["options"]["clips"] == 2


def test_the_page_s_lines_of_python_measure_what_tune_does(options):
    """On our own model; `HuggingFaceModel` meets the same protocol (tests/models)."""
    run = options()
    model = load_model(run.model)
    clips = windows(clips_of(), 3, 4)
    page = (Path(__file__).parents[2] / "docs" / "which-k.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = code.replace("diagd.HuggingFaceModel(llama)", "given").replace("tokens = ...", "")
    code = code.replace(", None, ", ", actions, ").replace(
        '("k=8", "k=4", "k=2", "k=1")', '("k=1",)'
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"given": model, "tokens": clips[0], "actions": clips[1]})
    name, steps, gap = printed.getvalue().split(" ", 2)
    row = next(row for row in main(run)["rows"] if row["name"] == name)
    assert int(steps) == row["num_steps"]
    assert ast.literal_eval(gap)["gap"] == pytest.approx(row["gap"], abs=1e-6)
