import matplotlib.pyplot as plt
import numpy as np

from diagd.evaluation.results import Results, grouped, summarize
from diagd.reporting import plots
from diagd.reporting.plots import plot_frontier, plot_horizons
from diagd.reporting.tables import TextTable, as_html, difference_table, main_table, markdown
from tests.evaluation.lines import clip_line, run_line


def results_with_every_metric():
    """Two clips; k=1 is better than raster in SSIM and LPIPS, worse in PSNR and both distances."""
    generator = np.random.default_rng(0)
    true = {clip: generator.normal(size=(4, 2)) for clip in "ab"}
    lines = []
    for method, steps, shift, quality in (
        ("truth", None, 0.0, {}),
        ("raster", 45, 0.5, {"psnr": [22.0, 20.0], "ssim": [0.6, 0.5], "lpips": [0.4, 0.4]}),
        ("k=1", 21, 1.0, {"psnr": [21.0, 20.0], "ssim": [0.7, 0.6], "lpips": [0.3, 0.4]}),
        ("copy", None, 3.0, {"psnr": [30.0, 30.0], "ssim": [0.9, 0.9], "lpips": [0.1, 0.1]}),
    ):
        for clip in "ab":
            features = {"tfd": true[clip] + shift, "fvd": true[clip][0] + shift}
            line = clip_line(method, clip, features=features, steps=steps, fps=90 / (steps or 1))
            lines.append(line | {"quality": quality})
    return Results([run_line()], lines)


def test_the_best_schedule_is_bold_where_they_differ_and_baselines_never_are():
    table = main_table(summarize(results_with_every_metric()))
    bold = {(table.cells[row][1], table.header[column]) for row, column in table.bold}
    assert bold == {
        *(("NTP (raster)", title) for title in ("FVD↓", "TFD↓", "PSNR↑")),
        *(("DiagD k=1", title) for title in ("LPIPS↓", "SSIM↑", "FPS↑", "TP↑", "STEP↓")),
    }


def test_differences_are_to_raster_with_the_gain_in_speed():
    table = difference_table(summarize(results_with_every_metric()))
    assert table.header[2:] == ["ΔPSNR", "ΔSSIM", "ΔLPIPS", "speedup", "fewer steps"]
    assert table.cells[0][:3] == ["tiny", "DiagD k=1", "-0.50 [-0.50, -0.50]"]
    assert table.cells[0][3].startswith("+0.1000 [")
    assert table.cells[0][5:] == ["2.14x", "2.14x"]
    assert table.cells[1][5:] == ["-", "-"]


def test_tokens_fed_and_agreement_are_shown_where_tokens_were_kept(tmp_path):
    rows = summarize(results_with_every_metric())
    assert "FED↓" not in main_table(rows).header
    kinds = ("tokens", 1.0, 1.0), ("distribution", 8.5, 0.125), (None, None, None), (None,) * 3
    for row, (lossless, fed, equal) in zip(rows, kinds, strict=False):
        row |= {"lossless": lossless, "fed_per_token": fed, "equal_to_raster": equal}
    rows[1]["method"] = "sjd"
    table = main_table(rows)
    assert table.header[-2:] == ["FED↓", "= raster"]
    assert [cells[-2:] for cells in table.cells] == [
        ["1.00", "100.0%"],
        ["8.50", "12.5%"],
        ["-", "-"],
    ]
    assert table.cells[1][1] == "sjd"
    assert not any(table.header[column] == "= raster" for _, column in table.bold)
    plot_frontier(rows, tmp_path / "frontier.png")


def test_lossless_strategies_are_told_apart_in_the_legend(tmp_path, monkeypatch):
    rows = summarize(results_with_every_metric())
    drawn = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: drawn.append(figure))
    rows.insert(1, {**rows[1], "method": "sjd", "lossless": "distribution"})
    plot_frontier(rows, tmp_path / "frontier.png")
    (figure,) = drawn
    words = {text.get_text() for text in figure.legends[0].get_texts()}
    assert words == {"tiny", "raster's tokens", "raster's distribution, other tokens", "neither"}
    markers = [line.get_marker() for line in figure.axes[0].lines if line.get_marker() in "oDx"]
    assert sorted(markers[:3]) == ["D", "o", "x"]
    plt.close(figure)


def test_a_table_is_written_as_markdown_and_as_html():
    table = TextTable(["a", "b", "c"], [["x|z", "<y>", "1.0 [0.5, 2.0]"]], frozenset({(0, 2)}))
    assert markdown(table) == (
        "| a | b | c |\n| --- | --- | ---: |\n| x\\|z | <y> | **1.0 [0.5, 2.0]** |\n"
    )
    cells = "<td>x|z</td><td>&lt;y&gt;</td><td class=best>1.0<br><small>[0.5, 2.0]</small></td>"
    assert f"<tr class=first>{cells}</tr>" in as_html(table)


def test_plots_are_drawn_with_every_metric(tmp_path):
    results = results_with_every_metric()
    plot_frontier(summarize(results), tmp_path / "frontier.png")
    plot_horizons(grouped(results), tmp_path / "horizons.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frontier.png", "horizons.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in tmp_path.iterdir())
