"""Any game with the interface of Gymnasium, played at random or by a player of yours.

A player is a class, or a function, that is called with the environment and a random generator when
a clip begins; what it returns is called with each observation and gives the name of an action:

    class Player:
        def __init__(self, env, rng): ...
        def __call__(self, observation) -> str: ...

diagd record --out gameplay --clips 400 --first-seed 0      # ViZDoom
diagd record --gym MiniGrid-FourRooms-v0 --out clips
diagd record --gym CarRacing-v3 --policy racing:Driver --out clips
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from diagd.data.actions import ActionVocabulary
from diagd.data.recorders.doom import open_doom
from diagd.data.recorders.recording import RecordOptions, record_clips
from diagd.extras import require

IDLE = "none"
NOTHING = {IDLE, "noop", "no_op", "nop", "nothing", "do_nothing", "idle", "stay", "wait"}
LONGEST_HOLD = 8  # frames for which the random player keeps an action
LONGEST_SIDE_PX = 96

Player = Callable[[Any], str]


class RandomPlayer:
    """Takes any action and holds it for a while, as a thumb on a key does."""

    def __init__(self, names: tuple[str, ...], rng: np.random.Generator) -> None:
        self.names, self.rng = names, rng
        self.action, self.frames_left = IDLE, 0

    def __call__(self, observation: Any) -> str:
        """Name the next action, whatever there is to see."""
        if not self.frames_left:
            self.action = self.names[self.rng.integers(len(self.names))]
            self.frames_left = int(self.rng.integers(1, LONGEST_HOLD + 1))
        self.frames_left -= 1
        return self.action


class GymGame:
    """A Gymnasium environment and who plays it; every episode is a fresh environment.

    Args:
        make: makes an environment whose `render()` gives a picture.
        name: what errors call it.
        values: action names and what the environment takes for them; None: it is not stepped, so
            that time stands still. Without: the environment's own names, and `none` first.
        player: called with the environment and a generator when an episode begins; None: random.

    Raises:
        ValueError: actions without names or that the environment does not take, or no picture.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        values: Mapping[str, Any] | None = None,
        player: Callable[[Any, np.random.Generator], Player] | None = None,
    ) -> None:
        self.make, self.name, self.env = make, name, make()
        self.values = own_actions(self.env, name) if values is None else dict(values)
        self.actions = ActionVocabulary(tuple(self.values))
        check_actions(self.env, name, self.values)
        rate = self.env.metadata.get("render_fps") or 10
        self.steps_per_second = Fraction(rate).limit_denominator(1001)
        self.new_player = player or (lambda env, rng: RandomPlayer(self.actions.names, rng))
        self.observation, _ = self.env.reset(seed=0)
        self.size_px = suitable_size(*self._picture().shape[:2])

    def start(self, seed: int, skip: int) -> np.ndarray | None:
        """Begin an episode with a generator of its own for the player."""
        self.env.close()
        self.env = self.make()
        self.observation, _ = self.env.reset(seed=seed)
        # not default_rng(seed), from which the environment draws, too
        self.player = self.new_player(self.env, np.random.default_rng((seed, 1)))
        return self._picture() if self._act(IDLE, skip) else None

    def advance(self, repeat: int) -> tuple[str, np.ndarray] | None:
        """Ask the player, and do what it says."""
        action = self.player(self.observation)
        if action not in self.values:
            known = ", ".join(self.actions.names)
            raise ValueError(f"the player said {action!r}, expected one of: {known}")
        return (action, self._picture()) if self._act(action, repeat) else None

    def close(self) -> None:
        """End the environment."""
        self.env.close()

    def _act(self, action: str, steps: int) -> bool:
        """Step the environment; return whether the episode goes on."""
        value = self.values[action]
        if value is None:
            return True
        for _ in range(steps):
            self.observation, _, terminated, truncated, _ = self.env.step(
                native(self.env.action_space, value)
            )
            if terminated or truncated:
                return False
        return True

    def _picture(self) -> np.ndarray:
        picture = self.env.render()
        if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.shape[2] != 3:
            found = getattr(picture, "shape", type(picture).__name__)
            raise ValueError(f"{self.name} renders no (height, width, 3) picture, but {found}")
        return picture.astype(np.uint8)


def native(space: Any, value: Any) -> Any:
    """Turn a value written by hand into what a space contains: a number or an array of its type."""
    array = np.asarray(value, dtype=space.dtype)
    return array if space.shape else array[()]


def own_actions(env: Any, name: str) -> dict[str, int | None]:
    """Name the actions of an environment as itself does, doing nothing first.

    Where no action of the game does nothing, `none` stands for not stepping it: the game waits.

    Raises:
        ValueError: it names none, or its actions are more than a choice of one.
    """
    space, inner = env.action_space, env.unwrapped
    meanings = getattr(inner, "get_action_meanings", None)
    listed = getattr(inner, "actions", None)
    spoken: dict[str, int] = {}
    if type(space).__name__ == "Discrete":
        if meanings is not None:
            spoken = {str(word): number for number, word in enumerate(meanings())}
        elif isinstance(listed, type) and issubclass(listed, Enum):
            spoken = {item.name: int(item.value) for item in listed}
    if not spoken:
        raise ValueError(
            f"{name} does not name its actions ({space}): write a dict such as "
            "ACTIONS = {'none': ..., 'forward': ..., 'left': ...} into game.py, "
            "and give it as --actions game:ACTIONS"
        )
    named: dict[str, int | None] = {IDLE: None}
    for word, number in spoken.items():
        plain = "_".join(word.lower().replace("-", " ").replace(",", " ").split())
        named[IDLE if plain in NOTHING else plain] = number
    return named


def check_actions(env: Any, name: str, values: Mapping[str, Any]) -> None:
    """See that an environment takes every value, and that doing nothing comes first.

    Raises:
        ValueError: names the action.
    """
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


def record(options: RecordOptions) -> dict[str, int]:
    """Record the clips that are not there yet, of a Gymnasium game or, without one, of ViZDoom."""
    return record_clips(options, open_gym if options.gym else open_doom)


def suitable_size(height_px: int, width_px: int) -> tuple[int, int]:
    """Return multiples of 16 near a picture's shape, the longer side at most 96."""
    scale = min(1.0, LONGEST_SIDE_PX / max(height_px, width_px))
    height, width = (max(round(side * scale / 16), 1) * 16 for side in (height_px, width_px))
    return height, width


@contextlib.contextmanager
def open_gym(options: RecordOptions) -> Iterator[GymGame]:
    """Make an environment with Gymnasium, and end it.

    Raises:
        ValueError: Gymnasium, the environment, the player or the actions are not there.
    """
    require("recording from Gymnasium", "gymnasium")
    import gymnasium

    name = options.gym or ""
    with _working_folder_first():
        try:
            values = None if options.actions is None else named(options.actions)
            player = None if options.policy in (None, "random") else named(options.policy)
            make = partial(gymnasium.make, name, render_mode="rgb_array", disable_env_checker=True)
            game = GymGame(make, name, values, player)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise ValueError(f"{name}: {error}") from None
        try:
            yield game
        finally:
            game.close()


def named(reference: str) -> Any:
    """Import what `module:name` means; modules of the working folder are found as well.

    Raises:
        ValueError: no such module, or nothing of that name in it.
    """
    module, colon, name = reference.partition(":")
    if not colon or not name:
        raise ValueError(f"expected module:name, got {reference!r}")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ValueError(f"module {module} has no {name!r}") from None
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ValueError(f"module not found: {module} (looked in {os.getcwd()}, too)") from None


@contextlib.contextmanager
def _working_folder_first() -> Iterator[None]:
    """Let the user's own files be imported, as `python -m` does."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
