from functools import cache

import pytest
import torch
from torch.nn import functional

from diagd.training.check import RowTiming, movement_between, row_timing

HEIGHT_PX, WIDTH_PX = 48, 80
CLIPS, FRAMES = 8, 65


def held_actions(generator, num_actions=4, longest=8, count=FRAMES + 2):
    """Draw actions that are held for 1 to `longest` frames, as a thumb on a key does."""
    actions: list[int] = []
    while len(actions) < count:
        hold = int(torch.randint(1, longest + 1, (), generator=generator))
        actions += [int(torch.randint(num_actions, (), generator=generator))] * hold
    return torch.tensor(actions[:count])


def landscape(generator):
    """Draw a smooth (H, W) picture, far larger than what the camera sees."""
    coarse = torch.rand(1, 1, 40, 60, generator=generator)
    return functional.interpolate(coarse, scale_factor=8, mode="bicubic")[0, 0].clamp(0, 1)


def film(actions, generator, inertia=0.0):
    """Move a camera by each action that leads to a frame; `inertia` of its speed stays."""
    ways = torch.tensor([(0.0, 0.0), (0.0, 4.0), (0.0, -4.0), (3.0, 0.0)])
    ground, place, speed, frames = landscape(generator), torch.tensor([130.0, 190.0]), 0.0, []
    for action in actions.tolist():
        speed = inertia * speed + (1 - inertia) * ways[action]
        place = place + speed
        top, left = (int(p) for p in place.round())
        rows = torch.arange(top, top + HEIGHT_PX) % ground.shape[0]
        columns = torch.arange(left, left + WIDTH_PX) % ground.shape[1]
        frames.append(ground[rows][:, columns])
    return (torch.stack(frames)[..., None].expand(-1, -1, -1, 3) * 255).to(torch.uint8)


@cache
def recordings(seed, inertia=0.0, longest=8, clips=CLIPS):
    """Return movements of clips, and actions from the row before frame 0 to the one behind."""
    generator = torch.Generator().manual_seed(seed)
    actions = [held_actions(generator, longest=longest) for _ in range(clips)]
    films = [film(a[1:-1], generator, inertia) for a in actions]
    return [movement_between(frames) for frames in films], actions


def timing_of(movements, actions, shift):
    """Ask of rows that hold the action `shift` frames after the one that led to the frame."""
    rows = [a[1 + shift : len(a) - 1 + shift] for a in actions]
    return row_timing(movements, rows)


@pytest.mark.parametrize("longest", [1, 3, 8], ids="held_{}".format)
def test_the_row_that_led_to_a_frame_is_found_however_the_rows_are_shifted(longest):
    """Rows that lead away hold the next action: the one that led to the frame is a row before."""
    movements, actions = recordings(1, longest=longest)
    for shift in (-1, 0, 1):
        assert timing_of(movements, actions, shift).found == -shift


@pytest.mark.parametrize("longest", [1, 8], ids="held_{}".format)
@pytest.mark.parametrize("inertia", [0.4, 0.6], ids="inertia_{}".format)
def test_inertia_is_not_taken_for_rows_that_lead_away(inertia, longest):
    """Bodies go on as before, so the row before tells a lot, too; a late row may be left open."""
    movements, actions = recordings(1, inertia, longest)
    assert timing_of(movements, actions, 0).found == 0
    assert timing_of(movements, actions, 1).found == -1
    assert timing_of(movements, actions, -1).found in (1, None)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("inertia", [0.8, 0.9], ids="inertia_{}".format)
def test_bodies_that_hardly_obey_leave_it_open_rather_than_accuse(inertia, seed):
    movements, actions = recordings(seed, inertia)
    assert timing_of(movements, actions, 0).found in (0, None)


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_have_nothing_to_do_with_the_frames_are_not_accused(seed):
    movements, _ = recordings(seed)
    generator = torch.Generator().manual_seed(100 + seed)
    rows = [held_actions(generator, count=FRAMES) for _ in movements]
    assert row_timing(movements, rows).found is None


def test_a_player_who_answers_to_what_moves_is_not_taken_for_a_late_row():
    """The next action mostly undoes the movement seen: it follows from it, yet did not cause it."""
    generator = torch.Generator().manual_seed(5)
    undo = torch.tensor([0, 2, 1, 3])
    actions = []
    for _ in range(CLIPS):
        taken = [0, 1]
        while len(taken) < FRAMES + 2:
            answers = torch.rand((), generator=generator) < 0.6
            free = int(torch.randint(4, (), generator=generator))
            taken.append(int(undo[taken[-1]]) if answers else free)
        actions.append(torch.tensor(taken))
    movements = [movement_between(film(a[1:-1], generator)) for a in actions]
    for shift in (-1, 0, 1):
        assert timing_of(movements, actions, shift).found == -shift


def test_what_movement_tells_is_a_share():
    timing = timing_of(*recordings(2), shift=0)
    assert set(timing.gains) == {-1, 0, 1}
    assert 0.1 < timing.gains[0] <= 1
    assert timing.scores[0] > 5
    assert max(timing.gains[-1], timing.gains[1]) < 0.05


def test_too_little_to_tell():
    movements, actions = recordings(3, clips=2)
    assert row_timing([], []) == RowTiming({}, {})
    assert timing_of(movements, actions, 0) == RowTiming({}, {})
    longer, acted = recordings(3)
    assert row_timing(longer, [torch.ones(FRAMES, dtype=torch.int64)] * CLIPS).found is None
    still = [torch.zeros_like(movement) for movement in longer]
    assert timing_of(still, acted, 0) == RowTiming({}, {})


@pytest.mark.parametrize("frames", [3, 4, 5, 6])
def test_clips_of_a_few_frames_leave_it_open(frames):
    generator = torch.Generator().manual_seed(6)
    movement = movement_between(film(held_actions(generator, count=frames), generator))
    rows = torch.arange(frames) % 2
    assert row_timing([movement] * 2, [rows] * 2) == RowTiming({}, {})


def test_two_rows_that_tell_about_as_much_are_not_told_apart():
    sure: dict[int, float] = {-1: 9.0, 0: 9.0, 1: 9.0}
    assert RowTiming({-1: 0.2, 0: 0.3, 1: 0.0}, sure).found == 0
    assert RowTiming({-1: 0.3, 0: 0.2, 1: 0.0}, sure).found is None
    assert RowTiming({-1: 0.3, 0: 0.09, 1: 0.0}, sure).found == -1
    assert RowTiming({-1: 0.0, 0: 0.3, 1: 0.2}, sure).found is None
    assert RowTiming({-1: 0.0, 0: 0.2, 1: 0.3}, sure).found is None
    assert RowTiming({-1: 0.0, 0: 0.09, 1: 0.3}, sure).found == 1
    assert RowTiming({-1: 0.0, 0: 0.3, 1: 0.0}, sure | {0: 3.9}).found is None
    assert RowTiming({}, {}).found is None


def test_movement_says_where_to():
    """The picture compared with the one before, moved, differs least where it moved to."""
    generator = torch.Generator().manual_seed(4)
    frames = film(torch.tensor([0, 1, 1, 2]), generator)
    movement = movement_between(frames)
    assert movement.shape[0] == 3
    sideways = movement[:, -25:-12]  # a shift of -6 to 6 along the rows
    assert (sideways[:2].argmin(dim=1) > 6).all()
    assert sideways[2].argmin() < 6
