"""Clips shown in a report: a strip and a side-by-side video each, where videos were kept."""

from pathlib import Path

from diagd.evaluation.results import Record, file_name
from diagd.evaluation.summary import Groups
from diagd.reporting.page import Section
from diagd.reporting.pictures import read_frames, write_side_by_side, write_strip

HIDDEN = ("copy", "reconstruction", "chance")  # of which only the numbers are of interest


def example_sections(folder: Path, out: Path, groups: Groups, count: int) -> list[Section]:
    """Draw the first clips by name, and return a section for each.

    Args:
        folder: of the results, which videos are named relative to.
        out: of the report; pictures go to figures/, videos to videos/.

    Raises:
        FileNotFoundError, ValueError: a video that the results speak of is missing or damaged.
    """
    kept: dict[str, list[Record]] = {}
    for (_, method), lines in groups.items():
        for clip, record in lines.items():
            if record["video"] and method not in HIDDEN:
                kept.setdefault(clip, []).append(record)
    return [_section(folder, out, clip, kept[clip]) for clip in sorted(kept)[:count]]


def _section(folder: Path, out: Path, clip: str, records: list[Record]) -> Section:
    """Draw one clip: ground truth, raster, each strategy; a video for each model."""
    models = list(dict.fromkeys(record["model"] for record in records))
    records = sorted(records, key=lambda r: (r["method"] != "truth", models.index(r["model"])))
    strip, videos = {}, {}
    for model in models:
        cells = {}
        for record in records:
            if record["model"] == model:
                frames = read_frames(folder / record["video"])
                cells[_label(record)] = frames
                several = len(models) > 1 and record["method"] != "truth"
                strip[f"{model}\n{_label(record)}" if several else _label(record)] = frames
        (out / "videos").mkdir(exist_ok=True)
        path = f"videos/{file_name(clip)}_{file_name(model)}.mp4"
        write_side_by_side(out / path, cells, records[0]["fps"])
        videos[path] = f"{model}: {', '.join(cells)}"
    picture = f"figures/{file_name(clip)}.png"
    write_strip(out / picture, strip)
    caption = "Frames after the given ones, the same times in every row."
    return Section(f"Example {clip}", figures={picture: caption}, videos=videos)


def _label(record: Record) -> str:
    return "ground truth" if record["method"] == "truth" else record["method"]
