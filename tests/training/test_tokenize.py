import shutil

import pytest

from diagd.data.video import write_video
from diagd.tokenizers.shards import read_shards
from diagd.tokenizers.vq import VQTokenizer
from diagd.training.corpus import advise
from tests.tokenizers.rectangles import rectangles, write_clips

QUICK = (
    *("--steps", 1, "--batch-size", 2, "--codes", 16, "--frame-stride", 1),
    *("--learning-rate", 1e-5),
)
SIZE_AND_PATCH = ("--size", "26x40", "--patch", 4)


def test_the_command_leaves_all_that_training_needs(command, tmp_path):
    clips, tokens, again = (tmp_path / name for name in ("clips", "tokens", "again"))
    write_clips(clips, num_clips=3)
    training = command("tokenize", "--clips", clips, "--out", tokens, *QUICK, "--json")
    assert training.code == 0, training
    document = training.document
    assert (document["clips"], document["frames_per_clip"]) == ({"train": 2, "heldout": 1}, 4)
    assert 10 < document["psnr"] < 28
    said = training.said
    assert "that is poor: the bundled worlds have 29 to 34 dB" in said
    assert "try --codes 4096" in said or "try longer training (--minutes 20)" in said
    assert len(read_shards(tokens / "train").tokens) == 2
    assert read_shards(tokens / "train").action_names == ("none", "forward", "left")
    assert VQTokenizer.from_pretrained(tokens / "tokenizer").compression == 4  # 24x40 px are small

    others = shutil.copytree(clips, tmp_path / "others")
    applying = command(
        *("tokenize", "--clips", clips, "--heldout", others, "--out", again),
        *("--tokenizer", tokens / "tokenizer"),
    )
    assert applying.code == 0, applying
    assert read_shards(again / "train").tokens[:2].equal(read_shards(tokens / "train").tokens)
    assert (again / "tokenizer" / "config.json").is_file()
    assert not (again / "tokenizer" / "training").exists()


def test_a_poor_tokenizer_comes_with_advice_that_fits_it():
    assert advise(psnr=31.0, codes_used=0.01, patch=8) is None  # a game of few tiles
    few, many = advise(20.0, codes_used=11 / 1024, patch=8), advise(20.0, codes_used=0.9, patch=4)
    assert few is not None
    assert "--patch 4 " in few
    assert "most codes are unused" in few
    assert many is not None
    assert "--codes 4096" in many
    assert "--patch" not in many


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), r"heldout: expected a clip of at least 4 frames, .*: record another"),
        (("--heldout-share", 0.7), r"heldout_share must be in \(0, 0\.5\], got 0\.7"),
        (("--tokenizer", "t", "--init", "t"), "tokenizer is used unchanged"),
        (("--heldout", "absent"), "folder of clips not found: absent"),
    ],
)
def test_mistakes_are_told_in_one_line_and_nothing_is_written(flags, message, command, tmp_path):
    write_clips(tmp_path / "clips", num_clips=1)
    out = tmp_path / "out"
    command("tokenize", "--clips", tmp_path / "clips", "--out", out, *flags).assert_refused(message)
    assert not out.exists()


def test_what_is_learnt_from_is_not_held_out(command, tmp_path):
    write_clips(tmp_path / "clips", num_clips=2)
    flags = "--heldout", tmp_path / "out" / ".." / "clips", "--out", tmp_path / "out"
    outcome = command("tokenize", "--clips", tmp_path / "clips", *flags)
    outcome.assert_refused("heldout must not be inside clips, got .*clips")


@pytest.mark.parametrize(
    ("heldout", "out"),
    [
        ("heldout", "clips"),
        ("heldout", "clips/tokens"),
        ("heldout", "clips/../heldout/"),
        ("heldout/scenes", "heldout"),
    ],
)
def test_a_prompt_and_scenes_are_not_written_over_clips(heldout, out, command, tmp_path):
    for folder in ("clips", heldout):
        (clip,) = write_clips(tmp_path / folder, num_clips=1)
        clip.rename(clip.with_name("prompt.mp4"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    folders = "--clips", tmp_path / "clips", "--heldout", tmp_path / heldout
    outcome = command("tokenize", *folders, "--out", f"{tmp_path}/{out}", *QUICK)
    outcome.assert_refused("out must not be inside the folders of clips, got .*")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


def test_sizes_that_do_not_fit_are_found_before_the_work(command, tmp_path):
    write_clips(tmp_path / "clips", num_clips=2)
    (other,) = write_clips(tmp_path / "heldout", num_clips=1)
    write_video(other, rectangles(4, size=(32, 40)))
    folders = ("--clips", tmp_path / "clips", "--heldout", tmp_path / "heldout")
    outcome = command("tokenize", *folders, "--out", tmp_path / "out")
    outcome.assert_refused(r"clip_000000\.mp4: expected frames of 24x40 px as in .*, got 32x40 px")
    outcome = command("tokenize", *folders, "--out", tmp_path / "out", *SIZE_AND_PATCH)
    outcome.assert_refused("must be even, and multiples of 4 px, got 26x40: give --size")
    assert not (tmp_path / "out").exists()


def test_a_damaged_action_file_is_found_before_the_work(command, tmp_path):
    paths = write_clips(tmp_path / "clips", num_clips=3)
    paths[2].with_suffix(".jsonl").write_text('{"action": "none"}\n')
    outcome = command("tokenize", "--clips", tmp_path / "clips", "--out", tmp_path / "out")
    outcome.assert_refused(r"clip_000002\.jsonl: expected 4 actions, got 1")
    assert not (tmp_path / "out").exists()
