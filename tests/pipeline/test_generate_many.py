"""`diagd generate --prompts DIR --out DIR`: a video for each prompt, over kills and broken ones."""

import json
import os
import re
import shutil
import sys
import time

import pytest
import torch

from diagd.backends import prepare
from diagd.data.actions import write_actions
from diagd.data.video import read_video, write_image, write_video
from diagd.pipeline import generate as generate_module
from diagd.pipeline.generate import PromptWorker
from diagd.pipeline.prompts import seed_of
from tests.backends.candidates import BFLOAT16, FLOAT32, candidates_of
from tests.worlds import HEIGHT_PX, PROMPT_ACTIONS, WIDTH_PX, smooth_frames, write_world

SHORT = ("--frames", 3, "--context-frames", 2)
NAMES = ["clip_0", "clip_1", "clip_2", "view"]


def write_prompts(folder, count=3):
    folder.mkdir()
    for clip in range(count):
        frames = smooth_frames(5, HEIGHT_PX, WIDTH_PX, seed=20 + clip)
        write_video(folder / f"clip_{clip}.mp4", frames, fps=8)
    write_actions(folder / "clip_1.jsonl", PROMPT_ACTIONS)
    write_image(folder / "view.png", smooth_frames(1, 50, 70)[0])
    (folder / ".view.png.1a2b3c4d.partial").touch()
    (folder / "notes.txt").write_text("no prompt")
    return folder


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts")


@pytest.fixture
def generate(command, world, prompts, tmp_path):
    """Run the command on the tiny world, three prompts and a picture."""

    def run(*flags, model=world):
        base = ("--model", model, *SHORT, "--prompts", prompts, "--out", tmp_path / "out")
        base += ("--batch-size", 2)
        return command("generate", *base, *flags, "--json")

    return run


@pytest.fixture
def read(monkeypatch):
    """Return the names of the prompts that are worked on, as they come."""
    names = []
    original = PromptWorker.__call__

    def counting(self, paths):
        names.extend(path.stem for path in paths)
        return original(self, paths)

    monkeypatch.setattr(PromptWorker, "__call__", counting)
    return names


def videos_of(out):
    """Return the bytes of each video; every one has its settings beside it."""
    assert {path.suffix for path in out.iterdir()} == {".mp4", ".json"}
    videos = {path.stem: path.read_bytes() for path in out.glob("*.mp4")}
    assert sorted(path.stem for path in out.glob("*.json")) == sorted(videos)
    return videos


def settings_of(out, name):
    return json.loads((out / f"{name}.json").read_text())


def test_each_prompt_has_the_video_that_it_has_alone_with_its_seed(
    generate, command, world, prompts, tmp_path
):
    outcome = generate("--strategy", "k=2", "--seed", 3)
    assert outcome.code == 0, outcome.err
    out = tmp_path / "out"
    assert outcome.document == {"out": str(out), "generated": 4, "done_before": 0, "failed": {}}
    assert f"4 videos written to {out}" in outcome.said
    videos = videos_of(out)
    assert sorted(videos) == NAMES
    for prompt in ("clip_0.mp4", "clip_1.mp4", "view.png"):
        name = prompt.partition(".")[0]
        told = settings_of(out, name)
        assert (told["prompt"], told["seed"]) == (prompt, seed_of(name, 3))
        flags = ("--prompt", prompts / prompt, "--seed", told["seed"], "--raster-frames", 0)
        alone = tmp_path / "alone.mp4"
        one = command(
            "generate", "--model", world, *SHORT, "-k", 2, *flags, "--output", alone, "--json"
        )
        assert one.code == 0, one.err
        assert alone.read_bytes() == videos[name]
        (run,) = one.document["runs"]
        assert told["stats"]["num_steps"] == run["num_steps"]
    assert len(set(videos.values())) == 4


def test_the_settings_say_how_a_video_was_made(generate, tmp_path):
    assert generate("--actions", "left,forward", "--temperature", 0.5).code == 0
    told = settings_of(tmp_path / "out", "clip_1")
    assert told["actions"] == ["left", "forward", "forward"]
    assert told["context_actions"] == [PROMPT_ACTIONS[-1]]
    assert (told["strategy"], told["sampling"]["temperature"]) == ("k=1", 0.5)
    assert told["notes"] == ["2 actions for 3 frames: 'forward' repeats to the end"]
    assert told["wall_seconds"] > told["stats"]["seconds"] > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", told["finished"])
    assert (told["settings"]["temperature"], told["settings"]["frames"]) == (0.5, 3)
    assert {"commit", "device", "torch", "threads", "python", "dtype"} <= set(told)
    idle = settings_of(tmp_path / "out", "clip_0")
    assert idle["context_actions"] == ["none"]
    assert any("has no actions" in note for note in idle["notes"])


def test_a_broken_prompt_does_not_stop_the_others_and_is_tried_again(
    generate, prompts, tmp_path, read
):
    whole = (prompts / "clip_0.mp4").read_bytes()
    (prompts / "clip_0.mp4").write_bytes(whole[:200])
    write_actions(prompts / "clip_2.jsonl", PROMPT_ACTIONS[1:])
    outcome = generate()
    assert outcome.code == 1
    failed = outcome.document["failed"]
    assert sorted(failed) == ["clip_0.mp4", "clip_2.mp4"]
    assert "clip_0.mp4 cannot be decoded (corrupt or truncated)" in failed["clip_0.mp4"]
    assert "clip_2.jsonl: expected 5 actions, got 4" in failed["clip_2.mp4"]
    assert "failed prompts: 2" in outcome.said
    assert f"  clip_2.mp4: {failed['clip_2.mp4']}" in outcome.said
    assert sorted(videos_of(tmp_path / "out")) == ["clip_1", "view"]
    (prompts / "clip_0.mp4").write_bytes(whole)
    write_actions(prompts / "clip_2.jsonl", PROMPT_ACTIONS)
    read.clear()
    outcome = generate()
    assert outcome.code == 0
    assert (outcome.document["generated"], outcome.document["done_before"]) == (2, 2)
    assert "2 existed before" in outcome.said
    assert read == ["clip_0", "clip_2"]


@pytest.mark.parametrize("killed_at", ["prompt", "video", "settings"])
def test_a_killed_run_goes_on_where_it_was(generate, tmp_path, monkeypatch, read, killed_at):
    assert generate("--out", tmp_path / "whole").code == 0
    whole = videos_of(tmp_path / "whole")
    read.clear()
    name = {"prompt": "seed_of", "video": "save_frames", "settings": "write_json"}[killed_at]
    original, calls = getattr(generate_module, name), []

    def die(*given, **settings):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*given, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(generate_module, name, die)
        assert generate().code == 130
    done = {path.stem for path in (tmp_path / "out").glob("*.json")}
    assert done == {"clip_0", "clip_1"}
    (tmp_path / "out" / ".clip_2.mp4.1a2b3c4d.partial").write_bytes(b"half a video")
    read.clear()
    outcome = generate()
    assert (outcome.document["generated"], outcome.document["done_before"]) == (2, 2)
    assert read == ["clip_2", "view"]
    assert videos_of(tmp_path / "out") == whole
    read.clear()
    assert generate().document["done_before"] == 4
    assert read == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_need_not_be_utf8(generate, world, prompts, tmp_path):
    """Nor that of the world, whose weights are read by a library that takes no other."""
    name = os.fsdecode(b"caf\xe9")
    for path in prompts.glob("clip_1.*"):
        path.rename(path.with_stem(name))
    outcome = generate(model=shutil.copytree(world, tmp_path / name))
    assert (outcome.code, outcome.document["generated"]) == (0, 4)
    assert (tmp_path / "out" / f"{name}.mp4").is_file()
    assert generate(model=tmp_path / name).document["done_before"] == 4


def test_a_prompt_can_be_added_later(generate, prompts, tmp_path, read):
    generate()
    before = videos_of(tmp_path / "out")
    shutil.copy(prompts / "clip_0.mp4", prompts / "again.mp4")
    read.clear()
    assert generate().document["generated"] == 1
    assert read == ["again"]
    after = videos_of(tmp_path / "out")
    assert {name: after[name] for name in before} == before
    frames = [read_video(tmp_path / "out" / f"{name}.mp4").frames for name in ("again", "clip_0")]
    assert not torch.equal(*frames)  # another name, another seed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--seed", 1), r"clip_0\.json was made with seed=0, now 1; choose another --out"),
        (("--frames", 2), "was made with frames=3, now 2"),
        (("--strategy", "k=2"), "was made with strategy=None, now k=2"),
        (("--actions", "left"), "was made with actions=None, now left"),
    ],
)
def test_videos_of_other_settings_are_never_mixed(flags, message, generate, tmp_path):
    generate()
    before = videos_of(tmp_path / "out")
    (tmp_path / "out" / "view.mp4").unlink()
    generate(*flags).assert_refused(message)
    assert not (tmp_path / "out" / "view.mp4").exists()
    assert generate().document["generated"] == 1
    assert videos_of(tmp_path / "out") == before


def test_a_world_may_move_but_not_change(generate, world, tmp_path):
    generate()
    moved = shutil.copytree(world, tmp_path / "moved")
    assert generate(model=moved).document["done_before"] == 4
    other = write_world(tmp_path / "other", num_action_tokens=0)
    generate(model=other).assert_refused("was made with weights=[0-9a-f]{12}, now")


def test_a_file_that_is_not_ours_is_left_alone(generate, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "view.json").write_text("[]")
    generate().assert_refused(r"view\.json: expected a record that diagd generate wrote")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["view.json"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prompts", "nowhere"), "folder of prompts not found: nowhere"),
        (("--prompt", "clip.mp4"), "prompt must be left out with --prompts"),
        (("--out", "dream.gif"), "out must be a folder for the videos of --prompts, got dream.gif"),
        (("--compare",), "compare must be left out with --prompts"),
        (("--raster-frames", 0), "raster_frames must be left out with --prompts"),
        (("--worker-cpus", -1), "worker_cpus must be at least 0, got -1"),
        (("--actions", "jump"), "unknown action 'jump'"),
        (("--actions", "left*5"), r"expected 3 actions \(one per frame\), got 5"),
        (("--text", "a maze"), "this model takes no text"),
        (("--model", "nowhere"), "no model at 'nowhere'"),
        (("--device", "cuda:99"), "device 'cuda:99' is not available"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(flags, message, generate, tmp_path):
    generate(*flags).assert_refused(message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--out", "dreams"), "out must be a file without --prompts: for one video dreams.mp4"),
        (("--workers", 2), "workers must be given with --prompts"),
        (("--batch-size", 2), "batch_size must be given with --prompts"),
        (("--address", "auto"), "address must be given with --prompts"),
        (("--prompts", "."), "out must be a folder for the videos of --prompts$"),
    ],
)
def test_flags_for_many_prompts_need_them(flags, message, command):
    command("generate", *flags).assert_refused(message)


def test_prompts_that_cannot_be_told_apart_or_are_none_are_refused(generate, prompts, tmp_path):
    generate("--out", prompts).assert_refused("out must not be the folder of prompts")
    shutil.copy(prompts / "view.png", prompts / "clip_0.PNG")
    generate().assert_refused(r"names of prompts must differ, got .*clip_0\.PNG and .*clip_0\.mp4")
    (tmp_path / "empty").mkdir()
    generate("--prompts", tmp_path / "empty").assert_refused(r"no prompts \(\.mp4, .*\) in .*empty")


def test_a_folder_that_another_run_writes_to_is_refused(generate, tmp_path):
    with generate_module.only_writer(tmp_path / "out"):
        generate().assert_refused("is being written by another process")


@pytest.mark.slow
def test_two_workers_killed_on_the_way_end_with_what_one_process_makes(world, tmp_path, spawn):
    prompts = write_prompts(tmp_path / "prompts", count=60)
    (prompts / "broken.mp4").write_bytes(b"no video")
    flags = ("-m", "diagd", "generate", "--model", world, *SHORT, "--prompts", prompts, "--json")
    alone, out = tmp_path / "alone", tmp_path / "out"
    # of one thread, as each worker has: more end the decoder's sums in other digits
    said, _ = spawn(*flags, "--threads", 1, "--out", alone).communicate(timeout=600)
    assert json.loads(said)["generated"] == 61

    together = (*flags, "--out", out, "--workers", 2, "--worker-cpus", 0.5)
    killed = spawn(*together)
    deadline = time.monotonic() + 600
    while not list(out.glob("*.json")):
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    num_done = len(list(out.glob("*.json")))
    assert 0 < num_done < 61

    went_on = spawn(*together)
    said, err = went_on.communicate(timeout=600)
    assert went_on.returncode == 1, err
    report = json.loads(said)
    assert (report["generated"], report["done_before"]) == (61 - num_done, num_done)
    assert list(report["failed"]) == ["broken.mp4"]
    assert videos_of(out) == videos_of(alone)


def test_what_auto_was_for_the_first_video_it_is_for_all(generate, tmp_path, read, monkeypatch):
    def find(costs):
        monkeypatch.setattr(prepare, "time_candidates", lambda _: candidates_of(*costs))
        assert generate().code == 0
        told = [settings_of(tmp_path / "out", name) for name in NAMES]
        return {(one["dtype"], one["backend"]) for one in told}, videos_of(tmp_path / "out")

    chosen, first = find(BFLOAT16)
    assert chosen == {("bfloat16", "eager")}
    for path in (tmp_path / "out").glob("clip_1.*"):
        path.unlink()
    assert find(FLOAT32) == (chosen, first)
    assert read == [*NAMES, "clip_1"]


def test_workers_are_told_what_auto_is(generate, monkeypatch):
    def run(paths, make, pool):
        options.append(make.args[0])
        return iter(())

    options = []
    monkeypatch.setattr(generate_module, "do_tasks", run)
    monkeypatch.setattr(prepare, "time_candidates", lambda _: candidates_of(*BFLOAT16))
    generate("--workers", 2)
    assert [(one.dtype, one.backend) for one in options] == [("bfloat16", "eager")]
