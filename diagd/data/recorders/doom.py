"""ViZDoom, which installs from PyPI with its game data, and a player that explores it."""

import contextlib
import random
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from diagd.data.actions import ActionVocabulary
from diagd.data.recorders.recording import RecordOptions
from diagd.extras import require

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


class DoomGame:
    """A scenario of ViZDoom, played by an `Explorer`."""

    actions = ACTIONS
    steps_per_second = Fraction(35)
    size_px = (112, 192)

    def __init__(self, game: Any, scenario: str) -> None:
        self.game = game
        self.name = f"scenario {scenario!r}"
        self.explorer = Explorer(0)

    def start(self, seed: int, skip: int) -> np.ndarray | None:
        """Begin an episode: a new spawn, a new explorer."""
        self.game.set_seed(seed)
        self.game.new_episode()
        self.explorer = Explorer(seed)
        return self._press("none", skip) if skip else self.game.get_state().screen_buffer

    def advance(self, repeat: int) -> tuple[str, np.ndarray] | None:
        """Let the explorer, who sees how far the walls are, press a button."""
        action = self.explorer.choose(self.game.get_state().depth_buffer)
        picture = self._press(action, repeat)
        return None if picture is None else (action, picture)

    def _press(self, action: str, tics: int) -> np.ndarray | None:
        self.game.make_action(list(PRESSED[action]), tics)
        return None if self.game.is_episode_finished() else self.game.get_state().screen_buffer


@contextlib.contextmanager
def open_doom(options: RecordOptions) -> Iterator[DoomGame]:
    """Start ViZDoom without a window, and end it.

    Raises:
        ValueError: it is not installed, or has no such scenario.
    """
    require("recording from ViZDoom", "vizdoom")
    import vizdoom

    scenario = options.scenario or "my_way_home"
    config = Path(vizdoom.scenarios_path) / f"{scenario}.cfg"
    if not config.is_file():
        known = ", ".join(sorted(path.stem for path in config.parent.glob("*.cfg")))
        raise ValueError(f"unknown scenario {scenario!r}, expected one of: {known}")
    with tempfile.TemporaryDirectory() as scratch:
        game = _start_vizdoom(vizdoom, config, Path(scratch))
        try:
            yield DoomGame(game, scenario)
        finally:
            game.close()


def _start_vizdoom(vizdoom, config: Path, scratch: Path):
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
