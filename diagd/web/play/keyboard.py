"""Which key does what: the words of a model's actions laid out on a keyboard and a touch pad.

Known words get the keys that games have given them for thirty years, the others number keys, then
letters nothing else uses. Keys are named as browsers name them (`KeyboardEvent.code`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from diagd.data.actions import ActionCodec

KNOWN: dict[str, tuple[str, ...]] = {
    "forward": ("KeyW", "ArrowUp"),
    "up": ("KeyW", "ArrowUp"),
    "left": ("KeyA", "ArrowLeft"),
    "back": ("KeyS", "ArrowDown"),
    "backward": ("KeyS", "ArrowDown"),
    "down": ("KeyS", "ArrowDown"),
    "right": ("KeyD", "ArrowRight"),
    "turn_left": ("KeyA", "ArrowLeft"),
    "turn_right": ("KeyD", "ArrowRight"),
    "strafe_left": ("KeyQ",),
    "strafe_right": ("KeyE",),
    "look_left": ("KeyJ",),
    "look_right": ("KeyL",),
    "look_up": ("KeyI",),
    "look_down": ("KeyK",),
    "jump": ("Space",),
    "attack": ("KeyF", "Space"),
    "use": ("KeyE",),
    "sneak": ("KeyC",),
    "sprint": ("KeyX",),
    "drop": ("KeyG",),
}
SPARE = (
    *(f"Digit{number}" for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 0)),
    *(f"Key{letter}" for letter in "ZXCBNMGHFTYUJKLIQE"),  # not P, R, O, V: the page's own
)
LABELS = {"ArrowUp": "↑", "ArrowLeft": "←", "ArrowDown": "↓", "ArrowRight": "→", "Space": "␣"}


@dataclass(frozen=True)
class Keyboard:
    """What a page needs to turn keys into actions.

    Attributes:
        idle: the action of pressing nothing.
        keys: action -> the keys that mean it; every word that stands alone is here.
        labels: key -> how it is written on a key cap.
        joined: actions of several words, such as `forward+left`, that the model knows by name.
        combines: whether any words may be joined.
    """

    idle: str
    keys: dict[str, tuple[str, ...]]
    labels: dict[str, str]
    joined: tuple[str, ...]
    combines: bool

    def document(self) -> dict[str, Any]:
        """Return it as JSON knows it."""
        return asdict(self)


def keyboard_of(codec: ActionCodec) -> Keyboard:
    """Lay out the words of a codec on keys that are free: first keys before second ones."""
    idle, *words = codec.names
    single = [word for word in words if "+" not in word]
    keys: dict[str, tuple[str, ...]] = dict.fromkeys(single, ())
    taken: set[str] = set()
    for rank, word in product(range(2), single):
        known = KNOWN.get(word.lower(), ())[rank : rank + 1]
        keys[word] += tuple(key for key in known if key not in taken)
        taken.update(keys[word])
    spare = [key for key in SPARE if key not in taken]
    for word in single:
        if not keys[word] and spare:
            keys[word] = (spare.pop(0),)
    labels = {key: _label(key) for found in keys.values() for key in found}
    joined = tuple(word for word in words if "+" in word)
    return Keyboard(idle, keys, labels, _joinable(joined, single), codec.combines)


def _joinable(joined: Sequence[str], single: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in joined if all(part in single for part in name.split("+")))


def _label(key: str) -> str:
    return LABELS.get(key, key.removeprefix("Key").removeprefix("Digit"))
