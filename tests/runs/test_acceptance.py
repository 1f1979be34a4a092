"""runs/acceptance.py on a tiny world: all its numbers, and that a second call measures nothing."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from diagd.data.actions import ActionVocabulary
from diagd.files import read_json_lines
from runs import acceptance, acceptance_table
from tests.evaluation.lines import write_clips
from tests.worlds import NAMES

ACTIONS = ActionVocabulary(("none", "forward", "left", "right"))


@pytest.mark.parametrize("shift", [-11, -1, 0, 7])
def test_a_picture_that_moved_is_found_by_how_much(shift):
    wide = torch.randint(0, 256, (6, 90, 3), generator=torch.Generator().manual_seed(0))
    before, after = wide[:, 20:70], wide[:, 20 - shift : 70 - shift]
    assert acceptance.shift_px(before, after) == shift


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("left", "left"), ("attack+left", "left"), ("attack", "none"), ("strafe_left", "none")],
)
def test_an_action_that_is_not_known_becomes_the_nearest(name, nearest):
    assert acceptance.nearest(name, ACTIONS) == nearest


def size_of(path):
    with Image.open(path) as picture:
        return picture.size


def test_pictures_are_stacked_in_the_order_of_their_names(tmp_path):
    for name, colour, height in (("b", "black", 2), ("a", "white", 3)):
        Image.new("RGB", (8, height), colour).save(tmp_path / f"{name}.png")
    acceptance.stack(tmp_path.glob("*.png"), tmp_path / "both.webp")
    with Image.open(tmp_path / "both.webp") as picture:
        both = np.asarray(picture)
    assert both.shape == (5, 8, 3)
    assert both[0].min() > 200
    assert both[-1].max() < 50


def test_all_is_measured_once(world, tmp_path, monkeypatch):
    clips = write_clips(tmp_path / "heldout_maze", count=3, num_frames=15)
    ActionVocabulary(NAMES).save(clips / "actions.json")
    options = acceptance.Options(
        data=tmp_path,
        models=(f"new={world}",),
        out=tmp_path / "out",
        num_clips=3,
        context_frames=2,
        frames=15,
        batch_size=2,
    )
    acceptance.main(options)
    (row,) = read_json_lines(tmp_path / "out" / "acceptance.jsonl")
    assert (row["model"], row["scenario"]) == ("new", "maze")
    assert np.shape(row["psnr"]["k=1"]) == np.shape(row["copy_psnr"]) == (3, 13)
    assert len(row["tfd"]) == 1
    assert np.isfinite(row["revisit"]["back"]).all()
    assert row["nats_after"]["7"] == pytest.approx(np.array(row["nats"]["raster"])[:, 6])
    assert all(len(costs) == 3 for costs in row["nats_after"].values())
    text = (tmp_path / "out" / "acceptance.md").read_text()
    assert text.startswith("| | maze, new |")
    for picture in ("new", "turns"):  # of one scenario, so nothing stands below it
        (part,) = (tmp_path / "out").glob(f"*-{picture}.png")
        assert size_of(tmp_path / "out" / f"{picture}.webp") == size_of(part)
    assert "nan" not in text
    asked = []
    monkeypatch.setattr(acceptance, "measure", lambda *given: asked.append(given) or {})
    monkeypatch.setattr(acceptance, "table", lambda rows: text if rows == [row] else "")
    acceptance.main(options)
    assert (tmp_path / "out" / "acceptance.md").read_text() == text
    assert not asked
    acceptance.main(dataclasses.replace(options, seed=1))  # what was measured otherwise is another
    assert len(asked) == 1
    path = tmp_path / "out" / "acceptance.jsonl"
    path.write_text(path.read_text() + '{"torn')
    shutil.copy(clips / "clip_0.mp4", clips / "clip_1.mp4")  # other clips of the same names
    acceptance.main(options)
    assert len(asked) == 2
    assert len(read_json_lines(path)) == 3


def test_clips_that_stand_still_are_left_out():
    copies, dreams = [[69.0] * 9, [20.0] * 9, [21.0] * 9], [[30.0] * 9, [23.0] * 9, [24.0] * 9]
    row = {"copy_psnr": copies, "psnr": {"k=1": dreams}}
    assert acceptance_table.above_copy(row, "k=1", 8) == "+3.00 [+3.00, +3.00]"
    assert acceptance_table.CELLS["clips that move"](row) == "2 of 3"
