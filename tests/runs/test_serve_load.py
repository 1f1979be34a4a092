import torch

from diagd.pipeline.generator import VideoGenerator
from runs.serve_load import NAMES, quantiles, write_images


def test_the_model_that_is_loaded_makes_guided_images(tmp_path):
    world = VideoGenerator.from_pretrained(write_images(tmp_path / "images", "tiny", "3x5"))
    one, other = world.generate([None] * 2, [NAMES[1], NAMES[2]], 1)
    assert one.frames.shape == (1, 48, 80, 3)
    assert not torch.equal(one.tokens, other.tokens)


def test_quantiles_are_those_of_what_was_measured():
    assert quantiles([2.0]) == {"p50_s": 2.0, "p99_s": 2.0}
    assert quantiles([1.0, 2.0, 3.0]) == {"p50_s": 2.0, "p99_s": 2.98}
