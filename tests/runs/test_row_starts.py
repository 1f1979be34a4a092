"""runs/row_starts.py on six-token frames: arms resume, are judged, and stand in a table."""

import json

import pytest
import torch

from diagd.decoding.likelihood import strategy_nll
from diagd.families.checkpoints import load_model
from diagd.files import read_json_lines
from diagd.tokenizers.shards import read_shards
from diagd.training.mixture import Mixture
from diagd.training.sequences import windows
from runs import arms_report, row_starts
from tests.worlds import clips_of, write_shard, write_shard_model

JUDGED = ("raster", "k=1", "k=1/action", "k=1,late=1")


@pytest.fixture
def options(tmp_path):
    """Return a function that makes options for arms of two steps."""
    (tmp_path / "tokens").mkdir()
    for number, part in enumerate(("train", "heldout")):
        write_shard(tmp_path / "tokens" / part, clips_of(seed=number))
    folders = {"tokens": tmp_path / "tokens", "work": tmp_path / "work", "out": tmp_path / "out"}
    init = str(write_shard_model(tmp_path / "model"))
    values = {"frames": 3, "batch_size": 1, "steps": 2, "clips": 3, "compile": False, "init": init}
    return lambda **changes: row_starts.Options(
        **{**folders, **values, "judged": JUDGED, **changes}
    )


def test_the_untouched_world_is_judged_under_every_mechanism(options, capsys):
    plan = options(arms=("untouched",))
    row_starts.main(plan)
    rows = read_json_lines(plan.out / "untouched-0.jsonl")
    tokens, actions = windows(read_shards(plan.tokens / "heldout"), 3, 3)
    costs = {}
    for row, strategy in zip(rows, Mixture.parse(JUDGED).weights, strict=True):
        nll = costs[row["strategy"]] = strategy_nll(
            load_model(plan.init), tokens, actions, strategy
        )
        assert row["by_clip_and_column"] == pytest.approx(nll.mean((1, 2)).numpy(), abs=1e-5)
        assert row["by_column"] == pytest.approx(nll.mean((0, 1, 2)).tolist(), abs=1e-5)
    gap = (costs["k=1,late=1"] - costs["raster"]).mean((1, 2))
    text = capsys.readouterr().out
    for part in (gap.mean(1), gap[:, 0], gap[:, 1]):
        assert f"{part.mean().item():+.4f} ± {part.std().item() / 3**0.5:.4f}" in text
    assert text.startswith("Nats a token above the arm `untouched` in raster order")


def test_arms_are_compared_with_the_control_of_their_seed(tmp_path):
    for arm, seed, cost in (("raster", 0, 1.0), ("raster", 1, 2.0), ("k1", 0, 1.5), ("k1", 1, 2.1)):
        row = {"arm": arm, "seed": seed, "strategy": "raster"}
        row["by_clip_and_column"] = torch.full((3, 7), cost).tolist()
        (tmp_path / f"{arm}-{seed}.jsonl").write_text(json.dumps(row) + "\n")
        (tmp_path / f"{arm}-{seed}.log.jsonl").write_text("")
    text = row_starts.table(tmp_path)
    cell = "+0.3000 ± 0.0000"
    assert f"| k1 | raster | {' | '.join([cell] * 5)} |" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ("raster", "k3")}, "arms must be some of raster, untouched, .*, got 'k3'"),
        ({"minutes": 0.0}, "minutes must be above 0, got 0.0"),
    ],
)
def test_plans_that_cannot_be_are_refused(changes, message, options):
    with pytest.raises(ValueError, match=message):
        options(**changes)


@pytest.mark.slow
def test_calls_go_on_until_all_arms_are_done(options):
    arms = ("raster", "k1-late1")
    row_starts.main(options(arms=arms, minutes=1e-4))
    assert not options().out.exists()
    row_starts.main(options(arms=arms))
    told = json.loads((options().work / "k1-late1-0" / "finetune.json").read_text())
    assert (told["strategies"], told["context_frames"]) == ("k=1,late=1", 1)
    arms_report.main(arms_report.Options(options().out))
    assert "| k1-late1 | 1 |" in (options().out / "arms.md").read_text()
