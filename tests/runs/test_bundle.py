"""runs/bundle.py: a world in bfloat16, whose starts are those that were named."""

import shutil

import torch

from diagd.data.actions import read_actions
from diagd.data.video import read_video
from diagd.families.checkpoints import load_model, save_model
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import model_scenes
from runs import bundle
from tests.evaluation.lines import write_clips


def test_a_bundled_world_starts_where_it_was_told_to(world, tmp_path):
    clips = write_clips(tmp_path / "clips", count=2, num_frames=9)
    given = tmp_path / "given"
    shutil.copytree(world, given)
    bundle.main(
        bundle.Options(
            world=given,
            clips=clips,
            out=tmp_path / "out",
            prompt="clip_1:3",
            scenes=("yard=clip_0:5", "hall=clip_1:0"),
            walk="left*2,none",
            top_p=0.75,
        )
    )
    bundled = VideoGenerator.from_pretrained(str(tmp_path / "out"))
    assert bundled.defaults.top_p == 0.75
    assert bundled.vocabulary is not None
    names = [scene.name for scene in model_scenes(tmp_path / "out", bundled, 4)]
    assert names == ["opening", "hall", "yard"]
    for name, clip, start in (("prompt", "clip_1", 3), ("scenes/yard", "clip_0", 5)):
        frames, path = read_video(clips / f"{clip}.mp4").frames, tmp_path / "out" / f"{name}.mp4"
        ours = read_video(path).frames
        assert (ours.float() - frames[start : start + 4].float()).abs().mean() < 3
        actions = read_actions((clips / clip).with_suffix(".jsonl"), bundled.vocabulary)
        taken = read_actions(path.with_suffix(".jsonl"), bundled.vocabulary)
        assert taken == actions[start : start + 4]
    walk = read_actions(tmp_path / "out" / "walk.jsonl", bundled.vocabulary)
    assert walk == ["left", "left", "none"]
    before, after = load_model(str(world)).state_dict(), load_model(tmp_path / "out").state_dict()
    assert all(
        torch.equal(after[name], one.bfloat16().to(one.dtype)) for name, one in before.items()
    )


def test_an_earlier_stage_is_mixed_in_by_its_share(world, tmp_path):
    clips, earlier = write_clips(tmp_path / "clips", count=1, num_frames=5), tmp_path / "earlier"
    shutil.copytree(world, earlier)
    before = load_model(world)
    doubled = load_model(earlier)
    for weight in doubled.parameters():
        weight.data.mul_(2)
    save_model(doubled, earlier)
    out = tmp_path / "out"
    bundle.main(bundle.Options(world, clips, out, "clip_0:0", blend=f"{earlier}=0.25", walk="none"))
    after = load_model(out).state_dict()
    for name, weight in before.state_dict().items():
        torch.testing.assert_close(after[name], 1.25 * weight, rtol=0.01, atol=1e-6)
