"""runs/keep_report.py on a report with figures and videos."""

from runs.keep_report import keep

REPORT = """# Title

Words.

## Quality

| a | table |

## Speed against quality

![Points.](figures/frontier.png)

## Quality by horizon

![Curves.](figures/horizons.png)

## Example clip_0

![Frames.](figures/clip_0.png)

- [doom](videos/clip_0_doom.mp4)

## Where these numbers come from

Here.
"""


def test_tables_and_the_named_figures_are_kept(tmp_path):
    figures = tmp_path / "report" / "figures"
    figures.mkdir(parents=True)
    (tmp_path / "report" / "report.md").write_text(REPORT)
    for name in ("frontier", "horizons", "clip_0"):
        (figures / f"{name}.png").write_bytes(b"picture")
    keep(tmp_path / "report", tmp_path / "kept", ("frontier",))
    text = (tmp_path / "kept" / "report.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# Title",
        "## Quality",
        "## Speed against quality",
        "## Where these numbers come from",
    ]
    assert "![Points.](frontier.png)" in text
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"report.md", "frontier.png"}
    keep(tmp_path / "report", tmp_path / "table")
    assert "frontier" not in (tmp_path / "table" / "report.md").read_text()
