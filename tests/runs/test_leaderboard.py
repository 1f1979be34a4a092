"""runs/leaderboard.py: an entry of the bundled maze, and the tables of LEADERBOARD.md."""

from dataclasses import replace

import pytest

from diagd.benchmark.options import BenchOptions
from diagd.files import write_json
from diagd.tokenizers.shards import read_shards
from runs import leaderboard
from tests.benchmark.test_disturbance import QUIET
from tests.worlds import write_shard


def test_an_entry_and_a_machine_come_into_the_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(leaderboard, "THREADS", 1)  # as all tests have
    clips = read_shards(leaderboard.ENTRIES / "tokens")
    write_shard(
        tmp_path / "tokens",
        replace(clips, tokens=clips.tokens[:1, :2], actions=clips.actions[:1, :2]),
        clips.codebook,
    )
    page, entries = tmp_path / "PAGE.md", tmp_path / "entries"
    (entries / "machines").mkdir(parents=True)
    page.write_text(leaderboard.PAGE.read_text())
    options = leaderboard.Options(
        "me", strategy="k=4", out=entries / "a.json", tokens=tmp_path / "tokens", repeats=1
    )
    entry = leaderboard.measure(options)
    assert 0.5 < entry["nll"] < 3
    assert 0 < entry["seconds_a_frame_min"] <= entry["seconds_a_frame"]
    write_json(entries / "a.json", entry)
    rows = [
        QUIET
        | {
            "strategy": name,
            "frames_per_second": speed,
            "over_hugging_face": over,
            "context_frames": count,
        }
        for name, speed, over in (("raster", 2.0, 3.0), ("k=1", 8.25, 12.0))
        for count in (1, 6)
    ]
    document = {"device": "a machine", "threads": 2, "commit": "abc", "rows": rows}
    write_json(entries / "machines" / "b.json", document)
    for _ in range(2):  # the second writes the same
        leaderboard.write_tables(page, entries)
        text = page.read_text()
        assert f"| {entry['nll']:.4f} | maze | k=4 |" in text.replace(" (over the limit)", "")
        assert text.count("| a machine | 2 | native float32 | 2.0 | 8.2 | 12.0x | abc |") == 1
        assert "Nothing has been measured" not in text


@pytest.mark.parametrize(
    "given", [{"model": "maze"}, {"quick": True, "baseline": "none"}, {"row_lag": (2,)}]
)
def test_only_the_common_measurement_is_submitted(given, tmp_path):
    assert BenchOptions(submit=tmp_path / "a.json", dtype=("int8",), row_lag=(1,)).is_comparable()
    with pytest.raises(ValueError, match="submit needs the same measurement"):
        BenchOptions(submit=tmp_path / "a.json", **given)
