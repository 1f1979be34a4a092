"""ViZDoom, and players that see only the picture, not the map."""

import contextlib
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from diagd.data.actions import ActionVocabulary
from diagd.data.recorders.options import RecordOptions
from diagd.extras import require

NEAR_DEPTH = 9  # of 255: about one stride from a wall
AIM = 0.05  # offset within which even a narrow monster is shot at
WORTH_FETCHING = 0.0004  # area above which a thing is near enough to fetch
ASIDE = 0.3  # offset of about two frames of turning

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


@dataclass(frozen=True)
class Sight:
    offset: float  # of its centre: -1 at the left edge of the picture, 1 at the right
    width: float  # as a share of the picture's
    area: float  # as a share of the picture's; larger is nearer


@dataclass(frozen=True)
class View:
    """A frame as a player sees it."""

    depth: np.ndarray  # (H_px, W_px) uint8, 0 near, 255 far
    monsters: Sequence[Sight] = ()  # alive
    pickups: Sequence[Sight] = ()  # medicine, ammunition, weapons


@dataclass(frozen=True)
class Style:
    """A style of play; all styles turn away before facing a wall."""

    moves: Moves = ROAMS
    dodges: Moves = ()  # for styles that hunt and fetch; the others only walk
    dodging: float = 0.1  # how often to dodge instead of shooting


PLAYERS = {
    "explorer": Style(WALKS),
    "roamer": Style(),  # steps aside and fires as well, with or without a target
    "hunter": Style(dodges=DODGES),
    # holds fire about as long as it shoots, to show the effect of shots
    "sentry": Style(dodges=(*DODGES, ("none", 4, 10, 2)), dodging=0.2),
}


class Player:
    """Plays in a style; hunters are distracted at random, for variety."""

    def __init__(self, style: Style, seed: int) -> None:
        self.style, self.random = style, random.Random(seed)
        self.action, self.frames_left = "none", 0
        self.attention = self.random.uniform(0.85, 0.97) if style.dodges else 0.0

    def choose(self, view: View) -> str:
        left, ahead, right = _distances(view.depth)
        hunts = self.style.dodges and self.frames_left <= 0
        if hunts and self.random.random() < self.attention:
            near = [pickup for pickup in view.pickups if pickup.area > WORTH_FETCHING]
            if view.monsters:
                return self._fight(max(view.monsters, key=lambda one: one.area))
            if near and ahead >= NEAR_DEPTH:
                return self._fetch(max(near, key=lambda one: one.area))
        if ahead < NEAR_DEPTH and not (self.action in ("left", "right") and self.frames_left > 0):
            self.action = "left" if left + self.random.uniform(-3, 3) > right else "right"
            self.frames_left = self.random.randint(2, 5)
        elif self.frames_left <= 0:
            self._plan(self.style.moves)
        self.frames_left -= 1
        return self.action

    def _plan(self, moves: Moves) -> None:
        weights = [weight for *_, weight in moves]
        self.action, shortest, longest, _ = self.random.choices(moves, weights)[0]
        self.frames_left = self.random.randint(shortest, longest)

    def _fight(self, monster: Sight) -> str:
        side = "left" if monster.offset < 0 else "right"
        distance, reach = abs(monster.offset), max(monster.width, AIM)
        if distance > ASIDE:
            return self._one_of({side: 4, f"forward+{side}": 2})
        if distance > reach:
            return self._one_of({f"strafe_{side}": 3, f"attack+{side}": 3, side: 1})
        if self.random.random() < self.style.dodging:
            self._plan(self.style.dodges)
            self.frames_left -= 1
            return self.action
        return self._one_of({"attack": 7, "attack+forward": 2})

    def _fetch(self, pickup: Sight) -> str:
        side = "left" if pickup.offset < 0 else "right"
        if abs(pickup.offset) < ASIDE / 2:
            return "forward"
        return self._one_of({f"forward+{side}": 3, side: 1, f"strafe_{side}": 1})

    def _one_of(self, weights: dict[str, float]) -> str:
        return self.random.choices(list(weights), weights=list(weights.values()))[0]


def _distances(depth: np.ndarray) -> tuple[float, float, float]:
    """Average the depth to the left, ahead and to the right, in a band about the horizon."""
    middle = depth.shape[0] // 2
    columns = depth[middle - 8 : middle + 8].mean(axis=0)
    left, ahead, right = (float(part.mean()) for part in np.array_split(columns, 3))
    return left, ahead, right


BUTTONS = {
    "left": "TURN_LEFT",
    "right": "TURN_RIGHT",
    "forward": "MOVE_FORWARD",
    "strafe_left": "MOVE_LEFT",
    "strafe_right": "MOVE_RIGHT",
    "attack": "ATTACK",
}
WALKING = ActionVocabulary(("none", "forward", "left", "right", "forward+left", "forward+right"))
_ARMED = "strafe_left", "strafe_right", "attack", "attack+left", "attack+right", "attack+forward"
ACTIONS = ActionVocabulary((*WALKING.names, *_ARMED))
DRAWING_TICS = 40  # to switch weapons
PICKUPS = ("Health", "Armor", "Ammo", "Weapon", "Powerup")  # ViZDoom's object categories


@dataclass(frozen=True)
class Scenario:
    """Settings of a scenario of the vizdoom package; None keeps its config."""

    config: str
    player: Style = PLAYERS["hunter"]
    actions: ActionVocabulary = ACTIONS
    skill: int | None = None  # difficulty, from 1 (easy) to 5
    level: str | None = None  # for a game with several levels
    weapon: str | None = None  # in hand from the start
    start_tics: int | None = None  # before an episode starts, while monsters gather


SCENARIOS = {
    "my_way_home": Scenario("my_way_home", PLAYERS["explorer"], WALKING),
    "maze": Scenario("my_way_home", PLAYERS["roamer"]),
    "defend_the_line": Scenario("defend_the_line", skill=3),
    "health_gathering_supreme": Scenario("health_gathering_supreme", skill=3),
    "deathmatch": Scenario("deathmatch", skill=1, weapon="chaingun", start_tics=410),
    "canyon": Scenario("freedoom2", skill=1, level="map10"),
}  # other scenarios of the package use the defaults of `Scenario(name)`


class DoomGame:
    """A scenario of ViZDoom, and its player."""

    steps_per_second = Fraction(35)  # the game's own clock
    size_px: tuple[int, int] = (112, 192)  # default (height_px, width_px) of clips

    def __init__(self, game: Any, scratch: str, name: str, scenario: Scenario) -> None:
        self.game, self.scratch, self.scenario = game, scratch, scenario
        self.name = f"scenario {name!r}"
        self.actions = scenario.actions  # the first one is idle

    def start(self, seed: int) -> None:
        """Restart the game: in a next episode the weapon would continue its bobbing."""
        self.game.close()
        self.game.set_seed(seed)
        with contextlib.chdir(self.scratch):  # the game creates a folder where it starts
            self.game.init()
        self.player = Player(self.scenario.player, seed)
        if weapon := self.scenario.weapon:
            for command in ("give", "use"):
                self.game.send_game_command(f"{command} {weapon}")
            self.press("none", DRAWING_TICS)

    def choose(self) -> str:
        return self.player.choose(view_of(self.state))

    def press(self, action: str, steps: int) -> np.ndarray | None:
        """Play some game steps; return (H_px, W_px, 3) uint8, or None if the episode ends."""
        if steps:
            words = action.split("+")
            self.game.make_action([word in words for word in BUTTONS], steps)
        self.state = self.game.get_state()
        return None if self.state is None else self.state.screen_buffer


def view_of(state: Any) -> View:
    height_px, width_px = state.depth_buffer.shape
    monsters, pickups = [], []
    for label in state.labels:
        middle, width = (label.x + label.width / 2) / width_px, label.width / width_px
        sight = Sight(2 * middle - 1, width, width * label.height / height_px)
        if label.object_category == "Monster":
            monsters.append(sight)
        elif label.object_category in PICKUPS and label.object_name != "Poison":
            pickups.append(sight)
    return View(state.depth_buffer, monsters, pickups)


@contextlib.contextmanager
def open_doom(options: RecordOptions) -> Iterator[DoomGame]:
    """Open ViZDoom without a window; ValueError for an unknown scenario or player."""
    require("recording from ViZDoom", "vizdoom")
    import vizdoom

    name = options.scenario or "maze"
    scenario = SCENARIOS.get(name) or Scenario(name)
    if options.policy is not None:
        if options.policy not in PLAYERS:
            raise ValueError(f"policy must be one of {', '.join(PLAYERS)}, got {options.policy!r}")
        scenario = replace(scenario, player=PLAYERS[options.policy])
    if not (config := Path(vizdoom.scenarios_path) / f"{scenario.config}.cfg").is_file():
        names = {*SCENARIOS, *(path.stem for path in config.parent.glob("*.cfg"))}
        raise ValueError(f"unknown scenario {name!r}, expected one of: {', '.join(sorted(names))}")
    with tempfile.TemporaryDirectory() as scratch, contextlib.closing(vizdoom.DoomGame()) as game:
        game.set_doom_config_path(f"{scratch}/vizdoom.ini")
        game.load_config(str(config))
        game.set_window_visible(False)
        game.set_sound_enabled(False)
        game.add_game_args("-nosound")  # otherwise OpenAL starts anyway and may crash the game
        game.set_mode(vizdoom.Mode.PLAYER)
        game.set_screen_resolution(vizdoom.ScreenResolution.RES_400X225)
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        game.set_render_hud(False)
        game.set_render_weapon(True)
        game.set_render_crosshair(False)
        game.set_render_messages(False)
        game.set_available_buttons([getattr(vizdoom.Button, name) for name in BUTTONS.values()])
        game.set_depth_buffer_enabled(True)
        game.set_labels_buffer_enabled(True)
        if scenario.level is not None:
            game.set_doom_map(scenario.level)
        if scenario.skill is not None:
            game.set_doom_skill(scenario.skill)
        if scenario.start_tics is not None:
            game.set_episode_start_time(scenario.start_tics)
        yield DoomGame(game, scratch, name, scenario)
