"""runs/arms.py and runs/arms_report.py on six-token frames: a part of the plan each call."""

import dataclasses
import json
import time

import pytest
import torch

from diagd.cli import options_of
from diagd.decoding.teacher_forcing import strategy_nll
from diagd.families.checkpoints import load_model
from diagd.files import read_json_lines
from diagd.flags import parse
from diagd.tokenizers.shards import read_shards
from diagd.training.options import parse_mixture
from diagd.training.sequences import windows
from runs import arms, arms_report
from tests.worlds import clips_of, write_shard, write_shard_model

JUDGED = ("raster", "k=1", "k=1/action", "k=1,d=2")
SMALL = ("frames=3", "batch-size=1", "steps=2", "warmup-steps=1")


@pytest.fixture
def options(tmp_path):
    """Return a function that makes options for arms of two steps of a tiny model."""
    (tmp_path / "tokens").mkdir()
    for number, part in enumerate(("train", "heldout")):
        write_shard(tmp_path / "tokens" / part, clips_of(seed=number))
    init = write_shard_model(tmp_path / "model")

    def make(study, **changes):
        own = (*SMALL, *([f"init={init}"] if study != "scratch" else []))
        folders = {name: tmp_path / name for name in ("tokens", "work", "out")}
        values = {"study": study, "clips": 3, "compile": False, "changes": own}
        return arms.Options(**{**folders, **values, "judged": JUDGED, **changes})

    return make


@pytest.mark.parametrize("study", arms.STUDIES)
def test_the_command_takes_the_flags_of_each_arm(study):
    command, _, trained, _ = arms.STUDIES[study]
    for arm in trained:
        words = ["--tokens", ".", "--out", ".", *arms.words_of(arms.Options(study).flags(arm))]
        options, _ = parse(options_of(command), command, words)
        assert isinstance(options, options_of(command))


def test_an_arm_is_judged_by_what_each_strategy_costs(options, tmp_path):
    plan = options("scratch")
    rows = arms.judge(plan, "k1", tmp_path / "model")
    tokens, actions = windows(read_shards(plan.tokens / "heldout"), 3, 3)
    strategies = parse_mixture(JUDGED)
    for row, strategy in zip(rows, strategies, strict=True):
        model = load_model(tmp_path / "model")
        nll = strategy_nll(model, tokens, actions, strategy)
        assert row["strategy"] == str(strategy)
        for name, axes in (("by_frame", (0, 2, 3)), ("by_row", (0, 1, 3))):
            assert row[name] == pytest.approx(nll.mean(axes).tolist(), abs=1e-5)
        assert row["by_clip_and_column"] == pytest.approx(nll.mean((1, 2)).numpy(), abs=1e-5)
        assert row["nll"] == pytest.approx(nll.mean().item(), abs=1e-5)
        assert row["clips"] == 3
        assert str(tmp_path) not in json.dumps(row)


def test_the_untouched_world_is_told_column_by_column(options, capsys):
    plan = options("row-starts", arms=("untouched",))
    arms.main(plan)
    arms_report.main(arms_report.Options(("row-starts",), plan.out))
    tokens, actions = windows(read_shards(plan.tokens / "heldout"), 3, 3)
    model = load_model(plan.flags("untouched")["init"])
    diagonal, raster = (
        strategy_nll(model, tokens, actions, strategy)
        for strategy in parse_mixture(("k=1/action", "raster"))
    )
    gap = (diagonal - raster).mean((1, 2))
    text = capsys.readouterr().out
    for part in (gap.mean(1), gap[:, 0], gap[:, 1]):
        assert f"{part.mean().item():+.4f} ± {part.std().item() / 3**0.5:.4f}" in text
    raster_nats = raster.mean().item()
    assert f"above the arm `untouched` in raster order ({raster_nats:.4f}), on" in text


def test_a_finished_arm_is_skipped_only_if_it_is_what_is_asked_for(options):
    plan = options("row-starts", arms=("untouched",))
    arms.main(plan)
    arms.main(plan)
    with pytest.raises(ValueError, match=r"untouched-0\.jsonl is of clips=3, now 2: remove it, or"):
        arms.main(dataclasses.replace(plan, clips=2))
    changes = tuple(one.replace("steps=2", "steps=5") for one in plan.changes)
    with pytest.raises(ValueError, match="is of steps=2, now 5"):
        arms.main(dataclasses.replace(plan, changes=changes))


def test_numbers_in_flags_are_those_of_the_command_line(options, tmp_path):
    plan = options("scratch", changes=("steps=400",))
    flags = plan.flags("k1") | {"steps": 400}
    result = tmp_path / "k1-0.jsonl"
    result.write_text(json.dumps({"clips": 3, "flags": flags}) + "\n")
    arms.check_same(result, plan, "k1")


def test_prices_are_paired_with_the_raster_arm_of_the_seed(tmp_path):
    costs = {  # arm, seed -> strategy -> nats a clip
        ("raster", 0): {"raster": [1.0, 2.0], "k=1": [1.5, 2.5]},
        ("raster", 1): {"raster": [1.2, 2.0], "k=1": [1.6, 2.6]},
        ("k1", 1): {"raster": [1.3, 2.3], "k=1": [1.3, 2.2]},
        ("k1", 2): {"raster": [9.0, 9.0], "k=1": [9.0, 9.0]},  # no raster arm of that seed yet
    }
    folder = tmp_path / "scratch"
    folder.mkdir()
    for (arm, seed), strategies in costs.items():
        rows = [
            {"arm": arm, "seed": seed, "strategy": name, "nll": sum(nll) / 2}
            | {"by_clip_and_column": torch.tensor(nll)[:, None].expand(-1, 7).tolist()}
            for name, nll in strategies.items()
        ]
        lines = "\n".join(json.dumps(row) for row in rows)
        (folder / f"{arm}-{seed}.jsonl").write_text(lines + "\n")
        curve = "".join(json.dumps({"step": n, "loss": 7.0 - n}) + "\n" for n in (1, 2))
        (folder / f"{arm}-{seed}.log.jsonl").write_text(curve)
    arms_report.main(arms_report.Options(("scratch",), tmp_path))
    text = (tmp_path / "arms.md").read_text()
    assert "above the arm `raster` in raster order (1.5500)" in text  # of both seeds
    assert "| k1 | 1 | raster | +0.2000 ± 0.1000 |" in text
    assert "| k1 | 1 | k=1 | +0.1500 ± 0.0500 |" in text
    assert "| raster | 2 | k=1 | +0.5000 ± 0.0500 |" in text
    assert (tmp_path / "scratch-curves.png").is_file()
    assert (tmp_path / "scratch-columns.png").is_file()


def test_a_report_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no results of arms"):
        arms_report.main(arms_report.Options(results=tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"study": "rows"}, "study must be one of scratch, row-starts, .*, got 'rows'"),
        ({"arms": ("raster", "k3")}, "arms must be some of raster, k1, .*, got 'k3'"),
        ({"minutes": 0.0}, "minutes must be above 0, got 0.0"),
        ({"changes": ("steps",)}, "changes must look like FLAG=VALUE, got 'steps'"),
    ],
)
def test_plans_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        arms.Options(**changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "arm", "told"),
    [
        ("scratch", "k1", {"strategies": "k=1", "context_frames": 1}),
        ("row-starts", "k1-action", {"strategies": "k=1/action", "context_frames": 1}),
    ],
)
def test_calls_go_on_until_all_arms_are_done(study, arm, told, options):
    arms.main(options(study, arms=(arm,), minutes=1e-4))
    plan = options(study, arms=(arm,))
    assert not plan.out.exists()
    arms.main(plan)
    names = {f"{arm}-0.jsonl", f"{arm}-0.log.jsonl"}
    assert {path.name for path in (plan.out / study).iterdir()} == names
    (row, *_) = read_json_lines(plan.out / study / f"{arm}-0.jsonl")
    assert (row["arm"], row["seed"], row["flags"]["steps"]) == (arm, 0, "2")
    command = arms.STUDIES[study].command
    found = json.loads((plan.work / study / f"{arm}-0" / f"{command}.json").read_text())
    assert {name: found[name] for name in told} == told
    started = time.monotonic()
    arms.main(plan)
    assert time.monotonic() - started < 1  # nothing is left to do
