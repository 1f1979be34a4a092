import numpy as np

from diagd.console import make_console
from diagd.evaluation import report
from diagd.evaluation.comparison import (
    DIFFERENCES,
    STRATEGY,
    Column,
    Table,
    compare,
    grouped,
    summarize,
)
from diagd.evaluation.report import plot_frontier, plot_horizons
from diagd.evaluation.results import Results
from tests.evaluation.lines import clip_line, run_line


def results_with_every_metric():
    """Two clips; k=1 is better than raster in SSIM and LPIPS, worse in PSNR and both distances."""
    generator = np.random.default_rng(0)
    true = {clip: generator.normal(size=(4, 2)) for clip in "ab"}
    lines = []
    for strategy, steps, shift, quality in (
        ("truth", None, 0.0, {}),
        ("raster", 45, 0.5, {"psnr": [22.0, 20.0], "ssim": [0.6, 0.5], "lpips": [0.4, 0.4]}),
        ("k=1", 21, 1.0, {"psnr": [21.0, 20.0], "ssim": [0.7, 0.6], "lpips": [0.3, 0.4]}),
        ("copy", None, 3.0, {"psnr": [30.0, 30.0], "ssim": [0.9, 0.9], "lpips": [0.1, 0.1]}),
    ):
        for clip in "ab":
            features = {"tfd": true[clip] + shift, "fvd": true[clip][0] + shift}
            line = clip_line(strategy, clip, features=features, steps=steps, fps=90 / (steps or 1))
            lines.append(line | {"quality": quality})
    return Results([run_line()], lines)


def test_the_best_strategy_is_bold_where_they_differ_and_baselines_never_are():
    table = compare(results_with_every_metric())
    bold = {
        (table.shown[row]["strategy"], table.columns[place].titled) for row, place in table.best()
    }
    assert bold == {
        *(("raster", title) for title in ("FVD↓", "TFD↓", "PSNR↑")),
        *(("k=1", title) for title in ("LPIPS↓", "SSIM↑", "frames/s↑", "tokens/s↑", "steps↓")),
    }


def test_differences_are_to_raster_with_the_gain_in_speed():
    rows = summarize(results_with_every_metric())
    table = Table(rows, (STRATEGY, *DIFFERENCES))
    titles = ["ΔPSNR", "ΔSSIM", "ΔLPIPS", "speedup", "fewer steps"]
    assert [column.titled for column in table.columns[2:]] == titles
    cells = [table.cells(row, brackets=True) for row in table.shown]
    assert cells[0][:3] == ["tiny", "k=1", "-0.50 [-0.50, -0.50]"]
    assert cells[0][3].startswith("+0.1000 [")
    assert cells[0][5:] == ["2.14x", "2.14x"]
    assert cells[1][5:] == ["-", "-"]
    assert len(cells) == 2  # raster is not compared with itself


def test_everything_that_is_printed_fits_80_columns(capsys, monkeypatch):
    results = results_with_every_metric()
    for line in results.clips:
        line["strategy"] = line["strategy"].replace("k=1", "exact,lanes=1234")
    monkeypatch.setenv("COLUMNS", "80")
    compare(results).print(make_console())
    printed = capsys.readouterr().out
    table = printed[: printed.index("LPIPS: not measured")]
    assert max(map(len, table.splitlines())) <= 80
    titles = [line.split() for line in table.splitlines() if "strategy" in line]
    assert titles == [
        ["strategy", "clips", "PSNR", "SSIM", "LPIPS", "FVD", "TFD"],
        ["strategy", "clips", "frames/s", "tokens/s", "steps", "fed/token", "=", "raster"],
    ]
    assert table.count("copy") == 2


def test_lossless_strategies_are_told_apart_in_the_legend(tmp_path, monkeypatch):
    rows = summarize(results_with_every_metric())
    rows[0]["promise"] = "tokens"
    drawn = []
    monkeypatch.setattr(report, "save_figure", lambda figure, path: drawn.append(figure))
    plot_frontier(rows, tmp_path / "frontier.png")
    (figure,) = drawn
    words = {text.get_text() for text in figure.legends[0].get_texts()}
    assert words == {"tiny", "raster's tokens", "other tokens"}
    markers = [line.get_marker() for line in figure.axes[0].lines if line.get_marker() in "ox"]
    assert sorted(markers[:2]) == ["o", "x"]


def test_a_table_is_written_as_markdown_and_on_the_page():
    columns = STRATEGY, Column("number", "n", "{:.1f}", "interval", "higher")
    row = {"model": "m", "strategy": "x|<z>", "number": 1.0, "interval": [0.5, 2.0]}
    table = Table([row, row | {"strategy": "k=1", "number": 0.5, "interval": None}], columns)
    parts = {"title": "t", "lead": "l", "sections": [report.Section("s", table=table)]}
    assert report.TEMPLATES.get_template("report.md").render(parts) == (
        "# t\n\nl\n\n## s\n\n| model | strategy | n↑ |\n| --- | --- | ---: |\n"
        "| m | x\\|<z> | **1.0 [0.5, 2.0]** |\n| m | k=1 | 0.5 |\n"
    )
    cells = "<td>m</td><td>x|&lt;z&gt;</td><td class=best>1.0<br><small>[0.5, 2.0]</small></td>"
    page = report.TEMPLATES.get_template("report.html").render(parts)
    assert f"<tr class=first>{cells}</tr>\n<tr><td>m</td><td>k=1</td>" in page


def test_plots_are_drawn_with_every_metric(tmp_path):
    results = results_with_every_metric()
    plot_frontier(summarize(results), tmp_path / "frontier.png")
    plot_horizons(grouped(results), tmp_path / "horizons.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frontier.png", "horizons.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in tmp_path.iterdir())
