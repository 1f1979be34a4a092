"""Drawings of places, and what is said of dreams of them."""

import json

import pytest
import torch

from diagd.data.actions import write_actions
from diagd.data.video import read_video, write_video
from runs import foreign, repaint
from tests.worlds import smooth_frames

HEIGHT_PX, WIDTH_PX = 112, 192


@pytest.mark.parametrize("name", foreign.PLACES)
def test_a_drawing_is_like_itself_and_another_one_is_not(name):
    drawing, regions = foreign.draw(foreign.PLACES[name], HEIGHT_PX, WIDTH_PX)
    assert (drawing.shape, drawing.dtype) == ((HEIGHT_PX, WIDTH_PX, 3), torch.uint8)
    assert set(regions.unique().tolist()) == {0, 1, 2}
    upside_down = drawing.flip(0)
    itself, other = foreign.kept(drawing, regions, torch.stack([drawing, upside_down]))
    assert itself > 0.9 > 0.7 > other  # walls are walls in both


def test_clips_are_repainted_in_one_way_from_start_to_end_and_keep_their_actions(tmp_path):
    clips, out = tmp_path / "clips", tmp_path / "out"
    frames = smooth_frames(6, 32, 48)
    for number in range(3):
        write_video(clips / f"clip_{number}.mp4", frames, 10)
        write_actions(clips / f"clip_{number}.jsonl", ["none"] * 6)
    (clips / "actions.json").write_text(json.dumps({"names": ["none", "left"]}))
    repaint.main(repaint.Options(clips, out, count=2))
    names = {f"repainted_clip_{n}.{kind}" for n in (0, 1) for kind in ("mp4", "jsonl")}
    assert {path.name for path in out.iterdir()} == names | {"actions.json"}
    written = (out / "repainted_clip_1.jsonl").read_bytes()
    assert written == (clips / "clip_1.jsonl").read_bytes()
    painted = read_video(out / "repainted_clip_1.mp4")
    assert painted.frames.shape == frames.shape
    assert painted.fps == 10
    one, other = (repaint.repaint(frames, seed) for seed in (1, 2))
    assert torch.equal(one, repaint.repaint(frames, 1))
    assert not torch.equal(one, other)
    both = repaint.repaint(frames[[0, 1, 0]], 1)
    assert torch.equal(both[0], both[2])
    assert not torch.equal(both[0], both[1])
