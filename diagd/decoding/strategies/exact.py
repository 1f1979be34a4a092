"""Exact decoding: raster's tokens in fewer steps.

The noise of a draw depends only on its place, so the raster sample is the fixed point of "draft,
feed all drafts causally, sample again". A step feeds draft tokens after the verified prefix and
drafts ahead of it (see `Drafts`); a draw replaces the draft that it verifies. Everything before the
first change is final, as it was sampled after final tokens only: at least one token per step
(Jacobi decoding, arXiv:2305.10427, with noise bound to the place). Keys and values of final tokens
are kept, the others are overwritten.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, compress, islice, product, takewhile
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from diagd.decoding.engine import NextStep, Stream
from diagd.decoding.schedule import SCRATCH, SequenceLayout, padded_width
from diagd.decoding.step import Lanes
from diagd.decoding.strategies.table import Exact

# Statistics of drafts on the bundled model at temperature 1 (dev/LOG.md, exact decoding), used to
# choose lanes. Wrong numbers cost speed, never tokens.
TOKENS_PER_STEP = {  # final tokens per step, by the maximum number of lanes
    1: 1.0, 8: 2.9, 12: 3.64, 16: 4.36, 24: 5.44, 32: 6.32, 40: 7.16, 96: 9.11, 192: 10.77,
}  # fmt: skip
DRAFT_LAG, DRAFTED_LANES = 2, 40  # the best lag of drafts, and the most lanes for which they pay
# rows down and columns right of a token whose draws are likely to change with it
NEIGHBOURS = ((0, 1), (0, 2), (1, -1), (1, 0), (1, 1), (2, 0))
# probability that a draw at the verified prefix differs from its draft, by the draft's last event:
# none yet; the token to its left changed with it or since; another neighbour did; it changed
# itself; it was confirmed
FRESH, BESIDE_A_CHANGE, STALE, CHANGED, CONFIRMED = 0.92, 0.45, 0.1, 0.07, 0.02
MIN_SURVIVAL = 0.3  # minimum probability of a lane being reached, to be fed
DRAFT_SHARE = 0.7  # maximum share of a step's lanes that draft ahead
REPEATS = 5  # runs of a timed step
_costs: WeakKeyDictionary[object, dict[int, float]] = WeakKeyDictionary()


class Drafts:
    """Choose the lanes of each step of exact decoding, and track which draws are final.

    The verified prefix grows up to and including the first draw that differs from its draft. A step
    feeds the lanes after it that are likely to be confirmed, and uses its other lanes to draft
    ahead: lanes that a diagonal opens, and stale ones, whose neighbours have changed since they
    were fed. The rest would most likely repeat their draws, and wait.

    Lanes are numbered from 0, the lane at the last slot before the generation; lane q writes slot
    q.
    A step has few of them: lists and loops take half the time of arrays.
    """

    def __init__(self, layout: SequenceLayout, how: Exact) -> None:
        assert how.num_lanes is not None
        self.layout, self.num_lanes, self.width = layout, how.num_lanes, how.draft_width
        best = DRAFT_LAG if self.num_lanes <= DRAFTED_LANES else 0
        self.lag = best if how.draft_lag is None else how.draft_lag
        self.size, self.height = layout.num_slots, layout.grid.height
        self.num_verified = 0 if layout.has_prompt else 1  # lanes that are final
        # for each row of tokens, over all frames: how many were fed, from the left
        self.fed_columns = [0] * (layout.grid.num_frames * self.height)
        self.stale: set[int] = set()  # lanes to feed again
        self.places = [(0, 0, 0)] * self.size  # of an action, that of the token after it
        for lane in reversed(range(self.size)):
            self.places[lane] = layout.places.get(lane) or self.places[lane + 1]
        self.row_starts = [lane for lane, (_, _, j) in layout.places.items() if j == 0]
        self.is_action = [lane not in layout.places for lane in range(self.size)]
        self.unfed_actions = dict.fromkeys(compress(range(self.size), self.is_action))  # in order
        # probabilities that a draw changes its draft
        self.doubts = [0.0 if is_action else FRESH for is_action in self.is_action]

    def unfed(self, frame: int) -> list[int]:
        """Return a frame's lanes that were not fed; none after the last frame."""
        rows = islice(enumerate(self.fed_columns), frame * self.height, (frame + 1) * self.height)
        width = self.layout.grid.width
        return [self.row_starts[row] + j for row, fed in rows for j in range(fed, width)]

    def choose(self) -> list[int]:
        """Return the lanes of the next step, ascending, between one and num_lanes."""
        first = self.num_verified
        end_of_room = min(first + self.num_lanes, self.size)
        if not self.lag:
            return list(range(first, end_of_room))
        end, survival = first + 1, 1.0
        while end < end_of_room:
            survival *= 1 - self.doubts[end - 1]
            if survival <= MIN_SURVIVAL:
                break
            end += 1
        room = min(self.num_lanes - (end - first), int(self.num_lanes * DRAFT_SHARE))
        return [*range(first, end), *self._ahead(end)[:room]]

    def update(self, lanes: Sequence[int], changed: Sequence[bool]) -> int:
        """Grow the prefix, mark drafts that became stale, and return the growth.

        `changed` holds for each lane whether its draw differs from the draft that it replaces.
        """
        before = self.num_verified
        run = next((i for i, lane in enumerate(lanes) if lane != before + i), len(lanes))
        found = [i for i, lane in enumerate(lanes) if changed[i] and not self.is_action[lane]]
        turned = {lanes[i] for i in found}
        self.num_verified = before + (found[0] + 1 if found and found[0] < run else run)
        self.stale.difference_update(lanes)
        for lane in lanes:
            if self.is_action[lane]:
                self.unfed_actions.pop(lane, None)
            else:
                frame, row, column = self.places[lane]
                row += frame * self.height
                self.fed_columns[row] = max(self.fed_columns[row], column + 1)
                self.doubts[lane] = CHANGED if lane in turned else CONFIRMED
        if self.lag:
            self._spread(turned)
        return self.num_verified - before

    def _ahead(self, start: int) -> list[int]:
        """Return lanes from `start` on that are stale or reached by the diagonal."""
        width, opened = self.layout.grid.width, list[int]()
        frame, row, _ = self.places[self.num_verified]
        first = frame * self.height + row
        limit = width  # columns that the row above allows
        for row in range(first, min(first + self.height, len(self.fed_columns))):
            fed, lane = self.fed_columns[row], self.row_starts[row]
            opened += range(lane + fed, lane + min(fed + self.width, limit))
            limit = fed - self.lag if fed < width else width
        last = opened[-1] if opened else 0  # drafts see their actions
        actions = takewhile(lambda lane: lane < last, self.unfed_actions)
        return sorted(lane for lane in chain(opened, self.stale, actions) if lane >= start)

    def _spread(self, lanes: set[int]) -> None:
        """Mark the fed neighbours of changed tokens as stale and uncertain."""
        for lane, (number, (down, right)) in product(lanes, enumerate(NEIGHBOURS)):
            frame, row, column = self.places[lane]
            row, column = row + down, column + right
            if row >= self.height or not 0 <= column < self.layout.grid.width:
                continue
            row += frame * self.height
            near = self.row_starts[row] + column
            if not number:
                self.doubts[near] = max(self.doubts[near], BESIDE_A_CHANGE)
            if near > self.num_verified:
                self.doubts[near] = max(self.doubts[near], STALE)
                if column < self.fed_columns[row]:
                    self.stale.add(near)


class VerifiedStep(NamedTuple):
    """One step of a strategy that checks draft tokens."""

    frame: int  # frame of the first token that was not final, in the whole stream
    row: int
    column: int
    num_lanes: int  # fed
    num_accepted: int  # tokens that became final, including actions


def exact(how: Exact, stream: Stream, layout: SequenceLayout) -> Iterator[NextStep]:
    """Draft, feed and verify until all frames are final."""
    if how.num_lanes is None:
        how = replace(how, num_lanes=best_num_lanes(step_costs(stream)))
    drafts = Drafts(layout, how)
    _draft_first(stream, layout)
    base, first_frame, frame = stream.num_used, stream.num_generated, 0
    lanes = torch.arange(-1, drafts.size - 1)
    outputs = torch.where(torch.tensor(drafts.is_action), SCRATCH, lanes + 1)
    places = torch.tensor(drafts.places).T
    table = stream.place(torch.stack([lanes, lanes, lanes, outputs, 0 * lanes, *places]))
    while drafts.num_verified < drafts.size:
        first = drafts.num_verified
        chosen = drafts.choose()
        step, drafted = _ask(stream, table, chosen, frame)
        yield step
        accepted = drafts.update(chosen, _changed(stream, step, drafted))
        t, i, j = drafts.places[first]
        stream.verified.append(VerifiedStep(first_frame + t, i, j, len(chosen), accepted))
        while drafts.num_verified >= (frame + 1) * layout.slots_per_frame:
            frame += 1
            _draft_next(stream, layout, drafts, frame, base)


def _draft_first(stream: Stream, layout: SequenceLayout) -> None:
    base, of_frame = stream.num_used, layout.slots_per_frame
    slots = stream.slots_between(base - of_frame, base + layout.num_slots)
    visual = slots.view(-1, of_frame)[:, layout.token_slots]
    if layout.context_frames:
        start = stream.tokens[0, visual[0]].repeat(len(visual) - 1)
    else:
        start = stream.ranges.low
    stream.write(visual[1:].flatten(), start)


def _draft_next(
    stream: Stream, layout: SequenceLayout, drafts: Drafts, frame: int, base: int
) -> None:
    if fresh := drafts.unfed(frame):
        positions = torch.tensor(fresh, device=stream.batch.device) + base
        newest = stream.tokens[0, stream.slots_at(positions - layout.slots_per_frame)]
        stream.write(stream.slots_at(positions), newest)


@torch.inference_mode()
def _ask(
    stream: Stream, table: Tensor, chosen: list[int], num_whole: int
) -> tuple[NextStep, Tensor]:
    """Return the step of the chosen lanes, and the drafts (L,) that it replaces."""
    count = len(chosen)
    lanes = table.index_select(2, torch.tensor(chosen))
    lane = Lanes.of(lanes)
    lane.steps.fill_(stream.num_steps)
    end = int(lane.positions[0, -1]) + max(stream.shifts) + 1
    if stream.model.replays:
        padding = lanes[..., :1].repeat(1, 1, padded_width(count) - count)
        of_padding = Lanes.of(padding)
        of_padding.slots.fill_(stream.batch.scratch)
        of_padding.outputs.fill_(stream.batch.scratch)
        lanes = torch.cat([lanes, padding], dim=2)
    device = stream.batch.device
    if stream.model.replays or device.type != "cpu":
        lanes = lanes.to(device)
        lane = Lanes.of(lanes[..., :count])
    stream.feed_at(lane.slots[0], stream.num_steps)
    return NextStep(lanes, count, end, num_whole), stream.tokens[0, lane.outputs[0]]


def _changed(stream: Stream, step: NextStep, drafted: Tensor) -> list[bool]:
    """Return where draws differ from the drafts that they replaced, (L,)."""
    outputs = Lanes.of(step.lanes).outputs[0, : step.num_fed]
    return (stream.tokens[0, outputs] != drafted).cpu().numpy().tolist()


def step_costs(stream: Stream) -> dict[int, float]:
    """Return the seconds of a stream's steps by number of lanes, measured once per model."""
    model = stream.batch.model  # the stream's own may be a new wrapper of it each time
    if model not in _costs:
        _costs[model] = time_steps(partial(_dry_step, stream))
    return _costs[model]


def time_steps(seconds_of: Callable[[int], float]) -> dict[int, float]:
    """Return the seconds of steps by number of lanes, up to the largest that can pay."""
    costs: dict[int, float] = {}
    for num_lanes in TOKENS_PER_STEP:
        costs[num_lanes] = seconds_of(num_lanes)
        best = min(seconds / TOKENS_PER_STEP[lanes] for lanes, seconds in costs.items())
        if costs[num_lanes] > best * max(TOKENS_PER_STEP.values()):
            break
    return costs


def best_num_lanes(costs: dict[int, float]) -> int:
    """Return the number of lanes with the most final tokens per second."""
    return max(costs, key=lambda num_lanes: TOKENS_PER_STEP[num_lanes] / costs[num_lanes])


def _dry_step(stream: Stream, num_lanes: int) -> float:
    """Return the median seconds of invisible steps; the first two compile and capture."""
    zero = torch.zeros(num_lanes, dtype=torch.int64)
    here = zero - 1 if stream.num_used else zero
    # not at scratch, as padding is free in our kernels: at slots not written yet
    ahead = torch.arange(num_lanes) % stream.frame.one.slots_per_frame
    table = stream.place(torch.stack([here, ahead, here, zero + SCRATCH, *[zero] * 4]))
    fed_at, seconds = stream.fed_at.clone(), list[float]()
    for _ in range(REPEATS + 2):
        started = time.perf_counter()
        step, drafted = _ask(stream, table, [*range(num_lanes)], 0)
        stream.batch.run([(stream, step)])
        _changed(stream, step, drafted)
        seconds.append(time.perf_counter() - started)
    stream.fed_at.copy_(fed_at)
    return statistics.median(seconds[2:])
