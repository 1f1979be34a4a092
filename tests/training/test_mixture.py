import json
from collections import Counter

import pytest
import torch

from diagd.decoding.strategies.table import parse_strategy
from diagd.training.mixture import draw_strategy
from diagd.training.options import parse_mixture, spell_mixture
from diagd.training.train import pretrain
from tests.worlds import clips_of, write_shard


def test_a_mixture_has_one_spelling():
    mixture = parse_mixture(["raster k=1:2", "k=1,d=14:0.5 zipar=4"])
    assert [(str(one), weight) for one, weight in mixture.items()] == [
        ("raster", 1),
        ("k=1", 2),
        ("k=1,d=14", 0.5),
        ("zipar=4", 1),
    ]
    assert spell_mixture(mixture) == "raster k=1:2 k=1,d=14:0.5 zipar=4"
    assert parse_mixture([spell_mixture(mixture)]) == mixture


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "strategies must not be empty, expected one such as k=1"),
        ("raster k=0.5", "strategy must look like raster, .* got 'k=0.5'"),
        ("raster jacobi", r"must have a schedule \(raster, k=..., zipar=...\), got 'jacobi'"),
        ("k=1 raster k=1/temporal:2", "strategies must differ, got k=1 twice"),
        ("k=1:0", "weight must be a number above 0, as in k=1:2, got 'k=1:0'"),
        ("k=1:much", "weight must be a number above 0, as in k=1:2, got 'k=1:much'"),
        ("k=1:", "weight must be a number above 0, as in k=1:2, got 'k=1:'"),
        ("k=1:inf", "weight must be a number above 0, as in k=1:2, got 'k=1:inf'"),
    ],
)
def test_what_is_no_mixture_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_mixture([text])


def test_strategies_are_drawn_as_often_as_their_weights_say():
    mixture = parse_mixture(["raster", "k=1:2", "k=2:5"])
    counts = Counter(str(draw_strategy(mixture, 3, step)) for step in range(4000))
    for name, share in (("raster", 1 / 8), ("k=1", 2 / 8), ("k=2", 5 / 8)):
        deviation = (4000 * share * (1 - share)) ** 0.5
        assert abs(counts[name] - 4000 * share) < 4 * deviation


def test_a_draw_is_a_function_of_seed_and_step_alone():
    mixture = parse_mixture(["raster k=1 k=2"])
    drawn = [draw_strategy(mixture, 0, step) for step in range(50)]
    torch.manual_seed(9)
    assert [draw_strategy(mixture, 0, step) for step in reversed(range(50))] == drawn[::-1]
    assert [draw_strategy(mixture, 1, step) for step in range(50)] != drawn
    assert draw_strategy(mixture, 5, 7) == draw_strategy(parse_mixture(["raster k=1 k=2"]), 5, 7)
    alone = parse_mixture(["k=3"])
    assert {draw_strategy(alone, 0, step) for step in range(9)} == {parse_strategy("k=3")}


def test_training_reports_every_strategy_and_records_its_mixture(options, tmp_path):
    held_out = write_shard(tmp_path / "heldout", clips_of(seed=5))
    run = options(strategy=("k=1:2 k=2",), validation=held_out)
    report = pretrain(run)
    assert list(report["validation_loss_by_strategy"]) == ["k=1", "k=2", "raster"]
    told = json.loads((run.out / "train.json").read_text())
    assert told["strategies"] == "k=1:2 k=2"
    with pytest.raises(ValueError, match="run holds a run of another model, tokenizer or schedule"):
        pretrain(options(strategy=("k=1 k=2",)))
