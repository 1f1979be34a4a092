import importlib

import pytest
import torch
import tyro

from diagd.pipeline.generator import VideoGenerator
from runs.serve_load import NAMES, play, quantiles, write_images
from tests.web.play.serving import serving
from tests.worlds import write_scenes, write_world


def test_the_model_that_is_loaded_makes_guided_images(tmp_path):
    world = VideoGenerator.from_pretrained(write_images(tmp_path / "images", "tiny", "3x5"))
    one, other = world.generate([None] * 2, [NAMES[1], NAMES[2]], 1)
    assert one.frames.shape == (1, 48, 80, 3)
    assert not torch.equal(one.tokens, other.tokens)


def test_quantiles_are_those_of_what_was_measured():
    assert quantiles([2.0]) == {"p50_s": 2.0, "p99_s": 2.0}
    assert quantiles([1.0, 2.0, 3.0]) == {"p50_s": 2.0, "p99_s": 2.98}


def test_players_share_the_frames_of_a_load(tmp_path):
    with serving(write_scenes(write_world(tmp_path / "world")), max_sessions=3) as served:
        row = play(served.url, "k=1", 3, num_frames=7, at_once=2)
    assert served.scheduler.frames >= 3 * (1 + 2)  # one each to warm up
    assert (row["clients"], 0 < row["p50_s"] <= row["p99_s"]) == (3, True)
    assert row["of_each"] <= row["frames_per_second"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("script", ["serve_load", "glm_stage"])
def test_a_device_that_is_not_there_is_refused_before_work_begins(script, tmp_path):
    run = importlib.import_module(f"runs.{script}")
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="device 'cuda' is not available"):
        run.main(tyro.cli(run.Options, args=["--device", "cuda", "--out", str(out)]))
    assert not out.exists()
