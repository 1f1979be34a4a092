"""Record gameplay with actions from ViZDoom, which installs from PyPI with its game data.

Every clip is one episode with its own seed: a new spawn, a new policy, nothing shared, so recording
can be killed and started again at any clip, and two machines record the same clips.
"""

import contextlib
import random
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diagd.console import track
from diagd.data.actions import ActionVocabulary, write_actions
from diagd.data.video import resize, write_video
from diagd.flags import OutputFolder

TICS_PER_SECOND = 35
NEAR_DEPTH = 9  # of 255: about one stride from a wall
BUTTONS = ("TURN_LEFT", "TURN_RIGHT", "MOVE_FORWARD")
PRESSED = {
    "none": (0, 0, 0),
    "forward": (0, 0, 1),
    "left": (1, 0, 0),
    "right": (0, 1, 0),
    "forward+left": (1, 0, 1),
    "forward+right": (0, 1, 1),
}
ACTIONS = ActionVocabulary(tuple(PRESSED))


@dataclass(frozen=True)
class RecordOptions:
    """Play ViZDoom with a seeded exploring policy and write clips as mp4 + jsonl actions."""

    # folder for clip_SEED.mp4, clip_SEED.jsonl and actions.json; clips there are kept
    out: OutputFolder
    clips: int = 400  # how many clips, one episode each
    frames: int = 64  # frames a clip
    first_seed: int = 0  # clip i uses seed first_seed + i; keep held-out clips far from training
    scenario: str = "my_way_home"  # a scenario of the vizdoom package
    tics: int = 4  # game tics an action lasts and a frame spans, of 35 a second
    height_px: int = 112  # frame height
    width_px: int = 192  # frame width

    def __post_init__(self) -> None:
        for name in ("clips", "frames", "tics"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("height_px", "width_px"):
            if getattr(self, name) < 16 or getattr(self, name) % 16:
                raise ValueError(f"{name} must be a multiple of 16, got {getattr(self, name)}")
        if self.first_seed < 0:
            raise ValueError(f"first_seed must be 0 or more, got {self.first_seed}")


class Explorer:
    """A seeded policy that walks, looks around and turns away from walls before it faces them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.action = "none"
        self.frames_left = 0

    def choose(self, depth: np.ndarray) -> str:
        """Name the next action.

        Args:
            depth: (H_px, W_px) uint8, the depth buffer: 0 near, 255 far.
        """
        left, ahead, right = (part.mean() for part in np.array_split(_horizon(depth), 3))
        if ahead < NEAR_DEPTH and not (self.action in ("left", "right") and self.frames_left > 0):
            self.action = "left" if left + self.random.uniform(-3, 3) > right else "right"
            self.frames_left = self.random.randint(2, 5)
        elif self.frames_left <= 0:
            self.action, shortest, longest = self.random.choices(
                (
                    ("forward", 3, 12),
                    ("forward+left", 2, 6),
                    ("forward+right", 2, 6),
                    ("left", 2, 7),
                    ("right", 2, 7),
                    ("none", 1, 2),
                ),
                weights=(10, 4, 4, 4, 4, 1),
            )[0]
            self.frames_left = self.random.randint(shortest, longest)
        self.frames_left -= 1
        return self.action


def _horizon(depth: np.ndarray) -> np.ndarray:
    """Return (W_px,) depths: each column's mean over a band about the horizon."""
    middle = depth.shape[0] // 2
    return depth[middle - 8 : middle + 8].mean(axis=0)


def record_clips(options: RecordOptions) -> dict[str, int]:
    """Record the clips that are not there yet."""
    try:
        import vizdoom
    except ImportError:
        raise ValueError("recording needs ViZDoom: pip install 'diagd[doom]'") from None
    config = Path(vizdoom.scenarios_path) / f"{options.scenario}.cfg"
    if not config.is_file():
        known = ", ".join(sorted(path.stem for path in config.parent.glob("*.cfg")))
        raise ValueError(f"unknown scenario {options.scenario!r}, expected one of: {known}")
    options.out.mkdir(parents=True, exist_ok=True)
    ACTIONS.save(options.out / "actions.json")
    seeds = [
        seed
        for seed in range(options.first_seed, options.first_seed + options.clips)
        if not all(path.is_file() for path in clip_paths(options.out, seed))
    ]
    if not seeds:
        return {"recorded": 0, "clips": options.clips}
    with tempfile.TemporaryDirectory() as scratch:
        game = _start_game(vizdoom, config, Path(scratch))
        try:
            for seed in track(seeds, f"recording {options.scenario}"):
                frames, actions = _play(game, seed, options)
                video_path, actions_path = clip_paths(options.out, seed)
                write_actions(actions_path, actions)
                fps = Fraction(TICS_PER_SECOND, options.tics)
                write_video(video_path, resize(frames, options.height_px, options.width_px), fps)
        finally:
            game.close()
    return {"recorded": len(seeds), "clips": options.clips}


def clip_paths(folder: Path, seed: int) -> tuple[Path, Path]:
    """Return where the video and the actions of a clip live."""
    return folder / f"clip_{seed:06d}.mp4", folder / f"clip_{seed:06d}.jsonl"


def _start_game(vizdoom, config: Path, scratch: Path):
    game = vizdoom.DoomGame()
    game.set_doom_config_path(str(scratch / "vizdoom.ini"))
    game.load_config(str(config))
    game.set_window_visible(False)
    game.set_sound_enabled(False)
    game.set_mode(vizdoom.Mode.PLAYER)
    game.set_screen_resolution(vizdoom.ScreenResolution.RES_400X225)
    game.set_screen_format(vizdoom.ScreenFormat.RGB24)
    game.set_render_hud(False)
    game.set_render_weapon(False)
    game.set_render_crosshair(False)
    game.set_render_messages(False)
    game.set_available_buttons([getattr(vizdoom.Button, name) for name in BUTTONS])
    game.set_depth_buffer_enabled(True)
    with contextlib.chdir(scratch):  # the game leaves a folder where it is started
        game.init()
    return game


def _play(game, seed: int, options: RecordOptions) -> tuple[Tensor, list[str]]:
    """Return frames and, for each, the action that led to it; short episodes are replayed."""
    for attempt in range(20):
        episode_seed = seed + attempt * 10_000_000
        game.set_seed(episode_seed)
        game.new_episode()
        explorer = Explorer(episode_seed)
        state = game.get_state()
        frames, actions = [state.screen_buffer], ["none"]
        while len(frames) < options.frames:
            action = explorer.choose(state.depth_buffer)
            game.make_action(list(PRESSED[action]), options.tics)
            if game.is_episode_finished():
                break
            state = game.get_state()
            frames.append(state.screen_buffer)
            actions.append(action)
        if len(frames) == options.frames:
            return torch.from_numpy(np.stack(frames)), actions
    raise ValueError(
        f"scenario {options.scenario!r} ended before {options.frames} frames 20 times in a row"
    )
