import json
from fractions import Fraction

import pytest
import torch

from diagd.data.actions import ActionVocabulary, read_actions, write_actions
from diagd.data.recorders.recording import RecordOptions, clip_paths, record
from diagd.data.vectors import VectorActions
from diagd.data.video import read_video, write_video
from diagd.training import check
from diagd.training.check import WRONG_ROWS, check_clips, row_timing

CLIPS, FRAMES = 8, 40
GAME = "tests.data.recorders.scroller:Scroller-v0"


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Record clips of a game, a random player in it."""
    folder = tmp_path_factory.mktemp("recording")
    options = RecordOptions(folder, GAME, clips=CLIPS, frames=FRAMES, repeat=1, size="32x64")
    record(options)
    return folder


@pytest.fixture
def clips(recording, tmp_path):
    """Copy the recording, to be spoilt."""
    for path in recording.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def shift_rows(folder, by):
    for path in folder.glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[by:] + lines[-by:] if by > 0 else lines[:1] + lines[:-1]))


def test_a_recording_has_no_problems(recording):
    report = check_clips(recording)
    assert report.problems == []
    assert [clip.path for clip in report.clips] == sorted(recording.glob("*.mp4"))
    assert {(clip.size_px, clip.fps) for clip in report.clips} == {((32, 64), Fraction(30))}
    assert report.timing is not None
    assert report.timing.found == 0
    assert list(report.uses) == ["none", "left", "right", "look_up"]


def test_uses_are_counted_without_the_rows_of_first_frames(recording):
    rows: list[str] = []
    vocabulary = ActionVocabulary.load(recording / "actions.json")
    for path in sorted(recording.glob("*.jsonl")):
        rows += read_actions(path, vocabulary)[1:]
    uses = check_clips(recording).uses
    for name, use in uses.items():
        assert use.frames == rows.count(name)
        assert use.share == pytest.approx(use.frames / (CLIPS * (FRAMES - 1)))
        assert 1 <= use.held_frames <= 17
    assert uses["none"].change < 1 < uses["left"].change


@pytest.mark.parametrize(("by", "found"), [(1, -1), (-1, 1)], ids=["away", "late"])
def test_rows_that_are_off_by_one_are_a_problem(clips, by, found):
    shift_rows(clips, by)
    report = check_clips(clips)
    assert report.timing is not None
    assert report.timing.found == found
    assert report.problems == [WRONG_ROWS[found]]


def test_what_the_problem_says_mends_rows_that_lead_away(clips):
    shift_rows(clips, 1)
    for path in clips.glob("*.jsonl"):
        rows = path.read_text().splitlines()
        path.write_text("\n".join([json.dumps({"action": "none"}), *rows[:-1]]))
    assert check_clips(clips).problems == []


def test_vectors_may_be_forces_that_act_a_row_later(clips):
    shift_rows(clips, 1)
    words = {"left": "x=min", "right": "move(1,0)", "look_up": "y=max", "none": "none"}
    for path in clips.glob("*.jsonl"):
        rows = path.read_text().splitlines()
        write_actions(path, [words[json.loads(row)["action"]] for row in rows])
    VectorActions(("x", "y"), (-1, -1), (1, 1)).save(clips / "actions.json")
    report = check_clips(clips)
    assert report.problems == []
    assert report.notes[0].startswith("right if actions are forces")
    assert WRONG_ROWS[-1] in report.notes[0]


def test_all_problems_are_told_at_once(clips):
    videos = sorted(clips.glob("*.mp4"))
    frames = read_video(videos[3]).frames
    videos[1].write_bytes(b"no video")
    videos[2].with_suffix(".jsonl").unlink()
    write_video(videos[3], frames[:-1], 30)
    write_video(videos[4], frames[:, :, :48], 30)
    write_video(videos[5], frames, 10)
    write_actions(videos[6].with_suffix(".jsonl"), ["none", "jump"] * (FRAMES // 2))
    write_video(videos[7], frames[:1], 30)
    write_actions(videos[7].with_suffix(".jsonl"), ["none"])
    expected = [
        "clip_000001.mp4 cannot be decoded",
        "action file not found: ",
        "clip_000003.jsonl: expected 39 actions, got 40",
        "expected frames of 32x64 px as in clip_000000.mp4, got 32x48",
        "expected 30 frames/s as in clip_000000.mp4, got 10",
        "clip_000006.jsonl:2: unknown action 'jump', expected one of: none, left",
        "expected at least 2 frames, got 1",
    ]
    report = check_clips(clips)
    assert len(report.problems) == len(expected)
    for problem, words in zip(report.problems, expected, strict=True):
        assert words in problem
    assert [clip.path for clip in report.clips] == videos[:1]


def test_what_will_disappoint_is_noted(clips):
    """One still clip, and a vocabulary of more than is ever done."""
    names = ActionVocabulary.load(clips / "actions.json").names
    ActionVocabulary((*names, "fly")).save(clips / "actions.json")
    video, _ = clip_paths(clips, 2)
    write_video(video, read_video(video).frames[:1].expand(FRAMES, -1, -1, -1), 30)
    notes = check_clips(clips).notes
    assert notes[0] == f"{video}: no motion"
    assert notes[1] == "actions never used, which the world cannot learn: fly"


def test_rare_and_lonely_actions_are_noted(clips):
    paths = sorted(clips.glob("*.jsonl"))
    for path in paths:
        write_actions(path, ["none"] * FRAMES)
    one_action = check_clips(clips)
    assert one_action.timing is not None
    assert one_action.timing.found is None
    assert one_action.notes[-1] == "only one action is used: this world cannot be controlled"
    write_actions(paths[0], ["left"] * 3 + ["none"] * (FRAMES - 3))
    assert "actions used in less than 1% of the frames: left" in check_clips(clips).notes


def test_two_frames_are_too_few_to_tell_and_no_warning(tmp_path):
    write_video(tmp_path / "a.mp4", torch.randint(0, 256, (2, 32, 48, 3), dtype=torch.uint8), 10)
    write_actions(tmp_path / "a.jsonl", ["none", "left"])
    timing = check_clips(tmp_path).timing
    assert timing is not None
    assert (timing.found, timing.gains) == (None, {})


def test_no_clip_is_so_long_that_the_next_one_shares_its_chunks(monkeypatch):
    """Chunks of one frame each: 1001 of a clip and two of the next one are 1003."""
    monkeypatch.setattr(check, "CHUNK_FRAMES", 1)
    monkeypatch.setattr(check, "MIN_CHUNKS", 1003)
    generator, lengths = torch.Generator().manual_seed(0), (1006, 7)  # 5 have not all the rows
    movements = [torch.randn(length - 1, 3, generator=generator) for length in lengths]
    actions = [torch.randint(2, (length,), generator=generator) for length in lengths]
    assert row_timing(movements, actions).gains
    monkeypatch.setattr(check, "MIN_CHUNKS", 1004)
    assert not row_timing(movements, actions).gains


def test_videos_alone_are_clips_without_actions(tmp_path):
    frames = torch.randint(0, 256, (4, 32, 48, 3), dtype=torch.uint8)
    write_video(tmp_path / "a.mp4", frames, 10)
    report = check_clips(tmp_path)
    assert (report.problems, report.uses, report.timing) == ([], {}, None)
    assert "the world will have no actions" in report.notes[0]


def test_a_folder_without_clips_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no clips .* in"):
        check_clips(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"folder of clips not found: .*nowhere"):
        check_clips(tmp_path / "nowhere")
