import numpy as np

from diagd.evaluation.comparison import compare
from diagd.evaluation.results import Results
from tests.evaluation.lines import clip_line, run_line


def notes_of(lines, **changes):
    return compare(Results([run_line() | changes], lines)).notes


def test_too_few_samples_are_warned_of():
    features = {"fvd": np.arange(3.0)}
    lines = [clip_line(m, clip, features=features) for m in ("truth", "copy") for clip in "abc"]
    warning = "FVD of 3 samples in 3 dimensions is too high: its covariance needs at least 4"
    assert any(note.startswith(f"Warning: {warning}. ") for note in notes_of(lines))
    lines += [clip_line(m, "d", features=features) for m in ("truth", "copy")]
    assert not [note for note in notes_of(lines) if note.startswith("Warning")]


def test_weights_and_preprocessing_are_named_or_said_to_be_missing():
    metrics = {"lpips": None, "fvd": {"resize": "crop", "detector_sha256": "abc"}}
    notes = notes_of([clip_line("raster", "a", (20.0,), steps=45)], metrics=metrics)
    assert notes == [
        "LPIPS: not measured, it needs weights (--lpips-backbone FILE).",
        "ST-LPIPS: not measured, it needs weights (--perceptual stlpips-alex).",
        "FVD: resize crop, detector_sha256 abc.",
        "TFD: not measured, this kind of tokenizer has no latents to compare.",
    ]


def test_forgotten_frames_and_shared_machines_are_told():
    line = clip_line("raster", "a", (20.0,), steps=45)
    line["stats"]["num_dropped_frames"] = 4
    notes = " ".join(notes_of([line], options={"workers": 3}))
    assert "without seeing up to 4 of the oldest ones" in notes
    assert "while 3 workers shared the machine" in notes
