"""runs/arms_doom.py and runs/arms_report.py on six-token frames: a part of the plan each call."""

import json
import time

import pytest

from diagd.decoding.likelihood import strategy_nll
from diagd.families.checkpoints import load_model
from diagd.files import read_json_lines
from diagd.tokenizers.shards import read_shards
from diagd.training.mixture import Mixture
from diagd.training.sequences import windows
from runs import arms_doom, arms_report
from tests.worlds import clips_of, write_shard, write_shard_model

JUDGED = ("raster", "k=1", "k=1,d=2")


@pytest.fixture
def options(tmp_path):
    """Return a function that makes options for arms of two steps."""
    (tmp_path / "tokens").mkdir()
    for number, part in enumerate(("train", "heldout")):
        write_shard(tmp_path / "tokens" / part, clips_of(seed=number))
    folders = {"tokens": tmp_path / "tokens", "work": tmp_path / "work", "out": tmp_path / "out"}
    values = {"frames": 3, "batch_size": 1, "steps": 2, "clips": 3, "compile": False}
    return lambda **changes: arms_doom.Options(**{**folders, **values, "judged": JUDGED, **changes})


@pytest.mark.parametrize("visible", ["causal", "fed"])
def test_an_arm_is_judged_under_its_own_rule(visible, options, tmp_path):
    folder = write_shard_model(tmp_path / "model")
    plan = options()
    rows = arms_doom.judge(plan, arms_doom.Arm("k=1", visible), folder)
    assert [row["strategy"] for row in rows] == list(JUDGED)
    tokens, actions = windows(read_shards(plan.tokens / "heldout"), 3, 3)
    for row, strategy in zip(rows, Mixture.parse(JUDGED).weights, strict=True):
        nll = strategy_nll(load_model(folder), tokens, actions, strategy, visible=visible)
        for name, axes in (("by_clip", (1, 2, 3)), ("by_frame", (0, 2, 3))):
            assert row[name] == pytest.approx(nll.mean(axes).tolist(), abs=1e-5)
        for name, axes in (("by_row", (0, 1, 3)), ("by_column", (0, 1, 2))):
            assert row[name] == pytest.approx(nll.mean(axes).tolist(), abs=1e-5)
        assert row["nll"] == pytest.approx(nll.mean().item(), abs=1e-5)


def test_prices_are_paired_with_the_raster_arm_of_the_seed(tmp_path):
    costs = {  # arm, seed -> strategy -> nats a clip
        ("raster", 0): {"raster": [1.0, 2.0], "k=1": [1.5, 2.5]},
        ("raster", 1): {"raster": [1.2, 2.0], "k=1": [1.6, 2.6]},
        ("k1", 1): {"raster": [1.3, 2.3], "k=1": [1.3, 2.2]},
        ("k1", 2): {"raster": [9.0, 9.0], "k=1": [9.0, 9.0]},  # no raster arm of that seed yet
    }
    for (arm, seed), strategies in costs.items():
        rows = [
            {"arm": arm, "seed": seed, "strategy": name, "by_clip": nll, "by_column": nll}
            for name, nll in strategies.items()
        ]
        lines = "\n".join(json.dumps(row) for row in rows)
        (tmp_path / f"{arm}-{seed}.jsonl").write_text(lines + "\n")
        curve = "".join(json.dumps({"step": n, "loss": 7.0 - n}) + "\n" for n in (1, 2))
        (tmp_path / f"{arm}-{seed}.log.jsonl").write_text(curve)
    arms_report.main(arms_report.Options(tmp_path))
    text = (tmp_path / "arms.md").read_text()
    assert "| k1 | 1 | +0.2000 ± 0.1000 | +0.1500 ± 0.0500 |" in text
    assert "| raster | 2 | +0.0000 ± 0.0000 | +0.5000 ± 0.0500 |" in text
    assert (tmp_path / "curves.png").is_file()
    assert (tmp_path / "columns.png").is_file()
    for path in tmp_path.glob("raster*"):
        path.unlink()
    with pytest.raises(ValueError, match="no results of the arm raster to compare with"):
        arms_report.main(arms_report.Options(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ("raster", "k3")}, "arms must be some of raster, k1, .*, got 'k3'"),
        ({"arms": ()}, "arms must be some of raster, k1"),
        ({"minutes": 0.0}, "minutes must be above 0, got 0.0"),
    ],
)
def test_plans_that_cannot_be_are_refused(changes, message, options):
    with pytest.raises(ValueError, match=message):
        options(**changes)


@pytest.mark.slow
def test_calls_go_on_until_all_arms_are_done(options):
    plan = options(arms=("k1-fed",))
    arms_doom.main(options(arms=("k1-fed",), minutes=1e-4))
    assert not plan.out.exists()
    arms_doom.main(plan)
    names = {"k1-fed-0.jsonl", "k1-fed-0.log.jsonl"}
    assert {path.name for path in plan.out.iterdir()} == names
    (row, *_) = read_json_lines(plan.out / "k1-fed-0.jsonl")
    assert (row["arm"], row["seed"], row["visible"]) == ("k1-fed", 0, "fed")
    told = json.loads((plan.work / "k1-fed-0" / "train.json").read_text())
    assert (told["strategies"], told["visible"], told["context_frames"]) == ("k=1", "fed", 1)
    started = time.monotonic()
    arms_doom.main(plan)
    assert time.monotonic() - started < 1  # nothing is left to do
