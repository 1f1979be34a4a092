import random
import tracemalloc
from statistics import fmean, quantiles

import numpy as np
import pytest

from diagd.evaluation.comparison import bootstrap_interval, grouped, summarize
from diagd.evaluation.results import Results, pack, unpack
from diagd.metrics.frechet import frechet_distance
from tests.evaluation.lines import clip_line, run_line


def test_the_interval_is_that_of_the_percentile_bootstrap():
    values = np.random.default_rng(3).gamma(2.0, size=40)
    interval = bootstrap_interval(values)
    assert interval is not None
    low, high = interval
    draw, drawn_from = random.Random(1), values.tolist()
    means = [fmean(draw.choices(drawn_from, k=40)) for _ in range(10_000)]
    first, *_, last = quantiles(means, n=40)  # 2.5% below the one, and above the other
    # two draws of 10,000 resamples; the spread of such an edge is about 1% of the interval
    assert [low, high] == pytest.approx([first, last], abs=0.05 * (last - first))
    assert bootstrap_interval(values) == [low, high]
    assert bootstrap_interval(values[:1]) is None


def test_the_interval_of_many_values_takes_little_memory():
    values = np.random.default_rng(3).gamma(2.0, size=1501)
    whole = np.random.default_rng(0).integers(1501, size=(10_000, 1501))
    expected = np.quantile(values[whole].mean(axis=1), [(1 - 0.95) / 2, (1 + 0.95) / 2]).tolist()
    tracemalloc.start()
    try:
        assert bootstrap_interval(values) == expected  # to the bit
        assert tracemalloc.get_traced_memory()[1] < whole.nbytes / 10
    finally:
        tracemalloc.stop()


def test_rows_hold_means_and_paired_differences_to_raster_of_the_same_clips():
    raster = {"a": (20.0, 18.0), "b": (30.0, 26.0), "c": (24.0, 24.0)}
    ours = {"c": (23.0, 24.0), "a": (19.0, 18.0)}  # b is not there yet, and the order is another
    lines = [clip_line("raster", clip, values, steps=45) for clip, values in raster.items()]
    lines += [clip_line("k=1", clip, values, steps=21, fps=7.0) for clip, values in ours.items()]
    rows = summarize(Results([run_line()], lines))
    assert [row["strategy"] for row in rows] == ["raster", "k=1"]
    first, second = rows
    assert (first["clips"], second["clips"]) == (3, 2)
    assert first["psnr"]["mean"] == pytest.approx(np.mean(list(raster.values())))
    assert first["psnr"]["difference"] is None
    assert second["psnr"]["mean"] == pytest.approx(21.0)
    assert second["psnr"]["difference"] == pytest.approx(-0.5)
    assert second["psnr"]["difference_interval"] == [-0.5, -0.5]  # both clips lost half a dB
    assert first["psnr"]["interval"][0] < 23 < first["psnr"]["interval"][1]
    assert second["num_steps"] == 21
    assert second["frames_per_second"] == 7
    assert (second["speedup"], second["step_ratio"]) == (3.5, 45 / 21)
    assert (first["speedup"], first["step_ratio"]) == (None, None)
    assert (second["ssim"], second["lpips"], second["fvd"], second["tfd"]) == (None,) * 4


def test_a_model_without_raster_has_no_differences():
    lines = [clip_line("k=1", clip, (20.0,), steps=21) for clip in "ab"]
    lines += [clip_line("raster", clip, (20.0,), steps=45, model="other") for clip in "ab"]
    rows = summarize(Results([run_line("tiny", "other")], lines))
    assert rows[0]["psnr"]["difference"] is rows[0]["psnr"]["difference_interval"] is None


def test_distances_compare_with_the_truth_of_the_same_clips():
    generator = np.random.default_rng(0)

    def line(method, clip):
        features = generator.normal(size=(6, 2)), generator.normal(size=3)
        return clip_line(method, clip, features=dict(zip(("tfd", "fvd"), features, strict=True)))

    truth = {clip: line("truth", clip) for clip in "abcde"}
    ours = {clip: line("k=1", clip) for clip in "dcba"}
    results = Results([run_line()], [*truth.values(), *ours.values()])
    (row,) = summarize(results)

    def stacked(lines, name):
        return np.concatenate([np.atleast_2d(unpack(lines[c]["features"][name])) for c in "abcd"])

    for name, samples, dimension in (("tfd", 24, 2), ("fvd", 4, 3)):
        expected = frechet_distance(stacked(ours, name), stacked(truth, name))
        assert row[name] == {
            "value": pytest.approx(expected, rel=1e-9),
            "samples": samples,
            "dimension": dimension,
            "clips": 4,
        }


def with_tokens(line, tokens, fed, promise="no"):
    line["stats"]["num_fed"] = fed
    return line | {"tokens": pack(np.array(tokens)), "promise": promise}


def test_agreement_is_with_raster_on_the_same_clips():
    lines = [
        with_tokens(clip_line("raster", "a", steps=4), [[1, 2, 3, 4]], 4, "tokens"),
        with_tokens(clip_line("raster", "b", steps=4), [[5, 6, 7, 8]], 4, "tokens"),
        with_tokens(clip_line("exact", "c", steps=2), [[1, 1, 1, 1]], 6, "tokens"),
        with_tokens(clip_line("exact", "b", steps=3), [[5, 6, 0, 8]], 10, "tokens"),
        with_tokens(clip_line("exact", "a", steps=2), [[0, 2, 0, 0]], 8, "tokens"),
        clip_line("copy", "a"),
    ]
    rows = {row["strategy"]: row for row in summarize(Results([run_line()], lines))}
    assert (rows["raster"]["equal_to_raster"], rows["raster"]["fed_per_token"]) == (1, 1)
    assert (rows["exact"]["equal_to_raster"], rows["exact"]["fed_per_token"]) == (0.5, 2)
    assert (rows["exact"]["promise"], rows["exact"]["num_steps"]) == ("tokens", 2)
    assert rows["copy"]["equal_to_raster"] is rows["copy"]["fed_per_token"] is None
    assert rows["copy"]["promise"] is None


def test_clips_of_a_strategy_are_in_order_whatever_steps_each_took():
    lines = [clip_line("exact", clip, steps=s) for clip, s in zip("cba", (9, 4, 8), strict=True)]
    lines.append(clip_line("k=1", "a", steps=7))
    groups = grouped(Results([run_line()], lines))
    assert [(strategy, list(clips)) for (_, strategy), clips in groups.items()] == [
        ("exact", ["a", "b", "c"]),
        ("k=1", ["a"]),
    ]


def test_a_distance_of_a_single_clip_is_none():
    lines = [clip_line(m, "a", features={"fvd": np.arange(3.0)}) for m in ("truth", "copy")]
    (row,) = summarize(Results([run_line()], lines))
    assert row["fvd"]["value"] is None


def test_groups_are_sorted_models_as_named_schedules_by_steps_baselines_last():
    lines = [
        clip_line("copy", "b"),
        clip_line("k=1", "b", steps=21, model="second"),
        clip_line("k=2", "b", steps=30),
        clip_line("k=1", "b", steps=21),
        clip_line("k=1", "a", steps=21),
        clip_line("k=5,d=15", "b", steps=45),  # as many steps as raster
        clip_line("raster", "b", steps=45),
    ]
    groups = grouped(Results([run_line("tiny", "second")], lines))
    assert list(groups) == [
        *[("tiny", strategy) for strategy in ("raster", "k=5,d=15", "k=2", "k=1", "copy")],
        ("second", "k=1"),
    ]
    assert list(groups["tiny", "k=1"]) == ["a", "b"]
