"""runs/true_weights.py on results written by hand."""

import json

import numpy as np
import pytest

from diagd.evaluation.results import Results
from diagd.metrics.frechet import frechet_distance
from runs import reproduce
from runs.true_weights import by_size, markdown, rank_correlation, table
from tests.evaluation.lines import clip_line, run_line

RANDOM = np.random.default_rng(0)
TRUE, REAL = RANDOM.standard_normal((2, 6, 2))
PRICES = {"raster": 2.0, "k=2": 2.1, "k=1": 2.5}
SHIFTS = {"truth": 0.0, "raster": 1.0, "exact": 1.0, "k=2": 2.0, "k=1": 3.0}


@pytest.fixture
def document():
    lines, priced = [], []
    for strategy, shift in SHIFTS.items():
        steps = None if strategy == "truth" else 45
        for clip, true in enumerate(TRUE):
            line = clip_line(strategy, f"c{clip}", features={"fvd": true + shift}, steps=steps)
            line["quality"] = {"psnr": [20.0], "ssim": [0.5], "stlpips": [shift / 10]}
            lines.append(line)
            if strategy in PRICES:
                priced.append(clip_line(strategy, f"c{clip}") | {"nll": PRICES[strategy]})
    results, prices = Results([run_line()], lines), Results([run_line()], priced)
    return table(results, prices, REAL, (3, 6))


def test_a_row_has_the_price_beside_fvd_and_the_floor_is_real_against_real(document):
    rows = {row["strategy"]: row for row in document["rows"]}
    assert list(rows) == ["raster", "exact", "k=1", "k=2"]
    assert rows["exact"]["nats"] == rows["raster"]["nats"] == 2.0
    assert rows["k=2"]["fvd"]["6"] == pytest.approx(8.0)  # 2 off in either of two dimensions
    assert document["floor"]["tiny"]["6"] == pytest.approx(frechet_distance(REAL, TRUE))
    assert document["floor"]["tiny"]["3"] > 0
    assert rows["k=2"]["over_raster_error"] == pytest.approx(0.0, abs=1e-6)  # as far everywhere
    assert rows["k=1"]["fvd_error"] > 0
    assert [name for name, row in rows.items() if row["repeats_raster"]] == ["exact"]
    ranks = document["rank_correlation_with_nats"]["tiny"]
    assert ranks["strategies"] == 3  # raster once
    assert (ranks["fvd"], ranks["stlpips"], ranks["psnr"]) == (1.0, 1.0, None)
    assert ranks["fvd of halves"] == [1.0] * 20
    text = markdown(document)
    assert "| tiny | k=2 | 6 | 2.1000 | 8 | 8 ±0 | +6 ±0 | 0.200 | 20.00 | 0.500 |" in text
    assert "over 3 strategies: fvd 1.00, stlpips 1.00, psnr -, ssim -." in text


def test_fvd_of_fewer_clips_is_a_mean_of_subsets_and_of_more_is_left_out():
    found = by_size(REAL, TRUE, (4, 6, 9))
    assert {size: len(values) for size, values in found.items()} == {4: 20, 6: 1}
    assert found[6] == pytest.approx(frechet_distance(REAL, TRUE))
    assert found[4].mean() > found[6]  # the bias of few


def test_ranks_that_are_none_have_no_correlation():
    assert rank_correlation([1.0, 2.0, 4.0], [9.0, 5.0, 1.0]) == pytest.approx(-1.0)
    assert rank_correlation([1.0, 2.0], [1.0, 2.0]) is None
    assert rank_correlation([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]) is None


def test_the_published_table_is_judged_once_it_is_there(document, tmp_path, monkeypatch):
    (tmp_path / "weights").mkdir()
    path = tmp_path / "weights/true_weights.json"
    path.write_text(json.dumps(document))
    monkeypatch.setattr(reproduce, "WEIGHTS", path)
    lines = reproduce.judge(reproduce.read_weights(tmp_path), reproduce.weights_ranges())
    assert len(lines) == 12  # four strategies, three numbers each
    assert all(line.endswith("ok") for line in lines)
