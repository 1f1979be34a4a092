"""Summary of an evaluation: rows, the columns that show them, and notes on how to read them."""

from typing import NamedTuple

from rich.console import Console

from diagd.evaluation import drift, revisit
from diagd.evaluation.results import DISTANCES, Results, biased, summarize
from diagd.evaluation.tables import CLIPS, MODEL, STRATEGY, Column, Row, Table

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
    """Rows as in the JSON; columns in groups, each of which fits a terminal of 80 columns."""

    rows: list[Row]
    labels: tuple[Column, ...]
    groups: tuple[tuple[Column, ...], ...]
    notes: list[str]

    def print(self, console: Console) -> None:
        """Print a table for each group of columns, and the notes."""
        for group in self.groups:
            Table((*self.labels, *group), self.rows).print(console)
        for note in self.notes:
            console.print(note)

    def table(self) -> Table:
        """Return all columns side by side."""
        return Table((MODEL, *self.labels, *(c for group in self.groups for c in group)), self.rows)


def compare(results: Results) -> Comparison:
    """Sum up quality and speed, or drift, or the way back, whichever was measured."""
    settings = results.runs[-1]["settings"]
    if settings["drift"]:
        rows = drift.summarize_drift(results)
        labels = STRATEGY, drift.FRAMES, drift.SAMPLES
        return Comparison(rows, labels, drift.COLUMNS, drift.drift_notes(results, rows))
    if settings["revisit"]:
        rows = revisit.summarize_revisit(results)
        notes = revisit.revisit_notes(settings)
        return Comparison(rows, (STRATEGY, CLIPS), revisit.COLUMNS, notes)
    rows = summarize(results)
    return Comparison(rows, (STRATEGY, CLIPS), (METRICS, SPEED), _notes(results, rows))


def _notes(results: Results, rows: list[Row]) -> list[str]:
    """Name weights, sample sizes and what is missing."""
    metrics, settings = results.runs[-1]["metrics"], results.runs[-1]["settings"]
    notes = []
    for name, flag in (("lpips", "--lpips-backbone"), ("fvd", "--fvd-detector")):
        if metrics[name] is None:
            notes.append(f"{name.upper()}: not available, no weights were given ({flag}).")
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
        notes.append("TFD: not available, the tokenizer gives no latents.")
    for name in DISTANCES:
        sizes = [(row[name]["samples"], row[name]["dimension"]) for row in rows if row[name]]
        if few := [(samples, dimension) for samples, dimension in sizes if samples <= dimension]:
            notes.append(biased(name, *min(few)))
    stats = [record["stats"] for record in results.clips if record["stats"]]
    dropped = max((one["num_dropped_frames"] for one in stats), default=0)
    if dropped:
        notes.append(
            f"The model's context was full: up to {dropped} of its oldest frames were forgotten on "
            "the way, and the times include reading the remaining ones again."
        )
    workers = max(run["options"]["workers"] for run in results.runs)
    if workers > 1:
        notes.append(f"Speed was measured while {workers} workers shared the machine.")
    return notes
