"""Which lanes are fed, when the verified prefix is moved by hand."""

import numpy as np
import pytest

from diagd.decoding.schedule import SequenceLayout, TokenGrid
from diagd.decoding.strategies.exact import DRAFT_SHARE, Drafts
from diagd.decoding.strategies.table import Exact


def drafts(num_lanes: int = 8, lag: int | None = 2, **layout) -> Drafts:
    """Two frames of 3 x 5 with one action token each: lanes 0 and 16 write actions."""
    layout = SequenceLayout(TokenGrid(2, 3, 5), layout.pop("num_action_tokens", 1), **layout)
    return Drafts(layout, Exact(num_lanes, lag, draft_width=2))


def changes(lanes: list[int], *changed: int) -> list[bool]:
    return [lane in changed for lane in lanes]


def test_without_drafts_all_lanes_follow_the_prefix():
    made = drafts(8, lag=0)
    assert made.choose() == list(range(8))
    assert made.update(made.choose(), changes(made.choose(), 3, 5)) == 4
    assert made.choose() == list(range(4, 12))


def test_what_writes_an_action_never_changes():
    made = drafts(4, lag=0)
    assert made.update(range(4), [True, False, True, True]) == 3


def test_a_row_opens_behind_the_row_above_and_actions_come_along():
    made = drafts(num_lanes=12)
    first = made.choose()
    assert first == [
        0,
        1,
        2,
    ]  # an action, and twice nothing known
    made.update(first, changes(first, 1))
    second = made.choose()
    assert second == [2, 3, 4]  # two columns more
    made.update(second, changes(second, 2))
    third = made.choose()
    assert third == [3, 4, 5, 6, 7]  # the row above has four columns: two below them
    made.update(third, changes(third))
    assert made.num_verified == 8


def test_neighbours_of_a_change_are_stale_and_fed_again_while_others_wait():
    made = drafts(num_lanes=31)
    everything = list(range(made.size))
    made.update(everything, changes(everything, 1, 9))
    assert made.num_verified == 2
    stale = made.stale.copy()
    # of lane 1 (row 0, column 0): right 3, below 6 and 7, two below 11; its left neighbour is none
    # of lane 9 (row 1, column 3): right 10, below 13, 14 and 15
    assert stale == {3, 6, 7, 10, 11, 13, 14, 15}
    fed = made.choose()
    assert {lane for lane in stale if lane > fed[0]} <= set(fed)
    assert 20 not in fed
    made.update(fed, changes(fed))
    assert not made.stale


def test_the_prefix_is_followed_past_one_change_and_up_to_the_second():
    made = drafts(num_lanes=10)
    everything = list(range(made.size))
    made.update(everything, changes(everything, 1, 6))
    made.stale.clear()  # no drafts
    assert made.choose() == [2, 3, 4, 5, 6, 7]  # 2 and 7 stand right of a change
    again = made.choose()
    made.update(again, changes(again))
    assert made.num_verified == 8
    assert made.choose() == list(range(8, 18))  # what was confirmed hardly counts


def test_drafts_ahead_never_take_a_whole_step():
    made = drafts(num_lanes=10)
    everything = list(range(made.size))
    made.update(everything, [lane % 2 == 1 for lane in everything])
    assert len(made.stale) > 10
    lanes = made.choose()
    run = sum(lane == made.num_verified + i for i, lane in enumerate(lanes))
    assert len(lanes) <= run + int(10 * DRAFT_SHARE)


def test_without_a_prompt_the_first_action_is_no_target():
    made = drafts(3, has_prompt=False)
    assert made.num_verified == 1
    assert made.choose()[0] == 1


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("num_lanes", [1, 2, 9])
def test_it_ends_and_never_feeds_more_than_it_may(num_lanes, lag):
    generator = np.random.default_rng(0)
    made, steps = drafts(num_lanes, lag, num_action_tokens=2), 0
    while made.num_verified < made.size:
        lanes = made.choose()
        assert 1 <= len(lanes) <= num_lanes
        assert lanes[0] == made.num_verified
        assert (np.diff(lanes) > 0).all()
        assert made.update(lanes, (generator.random(len(lanes)) < 0.5).tolist()) >= 1
        steps += 1
    assert steps <= made.size
