import random
from collections import Counter

import numpy as np
import pytest

from diagd.data.recorders.doom import (
    ACTIONS,
    ASIDE,
    NEAR_DEPTH,
    PLAYERS,
    WALKING,
    Player,
    Sight,
    View,
)


def view(left=60, ahead=60, right=60, **sights):
    """A depth buffer of three bands, near floor and ceiling as in a corridor, and what is there."""
    depth = np.zeros((60, 90), dtype=np.uint8)
    for band, value in enumerate((left, ahead, right)):
        depth[22:38, 30 * band : 30 * (band + 1)] = value
    return View(depth, **sights)


def at(offset, area=0.02, width=0.1):
    return Sight(offset, width, area)


def answers(seen, clips=40, frames=40, player="hunter"):
    """Count what hunters of many seeds do, who always see the same."""
    counts = Counter()
    for seed in range(clips):
        hunter = Player(PLAYERS[player], seed)
        counts.update(hunter.choose(seen) for _ in range(frames))
    return counts


def share(counts, *names):
    return sum(counts[name] for name in names) / counts.total()


@pytest.mark.parametrize("player", PLAYERS)
def test_a_player_is_a_function_of_its_seed(player):
    games = []
    for seed in (3, 3, 4):
        noise = np.random.default_rng(0)
        someone = Player(PLAYERS[player], seed)
        random.seed(len(games))  # what others draw does not matter
        games.append(
            [
                someone.choose(view(*noise.integers(0, 60, 3), monsters=[at(noise.uniform(-1, 1))]))
                for _ in range(60)
            ]
        )
    assert games[0] == games[1] != games[2]
    assert set(games[0]) <= set(ACTIONS.names)


@pytest.mark.parametrize("player", ["explorer", "roamer", "hunter"])
@pytest.mark.parametrize(
    ("left", "right", "action"), [(40, 5, "left"), (5, 40, "right")], ids=["left", "right"]
)
def test_a_player_turns_away_from_a_wall_to_the_open_side(player, left, right, action):
    for seed in range(10):
        someone = Player(PLAYERS[player], seed)
        turns = [someone.choose(view(left, NEAR_DEPTH - 1, right)) for _ in range(2)]
        assert turns == [action, action]


@pytest.mark.parametrize(
    ("player", "actions"), [("explorer", WALKING), ("roamer", ACTIONS), ("hunter", ACTIONS)]
)
def test_a_player_does_every_action_where_there_is_room(player, actions):
    someone = Player(PLAYERS[player], 0)
    done = [someone.choose(view()) for _ in range(1200)]
    assert set(done) == set(actions.names)
    assert done.count("forward") > done.count("none")


@pytest.mark.parametrize(("sign", "side"), [(-1, "left"), (1, "right")])
def test_a_hunter_turns_to_a_monster_and_shoots_it_in_the_middle(sign, side):
    aside = answers(view(monsters=[at(sign * (ASIDE + 0.3))]))
    assert share(aside, side, f"forward+{side}") > 0.5
    middle = answers(view(monsters=[at(sign * 0.02)]))
    assert share(middle, "attack", "attack+forward") > 0.5


def test_a_sentry_waits_about_as_long_as_it_shoots():
    seen = answers(view(monsters=[at(0.02)]), player="sentry")
    assert 0.35 < share(seen, "attack", "attack+forward") < 0.65
    assert share(seen, "none") > 0.2


@pytest.mark.parametrize(("sign", "side"), [(-1, "left"), (1, "right")])
def test_a_hunter_does_not_turn_past_a_monster_that_is_nearly_in_the_middle(sign, side):
    nearly = answers(view(monsters=[at(sign * (ASIDE - 0.05), width=0.1)]))
    assert share(nearly, f"strafe_{side}") > 2 * share(nearly, side)


def test_the_nearest_monster_comes_first_and_monsters_before_things():
    far, near, thing = at(-0.8, area=0.01), at(0.8, area=0.03), at(-0.8, area=0.5)
    seen = answers(view(monsters=[far, near], pickups=[thing]))
    assert share(seen, "right", "forward+right") > 0.5
    fetched = answers(view(pickups=[thing]))
    assert share(fetched, "left", "forward+left") > 0.5


def test_a_hunter_walks_straight_at_a_thing_ahead_but_not_into_a_wall():
    assert share(answers(view(pickups=[at(0.05)])), "forward") > 0.5
    walled = answers(view(40, NEAR_DEPTH - 1, 5, pickups=[at(0.05)]))
    assert share(walled, "left") > 0.5
