"""A report as one Markdown file and one HTML page, made from the same sections; no scripts."""

import html
from dataclasses import dataclass, field
from pathlib import Path

from diagd.data.video import read_video
from diagd.evaluation.results import Groups, Record, file_name
from diagd.evaluation.tables import Table
from diagd.reporting.plots import write_side_by_side, write_strip

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #6b7280; --line: #d8dbe0;
  --page: #ffffff; --tint: #f3f4f6; --accent: #0b6e4f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e7e9; --soft: #9aa1ab; --line: #3a3f47;
  --page: #16181b; --tint: #22262b; --accent: #5fd3a5; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 76rem; margin: 2rem auto 4rem; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin-bottom: .25rem; } h2 { margin-top: 2.5rem; font-size: 1.2rem; }
p.lead, figcaption, .note { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .35rem .7rem; text-align: right; white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
thead th { border-bottom: 2px solid var(--ink); } tr.first td { border-top: 1px solid var(--line); }
td { vertical-align: top; } small { color: var(--soft); font-weight: 400; }
td.best { font-weight: 700; color: var(--accent); }
figure { margin: 1rem 0 2rem; } img, video { max-width: 100%; border-radius: 4px; }
img { background: #fff; }
pre { background: var(--tint); padding: .8rem 1rem; overflow-x: auto; font-size: .8rem; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 0; }
"""


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, a table, pictures and videos (path -> caption), and JSON."""

    title: str
    text: list[str] = field(default_factory=list)
    table: Table | None = None
    figures: dict[str, str] = field(default_factory=dict)
    videos: dict[str, str] = field(default_factory=dict)
    code: str = ""


def as_markdown(title: str, lead: str, sections: list[Section]) -> str:
    parts = [f"# {title}", lead]
    for section in sections:
        parts += [f"## {section.title}", *section.text]
        if section.table:
            parts.append(section.table.markdown())
        parts += [f"![{caption}]({path})" for path, caption in section.figures.items()]
        if section.videos:
            links = [f"- [{caption}]({path})" for path, caption in section.videos.items()]
            parts.append("\n".join(links))
        if section.code:
            parts.append(f"```json\n{section.code}\n```")
    return "\n\n".join(parts) + "\n"


def as_page(title: str, lead: str, sections: list[Section]) -> str:
    """Write the report as one HTML page; pictures and videos are named by relative paths."""
    parts = [f"<h1>{html.escape(title)}</h1><p class=lead>{html.escape(lead)}</p>"]
    for section in sections:
        parts.append(f"<section><h2>{html.escape(section.title)}</h2>")
        parts += [f"<p class=note>{html.escape(paragraph)}</p>" for paragraph in section.text]
        if section.table:
            parts.append(f"<div class=scroll>{section.table.html()}</div>")
        for path, caption in {**section.figures, **section.videos}.items():
            source, words = html.escape(path, quote=True), html.escape(caption)
            content = f'<img src="{source}" alt="{words}" loading=lazy>'
            if path in section.videos:
                flags = "controls loop muted playsinline preload=metadata"
                content = f'<video src="{source}" {flags}></video>'
            parts.append(f"<figure>{content}<figcaption>{words}</figcaption></figure>")
        if section.code:
            code = html.escape(section.code)
            parts.append(f"<details><summary>JSON</summary><pre>{code}</pre></details>")
        parts.append("</section>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


HIDDEN = ("copy", "reconstruction", "chance")  # in numbers only


def example_sections(folder: Path, out: Path, groups: Groups, count: int) -> list[Section]:
    """Draw the first clips by name, from a folder of results to the report's, a section each."""
    kept: dict[str, list[Record]] = {}
    for (_, strategy), lines in groups.items():
        for clip, record in lines.items():
            if record["video"] and strategy not in HIDDEN:
                kept.setdefault(clip, []).append(record)
    return [_section(folder, out, clip, kept[clip]) for clip in sorted(kept)[:count]]


def _section(folder: Path, out: Path, clip: str, records: list[Record]) -> Section:
    """Draw one clip: the truth of each model, then its strategies; a video for each model."""
    models = list(dict.fromkeys(record["model"] for record in records))
    strip, videos = {}, {}
    (out / "videos").mkdir(exist_ok=True)
    for model in models:
        own = [record for record in records if record["model"] == model]
        cells = {}
        for record in sorted(own, key=lambda record: record["strategy"] != "truth"):
            frames = read_video(folder / record["video"]).frames.numpy()
            cells[record["strategy"]] = frames
            several = len(models) > 1 and record["strategy"] != "truth"
            strip[f"{model}\n{record['strategy']}" if several else record["strategy"]] = frames
        path = f"videos/{file_name(clip)}_{file_name(model)}.mp4"
        write_side_by_side(out / path, cells, records[0]["fps"])
        videos[path] = f"{model}: {', '.join(cells)}"
    picture = f"figures/{file_name(clip)}.png"
    write_strip(out / picture, strip)
    caption = "Frames after the given ones, the same times in every row."
    return Section(f"Example {clip}", figures={picture: caption}, videos=videos)
