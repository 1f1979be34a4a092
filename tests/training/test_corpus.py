from pathlib import Path

import pytest
import torch

from diagd.data.actions import ActionVocabulary, read_actions
from diagd.data.video import read_video, write_video
from diagd.families.clip_files import find_clips, find_films
from diagd.tokenizers.shards import codebook_fingerprint, read_shards
from diagd.tokenizers.vq import VQTokenizer
from diagd.training.corpus import TokenizeOptions, piece_length, split_clips, tokenize
from diagd.training.tokenizer import load_frames
from tests.data.encoding import encode_video
from tests.tokenizers.rectangles import rectangles, small_tokenizer, write_clips


@pytest.fixture
def options(tmp_path):
    """Return a function that makes options for two steps of training, and none if applied."""

    def make(**changes):
        plain = {
            "clips": tmp_path / "clips",
            "out": tmp_path / "out",
            "steps": 1,
            "batch_size": 2,
            "codes": 16,
            "frame_stride": 1,
        }
        return TokenizeOptions(**{**plain, **changes})

    return make


@pytest.mark.parametrize(
    ("lengths", "piece"),
    [
        ([6, 6], 6),
        ([64, 64], 64),
        ([500, 500], 64),
        ([5, 200], 64),  # the short one is left out
        ([40, 200], 40),
        ([5, 20], 5),  # of 25 frames it would be a fifth
        ([3, 40, 3, 41], 40),
        ([17, 12, 13, 16, 14, 15], 12),
    ],
)
def test_clips_too_short_for_a_piece_hold_a_tenth_of_the_frames_at_most(lengths, piece):
    assert piece_length(lengths) == piece


def test_the_held_out_part_stays_when_clips_are_added(tmp_path):
    write_clips(tmp_path / "clips", num_clips=8, num_frames=1)
    train, held_out = split_clips(find_films(tmp_path / "clips"), 0.25)
    assert [path.stem[-1] for path in held_out] == ["3", "7"]
    write_clips(tmp_path / "clips", num_clips=11, num_frames=1)
    more, still = split_clips(find_films(tmp_path / "clips"), 0.25)
    assert still == held_out
    assert more[: len(train)] == train
    assert not set(more) & set(still)


def test_clips_are_those_that_evaluation_finds_whatever_their_endings(tmp_path):
    paths = write_clips(tmp_path / "clips", num_clips=3, num_frames=1)
    (tmp_path / "clips/later").mkdir()
    paths[0].rename(paths[0].with_suffix(".MP4"))
    paths[2].rename(tmp_path / "clips/later/z.mkv")
    found = find_films(tmp_path / "clips")
    assert [path.suffix for path in found] == [".MP4", ".mp4", ".mkv"]
    assert found == [clip.path for clip in find_clips(tmp_path / "clips").values()]


def test_recordings_of_a_family_are_refused(tmp_path):
    (tmp_path / "FB_1_data.npz").touch()
    with pytest.raises(ValueError, match=r"FB_1_data.npz: training needs videos, got a rec"):
        find_films(tmp_path)


def test_few_clips_have_one_held_out():
    clips = [Path("a"), Path("b")]
    assert split_clips(clips, 0.1) == ([Path("a")], [Path("b")])
    assert split_clips(clips[:1], 0.1) == ([Path("a")], [])


def test_clips_of_any_length_are_cut_without_losing_a_frame(options, tmp_path):
    paths = write_clips(tmp_path / "clips", num_clips=3, num_frames=33)
    write_clips(tmp_path / "longer", num_clips=1, num_frames=75)
    for suffix in (".mp4", ".jsonl"):
        (tmp_path / "longer" / f"clip_000000{suffix}").rename(paths[0].with_suffix(suffix))
    write_video(paths[1], rectangles(4))
    paths[1].with_suffix(".jsonl").write_text('{"action": "none"}\n' * 4)
    report = tokenize(options())
    assert (report["frames_per_clip"], report["clips"]) == (33, {"train": 1, "heldout": 1})
    clips = read_shards(tmp_path / "out" / "train")
    assert clips.tokens.shape[:2] == (3, 33)  # of 75 frames: 0 to 32, 33 to 65, 42 to 74
    assert clips.tokens[1, 9:].equal(clips.tokens[2, :24])
    forward, left = 1, 2
    assert clips.actions[0, :3].tolist() == [0, forward, left]
    assert clips.actions[2, :2].tolist() == [left, forward]  # of frames 42 and 43


def test_the_prompt_and_the_scenes_are_held_out_frames_with_their_actions(options, tmp_path):
    paths = write_clips(tmp_path / "clips", num_clips=4, num_frames=12)
    out = tmp_path / "out"
    assert tokenize(options())["scenes"] == 5
    held_out = read_video(paths[3])
    names = read_actions(paths[3].with_suffix(".jsonl"), _vocabulary(out))
    starts = [out / "prompt.mp4", *sorted((out / "scenes").glob("*.mp4"))]
    found = set()
    for path in starts:
        video = read_video(path)
        actions = read_actions(path.with_suffix(".jsonl"), _vocabulary(out))
        assert (len(video.frames), video.fps) == (4, held_out.fps)
        errors = [
            (video.frames.float() - held_out.frames[t : t + 4].float()).abs().mean().item()
            for t in range(9)
        ]
        start = min(range(9), key=errors.__getitem__)
        found.add(start)
        assert errors[start] < 6  # of 255, by a video codec
        assert actions == names[start : start + 4]
    assert len(found) == 6
    first = read_actions(out / "walk.jsonl", _vocabulary(out))
    assert 0 < len(first) <= 8
    assert first == names[12 - len(first) :]


def test_frames_are_fitted_to_a_size(options, tmp_path):
    write_clips(tmp_path / "clips", num_clips=2)
    tokenize(options(size="16x32", patch=8))
    assert read_shards(tmp_path / "out" / "train").tokens.shape[2:] == (2, 4)
    assert read_video(tmp_path / "out" / "prompt.mp4").frames.shape[1:3] == (16, 32)


def test_clips_without_actions_have_one_that_does_nothing(options, tmp_path):
    write_clips(tmp_path / "clips", num_clips=2, actions=False)
    tokenize(options())
    assert _vocabulary(tmp_path / "out").names == ("none",)
    assert (tmp_path / "out" / "prompt.jsonl").read_text() == '{"action": "none"}\n' * 4


def test_a_finished_folder_is_left_as_it_is(options, tmp_path):
    write_clips(tmp_path / "clips", num_clips=3)
    tokenize(options())
    shard = tmp_path / "out" / "train" / "shard_00000.safetensors"
    kept, tokens = shard.stat().st_mtime_ns, read_shards(shard.parent).tokens
    tokenize(options())
    assert shard.stat().st_mtime_ns == kept
    assert torch.equal(read_shards(shard.parent).tokens, tokens)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_folder_is_left_as_it_is_by_another_tokenizer(options, tmp_path):
    write_clips(tmp_path / "clips", num_clips=2)
    small_tokenizer(seed=1).save_pretrained(tmp_path / "other")
    tokenize(options())
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match=": made from other clips, actions or another"):
        tokenize(options(tokenizer=tmp_path / "other"))
    assert contents(tmp_path / "out") == before


def test_a_call_killed_before_the_tokenizer_is_copied_goes_on(options, tmp_path, monkeypatch):
    write_clips(tmp_path / "clips", num_clips=2)
    small_tokenizer(seed=1).save_pretrained(tmp_path / "other")
    applied = options(tokenizer=tmp_path / "other")
    with monkeypatch.context() as patch:
        patch.setattr("diagd.training.corpus.copy_whole", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tokenize(applied)
    assert not (applied.out / "tokenizer").exists()
    tokenize(applied)
    assert read_shards(applied.out / "train").codebook == codebook_fingerprint(
        VQTokenizer.from_pretrained(applied.out / "tokenizer")
    )


def test_nor_is_a_tokenizer_trained_over_the_one_that_its_tokens_are_of(options, tmp_path):
    write_clips(tmp_path / "clips", num_clips=2)
    small_tokenizer().save_pretrained(tmp_path / "other")
    tokenize(options(tokenizer=tmp_path / "other"))
    before = contents(tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"out holds tokens of another tokenizer: give it as --tok"
    ):
        tokenize(options())
    assert contents(tmp_path / "out") == before


def test_scenes_of_the_user_stay_beside_those_that_are_made_anew(options, tmp_path):
    scenes = tmp_path / "out" / "scenes"
    scenes.mkdir(parents=True)
    for name in ("mine.png", "of_another_run_0012.mp4", "of_another_run_0012.jsonl"):
        (scenes / name).write_text("")
    write_clips(tmp_path / "clips", num_clips=2, num_frames=12)
    tokenize(options())
    names = {path.name for path in scenes.iterdir()}
    assert "mine.png" in names
    assert len(names) == 1 + 2 * 5
    assert not names & {"of_another_run_0012.mp4", "of_another_run_0012.jsonl"}


def test_frames_that_no_scene_can_be_written_of_are_refused_before_the_work(options, tmp_path):
    (tmp_path / "clips").mkdir()
    for name in ("a.mp4", "b.mp4"):
        frames = rectangles(4, size=(35, 49))
        encode_video(tmp_path / "clips" / name, frames, codec="libx264", pixels="yuv444p")
    message = "must be even, and multiples of 7 px, got 35x49: give --size"
    with pytest.raises(ValueError, match=message):
        tokenize(options())
    assert not (tmp_path / "out").exists()
    tokenize(options(size="28x42"))
    assert read_video(tmp_path / "out" / "prompt.mp4").frames.shape[1:3] == (28, 42)


def _vocabulary(folder):
    return ActionVocabulary.load(folder / "actions.json")


def test_a_second_call_learns_from_no_clip_again(options, tmp_path, monkeypatch):
    write_clips(tmp_path / "clips", num_clips=4, num_frames=4)
    first = tokenize(options())
    read = []
    monkeypatch.setattr(
        "diagd.training.corpus.load_frames",
        lambda paths, options: read.extend(paths) or load_frames(paths, options),
    )
    monkeypatch.chdir(tmp_path)  # clips may be named from anywhere
    second = tokenize(options(clips=Path("clips")))
    assert second["psnr"] == first["psnr"]
    assert len(read) == 1  # held out
    monkeypatch.setattr("diagd.training.corpus.load_frames", None)
    with pytest.raises(ValueError, match=r"state.pt is of a run with codes=16, now 8"):
        tokenize(options(codes=8))
