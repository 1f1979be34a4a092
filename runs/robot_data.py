"""Record a simulated robot arm as a LeRobot dataset, for docs/your-own-robot.md.

The arm is Gymnasium's Reacher (MuJoCo): two links above a table, seen from above. An action is the
velocity of both joints, held for a frame, so that it shows in the very next one; torques, which
Reacher takes itself, change a speed that only several frames show. Velocities are drawn anew every
few frames, so that all are seen in all poses.

pip install -e '.[robots]' 'gymnasium[mujoco]>=1.3'
MUJOCO_GL=egl python runs/robot_data.py --out work/robot/dataset
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pyarrow
import torch
import tyro
from numpy.typing import NDArray
from pyarrow import parquet

from diagd.data.video import write_video
from diagd.files import replacing, write_json, write_text

CAMERA, ACTION, STATE = "observation.images.top", "action", "observation.state"
SPEED = 2.0  # rad/s at most: 0.2 rad a frame, so that frames differ by a few pixels
FPS = 10
LOOK = {"lookat": np.zeros(3), "distance": 0.6, "elevation": -90.0, "azimuth": 90.0}
LINKS = {"link0": (0.0, 0.3, 0.7, 1), "link1": (0.9, 0.5, 0.0, 1)}  # colours that tell them apart
JOINTS = "shoulder", "elbow"
NAMES = {ACTION: [f"{one}_rad_s" for one in JOINTS], STATE: [f"{one}_rad" for one in JOINTS]}
TABLES = {
    "v2.1": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "v3.0": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
}
FILMS = {
    "v2.1": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    "v3.0": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
Episode = Mapping[str, NDArray[Any]]  # (T, H_px, W_px, 3) uint8 of cameras, (T, n) of vectors


@dataclass(frozen=True)
class Options:
    """Record episodes of Reacher as a LeRobot dataset."""

    out: Path  # folder of the dataset
    episodes: int = 900
    steps: int = 120  # frames of an episode, ten a second
    size: tuple[int, int] = (48, 48)  # height and width in pixels
    version: str = "v3.0"  # or v2.1
    seed: int = 0  # of the first episode


def make(height_px: int, width_px: int) -> Any:
    """Return Reacher with links thick enough for few pixels, and without its target."""
    look: dict[str, Any] = {"default_camera_config": LOOK, "height": height_px, "width": width_px}
    env: Any = gymnasium.make("Reacher-v5", render_mode="rgb_array", **look).unwrapped
    for name, colour in LINKS.items():
        link = env.model.geom(name)
        link.rgba, link.size[0] = colour, 0.016
    env.model.geom("fingertip").size[0] = 0.02
    env.model.geom("target").rgba[3] = 0
    return env


def play(env: Any, seed: int, steps: int) -> Episode:
    """Play an episode; rows are what LeRobot records.

    Each joint holds a velocity for one to eight frames: rest in a quarter of draws, and an end of
    the range in as many, since the keys of `diagd play` stand for ends.
    """
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)
    model, data = env.model, env.data
    pose = rng.uniform(-np.pi, np.pi), rng.uniform(*model.jnt_range[1])
    env.set_state(np.array([*pose, *data.qpos[2:]]), data.qvel)
    rows: dict[str, list[NDArray[Any]]] = {CAMERA: [], STATE: [], ACTION: []}
    held, velocities = np.zeros(2, int), np.zeros(2, np.float32)
    for _ in range(steps):
        for joint in np.flatnonzero(held == 0):
            held[joint] = rng.integers(1, 9)
            drawn = np.clip(rng.uniform(-1.5, 1.5), -1, 1) * (rng.random() < 0.75)
            velocities[joint] = SPEED * drawn
        held -= 1
        rows[CAMERA].append(np.asarray(env.render()))
        turns = (data.qpos[:2] + np.pi) % (2 * np.pi) - np.pi
        rows[STATE].append(turns.astype(np.float32))
        rows[ACTION].append(velocities.copy())
        for _ in range(round(1 / FPS / model.opt.timestep)):
            data.qvel[:2] = velocities
            env.do_simulation(np.zeros(2), 1)
    return {name: np.stack(values) for name, values in rows.items()}


def write_dataset(
    folder: Path,
    episodes: Sequence[Episode],
    fps: int,
    version: str = "v3.0",
    names: Mapping[str, Any] = NAMES,
) -> None:
    """Write episodes in LeRobot's layout: of v2.1, or of v3.0 with all in one file."""
    first, is_joined = episodes[0], version == "v3.0"
    groups = [list(episodes)] if is_joined else [[one] for one in episodes]
    cameras = [name for name, values in first.items() if values.ndim == 4]
    for number, group in enumerate(groups):
        place = {"chunk_index": 0, "file_index": 0, "episode_chunk": 0, "episode_index": number}
        for name in cameras:
            film = folder / FILMS[version].format(video_key=name, **place)
            frames = torch.from_numpy(np.concatenate([one[name] for one in group]))
            write_video(film, frames, fps, crf=4)
        columns: dict[str, list[Any]] = {
            name: [row for one in group for row in one[name].tolist()]
            for name in first
            if name not in cameras
        }
        lengths = [len(one[cameras[0]]) for one in group]
        columns["episode_index"] = [
            number + n for n, count in enumerate(lengths) for _ in range(count)
        ]
        columns["frame_index"] = [t for count in lengths for t in range(count)]
        columns["timestamp"] = [t / fps for t in columns["frame_index"]]
        write_table(folder / TABLES[version].format(**place), columns)
    lengths = [len(one[cameras[0]]) for one in episodes]
    if is_joined:
        starts = [sum(lengths[:n]) for n in range(len(lengths))]
        listed = {"episode_index": list(range(len(lengths))), "length": lengths}
        zeros = [0] * len(lengths)
        listed |= {"data/chunk_index": zeros, "data/file_index": zeros}
        for name in cameras:
            listed |= {f"videos/{name}/{part}_index": zeros for part in ("chunk", "file")}
            listed[f"videos/{name}/from_timestamp"] = [start / fps for start in starts]
        write_table(folder / "meta/episodes/chunk-000/file-000.parquet", listed)
    else:
        lines = ({"episode_index": n, "length": count} for n, count in enumerate(lengths))
        write_text(folder / "meta/episodes.jsonl", "".join(f"{json.dumps(one)}\n" for one in lines))
    features = {
        name: {
            "dtype": "video" if name in cameras else str(values.dtype),
            "shape": list(values.shape[1:]),
            "names": names.get(name),
        }
        for name, values in first.items()
    }
    info = {"codebase_version": version, "fps": fps, "chunks_size": 1000, "features": features}
    info |= {"data_path": TABLES[version], "video_path": FILMS[version]}
    write_json(folder / "meta/info.json", info, indent=2)


def write_table(path: Path, columns: Mapping[str, Iterable[Any]]) -> None:
    with replacing(path) as temporary:
        parquet.write_table(pyarrow.table(dict(columns)), temporary)


def main(options: Options) -> None:
    """Record all episodes, then write the dataset."""
    height_px, width_px = options.size
    env = make(height_px, width_px)
    seeds = range(options.seed, options.seed + options.episodes)
    episodes = [play(env, seed, options.steps) for seed in seeds]
    write_dataset(options.out, episodes, FPS, options.version)


if __name__ == "__main__":
    main(tyro.cli(Options))
