"""Games with Gymnasium's interface, played at random or by the user's own player.

A player is a class or a function, called with the environment and a random generator at the start
of a clip; it returns a function from an observation to the name of an action.
"""

import contextlib
import importlib
import itertools
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from diagd.checks import brief, shorten
from diagd.data.actions import IDLE_NAMES, ActionVocabulary
from diagd.data.recorders.options import RecordOptions
from diagd.extras import require

IDLE = "none"
LONGEST_HOLD = 8  # frames for which the random player keeps an action
LONGEST_SIDE_PX = 96
MAX_RATE = 100_000  # steps per second
_LIBRARIES = ("<frozen", *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))


def ask(about: str, code: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Call the user's code; anything that it raises becomes one ValueError that names it.

    The error ends with its type and the innermost line that is not of a library.
    """
    try:
        return code(*given, **options)
    except Exception as error:
        raised = (error.__cause__ or error).__traceback__  # make() wraps a TypeError
        lines = [one for one in traceback.extract_tb(raised) if one.filename != __file__]
        own = [one for one in lines if not one.filename.startswith(_LIBRARIES)] or lines
        place = "".join(f", {one.filename}:{one.lineno}" for one in own[-1:])
        reason = shorten(str(error).strip().rstrip("."))
        raise ValueError(f"{about}: {reason} ({type(error).__name__}{place})") from error


def random_actions(names: tuple[str, ...], rng: np.random.Generator) -> Iterator[str]:
    """Choose a random action and hold it for a while, as a player would; without end."""
    while True:
        action = names[rng.integers(len(names))]
        yield from itertools.repeat(action, int(rng.integers(1, LONGEST_HOLD + 1)))


class GymGame:
    """A Gymnasium environment, new for every episode, and its player; as `DoomGame`."""

    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        values: Mapping[str, Any] | None,  # by action; None: the environment's own names
        # None: random actions
        new_player: Callable[[Any, np.random.Generator], Callable[[Any], str]] | None,
    ) -> None:
        self.make, self.name, self.new_player = make, name, new_player
        self.env = ask(name, make)
        self.space = ask(name, getattr, self.env, "action_space")
        self.values = own_actions(self.env, name) if values is None else dict(values)
        check_actions(self.env, name, self.values)
        self.actions = ActionVocabulary(tuple(self.values))
        rate = ask(name, lambda: (self.env.metadata or {}).get("render_fps"))
        rate = 10 if rate is None else rate
        if not isinstance(rate, int | float | np.number) or not 1 / 1001 <= rate <= MAX_RATE:
            rule = f"render_fps of its metadata must be a number up to {MAX_RATE}"
            raise ValueError(f"{name}: {rule}, got {brief(rate)}")
        self.steps_per_second = Fraction(float(rate)).limit_denominator(1001)
        self.observation, _ = self._call("reset", "observation, info", seed=0)
        self.shape: tuple[int, ...] = ()  # of the picture, the same for all
        self.size_px = suitable_size(*self._picture().shape[:2])

    def start(self, seed: int) -> None:
        self.close()
        self.env = ask(self.name, self.make)
        self.observation, _ = self._call("reset", "observation, info", seed=seed)
        # not default_rng(seed), which the environment uses as well
        rng = np.random.default_rng((seed, 1))
        walk = random_actions(self.actions.names, rng)
        self.player = lambda _: next(walk)
        if self.new_player:
            self.player = ask(f"{self.name}: its player", self.new_player, self.env, rng)

    def choose(self) -> str:
        action = ask(f"{self.name}: its player", self.player, self.observation)
        if not isinstance(action, str) or action not in self.values:
            known = ", ".join(self.actions.names)
            raise ValueError(
                f"{self.name}: the player must return one of: {known}; got {brief(action)}"
            )
        return action

    def press(self, action: str, steps: int) -> np.ndarray | None:
        """As `DoomGame.press`; the game waits while an action of value None is pressed."""
        value = self.values[action]
        parts = "observation, reward, terminated, truncated, info"
        for _ in range(0 if value is None else steps):
            move = native(self.space, value)
            self.observation, _, *ends, _ = self._call("step", parts, move)
            if any(ask(self.name, bool, end) for end in ends):
                return None
        return self._picture()

    def close(self) -> None:
        ask(self.name, self.env.close)

    def _call(self, method: str, parts: str, *given: Any, **options: Any) -> tuple[Any, ...]:
        """Call a method that returns several parts, the last one a dict."""
        found = ask(self.name, getattr(self.env, method), *given, **options)
        is_tuple = isinstance(found, tuple) and len(found) == len(parts.split())
        if not is_tuple or not isinstance(found[-1], Mapping):
            kinds = found if isinstance(found, tuple) else (found,)
            got = ", ".join(type(one).__name__ for one in kinds)
            raise ValueError(f"{self.name}: {method} must return {parts} (a dict), got {got}")
        return found

    def _picture(self) -> np.ndarray:
        """Return a copy of the picture, as the game may reuse its buffer."""
        picture = ask(self.name, self.env.render)
        shape, dtype = getattr(picture, "shape", ()), getattr(picture, "dtype", "")
        is_rgb = isinstance(picture, np.ndarray) and dtype == np.uint8 and shape[2:] == (3,)
        if not is_rgb or 0 in shape:
            found = f"{dtype} {shape}" if shape else type(picture).__name__
            rule = "(height, width, 3) uint8 picture"
            raise ValueError(f"{self.name} must render a {rule}, got {found}")
        self.shape = self.shape or shape
        if shape != self.shape:
            sizes = f"{self.shape} and {shape}"
            raise ValueError(f"{self.name} must render pictures of one size, got {sizes}")
        return picture.copy()


def native(space: Any, value: Any) -> Any:
    """Convert a hand-written action to the type of a space, also in nested spaces.

    Numbers and arrays get the space's dtype; ValueError if that changes a value. Texts and graphs
    are kept.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Dict) and space.spaces.keys() == dict(value).keys():
        return {key: native(part, value[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(native(*pair) for pair in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.OneOf):
        number, part = value
        return number, native(space.spaces[number], part)
    if isinstance(space, spaces.Sequence) and not space.stack:
        return tuple(native(space.feature_space, part) for part in value)
    if space.dtype is None or space.dtype.kind not in "biuf":
        return value
    written = np.asarray(value)
    with np.errstate(all="ignore"):
        array = written.astype(space.dtype)
    loss = 1e-2 if array.dtype.kind == "f" else 0  # rounding error of a float
    if written.dtype.kind not in "biuf" or not np.allclose(array, written, loss, loss):
        raise ValueError(f"expected numbers of {space.dtype}, got {brief(value)}")
    return array if space.shape or isinstance(space, spaces.Box) else array[()]


def own_actions(env: Any, name: str) -> dict[str, int | None]:
    """Return the actions by the environment's own names, the idle action first.

    If no action is idle, `none` means that the environment is not stepped: the game waits.
    """
    space, inner, numbers = env.action_space, env.unwrapped, {}
    listed = getattr(inner, "actions", None)
    if type(space).__name__ == "Discrete":
        if hasattr(inner, "get_action_meanings"):
            words = ask(name, inner.get_action_meanings)
            words = words if isinstance(words, list | tuple) else ()
            numbers = {word: number for number, word in enumerate(words, int(space.start))}
        elif isinstance(listed, type) and issubclass(listed, Enum):
            numbers = {item.name: item.value for item in listed}
    are_named = (isinstance(word, str) and isinstance(n, int) for word, n in numbers.items())
    if not numbers or not all(are_named):
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
    """Raise ValueError unless an environment accepts every value, and the first action is idle."""
    if next(iter(values), None) != IDLE:
        given = brief(list(values))
        raise ValueError(f"{name}: the first action must be {IDLE!r} (idle), got {given}")
    space = env.action_space
    for action, value in values.items():
        if not isinstance(action, str) or not re.fullmatch(r"[^\s,*()]+", action):
            rule = "action names must not contain spaces or , * ( )"
            raise ValueError(f"{name}: {rule}, got {brief(action)}")
        try:
            fits = value is None or ask(name, space.contains, native(space, value))
        except (TypeError, ValueError, LookupError):
            fits = False
        if not fits:
            raise ValueError(
                f"{name} does not accept {brief(value)} for {action!r}, expected one of {space}"
            )


def suitable_size(height_px: int, width_px: int) -> tuple[int, int]:
    """Round a picture's shape to multiples of 16, the longer side at most 96."""
    scale = min(1.0, LONGEST_SIDE_PX / max(height_px, width_px))
    height, width = (max(round(side * scale / 16), 1) * 16 for side in (height_px, width_px))
    return height, width


@contextlib.contextmanager
def open_gym(options: RecordOptions) -> Iterator[GymGame]:
    """Open an environment, or raise ValueError if something is missing or does not match."""
    require("recording from Gymnasium", "gymnasium")
    import gymnasium

    name, folder = options.gym or "", os.getcwd()
    make = partial(gymnasium.make, name, render_mode="rgb_array", disable_env_checker=True)
    sys.path.insert(0, folder)  # for imports of the user's own files, as by `python -m`
    try:
        values = None if options.actions is None else ask(name, named, options.actions)
        if not isinstance(values, Mapping | None):
            found = type(values).__name__
            raise ValueError(f"{name}: {options.actions} must be a dict, got a {found}")
        player = None if options.policy in (None, "random") else ask(name, named, options.policy)
        with contextlib.closing(GymGame(make, name, values, player)) as game:
            yield game
    finally:
        sys.path.remove(folder)


def named(reference: str) -> Any:
    """Import `module:name`; ValueError or ModuleNotFoundError if it does not exist."""
    module, colon, name = reference.partition(":")
    if not colon or not name:
        raise ValueError(f"expected module:name, got {reference!r}")
    found = importlib.import_module(module)
    if not hasattr(found, name):
        raise ValueError(f"module {module} has no {name!r}")
    return getattr(found, name)
