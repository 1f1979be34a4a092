"""Games with the interface of Gymnasium, played at random or by the user's own player.

A player is a class, or a function, called with the environment and a random generator when a clip
begins; it returns a function from an observation to the name of an action.
"""

import contextlib
import importlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from diagd.data.actions import IDLE_NAMES, ActionVocabulary
from diagd.data.recorders.options import RecordOptions
from diagd.extras import require

IDLE = "none"
LONGEST_HOLD = 8  # frames for which the random player keeps an action
LONGEST_SIDE_PX = 96


def random_actions(names: tuple[str, ...], rng: np.random.Generator) -> Iterator[str]:
    """Choose any action and hold it for a while, as a thumb on a key does; without end."""
    while True:
        action = names[rng.integers(len(names))]
        yield from itertools.repeat(action, int(rng.integers(1, LONGEST_HOLD + 1)))


class GymGame:
    """A Gymnasium environment, a fresh one for every episode, and its player; as `DoomGame`."""

    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        values: Mapping[str, Any] | None,  # by action; None: the environment's own names
        # None: one that draws actions
        new_player: Callable[[Any, np.random.Generator], Callable[[Any], str]] | None,
    ) -> None:
        self.make, self.name, self.env, self.new_player = make, name, make(), new_player
        self.values = own_actions(self.env, name) if values is None else dict(values)
        self.actions = ActionVocabulary(tuple(self.values))
        check_actions(self.env, name, self.values)
        rate = self.env.metadata.get("render_fps") or 10
        self.steps_per_second = Fraction(rate).limit_denominator(1001)
        self.observation, _ = self.env.reset(seed=0)
        self.size_px = suitable_size(*self._picture().shape[:2])

    def start(self, seed: int) -> None:
        self.env.close()
        self.env = self.make()
        self.observation, _ = self.env.reset(seed=seed)
        # not default_rng(seed), from which the environment draws, too
        rng = np.random.default_rng((seed, 1))
        walk = random_actions(self.actions.names, rng)
        self.player = self.new_player(self.env, rng) if self.new_player else lambda _: next(walk)

    def choose(self) -> str:
        action = self.player(self.observation)
        if action not in self.values:
            known = ", ".join(self.actions.names)
            raise ValueError(f"the player said {action!r}, expected one of: {known}")
        return action

    def press(self, action: str, steps: int) -> np.ndarray | None:
        """As `DoomGame.press`; nothing changes while an action of value None is pressed."""
        value = self.values[action]
        for _ in range(0 if value is None else steps):
            move = native(self.env.action_space, value)
            self.observation, _, terminated, truncated, _ = self.env.step(move)
            if terminated or truncated:
                return None
        return self._picture()

    def close(self) -> None:
        self.env.close()

    def _picture(self) -> np.ndarray:
        picture = self.env.render()
        if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.shape[2] != 3:
            found = getattr(picture, "shape", type(picture).__name__)
            raise ValueError(f"{self.name} renders no (height, width, 3) picture, but {found}")
        return picture.astype(np.uint8)


def native(space: Any, value: Any) -> Any:
    """Convert a value written by hand to a number or an array of a space's dtype."""
    array = np.asarray(value, dtype=space.dtype)
    return array if space.shape else array[()]


def own_actions(env: Any, name: str) -> dict[str, int | None]:
    """Return the actions by the environment's own names, doing nothing first.

    Without an action that does nothing, `none` stands for not stepping it: the game waits.
    """
    space, inner, numbers = env.action_space, env.unwrapped, {}
    listed = getattr(inner, "actions", None)
    if type(space).__name__ == "Discrete":
        if hasattr(inner, "get_action_meanings"):
            numbers = {str(word): n for n, word in enumerate(inner.get_action_meanings())}
        elif isinstance(listed, type) and issubclass(listed, Enum):
            numbers = {item.name: int(item.value) for item in listed}
    if not numbers:
        raise ValueError(
            f"{name} does not name its actions ({space}): write a dict such as "
            "ACTIONS = {'none': ..., 'forward': ..., 'left': ...} into game.py, "
            "and give it as --actions game:ACTIONS"
        )
    named: dict[str, int | None] = {IDLE: None}
    for word, number in numbers.items():
        plain = "_".join(re.findall(r"[^\s,-]+", word.lower()))
        named[IDLE if IDLE_NAMES.fullmatch(plain) else plain] = number
    return named


def check_actions(env: Any, name: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError unless an environment accepts every value, and doing nothing is first."""
    if next(iter(values), None) != IDLE:
        raise ValueError(f"the first action must be {IDLE!r}, doing nothing, got {list(values)}")
    for action, value in values.items():
        if set(action) & set(",*() ") or not action:
            raise ValueError(f"action names are written without spaces and , * ( ): {action!r}")
        try:
            fits = value is None or env.action_space.contains(native(env.action_space, value))
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError(
                f"{name} does not take {value!r} for {action!r}, expected one of {env.action_space}"
            )


def suitable_size(height_px: int, width_px: int) -> tuple[int, int]:
    """Round a picture's shape to multiples of 16, the longer side at most 96."""
    scale = min(1.0, LONGEST_SIDE_PX / max(height_px, width_px))
    height, width = (max(round(side * scale / 16), 1) * 16 for side in (height_px, width_px))
    return height, width


@contextlib.contextmanager
def open_gym(options: RecordOptions) -> Iterator[GymGame]:
    """Open an environment, or raise ValueError for what is missing or does not fit."""
    require("recording from Gymnasium", "gymnasium")
    import gymnasium

    name, folder = options.gym or "", os.getcwd()
    make = partial(gymnasium.make, name, render_mode="rgb_array", disable_env_checker=True)
    sys.path.insert(0, folder)  # the user's own files can be imported, as by `python -m`
    try:
        values = None if options.actions is None else named(options.actions)
        if not isinstance(values, Mapping | None):
            raise ValueError(f"{options.actions} must be a dict, got a {type(values).__name__}")
        player = None if options.policy in (None, "random") else named(options.policy)
        with contextlib.closing(GymGame(make, name, values, player)) as game:
            yield game
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ValueError(f"{name}: {error}") from None
    finally:
        sys.path.remove(folder)


def named(reference: str) -> Any:
    """Import `module:name`; ValueError or ModuleNotFoundError for one that is not there."""
    module, colon, name = reference.partition(":")
    if not colon or not name:
        raise ValueError(f"expected module:name, got {reference!r}")
    found = importlib.import_module(module)
    if not hasattr(found, name):
        raise ValueError(f"module {module} has no {name!r}")
    return getattr(found, name)
