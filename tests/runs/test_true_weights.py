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
    assert document["rank_correlation_with_nats"] == {
        "tiny, fvd": pytest.approx(1.0),
        "tiny, stlpips": pytest.approx(1.0),
    }
    text = markdown(document)
    assert "| tiny | k=2 | 6 | 2.1000 | 8 | 8 | 0.200 | 20.00 | 0.500 |" in text
    assert "tiny, fvd 1.00" in text


def test_fvd_of_fewer_clips_is_a_mean_of_subsets_and_of_more_is_left_out():
    found = by_size(REAL, TRUE, (4, 6, 9))
    assert list(found) == ["4", "6"]
    assert found["6"] == pytest.approx(frechet_distance(REAL, TRUE))
    assert found["4"] > found["6"]  # the bias of few


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
    assert len(lines) == 12
    assert all(line.endswith("ok") for line in lines)
