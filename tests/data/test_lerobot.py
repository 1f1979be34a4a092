"""LeRobot datasets of both versions, as clips whose actions are vectors."""

import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from diagd.data.actions import read_actions
from diagd.data.lerobot import read_lerobot
from diagd.data.vectors import VectorActions, load_actions
from diagd.data.video import read_video
from runs.robot_data import ACTION, STATE
from tests.data.robots import LENGTHS, TOP, WRIST, write_robot

BOTH = pytest.mark.parametrize("version", ["v2.1", "v3.0"])


def edit(folder, **changes):
    path = folder / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace_column(path, name, values):
    table = parquet.read_table(path)
    place = table.column_names.index(name)
    parquet.write_table(table.set_column(place, name, pyarrow.array(values)), path)


def clips_of(robot, folder, size_px=None):
    return sorted(robot.write(folder, size_px))


@BOTH
def test_episodes_are_clips_of_a_camera_with_the_vectors_that_led_to_frames(version, tmp_path):
    episodes = write_robot(tmp_path / "set", version)
    robot = read_lerobot(tmp_path / "set", "top")
    paths = clips_of(robot, tmp_path / "clips")
    assert robot.lengths(tmp_path / "clips") == dict(zip(paths, LENGTHS, strict=True))
    codec = load_actions(tmp_path / "clips" / "actions.json")
    assert isinstance(codec, VectorActions)
    assert (codec, codec.axes) == (robot.codec, ("shoulder.pos", "elbow.pos", "grip"))
    assert (codec.lowest, codec.highest) == ((0.0, -24.0, 0.0), (24.0, 0.0, 0.0))
    for path, episode in zip(paths, episodes, strict=True):
        video = read_video(path)
        assert video.fps == 10
        error = np.abs(video.frames.numpy().astype(int) - episode[TOP]).mean()
        assert error < 12  # of two encodings; other frames are 60 away
        spelled = read_actions(path.with_suffix(".jsonl"), codec, len(video.frames))
        led = [codec.numbers_of(action).tolist() for action in spelled[1:]]
        assert (spelled[0], led) == ("none", episode[ACTION][:-1].tolist())


def test_every_third_frame_has_the_mean_action_since_the_one_before_and_its_own_state(tmp_path):
    write_robot(tmp_path / "set", fps=30)
    robot = read_lerobot(tmp_path / "set", WRIST, vectors=(ACTION, STATE), bins=9)
    assert (robot.every, robot.fps, robot.codec.bins) == (3, 10, 9)
    assert robot.codec.axes[2:] == ("action.grip", "state.state_0", "state.state_1")
    assert robot.rows[0].tolist() == [[1, -1, 0, 1.5, 0.75], [4, -4, 0, 3, 1.5]]
    first = clips_of(robot, tmp_path / "clips", (8, 16))[0]
    assert read_video(first).frames.shape == (3, 8, 16, 3)
    assert len(read_lerobot(tmp_path / "set", "top", every=2).rows[0]) == 3


def test_a_killed_import_goes_on_and_clips_of_another_one_are_left_alone(tmp_path):
    write_robot(tmp_path / "set")
    robot, clips = read_lerobot(tmp_path / "set", "top"), tmp_path / "clips"
    whole = {path: path.read_bytes() for path in clips_of(robot, clips)}
    gone = clips / "episode_000001.jsonl"  # written last
    gone.unlink()
    kept = (clips / "episode_000000.mp4").stat().st_mtime_ns
    assert {path: path.read_bytes() for path in clips_of(robot, clips)} == whole
    assert gone.is_file()
    assert (clips / "episode_000000.mp4").stat().st_mtime_ns == kept
    other = read_lerobot(tmp_path / "set", "wrist")
    with pytest.raises(ValueError, match=r"clips holds clips of camera=.*top, now .*wrist; choose"):
        clips_of(other, clips)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codebase_version": "v1.6"}, r"info\.json: expected codebase_version v2\.0, .*got 'v1"),
        ({"fps": 0}, r"info\.json: fps must be in \[0\.1, 1000\], got 0"),
        ({"fps": 20}, r"\.mp4: expected 20 frames/s as in info\.json, got 10"),
        ({"features": 3}, r"info\.json: "),
        ({"data_path": "../{file_index}"}, r"info\.json: data_path .*: expected a path inside"),
        ({"video_path": "{camera}.mp4"}, r"info\.json: video_path .*: missing key 'camera'"),
        ({"data_path": None}, r"info\.json: data_path None: "),
    ],
)
def test_an_info_file_that_does_not_fit_is_refused_by_name(changes, message, tmp_path):
    write_robot(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_lerobot(tmp_path, "top")


@pytest.mark.parametrize(
    ("camera", "vectors", "message"),
    [
        (None, (ACTION,), f"camera must be given: expected one of: {TOP}, {WRIST}"),
        ("side", (ACTION,), f"no camera side, expected one of: {TOP}, {WRIST}"),
        ("top", ("qpos",), f"no vectors named qpos, expected one of: {ACTION}, {STATE}"),
        ("top", (TOP,), f"no vectors named {TOP}, expected one of"),
    ],
)
def test_what_a_dataset_has_is_listed(camera, vectors, message, tmp_path):
    write_robot(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_lerobot(tmp_path, camera, vectors)


DATA = {"v2.1": "data/chunk-000/episode_000001.parquet", "v3.0": "data/chunk-000/file-000.parquet"}
FILMS = {
    "v2.1": f"videos/chunk-000/{TOP}/episode_000001.mp4",
    "v3.0": f"videos/{TOP}/chunk-000/file-000.mp4",
}
LISTS = {"v2.1": "meta/episodes.jsonl", "v3.0": "meta/episodes/chunk-000/file-000.parquet"}


@BOTH
def test_files_that_are_missing_or_torn_are_named(version, tmp_path):
    for number, (name, kind) in enumerate(
        [(DATA[version], "table"), (FILMS[version], "film"), (LISTS[version], "list")]
    ):
        folder = tmp_path / str(number)
        write_robot(folder, version)
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=name.rpartition("/")[2].replace(".", r"\.")):
            read_lerobot(folder, "top")
        (folder / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"{kind} of .* not found: "):
            read_lerobot(folder, "top")
    with pytest.raises(FileNotFoundError, match="info of a LeRobot dataset not found"):
        read_lerobot(tmp_path / "absent")


@BOTH
def test_vectors_that_do_not_fit_are_refused_by_their_row(version, tmp_path):
    write_robot(tmp_path, version)
    path = tmp_path / DATA[version]
    rows = parquet.read_table(path)[ACTION].to_pylist()
    before = sum(LENGTHS[:1]) if version == "v3.0" else 0
    for bad, message in (
        (
            rows[0][:2],
            r"action must be 3 numbers as info\.json says, got 2 in row \d+, of episode 1",
        ),
        (None, r"got 0 in row \d+, of episode 1"),
        ([1.0, float("nan"), 0.0], "action must be finite numbers"),
    ):
        replace_column(path, ACTION, [*rows[: before + 2], bad, *rows[before + 3 :]])
        with pytest.raises(ValueError, match=message):
            read_lerobot(tmp_path, "top")
    replace_column(path, ACTION, [["a", "b", "c"]] * len(rows))
    with pytest.raises(ValueError, match="action must be numbers, got string"):
        read_lerobot(tmp_path, "top")
    parquet.write_table(parquet.read_table(path).drop_columns([ACTION]), path)
    with pytest.raises(ValueError, match=r"\.parquet: expected a column action, got observation"):
        read_lerobot(tmp_path, "top")


@BOTH
def test_tables_and_films_must_be_as_long_as_their_episodes(version, tmp_path):
    write_robot(tmp_path, version)
    path = tmp_path / LISTS[version]
    if version == "v3.0":
        replace_column(path, "length", [7, 5, 9])
    else:
        path.write_text(path.read_text().replace("6}", "9}"))
    with pytest.raises(ValueError, match=r"\.mp4: expected \d+ frames for episode_000002, got \d+"):
        read_lerobot(tmp_path, "top")
    write_robot(tmp_path, version)
    table = parquet.read_table(tmp_path / DATA[version])
    parquet.write_table(table.slice(0, len(table) - 1), tmp_path / DATA[version])
    with pytest.raises(ValueError, match=r"\.parquet: expected \d rows of episode_00000\d, got \d"):
        read_lerobot(tmp_path, "top")
