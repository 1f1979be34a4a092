"""Record a simulated robot arm as a LeRobot dataset, for docs/your-own-robot.md.

The arm is Gymnasium's Reacher (MuJoCo): two torques swing two links above a table, seen from above.
Torques are drawn anew every few steps, so that all are seen at all speeds.

pip install -e '.[robots]' 'gymnasium[mujoco]>=1.3'
MUJOCO_GL=egl python runs/robot_data.py --out work/robot/dataset
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
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
TORQUES = -0.05, 0.05  # lowest and highest; with more the arm whirls, too far between two frames
LOOK = {"trackbodyid": 0, "distance": 0.62, "elevation": -90.0, "azimuth": 90.0}
NAMES = {ACTION: ["shoulder", "elbow"], STATE: ["shoulder", "elbow"]}
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
    episodes: int = 300
    steps: int = 240  # of an episode, fifty a second
    size: tuple[int, int] = (64, 72)  # height and width in pixels
    version: str = "v3.0"  # or v2.1
    seed: int = 0  # of the first episode


def make(height_px: int, width_px: int) -> gymnasium.Env[Any, Any]:
    size = {"height": height_px, "width": width_px}
    return gymnasium.make("Reacher-v5", render_mode="rgb_array", default_camera_config=LOOK, **size)


def play(env: gymnasium.Env[Any, Any], seed: int, steps: int) -> Episode:
    """Play an episode with torques that are held for a while; rows are what LeRobot records."""
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    rows: dict[str, list[NDArray[Any]]] = {CAMERA: [], STATE: [], ACTION: []}
    held, torques = 0, np.zeros(2, np.float32)
    for _ in range(steps):
        if not held:
            held = int(rng.integers(5, 30))
            torques = (rng.uniform(*TORQUES, 2) * (rng.random(2) < 0.7)).astype(np.float32)
        held -= 1
        rows[CAMERA].append(np.asarray(env.render()))
        rows[STATE].append(np.arctan2(observation[2:4], observation[:2]).astype(np.float32))
        rows[ACTION].append(torques)
        observation, *_ = env.step(torques)
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
    fps = Fraction(env.metadata["render_fps"])
    seeds = range(options.seed, options.seed + options.episodes)
    episodes = [play(env.unwrapped, seed, options.steps) for seed in seeds]
    write_dataset(options.out, episodes, int(fps), options.version)


if __name__ == "__main__":
    main(tyro.cli(Options))
