import numpy as np
import pytest
import torch

import diagd
from diagd.evaluation.meters import METERS, Task
from diagd.evaluation.options import EvaluateOptions
from diagd.evaluation.results import unpack
from diagd.metrics.quality import frame_features, psnr, ssim
from diagd.pipeline.prompts import seed_of
from diagd.tokenizers.vq import VQTokenizer
from tests.evaluation.lines import write_clips
from tests.metrics.detectors import write_detector
from tests.metrics.published import narrow, write_i3d, write_stlpips
from tests.metrics.test_lpips import random_heads, random_weights
from tests.worlds import HEIGHT_PX, WIDTH_PX, write_world

GIVEN, FRAMES, START = 2, 5, 1


def meter_of(world, clips, **changes):
    values = {
        "models": (f"tiny={world}",),
        "clips": clips,
        "out": clips.parent / "out",
        "start": START,
        "context_frames": GIVEN,
        "frames": FRAMES,
        "seed": 5,
        "backend": "native",
        "save_videos": True,
    }
    options = EvaluateOptions(**values | changes)
    backends = dict.fromkeys(options.labelled_models(), options.backend)
    return METERS[options.mode](options, "float32", backends)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("data") / "clips", count=2)


@pytest.fixture(scope="module")
def meter(world, clips):
    return meter_of(world, clips)


@pytest.mark.parametrize(
    ("strategy", "steps"), [("raster", 45), ("k=2", 27), ("k=2,d=4", 17), ("k=1/predecessor", 21)]
)
def test_a_schedule_s_line_is_what_the_pipeline_gives(strategy, steps, meter, world):
    record, frames = meter(Task("tiny", strategy, "clip_1"))
    clip = meter.clip("tiny", "clip_1")
    truth = clip.frames[GIVEN:]
    generator = diagd.VideoGenerator.from_pretrained(world, backend="native")
    video = generator.generate(
        clip.frames[:GIVEN],
        clip.actions[GIVEN:],
        FRAMES - GIVEN,
        strategy=strategy,
        context_actions=clip.actions[1:GIVEN],
        sampling=diagd.SamplingOptions(1.0, top_p=0.9),
        seed=seed_of("clip_1", 5),
    )
    assert torch.equal(frames, video.frames)
    assert record["quality"] == {
        "psnr": psnr(video.frames, truth).tolist(),
        "ssim": ssim(video.frames, truth).tolist(),
    }
    assert record["stats"]["num_steps"] == steps
    np.testing.assert_array_equal(unpack(record["tokens"]), video.tokens)
    assert record["promise"] == ("tokens" if strategy == "raster" else "no")
    assert (record["model"], record["strategy"], record["clip"]) == ("tiny", strategy, "clip_1")
    assert record["seed"] == seed_of("clip_1", 5)
    assert record["frame_size_px"] == [HEIGHT_PX, WIDTH_PX]
    assert record["wall_seconds"] >= record["stats"]["seconds"]
    assert isinstance(generator.tokenizer, VQTokenizer)
    latents = generator.tokenizer.latents(torch.cat([clip.frames[GIVEN - 1 : GIVEN], video.frames]))
    expected = frame_features(latents).detach().numpy()
    np.testing.assert_allclose(unpack(record["features"]["tfd"]), expected, atol=1e-5)


def test_baselines_are_the_truth_its_reconstruction_and_a_standing_picture(meter):
    clip = meter.clip("tiny", "clip_0")
    tokenizer = meter.world("tiny").tokenizer
    frames = {
        "truth": clip.frames[GIVEN:],
        "reconstruction": tokenizer.decode(tokenizer.encode(clip.frames))[GIVEN:],
        "copy": clip.frames[GIVEN - 1 : GIVEN].repeat(FRAMES - GIVEN, 1, 1, 1),
    }
    for strategy, expected in frames.items():
        record, shown = meter(Task("tiny", strategy, "clip_0"))
        assert torch.equal(shown, expected), strategy
        assert record["stats"] is None
        assert "tokens" not in record
        quality = record["quality"]
        if strategy == "truth":
            assert quality == {}
        else:
            assert quality["psnr"] == psnr(expected, frames["truth"]).tolist()


def test_networks_of_lpips_and_fvd_are_used_where_given(world, tmp_path):
    clips = write_clips(tmp_path / "clips", count=1, num_frames=12)
    torch.save(random_weights("vgg"), tmp_path / "vgg16.pth")
    torch.save(random_heads("vgg"), tmp_path / "heads.pth")
    meter = meter_of(
        world,
        clips,
        start=0,
        frames=12,
        lpips_backbone=tmp_path / "vgg16.pth",
        lpips_heads=tmp_path / "heads.pth",
        fvd_detector=str(write_detector(tmp_path / "i3d.pt")),
        fvd_resize="stretch",
    )
    truth, copy = (meter(Task("tiny", strategy, "clip_0"))[0] for strategy in ("truth", "copy"))
    assert len(copy["quality"]["lpips"]) == 10
    assert min(copy["quality"]["lpips"]) > 0
    first, last = (unpack(record["features"]["fvd"]) for record in (truth, copy))
    assert first.shape == last.shape == (9,)
    assert not np.allclose(first, last)
    assert meter.provenance["fvd"]["resize"] == "stretch"
    assert meter.provenance["lpips"]["network"] == "vgg"


def test_published_weights_are_used_where_given(world, tmp_path, monkeypatch):
    narrow(monkeypatch)
    clips = write_clips(tmp_path / "clips", count=1, num_frames=12)
    write_i3d(tmp_path / "i3d.ckpt")
    write_stlpips(tmp_path / "alex.pth", "stlpips-alex")
    meter = meter_of(
        world,
        clips,
        start=0,
        frames=12,
        perceptual=f"stlpips-alex={tmp_path / 'alex.pth'}",
        fvd_detector=f"i3d={tmp_path / 'i3d.ckpt'}",
    )
    copy, _ = meter(Task("tiny", "copy", "clip_0"))
    assert len(copy["quality"]["stlpips"]) == 10
    assert min(copy["quality"]["stlpips"]) > 0
    assert "lpips" not in copy["quality"]
    assert unpack(copy["features"]["fvd"]).shape == (400,)
    assert meter.provenance["fvd"]["detector"] == "i3d"
    assert meter.provenance["stlpips"]["network"] == "stlpips-alex"


def test_without_weights_there_is_no_provenance(meter):
    assert meter.provenance == dict.fromkeys(("lpips", "stlpips", "fvd", "fid", "efd"))


def test_a_model_without_actions_needs_no_action_files(tmp_path):
    world = write_world(tmp_path / "silent", num_action_tokens=0)
    clips = write_clips(tmp_path / "clips", count=1)
    (clips / "clip_0.jsonl").unlink()
    record, _ = meter_of(world, clips)(Task("tiny", "k=1", "clip_0"))
    assert record["stats"]["num_steps"] == 21
    assert len(record["quality"]["psnr"]) == FRAMES - GIVEN
