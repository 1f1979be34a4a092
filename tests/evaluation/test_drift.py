import numpy as np
import pytest
from numpy.random import default_rng

from diagd.evaluation.comparison import compare
from diagd.evaluation.results import Results
from diagd.metrics.frechet import frechet_distance
from tests.evaluation.lines import clip_line, run_line


def line(strategy, clip, num_frames, true_frames, seed, steps=None):
    """A dream of so many frames, of which the first ones have a truth."""
    random = default_rng(seed)
    features = random.normal(size=(num_frames, 2)).astype(np.float32)
    psnr = [] if strategy == "truth" else random.random(true_frames).tolist()
    signs = {name: random.random(num_frames).tolist() for name in ("sharpness", "repeated")}
    drift = {"drift": {**signs, "distinct": [0.5] * num_frames}}
    return clip_line(strategy, clip, psnr, features={"tfd": features}, steps=steps) | drift


def results_of(lines):
    run = run_line()
    return Results([run | {"mode": "drift"}], lines)


def test_every_eight_of_frames_is_compared_with_all_true_frames():
    """Clip b is over after 5 frames and clip a after 11; both dreams have 20."""
    dreams = [line("k=1", "a", 20, 11, 0, steps=9), line("k=1", "b", 20, 5, 1, steps=9)]
    truths = [line("truth", "a", 11, 11, 2), line("truth", "b", 5, 5, 3)]
    results = results_of([*dreams, *truths])
    comparison = compare(results)
    rows = comparison.rows
    assert [(row["strategy"], row["frames"], row["samples"]) for row in rows] == [
        ("k=1", [1, 8], 16),
        ("k=1", [9, 16], 16),
        ("k=1", [17, 20], 8),
        ("truth", [1, 8], 13),
        ("truth", [9, 11], 3),
    ]

    def drawn(clip, seed, frames):  # the first numbers that `line` draws
        return default_rng(seed).normal(size=(frames, 2)).astype(np.float32)

    truth = np.concatenate([drawn("a", 2, 11), drawn("b", 3, 5)])
    for row, eight in zip(rows, (slice(8), slice(8, 16), slice(16, 24)), strict=False):
        dreamt = np.concatenate([drawn("a", 0, 20)[eight], drawn("b", 1, 20)[eight]])
        assert row["tfd"] == pytest.approx(frechet_distance(dreamt, truth))
        repeated = [dream["drift"]["repeated"][eight] for dream in dreams]
        assert row["repeated"] == pytest.approx(np.mean(repeated))
        sharp = np.concatenate([true["drift"]["sharpness"] for true in truths]).mean()
        now = [dream["drift"]["sharpness"][eight] for dream in dreams]
        assert row["sharpness"] == pytest.approx(np.mean(now) / sharp)
    first, second = (dream["quality"]["psnr"] for dream in dreams)
    assert rows[0]["psnr"] == pytest.approx(np.mean([*first[:8], *second]))
    assert rows[1]["psnr"] == pytest.approx(np.mean(first[8:]))
    assert rows[2]["psnr"] is rows[0]["ssim"] is rows[3]["psnr"] is None
    assert [column.heading for column in comparison.columns] == [
        *("model", "strategy", "frames", "samples"),
        *("TFD", "PSNR", "sharpness", "repeated", "distinct"),
    ]
    cells = comparison.cells(comparison.shown[2], brackets=True)
    assert (cells[1:3], cells[5]) == (["k=1", "17-20"], "-")
    assert not any("Warning" in note for note in comparison.notes)


def test_too_few_frames_for_a_distance_are_told():
    results = results_of([line("k=1", "a", 9, 3, 0, steps=9), line("truth", "a", 3, 3, 1)])
    comparison = compare(results)
    assert comparison.rows[1]["tfd"] is None  # of a single frame
    warning = "Warning: TFD of 1 samples in 2 dimensions is too high"
    assert warning in " ".join(comparison.notes)
