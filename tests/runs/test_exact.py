"""runs/exact.py on a tiny world: what it writes, and that a killed run goes on."""

import json
from pathlib import Path

import pytest

from runs import exact
from tests.evaluation.lines import write_clips


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("data") / "clips", count=3)


def options_of(world: Path, clips: Path, out: Path, **changes) -> exact.Options:
    values = {"num_clips": 2, "frames": 3, "context_frames": 2, "strategy": ("k=1", "exact sjd")}
    return exact.Options(clips, out, str(world), **values | changes)


def test_every_strategy_is_put_into_numbers_and_pictures(world, clips, tmp_path):
    exact.main(options_of(world, clips, tmp_path))
    report = json.loads((tmp_path / "exact.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exact.json", "exact_runs.png"]
    rows = report["strategies"]
    assert list(rows) == ["raster", "k=1", "exact", "sjd", "exact, frame by frame"]
    assert len(report["clips"]) == 2
    for name in ("raster", "exact", "exact, frame by frame"):
        assert rows[name]["tokens_equal_to_raster"] == rows[name]["clips_equal_to_raster"] == 1
    assert rows["raster"]["steps_a_frame"] == 15
    assert rows["k=1"]["steps_a_frame"] == 7
    assert rows["k=1"]["fewer_steps"] == pytest.approx(15 / 7)
    assert rows["exact"]["steps_a_frame"] < 15
    assert rows["raster"]["fed_per_token"] == pytest.approx(16 / 15)  # an action a frame
    assert set(report["runs"]) == {"exact", "sjd", "exact, frame by frame"}
    for name, runs in report["runs"].items():
        steps = report["totals"][name]["steps"]
        assert sum(runs["runs"].values()) == steps
        assert sum(count for count, _ in runs["by_row"].values()) == steps
        gained = sum(int(gain) * count for gain, count in runs["runs"].items())
        assert gained == sum(gain for _, gain in runs["by_row"].values()) == 2 * 3 * 16
    waited = report["runs"]["exact"]["by_entropy"]
    assert sum(count for count, _ in waited.values()) == report["totals"]["exact"]["steps"]


def test_a_killed_run_goes_on_with_the_next_clip(world, clips, tmp_path, monkeypatch):
    names = ("k=1", "exact,lanes=8", "mc-sjd")
    exact.main(options_of(world, clips, tmp_path / "whole", strategy=names, interactive=()))
    measure, seen = exact.measure, []

    def dying(world, options, todo, name, report):
        if len(seen) == 1:
            raise KeyboardInterrupt
        seen.append(name)
        return measure(world, options, todo, name, report)

    monkeypatch.setattr(exact, "measure", dying)
    options = options_of(world, clips, tmp_path / "killed", strategy=names, interactive=())
    with pytest.raises(KeyboardInterrupt):
        exact.main(options)
    monkeypatch.setattr(exact, "measure", measure)
    exact.main(options)
    whole, killed = (
        json.loads((tmp_path / name / "exact.json").read_text()) for name in ("whole", "killed")
    )
    assert killed["clips"] == whole["clips"]
    assert killed["runs"] == whole["runs"]
    for name, totals in whole["totals"].items():
        del totals["seconds"], killed["totals"][name]["seconds"]
        assert killed["totals"][name] == totals
    with pytest.raises(ValueError, match="was measured with another settings: remove it, or"):
        exact.main(options_of(world, clips, tmp_path / "killed", strategy=names, seed=1))


def test_clips_of_a_model_that_has_changed_are_not_added(world, clips, tmp_path):
    path = tmp_path / "exact.json"
    options = options_of(world, clips, tmp_path)
    path.write_text(json.dumps({**exact.start_report(path, options), "weights": "other"}))
    with pytest.raises(ValueError, match="was measured with another weights: remove it, or"):
        exact.start_report(path, options)
    older = json.loads(path.read_text())
    del older["weights"]
    path.write_text(json.dumps(older))
    assert exact.start_report(path, options)["weights"]


def test_greedy_numbers_stand_beside_sampled_ones(world, clips, tmp_path):
    options = options_of(world, clips, tmp_path, num_clips=1, strategy=("exact",), temperature=0.0)
    exact.main(options)
    assert {path.name for path in tmp_path.iterdir()} == {
        "exact_greedy.json",
        "exact_greedy_runs.png",
    }
    with pytest.raises(ValueError, match="sjd needs a temperature above 0"):
        exact.main(options_of(world, clips, tmp_path / "new", temperature=0.0))
    assert not (tmp_path / "new").exists()
