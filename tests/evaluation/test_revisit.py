import pytest

from diagd.evaluation.comparison import compare, walk
from diagd.evaluation.results import Results
from tests.evaluation.lines import clip_line, run_line


def test_one_stands_still_before_turning_back():
    assert walk("left", "right", "none", 2) == ["left", "left", "none", "right", "right"]


def test_the_last_frame_is_compared_with_the_turning_point_and_with_chance():
    run = run_line()
    run["mode"] = "revisit"
    run["settings"] |= {"revisit": 2, "revisit_actions": ["left", "right"]}
    lines = [
        clip_line("k=1", "a", (25.0, 15, 10, 16, 24), steps=9),
        clip_line("k=1", "b", (25.0, 15, 12, 16, 20), steps=9),
        clip_line("chance", "a", (11.0,) * 5),
        clip_line("chance", "b", (9.0,) * 5),
        clip_line("reconstruction", "a", (31.0,) * 5),
    ]
    comparison = compare(Results([run], lines))
    rows = {row["strategy"]: row for row in comparison.rows}
    psnr = rows["k=1"]["psnr"]
    assert (psnr["back"], psnr["turned"]) == (22, 11)
    assert (psnr["above_turned"], psnr["above_chance"]) == (11, 12)
    assert psnr["above_turned_interval"] == pytest.approx([8, 14])
    assert psnr["above_chance_interval"] == pytest.approx([11, 13])
    reconstruction = rows["reconstruction"]["psnr"]
    assert (reconstruction["turned"], reconstruction["above_turned"]) == (None, None)
    assert reconstruction["above_chance"] == 20
    assert rows["k=1"]["ssim"] is None
    assert [column.heading for column in comparison.columns] == [
        *("model", "strategy", "clips"),
        *("PSNR turned", "back", "back - turned", "back - chance"),
    ]
    cells = [comparison.cells(row, brackets=True)[1:] for row in comparison.shown]
    dream = ["k=1", "2", "11.00", "22.00", "+11.00 [+8.00, +14.00]", "+12.00 [+11.00, +13.00]"]
    assert dream in cells
    assert ["chance", "2", "-", "10.00", "-", "-"] in cells
    assert "+11.00 ±3.00" in [cell for row in comparison.shown for cell in comparison.cells(row)]
