import json

import pytest

from diagd.backends.native.trained_attention import kernels_train
from runs.train_speed import Case, Options, main


@pytest.mark.skipif(not kernels_train(), reason="no products of bfloat16 here")
def test_both_are_timed_on_the_same_tokens(tmp_path, capsys):
    case = Case(2, 1, "k=1")
    main(Options(tmp_path, "mc-ar-128x3", (case,), repeats=2, compile=False))
    document = json.loads((tmp_path / "train_speed.json").read_text())
    (row,) = document["cases"]
    assert {name: row[name] for name in Case._fields} == case._asdict()
    for name in ("ours", "pytorch"):
        low, median, high = row[name]["seconds"]
        assert 0 < low <= median <= high
        assert row[name]["tokens_per_second"] == pytest.approx((2 * 337 - 1) / median, abs=0.5)
    assert "tokens/s" in capsys.readouterr().out
