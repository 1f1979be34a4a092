import json
import math
import shutil
from types import SimpleNamespace

import psutil
import pytest
import torch

import diagd
from diagd.backends import prepare
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.world_folder import load_parts
from tests.backends.candidates import candidates_of
from tests.worlds import WALK


@pytest.fixture
def trained(world, tmp_path):
    """Return a copy of the world with a scene and a log of its training, torn at its end."""
    folder = shutil.copytree(world, tmp_path / "trained")
    (folder / "scenes").mkdir()
    shutil.copy(world / "prompt.mp4", folder / "scenes" / "start.mp4")
    lines = [{"step": 20, "loss": 4.5, "validation_loss": 3.25}, {"step": 1040, "loss": 2.125}]
    log = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "log.jsonl").write_text(log + '{"step": 10')
    return folder


def files_of(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("settings", [{}, {"dtype": torch.bfloat16, "backend": "eager"}])
def test_a_world_saved_is_the_world_whatever_it_ran_in(settings, trained, tmp_path):
    goal = tmp_path / "saved"
    VideoGenerator.from_pretrained(trained, **settings).save_pretrained(goal)
    before, after = files_of(trained), files_of(goal)
    assert set(after) == {*before, "README.md", "generation.json"}
    same = {"prompt.mp4", "prompt.jsonl", "walk.jsonl", "scenes/start.mp4", "log.jsonl"}
    assert all(after[name] == before[name] for name in same)
    one, other = (VideoGenerator.from_pretrained(folder) for folder in (trained, goal))
    prompt = trained / "prompt.mp4"
    videos = [w.generate(prompt, WALK, seed=3) for w in (one, other)]
    assert torch.equal(videos[0].frames, videos[1].frames)
    assert one.defaults == other.defaults


def test_the_fastest_type_is_one_that_the_backend_gains_by(trained, monkeypatch):
    timed = candidates_of(1.0, 0.8, 0.4, 3.0, 2.0)
    monkeypatch.setattr(prepare, "time_candidates", lambda config: timed)
    assert VideoGenerator.from_pretrained(trained, dtype="fastest").dtype == "int8"
    world = VideoGenerator.from_pretrained(trained, dtype="fastest", backend="eager")
    assert world.dtype == "bfloat16"


def test_the_card_says_what_it_is_and_how_it_was_trained(trained, tmp_path):
    goal = tmp_path / "saved"
    VideoGenerator.from_pretrained(trained).save_pretrained(goal)
    card = (goal / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: diagd\ntags: [world-model, autoregressive-video]\n")
    for line in (
        "# saved",
        "Continues video of 24x40 pixels at 8.75 frames/s, given the actions none, forward, "
        "left, right.",
        "| frame | 3x5 tokens of 20 codes |",
        "| training | 1,040 steps, loss 2.125 nats per token, held-out loss 3.250 nats per token |",
    ):
        assert f"\n{line}\n" in card
    code = card.split("```")[1].removeprefix("python")
    assert "right*16" in code
    shutil.copy(trained / "prompt.mp4", tmp_path / "clip.mp4")
    code = code.replace('"clip.mp4"', f'"{tmp_path / "clip.mp4"}"')
    exec(code.replace("dream.mp4", str(tmp_path / "dream.mp4")), {})
    assert (tmp_path / "dream.mp4").is_file()


def test_a_card_that_is_there_is_kept(trained, tmp_path):
    (trained / "README.md").write_text("# Mine\n")
    VideoGenerator.from_pretrained(trained).save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "README.md").read_text() == "# Mine\n"


def test_a_world_is_not_saved_onto_itself_nor_from_nowhere(trained):
    world = diagd.VideoGenerator.from_pretrained(trained)
    before = files_of(trained)
    with pytest.raises(
        ValueError, match="is where the world was loaded from: choose another folder"
    ):
        world.save_pretrained(trained)
    assert files_of(trained) == before
    parts = load_parts(trained)
    config = parts.model.config
    by_hand = VideoGenerator(parts.model, config, parts.tokenizer, parts.vocabulary, parts.defaults)
    assert repr(by_hand) == "VideoGenerator(unnamed: 24x40 px, 3x5 tokens, 4 actions)"
    with pytest.raises(ValueError, match="world cannot be saved: it was not loaded by from_pre"):
        by_hand.save_pretrained(trained.with_name("other"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"grid_height": 10**4, "grid_width": 10**4, "max_positions": 2**28},
            r"a frame of 80000x80000 pixels would need 76\.8 GB, this machine has",
        ),
        (
            {"prefix_length": 2**27, "max_positions": 2**28},
            "prefix_length is 134217728, but there are only 0 extra embeddings",
        ),
    ],
)
def test_sizes_that_no_weight_shows_are_refused_before_they_are_allocated(
    trained, changes, message, monkeypatch
):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**34))
    config = json.loads((trained / "config.json").read_text())
    (trained / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        VideoGenerator.from_pretrained(trained)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": "warm"}, "temperature must be a number, got 'warm'"),
        ({"top_p": [1]}, "top_p must be a number or null"),
        ({"context_frames": 2.5}, "context_frames must be a whole number, got 2.5"),
        ({"num_frames": 1e30}, "num_frames must be a whole number, got 1e\\+30"),
        ({"num_frames": True}, "num_frames must be a whole number, got True"),
        ({"fps": -1}, "fps must be above 0 and at most 1000, got -1"),
        ({"fps": math.nan}, "fps must be above 0 and at most 1000, got nan"),
        ({"fps": math.inf}, "fps must be above 0 and at most 1000, got inf"),
        ({"num_frames": 10**30}, "num_frames must be 1 to 268435456, got 1000"),
        ({"num_frames": 0}, "num_frames must be 1 to 268435456, got 0"),
        ({"context_frames": -1}, "context_frames must be 0 to 268435456, got -1"),
        ({"row_lag": -1}, "row_lag must be 1 to 268435456, got -1"),
        ({"keep_frames": -1}, "keep_frames must be 0 to 268435456, got -1"),
        ({"first_id": -1}, "first_id must be 0 to 268435456, got -1"),
        ({"top_p": -1}, r"top_p must be in \(0, 1\], got -1"),
        ({"temperature": math.nan}, "temperature must be 0 or more, got nan"),
        ({"temperature": -0.5}, "temperature must be 0 or more, got -0.5"),
        ({"decoding": "k=zero"}, "k=zero"),
    ],
)
def test_generation_defaults_out_of_their_range_are_refused(trained, wrong, message):
    (trained / "generation.json").write_text(json.dumps(wrong))
    with pytest.raises(
        ValueError, match=rf"generation\.json: not generation defaults: .*{message}"
    ):
        load_parts(trained)
