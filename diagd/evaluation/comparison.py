"""Summary of an evaluation: rows, tables of columns that are specified once, notes for readers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from rich.console import Console

from diagd.console import print_table
from diagd.decoding.teacher_forcing import gap_to_raster
from diagd.evaluation.options import CONTINUATION, DRIFT, IMAGES, LIKELIHOOD, REVISIT
from diagd.evaluation.results import BASELINES, CHANCE, RASTER, Record, Results, unpack
from diagd.metrics.frechet import PUBLISHED_FRAMES, frechet_distance

Row = dict[str, Any]  # as in the JSON of a command


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    key: str  # of the value in a row; `psnr.mean` is row["psnr"]["mean"]
    heading: str
    form: str = "{}"  # formats a value
    interval: str | None = None  # key of the value's 95% interval, a pair
    better: Literal["higher", "lower"] | None = None  # of two values; None where neither is
    is_label: bool = False  # it names the row

    def value(self, row: Row) -> Any:
        return _look_up(row, self.key)

    def cell(self, row: Row, brackets: bool) -> str:
        """Format the value with its interval, in brackets or as plus and minus half its width."""
        value = self.value(row)
        interval = self.interval and _look_up(row, self.interval)
        if value is None:
            return "-"
        text = self.form.format(value)
        if not interval:
            return text
        low, high = interval
        if brackets:
            return f"{text} [{self.form.format(low)}, {self.form.format(high)}]"
        return f"{text} ±{self.form.format((high - low) / 2).lstrip('+')}"

    @property
    def titled(self) -> str:
        return self.heading + {"higher": "↑", "lower": "↓", None: ""}[self.better]


def _look_up(row: Row, key: str) -> Any:
    name, _, rest = key.partition(".")
    value = row.get(name)
    return _look_up(value, rest) if rest and value is not None else value


MODEL = Column("model", "model", is_label=True)
STRATEGY = Column("strategy", "strategy", is_label=True)
CLIPS = Column("clips", "clips", is_label=True)


class Table:
    """Rows as in the JSON, columns to show them, and notes on how to read them.

    Rows and columns that hold nothing but labels are not shown.
    """

    def __init__(
        self, rows: list[Row], columns: Sequence[Column], notes: Sequence[str] = ()
    ) -> None:
        self.rows, self.notes = rows, notes
        self.numbers = [
            one
            for one in columns
            if not one.is_label and any(one.value(row) is not None for row in rows)
        ]
        self.columns = [MODEL, *(one for one in columns if one.is_label or one in self.numbers)]
        self.shown = [
            row for row in rows if any(one.value(row) is not None for one in self.numbers)
        ]

    def cells(self, row: Row, brackets: bool = False) -> list[str]:
        return [column.cell(row, brackets) for column in self.columns]

    def best(self) -> set[tuple[int, int]]:
        """Return (row, column) of the best value among the strategies of each model."""
        found = set[tuple[int, int]]()
        for place, column in enumerate(self.columns):
            for model in {row["model"] for row in self.shown} if column.better else ():
                values = {
                    number: column.value(row)
                    for number, row in enumerate(self.shown)
                    if row["model"] == model and row["strategy"] not in BASELINES
                }
                known = {value for value in values.values() if value is not None}
                if len(known) > 1:
                    best = max(known) if column.better == "higher" else min(known)
                    found |= {(number, place) for number, value in values.items() if value == best}
        return found

    def print(self, console: Console) -> None:
        """Print a table for each model, and the notes."""
        _, *columns = self.columns
        num_labels = sum(column.is_label for column in columns)
        for model in dict.fromkeys(row["model"] for row in self.shown):
            own = [self.cells(row)[1:] for row in self.shown if row["model"] == model]
            print_table(console, model, [one.heading for one in columns], own, num_labels)
        for note in self.notes:
            console.print(note)


QUALITY = ("psnr", "ssim", "lpips", "stlpips")
DISTANCES, IMAGE_DISTANCES = ("fvd", "tfd"), ("fid", "efd")
RESAMPLES, AT_ONCE = 10_000, 100  # bounds the memory
LEVEL = 0.95

Groups = dict[tuple[str, str], dict[str, Record]]  # (model, strategy) -> clip -> its line


def grouped(results: Results) -> Groups:
    """Sort lines by model and strategy: raster, others by falling number of steps, baselines."""
    models = list(dict.fromkeys(label for run in results.runs for label in run["models"]))
    groups: Groups = {}
    for record in sorted(results.clips, key=lambda record: record["clip"]):
        groups.setdefault((record["model"], record["strategy"]), {})[record["clip"]] = record

    def rank(key: tuple[str, str]) -> tuple[Any, ...]:
        model, strategy = key
        steps = _speed(groups[key])["num_steps"] or 0.0
        return models.index(model), strategy in BASELINES, strategy != RASTER, -steps, strategy

    return {key: groups[key] for key in sorted(groups, key=rank)}


def bootstrap_interval(values: NDArray[np.float64]) -> list[float] | None:
    """Return the 95% interval of the mean of (N,) values; None of fewer than two."""
    if len(values) < 2:
        return None
    generator, size = np.random.default_rng(0), (AT_ONCE, len(values))
    draws = (generator.integers(len(values), size=size) for _ in range(RESAMPLES // AT_ONCE))
    means = np.concatenate([values[draw].mean(axis=1) for draw in draws])
    return np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()


def mean_and_interval(name: str, values: ArrayLike) -> dict[str, Any]:
    """Return the mean of (N,) values by its name, None of none, and its interval."""
    own = np.asarray(values)
    mean = float(own.mean()) if len(own) else None
    return {name: mean, f"{name}_interval": bootstrap_interval(own)}


def bias_notes(name: str, distances: Iterable[dict[str, Any] | None]) -> list[str]:
    """Warn of a Frechet distance that rests on too few samples, as `distance_of` tells."""
    sizes = [(one["samples"], one["dimension"]) for one in distances if one]
    few = sorted((samples, dimension) for samples, dimension in sizes if samples <= dimension)
    return [
        f"Warning: {name.upper()} of {samples} samples in {dimension} dimensions is too high: its "
        f"covariance needs at least {dimension + 1}. More clips help (--num-clips); compare only "
        "rows of equally many."
        for samples, dimension in few[:1]
    ]


def summarize(results: Results) -> list[dict[str, Any]]:
    """Return one row for each model and strategy, and for each baseline but the truth.

    A row holds `clips`; for each metric `{"mean", "interval", "difference", "difference_interval"}`
    (the last two against raster of the same model on the clips both have); for each distance
    `{"value", "samples", "dimension", "clips"}`. For a strategy there are medians of speed,
    `fed_per_token`, `speedup` and `step_ratio` (over raster), `equal_to_raster` (share of tokens,
    over all clips that raster was run on) and its `promise` (see `Strategy`).
    """
    groups = grouped(results)
    rows = []
    for (model, strategy), clips in groups.items():
        if strategy == "truth":
            continue
        raster, truth = (groups.get((model, name), {}) for name in (RASTER, "truth"))
        others = {} if strategy == RASTER else raster
        row: dict[str, Any] = {"model": model, "strategy": strategy, "clips": len(clips)}
        row |= {metric: quality_of(metric, clips, others) for metric in QUALITY}
        row |= {name: distance_of(name, clips, truth) for name in DISTANCES}
        speed, reference = _speed(clips), _speed(others)
        row |= speed
        row["speedup"] = _ratio(speed["frames_per_second"], reference["frames_per_second"])
        row["step_ratio"] = _ratio(reference["num_steps"], speed["num_steps"])
        shares = [
            np.mean(unpack(record["tokens"]) == unpack(raster[clip]["tokens"]))
            for clip, record in clips.items()
            if "tokens" in record and clip in raster
        ]
        row["equal_to_raster"] = float(np.mean(shares)) if shares else None
        row["promise"] = next(iter(clips.values())).get("promise")
        rows.append(row)
    return rows


def per_horizon(clips: dict[str, Record], metric: str) -> NDArray[np.float64] | None:
    """Return the (N, T) values of a metric, one row a clip; None if it was not measured."""
    rows = [record["quality"][metric] for record in clips.values() if metric in record["quality"]]
    return np.array(rows, dtype=np.float64) if rows else None


def quality_of(
    metric: str, clips: dict[str, Record], raster: dict[str, Record]
) -> dict[str, Any] | None:
    """Return a metric of a strategy as in a row of `summarize`; None if it was not measured."""
    if (values := per_horizon(clips, metric)) is None:
        return None
    means = dict(zip(clips, values.mean(axis=1), strict=True))
    both = {clip: record for clip, record in raster.items() if clip in means}
    reference = per_horizon(both, metric)
    pairs = [] if reference is None else [means[clip] for clip in both] - reference.mean(axis=1)
    interval = bootstrap_interval(values.mean(axis=1))
    difference = mean_and_interval("difference", pairs)
    return {"mean": float(values.mean()), "interval": interval, **difference}


def distance_of(
    name: str, clips: dict[str, Record], truth: dict[str, Record]
) -> dict[str, Any] | None:
    """Return a distance from what is true, of the same names, as in a row of `summarize`."""
    both = [clip for clip in clips if clip in truth and name in truth[clip]["features"]]
    if not both or name not in clips[both[0]]["features"]:
        return None
    features, reference = (
        np.concatenate([np.atleast_2d(unpack(lines[clip]["features"][name])) for clip in both])
        for lines in (clips, truth)
    )
    samples, dimension = features.shape
    value = frechet_distance(features, reference) if samples > 1 else None
    return {"value": value, "samples": samples, "dimension": dimension, "clips": len(both)}


def _speed(clips: dict[str, Record]) -> dict[str, float | None]:
    decoded = [record for record in clips.values() if record["stats"]]
    names = ("num_steps", "frames_per_second", "tokens_per_second")
    values = {name: [record["stats"][name] for record in decoded] for name in names}
    values["fed_per_token"] = [
        record["stats"]["num_fed"] / math.prod(record["tokens"]["shape"]) for record in decoded
    ]
    return {name: float(np.median(own)) if own else None for name, own in values.items()}


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value and other else None


FRAMES_A_ROW = 8  # of the table of a drift
DRIFT_COLUMNS = (
    STRATEGY,
    Column("frames", "frames", "{0[0]}-{0[1]}", is_label=True),
    Column("samples", "samples", is_label=True),
    Column("tfd", "TFD", "{:.3f}", better="lower"),
    Column("psnr", "PSNR", "{:.2f}", better="higher"),
    Column("ssim", "SSIM", "{:.3f}", better="higher"),
    Column("lpips", "LPIPS", "{:.3f}", better="lower"),
    Column("stlpips", "ST-LPIPS", "{:.3f}", better="lower"),
    Column("sharpness", "sharpness", "{:.2f}"),
    Column("repeated", "repeated", "{:.3f}"),
    Column("distinct", "distinct", "{:.3f}"),
)


def compare_drift(results: Results) -> Table:
    """Make a row for each model, strategy and 8 frames of a long dream.

    A walk looks the same however long it has lasted, so the true frames of all clips and moments
    are the reference of every eight; each has equally many frames of a clip. So neither makes TFD
    rise, drift does.

    A row holds `frames`, the first and the last (from 1, after the given ones), `samples`, how many
    there are over all clips, and means over them, None where there are none.
    """
    groups = grouped(results)
    rows = []
    for (model, strategy), clips in groups.items():
        truth = groups.get((model, "truth"), {})
        length = max(len(record["drift"]["sharpness"]) for record in clips.values())
        for start in range(0, length, FRAMES_A_ROW):
            end = min(start + FRAMES_A_ROW, length)
            row = {"model": model, "strategy": strategy, "frames": [start + 1, end]}
            rows.append(row | _row_of(clips, truth, slice(start, end)))
    packed = [one["features"]["tfd"] for one in results.clips if "tfd" in one["features"]]
    dimension = max((features["shape"][1] for features in packed), default=0)
    notes = [
        f"Every clip's first {results.runs[-1]['settings']['context_frames']} frames are given; "
        "where its actions are over, they begin again. PSNR and SSIM are against the true frame of "
        "the moment, as long as there is one.",
        "TFD is the Frechet distance of these frames to all true frames, in statistics of our own "
        "tokenizer's latents; the row of the truth shows what it is without drift.",
        "Sharpness (variance of the Laplacian) is a multiple of the true frames'. Repeated is the "
        "share of tokens equal to the frame before's, distinct how many ids a frame has a token. "
        "The truth shows what is right, the reconstruction what the tokenizer can show of it.",
        *bias_notes("tfd", [{"samples": row["samples"], "dimension": dimension} for row in rows]),
    ]
    return Table(rows, DRIFT_COLUMNS, notes)


def _row_of(clips: dict[str, Record], truth: dict[str, Record], frames: slice) -> dict[str, Any]:
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
    packed = (record["features"].get("tfd") for record in clips.values())
    found = [unpack(features)[frames] for features in packed if features]
    return np.concatenate(found) if found else np.empty((0, 0), np.float32)  # (N, D)


TITLES = {"stlpips": "ST-LPIPS"}  # where it is not just capitals


def title_of(metric: str) -> str:
    return TITLES.get(metric, metric.upper())


def _revisit_columns(name: str, digits: int) -> tuple[Column, ...]:
    form, signed, above = f"{{:.{digits}f}}", f"{{:+.{digits}f}}", f"{name}.above"
    return (
        Column(f"{name}.turned", f"{title_of(name)} turned", form),
        Column(f"{name}.back", "back", form),
        Column(f"{above}_turned", "back - turned", signed, f"{above}_turned_interval"),
        Column(f"{above}_chance", "back - chance", signed, f"{above}_chance_interval"),
    )


REVISIT_COLUMNS = (
    *(STRATEGY, CLIPS),
    *_revisit_columns("psnr", 2),
    *_revisit_columns("ssim", 3),
    *_revisit_columns("lpips", 3),
    *_revisit_columns("stlpips", 3),
)


def walk(away: str, back: str, still: str, num_frames: int) -> list[str]:
    """Return the actions: `away` for so many frames, `still` for one, `back` for as many."""
    return [away] * num_frames + [still] + [back] * num_frames


def compare_revisit(results: Results) -> Table:
    """Make a row for each model and strategy: does a world remember where one turned away?

    ViZDoom's turns are slow in the first tics; with a frame of standing still in between both are,
    and the game itself comes back to the very pixel (measured), if the player stands still to begin
    with.

    A row holds `clips`, and for each metric None or means over clips: `back`, of the last frame,
    and `turned`, of the frame at the turning point; how far `back` is above `turned`, and above
    chance on the same clips, with 95% intervals. Baselines do not turn.
    """
    settings, groups = results.runs[-1]["settings"], grouped(results)
    rows = []
    for (model, strategy), clips in groups.items():
        chance = {} if strategy == CHANCE else groups.get((model, CHANCE), {})
        turning = None if strategy in (*BASELINES, CHANCE) else settings["revisit"]
        row = {"model": model, "strategy": strategy, "clips": len(clips)}
        rows.append(row | {name: _revisited(name, clips, chance, turning) for name in QUALITY})
    away, back = settings["revisit_actions"]
    notes = [
        f"After {settings['context_frames']} given frames: {away} for {settings['revisit']}, "
        f"nothing for one, {back} for {settings['revisit']}. All frames are compared with the last "
        "given one: turned is the one at the turning point, back the last one.",
        "Chance is the last given picture of another clip; the reconstruction is the best that the "
        "tokenizer can show. Intervals are 95% bootstrap intervals over clips, paired.",
    ]
    return Table(rows, REVISIT_COLUMNS, notes)


def _revisited(
    name: str, clips: dict[str, Record], chance: dict[str, Record], turning: int | None
) -> dict[str, Any] | None:
    if (values := per_horizon(clips, name)) is None:
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


METRICS = (
    Column("psnr.mean", "PSNR", "{:.2f}", "psnr.interval", "higher"),
    Column("ssim.mean", "SSIM", "{:.3f}", "ssim.interval", "higher"),
    Column("lpips.mean", "LPIPS", "{:.3f}", "lpips.interval", "lower"),
    Column("stlpips.mean", "ST-LPIPS", "{:.3f}", "stlpips.interval", "lower"),
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
    Column("stlpips.difference", "ΔST-LPIPS", "{:+.4f}", "stlpips.difference_interval"),
    Column("speedup", "speedup", "{:.2f}x"),
    Column("step_ratio", "fewer steps", "{:.2f}x"),
)


def compare_continuations(results: Results) -> Table:
    """Sum up quality and speed."""
    rows = summarize(results)
    return Table(rows, (STRATEGY, CLIPS, *METRICS, *SPEED), _notes(results, rows))


def _notes(results: Results, rows: list[Row]) -> list[str]:
    metrics, settings = results.runs[-1]["metrics"], results.runs[-1]["settings"]
    notes = []
    for name, flag in (
        ("lpips", "--lpips-backbone FILE"),
        ("stlpips", "--perceptual stlpips-alex"),
        ("fvd", "--fvd-detector i3d"),
    ):
        if (used := metrics.get(name)) is None:
            notes.append(f"{title_of(name)}: not measured, it needs weights ({flag}).")
        else:
            words = ", ".join(f"{key} {value}" for key, value in used.items())
            notes.append(f"{title_of(name)}: {words}.")
    if fvd := next((row["fvd"] for row in rows if row["fvd"]), None):
        generated = settings["num_frames"] - settings["context_frames"]
        notes.append(
            f"FVD compares {fvd['clips']} generated with as many real clips of {generated} frames "
            f"(the given frames are left out), in {fvd['dimension']} dimensions."
        )
        if generated != PUBLISHED_FRAMES:
            notes.append(f"FVD in papers is of {PUBLISHED_FRAMES} frames: compare with no other.")
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
            "The model looks back fewer frames than there are: later ones were generated without "
            f"seeing up to {dropped} of the oldest ones (normal for such a model). Times include "
            "any prefill that this took."
        )
    if (workers := max(run["options"]["workers"] for run in results.runs)) > 1:
        notes.append(f"Speed was measured while {workers} workers shared the machine.")
    return notes


IMAGE_COLUMNS = (
    STRATEGY,
    Column("clips", "images", is_label=True),
    Column("nll.mean", "nats a token", "{:.3f}", better="lower"),
    Column("nll.difference", "above raster", "{:+.3f}", "nll.difference_interval"),
    *METRICS[:4],  # PSNR, SSIM, LPIPS and ST-LPIPS
    Column("fid.value", "FID", "{:.1f}", better="lower"),
    Column("efd.value", "EFD", "{:.3f}", better="lower"),
    Column("equal_to_raster", "= raster", "{:.1%}"),
    Column("num_steps", "steps", "{:.0f}", better="lower"),
    Column("seconds", "seconds", "{:.2f}", better="lower"),
    Column("tokens_per_second", "tokens/s", "{:.0f}", better="higher"),
    Column("speedup", "speedup", "{:.2f}x"),
)


def compare_images(results: Results) -> Table:
    """Sum up the price of each strategy, its likeness to raster and its speed."""
    groups, rows = grouped(results), summarize(results)
    for row in rows:
        model, per_second = row["model"], row["frames_per_second"]
        raster = {} if row["strategy"] == RASTER else groups.get((model, RASTER), {})
        own = groups[model, row["strategy"]]
        row["nll"] = quality_of("nll", own, raster)
        row |= {name: distance_of(name, own, raster) for name in IMAGE_DISTANCES}
        row["seconds"] = 1 / per_second if per_second else None
    notes = [
        "Nats a token: what raster's own tokens cost while they are decoded by a strategy, guided "
        "as they were drawn; none where a strategy has no schedule.",
        "PSNR, SSIM and = raster (the share of equal tokens) compare with raster's image of the "
        "same prompt and noise. Seconds are of decoding. Intervals are 95% over images.",
    ]
    metrics = results.runs[-1]["metrics"]
    if (detector := metrics["fid"]) is None:
        notes.append("FID: not measured, it needs weights (--fid-detector FILE).")
    else:
        notes.append(f"FID: from raster's images, detector_sha256 {detector['detector_sha256']}.")
    if (network := metrics.get("efd")) is not None:
        notes.append(
            "EFD is the EfficientNet Frechet distance, not FID: from raster's images, in "
            f"{network['network']}'s features, weights_sha256 {network['weights_sha256']}."
        )
    for name in IMAGE_DISTANCES:
        notes += bias_notes(name, [row[name] for row in rows])
    return Table(rows, IMAGE_COLUMNS, notes)


LIKELIHOOD_COLUMNS = (
    *(STRATEGY, CLIPS),
    Column("nll", "nats a token", "{:.4f}"),
    Column("gap", "gap to raster", "{:+.4f}"),
    Column("gap_error", "± error", "{:.4f}"),
)


def compare_likelihood(results: Results) -> Table:
    """Return likelihood and gap of each model and strategy, on the clips that raster has too."""
    by_key: dict[tuple[str, str], dict[str, float]] = {}
    for line in results.clips:
        by_key.setdefault((line["model"], line["strategy"]), {})[line["clip"]] = line["nll"]
    rows = []
    for (model, strategy), clips in by_key.items():
        raster = by_key[model, RASTER]
        pairs = [(nll, raster[clip]) for clip, nll in clips.items() if clip in raster]
        gap = gap_to_raster(*torch.tensor(pairs, dtype=torch.float64).T)
        rows.append({"model": model, "strategy": strategy, "clips": len(pairs), **gap})
    return Table(rows, LIKELIHOOD_COLUMNS)


_TABLES = {
    CONTINUATION.name: compare_continuations,
    LIKELIHOOD.name: compare_likelihood,
    DRIFT.name: compare_drift,
    REVISIT.name: compare_revisit,
    IMAGES.name: compare_images,
}


def compare(results: Results) -> Table:
    """Sum up what was measured, by its mode."""
    return _TABLES[results.runs[-1]["mode"]](results)
