"""Who plays ViZDoom: one who looks at a maze, and one who fights, fetches things and looks around.

Players see what is in the picture, not the map: how far away everything is, and where monsters and
things to pick up stand. All chance comes from their seed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NEAR_DEPTH = 9  # of 255: about one stride from a wall
AIM = 0.05  # how far from the middle even a narrow monster is shot at, in halves of the width
WORTH_FETCHING = 0.0004  # area of a thing that is near enough
ASIDE = 0.3  # from the middle, in halves of the width: about two frames of turning

Moves = Sequence[tuple[str, int, int, float]]  # action, shortest and longest hold, weight

WALKS: Moves = (
    ("forward", 3, 12, 10),
    ("forward+left", 2, 6, 4),
    ("forward+right", 2, 6, 4),
    ("left", 2, 7, 4),
    ("right", 2, 7, 4),
    ("none", 1, 2, 1),
)
ROAMS: Moves = (
    *WALKS,
    ("none", 1, 4, 2),
    ("strafe_left", 2, 5, 4),
    ("strafe_right", 2, 5, 4),
    ("attack", 1, 4, 2),
    ("attack+left", 1, 4, 2),
    ("attack+right", 1, 4, 2),
    ("attack+forward", 1, 4, 2),
)
DODGES: Moves = (("strafe_left", 2, 4, 1), ("strafe_right", 2, 4, 1), ("none", 1, 2, 0.5))
DODGING = 0.1  # how often a monster in the line of fire is not shot at


@dataclass(frozen=True)
class Sight:
    """Something in the picture.

    Attributes:
        offset: of its middle from the picture's: -1 at the left edge, 1 at the right one.
        width: as a share of the picture's.
        area: as a share of the picture's; larger is nearer.
    """

    offset: float
    width: float
    area: float


@dataclass(frozen=True)
class View:
    """What a player sees of a frame.

    Attributes:
        depth: (H_px, W_px) uint8, 0 near, 255 far.
        monsters: alive and in sight.
        pickups: things to walk over: medicine, ammunition, weapons.
    """

    depth: np.ndarray
    monsters: Sequence[Sight] = ()
    pickups: Sequence[Sight] = ()


class Explorer:
    """Walks, looks around, and turns away from walls before it faces them."""

    moves = WALKS

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.action = "none"
        self.frames_left = 0

    def choose(self, view: View) -> str:
        """Name the next action."""
        left, ahead, right = _distances(view.depth)
        if ahead < NEAR_DEPTH and not (self.action in ("left", "right") and self.frames_left > 0):
            self.action = "left" if left + self.random.uniform(-3, 3) > right else "right"
            self.frames_left = self.random.randint(2, 5)
        elif self.frames_left <= 0:
            self._plan(self.moves)
        self.frames_left -= 1
        return self.action

    def _plan(self, moves: Moves) -> None:
        """Draw an action, and for how many frames to keep it."""
        weights = [weight for *_, weight in moves]
        self.action, shortest, longest, _ = self.random.choices(moves, weights)[0]
        self.frames_left = self.random.randint(shortest, longest)


class Roamer(Explorer):
    """An explorer who steps aside and fires, too, though there may be nothing to fire at."""

    moves = ROAMS


class Hunter(Roamer):
    """Shoots at monsters, fetches what lies about, and explores where there is neither.

    It is no machine: it is distracted now and then, each seed more or less often, so that every
    action is seen in every kind of place.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.attention = self.random.uniform(0.85, 0.97)

    def choose(self, view: View) -> str:
        """Name the next action."""
        if self.frames_left <= 0 and self.random.random() < self.attention:
            near = [pickup for pickup in view.pickups if pickup.area > WORTH_FETCHING]
            _, ahead, _ = _distances(view.depth)
            if view.monsters:
                return self._fight(max(view.monsters, key=lambda sight: sight.area))
            if near and ahead >= NEAR_DEPTH:
                return self._fetch(max(near, key=lambda sight: sight.area))
        return super().choose(view)

    def _fight(self, monster: Sight) -> str:
        """Turn to a monster, step aside where it is nearly ahead, and shoot."""
        side = "left" if monster.offset < 0 else "right"
        distance, reach = abs(monster.offset), max(monster.width, AIM)
        if distance > ASIDE:
            return self._one_of({side: 4, f"forward+{side}": 2})
        if distance > reach:
            return self._one_of({f"strafe_{side}": 3, f"attack+{side}": 3, side: 1})
        if self.random.random() < DODGING:
            self._plan(DODGES)
            self.frames_left -= 1
            return self.action
        return self._one_of({"attack": 7, "attack+forward": 2})

    def _fetch(self, pickup: Sight) -> str:
        """Walk to something; where it is aside, on a curve or by stepping aside."""
        side = "left" if pickup.offset < 0 else "right"
        if abs(pickup.offset) < ASIDE / 2:
            return "forward"
        return self._one_of({f"forward+{side}": 3, side: 1, f"strafe_{side}": 1})

    def _one_of(self, weights: dict[str, float]) -> str:
        return self.random.choices(list(weights), weights=list(weights.values()))[0]


def _distances(depth: np.ndarray) -> tuple[float, float, float]:
    """Return how far it is to the left, ahead and to the right, in a band about the horizon."""
    middle = depth.shape[0] // 2
    columns = depth[middle - 8 : middle + 8].mean(axis=0)
    left, ahead, right = (float(part.mean()) for part in np.array_split(columns, 3))
    return left, ahead, right
