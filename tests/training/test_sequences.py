import pytest
import torch

from diagd.tokenizers.shards import TokenClips
from diagd.training.sequences import draw_batch, sequences, windows
from tests.worlds import SHARD_CODES, SHARD_NAMES, clips_of


def test_a_sequence_is_frame_action_frame_by_hand():
    tokens = torch.tensor(
        [
            [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 0]], [[1, 3, 5], [7, 9, 2]]],
            [[[5, 5, 5], [5, 5, 5]], [[4, 4, 4], [4, 4, 4]], [[3, 3, 3], [3, 3, 3]]],
        ],
        dtype=torch.int16,
    )
    actions = torch.tensor([[0, 1, 2], [0, 2, 1]], dtype=torch.int16)
    clips = TokenClips(tokens, actions, SHARD_CODES, SHARD_NAMES)
    cut = sequences(clips, torch.tensor([0, 1]), torch.tensor([[1, 2], [0, 1]]))
    right = SHARD_CODES + 2  # action ids follow the visual ones
    assert cut.tolist() == [
        [6, 7, 8, 9, 10, 0, right, 1, 3, 5, 7, 9, 2],  # the action that led to the second frame
        [5, 5, 5, 5, 5, 5, right, 4, 4, 4, 4, 4, 4],
    ]
    assert cut.dtype == torch.int64


def test_a_batch_is_a_function_of_its_seed_alone():
    clips = clips_of()
    batch = draw_batch(clips, 3, 5, 17)
    torch.rand(3)
    assert torch.equal(draw_batch(clips, 3, 5, 17), batch)
    assert not torch.equal(draw_batch(clips, 3, 5, 18), batch)


def test_runs_of_different_seeds_draw_different_batches():
    """Torch keeps the low 32 bits of a seed; the loop puts the run's seed above them."""
    clips = clips_of()
    batches = [draw_batch(clips, 3, 5, (seed << 40) + 17) for seed in range(3)]
    assert not torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[1], batches[2])


def test_batches_reach_the_last_frame_and_no_further():
    clips = clips_of(num_clips=1, num_frames=4)
    found = {tuple(row) for row in draw_batch(clips, 3, 50, 0).tolist()}
    times = torch.tensor([[0, 1, 2], [1, 2, 3]])
    expected = sequences(clips, torch.zeros(2, dtype=torch.int64), times).tolist()
    assert found == {tuple(row) for row in expected}


def test_a_frame_that_repeats_stands_under_no_action():
    clips = clips_of()
    times = torch.tensor([[2, 2, 3]])
    held = sequences(clips, torch.tensor([1]), times)
    moving = sequences(clips, torch.tensor([1]), torch.tensor([[2, 3, 4]]))
    area = clips.tokens[0, 0].numel()
    assert torch.equal(held[0, :area], held[0, area + 1 : 2 * area + 1])
    assert held[0, area] == SHARD_CODES + SHARD_NAMES.index("none")
    assert held[0, 2 * area + 1] == moving[0, area] == SHARD_CODES + clips.actions[1, 3]


def test_frames_are_held_as_often_as_asked():
    tokens = torch.arange(6, dtype=torch.int16).view(1, 6, 1, 1).expand(1, 6, 2, 3)
    always_left = torch.ones(1, 6, dtype=torch.int16)
    clips = TokenClips(tokens, always_left, SHARD_CODES, SHARD_NAMES)
    batch = draw_batch(clips, 4, 400, 0, hold=0.3)
    frames = torch.nn.functional.pad(batch, (1, 0)).unflatten(1, (4, -1))[..., 1:]
    share = (frames[:, 1:] == frames[:, :-1]).all(-1).float().mean().item()
    assert 0.25 < share < 0.35


def test_windows_are_stretches_of_the_first_clips_at_places_that_the_seed_names():
    clips = clips_of()
    tokens, actions = windows(clips, 3, 4, seed=1)
    starts = []
    for clip in range(3):
        starts += [
            start for start in range(3) if torch.equal(tokens[clip], clips.tokens[clip][start:][:4])
        ]
        own = clips.actions[clip][starts[-1] :][:4] + SHARD_CODES
        assert torch.equal(actions[clip, :, 0], own.long())
    assert len(starts) == 3
    places = {tuple(windows(clips, 4, 2, seed)[0].flatten().tolist()) for seed in range(9)}
    assert len(places) > 5
    assert torch.equal(windows(clips, 3, 4, seed=1)[0], tokens)


@pytest.mark.parametrize(
    ("size", "frames", "message"),
    [
        (5, 2, r"clips must be in \[1, 4\], got 5"),
        (0, 2, r"clips must be in \[1, 4\], got 0"),
        (2, 7, r"frames must be in \[1, 6\], got 7"),
    ],
)
def test_windows_that_are_not_there_are_refused(size, frames, message):
    with pytest.raises(ValueError, match=message):
        windows(clips_of(), size, frames)
