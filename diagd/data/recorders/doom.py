"""ViZDoom, which installs from PyPI with its game data: scenarios, and how each is played.

All have the same actions, those of the bundled world `doom`, so that clips of several can share a
folder and a world. `my_way_home` is the exception: it keeps the six of walking, which the bundled
world `maze` knows; the scenario `maze` is the same place with all twelve. Where a scenario gives no
weapon, as these and `health_gathering_supreme` do, to attack changes nothing.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from diagd.data.actions import ActionVocabulary
from diagd.data.recorders.doom_players import Explorer, Hunter, Roamer, Sight, View
from diagd.data.recorders.recording import RecordOptions
from diagd.extras import require

BUTTONS = {
    "left": "TURN_LEFT",
    "right": "TURN_RIGHT",
    "forward": "MOVE_FORWARD",
    "strafe_left": "MOVE_LEFT",
    "strafe_right": "MOVE_RIGHT",
    "attack": "ATTACK",
}
WALKING = ActionVocabulary(("none", "forward", "left", "right", "forward+left", "forward+right"))
ACTIONS = ActionVocabulary(
    (
        *WALKING.names,
        *("strafe_left", "strafe_right"),
        *("attack", "attack+left", "attack+right", "attack+forward"),
    )
)
DRAWING_TICS = 40  # to put a weapon away and draw another
PICKUPS = ("Health", "Armor", "Ammo", "Weapon", "Powerup")  # as ViZDoom calls kinds of objects


@dataclass(frozen=True)
class Scenario:
    """How a scenario is played.

    Attributes:
        config: its name in the vizdoom package.
        player: who plays it, made from a seed.
        actions: what may be done.
        skill: of the game, from 1, easy, to 5; None: what the config says.
        weapon: in hand from the start; None: what the game gives.
        start_tics: of the game's clock before an episode begins, in which monsters gather; None:
            what the config says.
    """

    config: str
    player: type[Explorer] = Hunter
    actions: ActionVocabulary = ACTIONS
    skill: int | None = None
    weapon: str | None = None
    start_tics: int | None = None


SCENARIOS = {
    "my_way_home": Scenario("my_way_home", Explorer, WALKING),
    "maze": Scenario("my_way_home", Roamer),
    "defend_the_line": Scenario("defend_the_line", skill=3),
    "health_gathering_supreme": Scenario("health_gathering_supreme", skill=3),
    "deathmatch": Scenario("deathmatch", skill=1, weapon="chaingun", start_tics=410),
}  # others of the package are played as `Scenario(name)` says


class DoomGame:
    """A scenario of ViZDoom, and its player."""

    steps_per_second = Fraction(35)
    size_px = (112, 192)

    def __init__(self, game: Any, name: str, scenario: Scenario) -> None:
        self.game, self.scenario = game, scenario
        self.name = f"scenario {name!r}"
        self.actions = scenario.actions
        self.player = scenario.player(0)
        self.state: Any = None

    def start(self, seed: int, skip: int) -> np.ndarray | None:
        """Begin an episode: a new spawn, a new player."""
        self.game.set_seed(seed)
        self.game.new_episode()
        self.player = self.scenario.player(seed)
        if self.scenario.weapon:
            self.game.send_game_command(f"give {self.scenario.weapon}")
            self.game.send_game_command(f"use {self.scenario.weapon}")
            skip += DRAWING_TICS
        return self._press("none", skip) if skip else self._look()

    def advance(self, repeat: int) -> tuple[str, np.ndarray] | None:
        """Let the player, who sees what is in the picture, press buttons."""
        action = self.player.choose(view_of(self.state))
        picture = self._press(action, repeat)
        return None if picture is None else (action, picture)

    def _press(self, action: str, tics: int) -> np.ndarray | None:
        words = action.split("+")
        self.game.make_action([word in words for word in BUTTONS], tics)
        return self._look()

    def _look(self) -> np.ndarray | None:
        """Keep what there is to see; None where the episode has ended."""
        self.state = self.game.get_state()
        return None if self.state is None else self.state.screen_buffer


def view_of(state: Any) -> View:
    """Sort what the labels of a state say is in sight."""
    height_px, width_px = state.depth_buffer.shape
    monsters: list[Sight] = []
    pickups: list[Sight] = []
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
    """Start ViZDoom without a window, and end it.

    Raises:
        ValueError: it is not installed, or has no such scenario.
    """
    require("recording from ViZDoom", "vizdoom")
    import vizdoom

    name = options.scenario or "maze"
    scenario = SCENARIOS.get(name) or Scenario(name)
    config = Path(vizdoom.scenarios_path) / f"{scenario.config}.cfg"
    if not config.is_file():
        names = {*SCENARIOS, *(path.stem for path in config.parent.glob("*.cfg"))}
        raise ValueError(f"unknown scenario {name!r}, expected one of: {', '.join(sorted(names))}")
    with tempfile.TemporaryDirectory() as scratch:
        game = _start_vizdoom(vizdoom, config, scenario, Path(scratch))
        try:
            yield DoomGame(game, name, scenario)
        finally:
            game.close()


def _start_vizdoom(vizdoom: Any, config: Path, scenario: Scenario, scratch: Path) -> Any:
    game = vizdoom.DoomGame()
    game.set_doom_config_path(str(scratch / "vizdoom.ini"))
    game.load_config(str(config))
    game.set_window_visible(False)
    game.set_sound_enabled(False)
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
    if scenario.skill is not None:
        game.set_doom_skill(scenario.skill)
    if scenario.start_tics is not None:
        game.set_episode_start_time(scenario.start_tics)
    with contextlib.chdir(scratch):  # the game leaves a folder where it is started
        game.init()
    return game
