import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from diagd.data.video import read_video, write_video
from diagd.families.checkpoints import save_model
from tests.golden import FIXTURES
from tests.worlds import model_config, random_model, smooth_frames, write_world


@pytest.fixture
def attention(command, world, tmp_path, monkeypatch):
    """Run `diagd attention` on the tiny world, into an empty folder which is also where we are."""
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    return lambda *flags: command("attention", "--model", world, *flags, "--json")


def written(tmp_path):
    return sorted(path.name for path in (tmp_path / "out").iterdir())


def test_the_figure_and_the_numbers_are_written(attention, tmp_path):
    done = attention()
    assert done.code == 0, done.err
    assert written(tmp_path) == ["attention.json", "attention.png"]
    numbers = json.loads((tmp_path / "out" / "attention.json").read_text())
    document = done.document
    assert (document.pop("figure"), document.pop("numbers")) == ("attention.png", "attention.json")
    assert document == numbers
    assert (numbers["grid"], numbers["frame"], numbers["clips"]) == ("3x5", 1, ["prompt.mp4"])
    picture = read_video(tmp_path / "out" / "attention.png").frames[0]
    assert picture.shape[0] > 900
    assert picture.float().std() > 20
    assert "times even" in done.said


def test_clips_of_a_folder_are_averaged(attention, world, tmp_path):
    clips = tmp_path / "clips"
    clips.mkdir()
    for seed in range(3):
        write_video(clips / f"{seed}.mp4", smooth_frames(5, 24, 40, seed=seed), fps=8)
        shutil.copy(world / "prompt.jsonl", clips / f"{seed}.jsonl")
    flags = ("--frame", 2, "--layer", 1, "--head", 0)
    both = attention("--clips", clips, "--num-clips", 2, *flags).document
    assert both["clips"] == ["0.mp4", "1.mp4"]
    alone = [attention("--clips", clips / f"{n}.mp4", *flags).document for n in range(2)]
    for kind, share in both["shares"].items():
        mean = sum(document["shares"][kind] for document in alone) / 2
        assert share == pytest.approx(mean, abs=2e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--frame", 0), "frame must be at least 1, got 0"),
        (("--frame", 5), "prompt.mp4 has 5 frames, expected at least 6"),
        (("--frame", 8), r"frame must be in \[1, 8\), the model's frames, got 8"),
        (("--frame", 10**20), "frame must fit in 64 bits"),
        (("--num-clips", 0), "num_clips must be at least 1, got 0"),
        (("--layer", 2), r"layer must be in \[0, 2\), got 2"),
        (("--output", "map.jpg"), "output must end in .png, got map.jpg"),
        (("--output", "none/map.png"), "output folder does not exist: none"),
        (("--clips", "none.mp4"), "none.mp4"),
        (("--clips", "."), r"no clips .* in \."),
    ],
)
def test_mistakes_are_refused_and_write_nothing(flags, message, attention, tmp_path):
    attention(*flags).assert_refused(message)
    assert written(tmp_path) == []


def test_the_tokenizer_may_lie_elsewhere(attention, world, tmp_path):
    whole = attention().document
    bare = shutil.copytree(world, tmp_path / "bare")
    tokenizer = shutil.move(bare / "tokenizer", tmp_path / "tokenizer")
    attention("--model", bare).assert_refused("give its folder as --tokenizer")
    done = attention("--model", bare, "--tokenizer", tokenizer)
    assert done.code == 0, done.err
    assert done.document["shares"] == whole["shares"]


def test_a_clip_without_its_actions_is_refused(attention, tmp_path):
    clip = tmp_path / "clip.mp4"
    write_video(clip, torch.zeros(3, 24, 40, 3, dtype=torch.uint8), fps=8)
    attention("--clips", clip).assert_refused("clip.jsonl")


def test_recordings_have_their_actions_in_them(attention, tmp_path):
    (tmp_path / "clips").mkdir()
    for seed in range(2):
        images = smooth_frames(4, 128, 128, seed).movedim(-1, 1).numpy()
        actions = np.full((4, 16), 5, dtype=np.float32)
        actions[:, :12] = 0
        np.savez(tmp_path / "clips" / f"{seed}.npz", images=images, actions=actions)
    done = attention("--model", FIXTURES / "wham_tiny", "--clips", tmp_path / "clips")
    assert done.code == 0, done.err
    assert done.document["clips"] == ["0.npz", "1.npz"]


def test_the_prompt_of_a_model_named_by_its_file_is_beside_it(attention, tmp_path):
    folder = shutil.copytree(FIXTURES / "mineworld_tiny_v256", tmp_path / "model")
    write_video(folder / "prompt.mp4", smooth_frames(2, 224, 384), fps=8)
    (folder / "prompt.jsonl").write_text('{"action": "none"}\n' * 2)
    done = attention("--model", folder / "model.ckpt")
    assert done.code == 0, done.err


def test_a_model_that_reads_a_text_is_refused(attention, tmp_path):
    reader = write_world(tmp_path / "reader")
    save_model(random_model(replace(model_config(), context_size=6)), reader)
    attention("--model", reader).assert_refused("attention is measured without a text")
    assert written(tmp_path) == []
