"""Summary of an evaluation: rows, the columns that show them, and notes on how to read them."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from diagd.evaluation.results import (
    DISTANCES,
    QUALITY,
    RASTER,
    Record,
    Results,
    bias_notes,
    distance_of,
    grouped,
    mean_and_interval,
    per_horizon,
    quality_of,
    summarize,
    unpack,
)
from diagd.evaluation.tables import CLIPS, MODEL, STRATEGY, Column, Row, Table
from diagd.metrics.frechet import frechet_distance

DRIFT_FRAMES = 256  # dreamt where no other number is asked for
EIGHT = 8  # frames that a row of the table speaks of
FRAMES = Column("frames", "frames", "{0[0]}-{0[1]}", is_label=True)
SAMPLES = Column("samples", "samples", is_label=True)
DRIFT_COLUMNS = (
    *(STRATEGY, FRAMES, SAMPLES),
    Column("tfd", "TFD", "{:.3f}", better="lower"),
    Column("psnr", "PSNR", "{:.2f}", better="higher"),
    Column("ssim", "SSIM", "{:.3f}", better="higher"),
    Column("lpips", "LPIPS", "{:.3f}", better="lower"),
    Column("sharpness", "sharpness", "{:.2f}"),
    Column("repeated", "repeated", "{:.3f}"),
    Column("distinct", "distinct", "{:.3f}"),
)


def summarize_drift(results: Results) -> list[dict[str, Any]]:
    """Return one row for each model, strategy and eight of frames of a dream that goes on and on.

    TFD is read against the true frames of all clips and moments: a walk looks the same however long
    it has lasted. That reference is one for all eights, and each eight has equally many frames of
    every clip; so neither makes TFD rise, drift does.

    A row holds `frames`, the first and the last (from 1, after the given ones), `samples`, how many
    there are over all clips, and means over them, None where there are none (PSNR and SSIM end with
    the clip); `sharpness` is a multiple of the true frames' mean.
    """
    groups = grouped(results)
    rows = []
    for (model, strategy), clips in groups.items():
        truth = groups.get((model, "truth"), {})
        length = max(len(record["drift"]["sharpness"]) for record in clips.values())
        for start in range(0, length, EIGHT):
            end = min(start + EIGHT, length)
            row = {"model": model, "strategy": strategy, "frames": [start + 1, end]}
            rows.append(row | _eight(clips, truth, slice(start, end)))
    return rows


def _eight(clips: dict[str, Record], truth: dict[str, Record], frames: slice) -> dict[str, Any]:
    def mean(part: str, name: str, of: dict[str, Record], frames: slice) -> float | None:
        values = [value for one in of.values() for value in one[part].get(name, ())[frames]]
        return float(np.mean(values)) if values else None

    usual = mean("drift", "sharpness", truth, slice(None))
    sharpness = mean("drift", "sharpness", clips, frames)
    features, reference = _features(clips, frames), _features(truth, slice(None))
    comparable = min(len(features), len(reference)) > 1
    return {
        **{name: mean("quality", name, clips, frames) for name in QUALITY},
        **{name: mean("drift", name, clips, frames) for name in ("repeated", "distinct")},
        "sharpness": sharpness / usual if sharpness is not None and usual else None,
        "samples": sum(len(one["drift"]["sharpness"][frames]) for one in clips.values()),
        "tfd": frechet_distance(features, reference) if comparable else None,
    }


def _features(clips: dict[str, Record], frames: slice) -> NDArray[np.float32]:
    """Return the (N, D) features of some frames of all clips, N being 0 where there are none."""
    packed = (record["features"].get("tfd") for record in clips.values())
    found = [unpack(features)[frames] for features in packed if features]
    return np.concatenate(found) if found else np.empty((0, 0), np.float32)


def drift_notes(results: Results, rows: list[dict[str, Any]]) -> list[str]:
    notes = [
        f"Every clip's first {results.runs[-1]['settings']['context_frames']} frames are given; "
        "where its actions are over, they begin again. PSNR and SSIM are against the true frame of "
        "the moment, as long as there is one.",
        "TFD is the Frechet distance of these frames to all true frames, in statistics of our own "
        "tokenizer's latents; the row of the truth shows what it is without drift.",
        "Sharpness (variance of the Laplacian) is a multiple of the true frames'. Repeated is the "
        "share of tokens equal to the frame before's, distinct how many ids a frame has a token. "
        "The truth shows what is right, the reconstruction what the tokenizer can show of it.",
    ]
    packed = [one["features"]["tfd"] for one in results.clips if "tfd" in one["features"]]
    dimension = max((features["shape"][1] for features in packed), default=0)
    sizes = [{"samples": row["samples"], "dimension": dimension} for row in rows]
    return notes + bias_notes("tfd", sizes)


CHANCE = "chance"
REVISIT_BASELINES = ("reconstruction", CHANCE)


def _revisit_columns(name: str, digits: int) -> tuple[Column, ...]:
    form, signed, above = f"{{:.{digits}f}}", f"{{:+.{digits}f}}", f"{name}.above"
    return (
        Column(f"{name}.turned", f"{name.upper()} turned", form),
        Column(f"{name}.back", "back", form),
        Column(f"{above}_turned", "back - turned", signed, f"{above}_turned_interval"),
        Column(f"{above}_chance", "back - chance", signed, f"{above}_chance_interval"),
    )


REVISIT_COLUMNS = (
    *(STRATEGY, CLIPS),
    *_revisit_columns("psnr", 2),
    *_revisit_columns("ssim", 3),
    *_revisit_columns("lpips", 3),
)


def walk(away: str, back: str, still: str, num_frames: int) -> list[str]:
    """Return the actions: `away` for so many frames, `still` for one, `back` for as many."""
    return [away] * num_frames + [still] + [back] * num_frames


def summarize_revisit(results: Results) -> list[dict[str, Any]]:
    """Return one row for each model and strategy: does a world remember where one turned away?

    A dream turns away from the last given picture, stands still for a frame, and turns back; then
    it should show that picture again. Chance is the last given picture of another clip. ViZDoom's
    turns are slow in the first tics; with the frame in between both are, and the game itself comes
    back to the very pixel (measured), if the player stands still to begin with.

    A row holds `clips`, and for each metric None or means over clips: `back`, of the last frame,
    and `turned`, of the frame at the turning point; how far `back` is above `turned`, and above
    chance on the same clips, with 95% intervals. Baselines do not turn.
    """
    groups = grouped(results)
    rows = []
    for (model, strategy), clips in groups.items():
        chance = {} if strategy == CHANCE else groups.get((model, CHANCE), {})
        turning = None if strategy in REVISIT_BASELINES else results.runs[-1]["settings"]["revisit"]
        row = {"model": model, "strategy": strategy, "clips": len(clips)}
        rows.append(row | {name: _revisited(name, clips, chance, turning) for name in QUALITY})
    return rows


def _revisited(
    name: str, clips: dict[str, Record], chance: dict[str, Record], turning: int | None
) -> dict[str, Any] | None:
    values = per_horizon(clips, name)
    if values is None:
        return None
    back = values[:, -1]
    turned = None if turning is None else values[:, turning]
    both = [(value, clip) for value, clip in zip(back, clips, strict=True) if clip in chance]
    above_chance = [value - chance[clip]["quality"][name][-1] for value, clip in both]
    return {
        "back": float(back.mean()),
        "turned": None if turned is None else float(turned.mean()),
        **mean_and_interval("above_turned", [] if turned is None else back - turned),
        **mean_and_interval("above_chance", above_chance),
    }


def revisit_notes(settings: Record) -> list[str]:
    away, back = settings["revisit_actions"]
    return [
        f"After {settings['context_frames']} given frames: {away} for {settings['revisit']}, "
        f"nothing for one, {back} for {settings['revisit']}. All frames are compared with the last "
        "given one: turned is the one at the turning point, back the last one.",
        "Chance is the last given picture of another clip; the reconstruction is the best that the "
        "tokenizer can show. Intervals are 95% bootstrap intervals over clips, paired.",
    ]


METRICS = (
    Column("psnr.mean", "PSNR", "{:.2f}", "psnr.interval", "higher"),
    Column("ssim.mean", "SSIM", "{:.3f}", "ssim.interval", "higher"),
    Column("lpips.mean", "LPIPS", "{:.3f}", "lpips.interval", "lower"),
    Column("fvd.value", "FVD", "{:.0f}", better="lower"),
    Column("tfd.value", "TFD", "{:.3f}", better="lower"),
)
SPEED = (
    Column("frames_per_second", "frames/s", "{:.2f}", better="higher"),
    Column("tokens_per_second", "tokens/s", "{:.0f}", better="higher"),
    Column("num_steps", "steps", "{:.0f}", better="lower"),
    Column("fed_per_token", "fed/token", "{:.2f}", better="lower"),
    Column("equal_to_raster", "= raster", "{:.1%}"),
)
DIFFERENCES = (
    Column("psnr.difference", "ΔPSNR", "{:+.2f}", "psnr.difference_interval"),
    Column("ssim.difference", "ΔSSIM", "{:+.4f}", "ssim.difference_interval"),
    Column("lpips.difference", "ΔLPIPS", "{:+.4f}", "lpips.difference_interval"),
    Column("speedup", "speedup", "{:.2f}x"),
    Column("step_ratio", "fewer steps", "{:.2f}x"),
)


class Comparison(NamedTuple):
    """Rows as in the JSON, how to show them, and how to read them."""

    rows: list[Row]
    columns: tuple[Column, ...]
    notes: list[str]

    def print(self, console: Console) -> None:
        """Print a table for each model, and the notes."""
        Table(self.columns, self.rows).print(console)
        for note in self.notes:
            console.print(note)

    def table(self) -> Table:
        """Return one table of all models."""
        return Table((MODEL, *self.columns), self.rows)


def compare(results: Results) -> Comparison:
    """Sum up quality and speed, or drift, or the way back, whichever was measured."""
    settings = results.runs[-1]["settings"]
    if settings["drift"]:
        rows = summarize_drift(results)
        return Comparison(rows, DRIFT_COLUMNS, drift_notes(results, rows))
    if settings["revisit"]:
        return Comparison(summarize_revisit(results), REVISIT_COLUMNS, revisit_notes(settings))
    rows = summarize(results)
    return Comparison(rows, (STRATEGY, CLIPS, *METRICS, *SPEED), _notes(results, rows))


def _notes(results: Results, rows: list[Row]) -> list[str]:
    metrics, settings = results.runs[-1]["metrics"], results.runs[-1]["settings"]
    notes = []
    for name, flag in (("lpips", "--lpips-backbone"), ("fvd", "--fvd-detector")):
        if metrics[name] is None:
            notes.append(f"{name.upper()}: not measured, it needs weights ({flag} FILE).")
        else:
            words = ", ".join(f"{key} {value}" for key, value in metrics[name].items())
            notes.append(f"{name.upper()}: {words}.")
    if fvd := next((row["fvd"] for row in rows if row["fvd"]), None):
        generated = settings["num_frames"] - settings["context_frames"]
        notes.append(
            f"FVD compares {fvd['clips']} generated with as many real clips of {generated} frames "
            f"(the given frames are left out), in {fvd['dimension']} dimensions."
        )
    if tfd := next((row["tfd"] for row in rows if row["tfd"]), None):
        notes.append(
            "TFD is the tokenizer Frechet distance, not FVD: Frechet distance between real and "
            f"generated frames ({tfd['samples']} each) in {tfd['dimension']} statistics of our own "
            "tokenizer's latents (mean, spread and change to the frame before, of each channel). "
            "It is comparable only between rows that share a tokenizer."
        )
    else:
        notes.append("TFD: not measured, this kind of tokenizer has no latents to compare.")
    for name in DISTANCES:
        notes += bias_notes(name, [row[name] for row in rows])
    stats = [record["stats"] for record in results.clips if record["stats"]]
    if dropped := max((one["num_dropped_frames"] for one in stats), default=0):
        notes.append(
            "Videos outgrew the model's context: their latest frames were generated without seeing "
            f"up to {dropped} of the oldest ones. Times include any prefill that this took."
        )
    if (workers := max(run["options"]["workers"] for run in results.runs)) > 1:
        notes.append(f"Speed was measured while {workers} workers shared the machine.")
    return notes


IMAGES = Column("clips", "images", is_label=True)
IMAGE_COLUMNS = (
    *(STRATEGY, IMAGES),
    Column("nll.mean", "nats a token", "{:.3f}", better="lower"),
    Column("nll.difference", "above raster", "{:+.3f}", "nll.difference_interval"),
    *METRICS[:3],  # PSNR, SSIM and LPIPS
    Column("fid.value", "FID", "{:.1f}", better="lower"),
    Column("equal_to_raster", "= raster", "{:.1%}"),
    Column("num_steps", "steps", "{:.0f}", better="lower"),
    Column("seconds", "seconds", "{:.2f}", better="lower"),
    Column("tokens_per_second", "tokens/s", "{:.0f}", better="higher"),
    Column("speedup", "speedup", "{:.2f}x"),
)


def compare_images(results: Results) -> Comparison:
    """Sum up the price of each strategy, its likeness to raster and its speed."""
    groups, rows = grouped(results), summarize(results)
    for row in rows:
        model, per_second = row["model"], row["frames_per_second"]
        raster = {} if row["strategy"] == RASTER else groups.get((model, RASTER), {})
        own = groups[model, row["strategy"]]
        row["nll"] = quality_of("nll", own, raster)
        row["fid"] = distance_of("fid", own, raster)
        row["seconds"] = 1 / per_second if per_second else None
    notes = [
        "Nats a token: what raster's own tokens cost while they are decoded by a strategy, guided "
        "as they were drawn; none where a strategy has no schedule.",
        "PSNR, SSIM and = raster (the share of equal tokens) compare with raster's image of the "
        "same prompt and noise. Seconds are of decoding. Intervals are 95% over images.",
    ]
    if (detector := results.runs[-1]["metrics"]["fid"]) is None:
        notes.append("FID: not measured, it needs weights (--fid-detector FILE).")
    else:
        notes.append(f"FID: from raster's images, detector_sha256 {detector['detector_sha256']}.")
    notes += bias_notes("fid", [row["fid"] for row in rows])
    return Comparison(rows, IMAGE_COLUMNS, notes)
