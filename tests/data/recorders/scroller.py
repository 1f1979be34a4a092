"""Games for tests, with the interface of Gymnasium: a camera over a landscape, new each episode.

`tests.data.recorders.scroller:Scroller-v0` makes Gymnasium import this module and find them.
"""

from enum import IntEnum
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

HEIGHT_PX, WIDTH_PX = 40, 70
MOVES = {"NOOP": (0, 0), "Left": (0, -3), "right": (0, 3), "Look Up": (-3, 0)}
ACTIONS = {"none": 0, "left": 1, "right": 2, "up": 3}
TOO_MANY = {"none": 0, "left": 7}
NOT_FIRST = {"left": 1, "none": 0}
LISTED = ["none", "left"]
NUMBERED = {"none": 0, 1: 1}


class Turn(IntEnum):
    """The actions of `Turner`."""

    Left = 1
    Right = 2


class Silent(gymnasium.Env):
    """Moves three pixels a step, and does not name its actions; observed are the steps made."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012
    observation_space = spaces.Discrete(1000)
    action_space = spaces.Discrete(len(MOVES))

    def __init__(self, render_mode: str | None = None, lifetime: int = 1000) -> None:
        self.render_mode, self.lifetime = render_mode, lifetime

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        coarse = self.np_random.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        self.landscape = coarse.repeat(8, axis=0).repeat(8, axis=1)
        self.place, self.steps = np.array([100, 120]), 0
        return self.steps, {}

    def step(self, action):
        self.steps += 1
        self.place += list(MOVES.values())[action]
        return self.steps, 0.0, self.steps >= self.lifetime, False, {}

    def render(self) -> Any:
        rows, columns = (
            range(start, start + extent)
            for start, extent in zip(self.place, (HEIGHT_PX, WIDTH_PX), strict=True)
        )
        return self.landscape.take(rows, 0, mode="wrap").take(columns, 1, mode="wrap")


class Scroller(Silent):
    """Names its actions."""

    def get_action_meanings(self):
        return list(MOVES)


class Turner(Silent):
    """Names its actions by an enum, and always has to do one of them."""

    actions = Turn
    action_space = spaces.Discrete(2, start=1)


class Blind(Scroller):
    """Has no picture."""

    def render(self):
        return None


class Pilot:
    """Counts what it sees, and goes right on every even observation."""

    def __init__(self, env, rng):
        assert isinstance(env.unwrapped, Silent)
        self.rng = rng

    def __call__(self, observation):
        return ("left", "right")[observation % 2 == 0]


def confused(env, rng):
    """Return a player who says what the game does not know."""
    return lambda observation: "jump"


def mute(env, rng):
    """Return no player."""


def dizzy(env, rng):
    """Return a player who says an array."""
    return lambda observation: np.zeros(3)


def lost(env, rng):
    """Return a player with a mistake."""
    return lambda observation: {}[observation]


for game in ("Scroller", "Turner", "Silent", "Blind"):
    gymnasium.register(f"{game}-v0", f"{__name__}:{game}")
gymnasium.register("Mayfly-v0", f"{__name__}:Scroller", kwargs={"lifetime": 12})
