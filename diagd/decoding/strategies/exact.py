"""How drafts fare on a model, by measurement: what choosing lanes is tuned by, and nothing else.

Wrong numbers cost speed, never tokens.
"""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice, product, takewhile
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from diagd.decoding.engine import DrawRule, Step, Stream, VerifiedStep
from diagd.decoding.plan import SCRATCH, Lanes, padded_width
from diagd.decoding.sampling import gumbel_noise, if_any_best, lowest_id_of, truncated_logits
from diagd.decoding.schedule import SequenceLayout


@dataclass(frozen=True)
class DraftStatistics:
    """What was measured on one model.

    Attributes:
        source: which model, and where the measurement is told.
        tokens_per_step: pairs of most lanes in a step and tokens that become final in it.
        draft_lag, drafted_lanes: the best lag of drafts, and the lanes above which none pay.
        neighbours: rows down and columns right of a token whose draws are likely to change when it
            does; the first is the one to its right.
        fresh, beside_a_change, stale, changed, confirmed: how often a draw at the verified prefix
            differs from its draft, by what happened to the draft last: nothing yet; the token to
            its left changed with it or since; another neighbour did; it changed itself; it was
            confirmed.
        least_survival: chance of a lane being reached, below which it is not fed there.
        draft_share: most of a step's lanes that draft ahead.
    """

    source: str
    tokens_per_step: tuple[tuple[int, float], ...]
    draft_lag: int
    drafted_lanes: int
    neighbours: tuple[tuple[int, int], ...]
    fresh: float
    beside_a_change: float
    stale: float
    changed: float
    confirmed: float
    least_survival: float
    draft_share: float

    @property
    def num_lanes(self) -> tuple[int, ...]:
        """The lanes that were tried."""
        return tuple(lanes for lanes, _ in self.tokens_per_step)


BUNDLED = DraftStatistics(
    source="the bundled model at temperature 1 on ViZDoom clips; docs/log.md, exact decoding",
    tokens_per_step=(
        (1, 1.0),
        (8, 2.9),
        (12, 3.64),
        (16, 4.36),
        (24, 5.44),
        (32, 6.32),
        (40, 7.16),
        (96, 9.11),
        (192, 10.77),
    ),
    draft_lag=2,
    drafted_lanes=40,
    neighbours=((0, 1), (0, 2), (1, -1), (1, 0), (1, 1), (2, 0)),
    fresh=0.92,
    beside_a_change=0.45,
    stale=0.1,
    changed=0.07,
    confirmed=0.02,
    least_survival=0.3,
    draft_share=0.7,
)


DryStep = Callable[[int], object]
Clock = Callable[[DryStep, int], float]
REPEATS = 5
_MEASURED: WeakKeyDictionary[object, dict[Hashable, dict[int, float]]] = WeakKeyDictionary()


def median_seconds(dry_step: DryStep, num_lanes: int) -> float:
    """Return the median seconds of a step, the first two left out (they compile and capture)."""
    seconds: list[float] = []
    for _ in range(REPEATS + 2):
        started = time.perf_counter()
        dry_step(num_lanes)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def measure_costs(
    model: object, kind: Hashable, dry_step: DryStep, clock: Clock = median_seconds
) -> dict[int, float]:
    """Time steps of 1 lane and more, until no more lanes can pay: {lanes: seconds}.

    Args:
        model: measured once in a process for each `kind` of step.
        dry_step: does all that a step of so many lanes does, waits for it, and leaves no trace.
    """
    measured = _MEASURED.setdefault(model, {})
    if kind not in measured:
        costs: dict[int, float] = {}
        tokens = dict(BUNDLED.tokens_per_step)
        for num_lanes in BUNDLED.num_lanes:
            costs[num_lanes] = clock(dry_step, num_lanes)
            least = min(seconds / tokens[lanes] for lanes, seconds in costs.items())
            if costs[num_lanes] > least * max(tokens.values()):
                break
        measured[kind] = costs
    return measured[kind]


def best_num_lanes(costs: dict[int, float]) -> int:
    """Return the lanes with the most final tokens a second, if drafts fare as `BUNDLED` says.

    Args:
        costs: {lanes: seconds of a step}.
    """
    tokens = dict(BUNDLED.tokens_per_step)
    return max(costs, key=lambda num_lanes: tokens[num_lanes] / costs[num_lanes])


class Drafts:
    """What is known of every lane of a generation: fed or not, stale or not, verified or not.

    Args:
        layout: of the generation.
        batch_size: rows; they share lanes, so the slowest one sets the pace.
        num_lanes: most lanes of a step.
        lag: columns that a row's drafts keep behind those of the row above; 0 drafts nothing ahead
            and fills the step with the lanes behind the prefix (plain Jacobi decoding). None is
            the best by the statistics.
        width: columns that a row's drafts advance in a step.

    Attributes:
        size: lanes of the generation.
        verified: of each row of the batch, how many lanes are final.
        num_verified: lanes that are final in every one.
        fed_columns: of each row of tokens, all frames' in turn, how many were fed, from its left.
        stale: lanes that were fed, and are to be fed again.
    """

    def __init__(
        self,
        layout: SequenceLayout,
        batch_size: int,
        num_lanes: int,
        lag: int | None,
        width: int = 3,
    ) -> None:
        if lag is None:
            lag = BUNDLED.draft_lag if num_lanes <= BUNDLED.drafted_lanes else 0
        self.layout, self.num_lanes, self.lag, self.width = layout, num_lanes, lag, width
        self.size, self.height = layout.num_slots, layout.grid.height
        self.num_verified = 0 if layout.has_prompt else 1
        self.verified = [self.num_verified] * batch_size
        self.fed_columns = [0] * (layout.grid.num_frames * self.height)
        self.stale: set[int] = set()
        self.places = [self._place(lane) for lane in range(self.size)]
        inside = (lane % layout.slots_per_frame for lane in range(self.size))
        self.is_action = [within < layout.num_action_tokens for within in inside]
        self.unfed_actions = dict.fromkeys(compress(range(self.size), self.is_action))  # in order
        # chances that a draw will change its draft
        self.doubts = [0.0 if is_action else BUNDLED.fresh for is_action in self.is_action]

    @property
    def is_done(self) -> bool:
        """Whether all tokens are final."""
        return self.num_verified >= self.size

    def unfed(self, frame: int) -> list[int]:
        """Return the lanes of a frame's tokens that were not fed; none behind the last frame."""
        rows = islice(enumerate(self.fed_columns), frame * self.height, (frame + 1) * self.height)
        width = self.layout.grid.width
        return [self._first_of(row) + j for row, fed in rows for j in range(fed, width)]

    def choose(self) -> list[int]:
        """Return the lanes of the next step, ascending, at least one and at most num_lanes."""
        first = self.num_verified
        most = min(first + self.num_lanes, self.size)
        if not self.lag:
            return list(range(first, most))
        end, survival = first + 1, 1.0
        while end < most:
            survival *= 1 - self.doubts[end - 1]
            if survival <= BUNDLED.least_survival:
                break
            end += 1
        room = min(self.num_lanes - (end - first), int(self.num_lanes * BUNDLED.draft_share))
        return [*range(first, end), *self._ahead(end)[:room]]

    def update(self, lanes: Sequence[int], changed: Sequence[Sequence[bool]]) -> int:
        """Take in a step: let the prefix grow, and mark who has become stale.

        Args:
            lanes: what `choose` returned.
            changed: of each row of the batch and lane, whether a draw differs from the draft it
                replaces.

        Returns:
            Lanes by which the slowest row advanced.
        """
        before, turned = self.num_verified, set[int]()
        run = next((i for i, lane in enumerate(lanes) if lane != before + i), len(lanes))
        for b, of_row in enumerate(changed):
            found = [
                i
                for i, lane in enumerate(lanes)
                if of_row[i] and lane >= self.verified[b] and not self.is_action[lane]
            ]
            turned.update(lanes[i] for i in found)
            accepted = found[0] + 1 if found and found[0] < run else run
            self.verified[b] = max(self.verified[b], before + accepted)
        self.num_verified = min(self.verified)
        self.stale.difference_update(lanes)
        for lane in lanes:
            if self.is_action[lane]:
                self.unfed_actions.pop(lane, None)
            else:
                frame, row, column = self.places[lane]
                row += frame * self.height
                self.fed_columns[row] = max(self.fed_columns[row], column + 1)
                self.doubts[lane] = BUNDLED.changed if lane in turned else BUNDLED.confirmed
        if self.lag:
            self._spread(turned)
        return self.num_verified - before

    def _ahead(self, start: int) -> list[int]:
        """Return lanes from `start` on that are stale or that the diagonal has reached."""
        width, opened = self.layout.grid.width, list[int]()
        frame, row, _ = self.places[self.num_verified]
        first = frame * self.height + row
        limit = width  # columns that the row above leaves free
        for row in range(first, min(first + self.height, len(self.fed_columns))):
            fed, lane = self.fed_columns[row], self._first_of(row)
            opened += range(lane + fed, lane + min(fed + self.width, limit))
            limit = fed - self.lag if fed < width else width
        last = opened[-1] if opened else 0  # drafts see their actions
        actions = takewhile(lambda lane: lane < last, self.unfed_actions)
        return sorted(lane for lane in chain(opened, self.stale, actions) if lane >= start)

    def _spread(self, lanes: set[int]) -> None:
        """Let the fed neighbours of tokens that changed be stale, and doubted."""
        width = self.layout.grid.width
        for lane, (number, (down, right)) in product(lanes, enumerate(BUNDLED.neighbours)):
            frame, row, column = self.places[lane]
            row, column, near = row + down, column + right, lane + down * width + right
            if row >= self.height or not 0 <= column < width:
                continue
            if not number:
                self.doubts[near] = max(self.doubts[near], BUNDLED.beside_a_change)
            if near > self.num_verified:
                self.doubts[near] = max(self.doubts[near], BUNDLED.stale)
                if column < self.fed_columns[frame * self.height + row]:
                    self.stale.add(near)

    def _first_of(self, row: int) -> int:
        """Return the lane of a row's first token."""
        frame, i = divmod(row, self.height)
        before = frame * self.layout.slots_per_frame + self.layout.num_action_tokens
        return before + i * self.layout.grid.width

    def _place(self, lane: int) -> tuple[int, int, int]:
        """Return frame, row and column of what a lane writes: row 0 and column 0 of actions."""
        frame, within = divmod(lane, self.layout.slots_per_frame)
        row, column = divmod(max(0, within - self.layout.num_action_tokens), self.layout.grid.width)
        return frame, row, column


_FRAMES = 4096  # the noise of step n is that of frame n * _FRAMES + frame


def keep_within(scores: Tensor, drafts: Tensor, tolerance: float) -> Tensor:
    """Return the best ids, or the drafts where their score is within log(tolerance) of the best.

    Args:
        scores: (B, L, V) float32, log p + noise. drafts: (B, L) int64; out of [0, V) never stays.

    Returns:
        (B, L) int64.
    """
    best = scores.amax(-1)
    known = (drafts >= 0) & (drafts < scores.shape[-1])
    score = scores.gather(-1, torch.where(known, drafts, 0)[..., None])[..., 0]
    stays = known & (score >= best - math.log(tolerance))
    return torch.where(stays, drafts, lowest_id_of(best, scores))


def couple(
    target: Tensor, source: Tensor, drafts: Tensor, seeds: Tensor, lane: Lanes, afresh: bool
) -> Tensor:
    """Turn drafts drawn from `source` into draws from `target`, changing as few as possible.

    Args:
        target, source: (B, L, V) float32 probabilities; a source of zeros stands for a draft that
            was not drawn.
        drafts: (B, L) int64; out of [0, V) never stays.
        seeds: (B,) int64.
        afresh: draw what follows the first change without regard to its draft.

    Returns:
        (B, L) int64.
    """
    size = target.shape[-1]
    known = (drafts >= 0) & (drafts < size)
    ids = torch.where(known, drafts, 0)[..., None]
    certain = torch.zeros_like(source).scatter_(-1, ids, 1.0)
    source = torch.where(source.sum(-1, keepdim=True) > 0, source, certain)
    frames = lane.frames + (lane.steps + 1) * _FRAMES
    noise = gumbel_noise(seeds, frames, lane.rows, lane.columns, 0, size + 1)
    uniform = torch.exp(-torch.exp(-noise[..., size]))
    keep = known & (uniform * source.gather(-1, ids)[..., 0] < target.gather(-1, ids)[..., 0])
    after = (~keep).cumsum(-1) - (~keep).long() > 0 if afresh else torch.zeros_like(keep)
    residual = (target - source).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)  # uniform was 1
    weights = torch.where(after[..., None], target, residual)
    drawn = (weights.log() + noise[..., :size]).argmax(-1)
    return torch.where(keep & ~after, drafts, drawn)


@dataclass(frozen=True)
class KeepWithin:
    """The rule of `Tolerant`: `keep_within`."""

    tolerance: float

    def __call__(self, step: Step, logits: Tensor, lane: Lanes) -> Tensor:
        low, high = step.ranges.low, step.ranges.high
        scores = truncated_logits(logits, step.sampling, step.ranges, lane.rows, lane.columns)
        if step.sampling.temperature > 0:
            places = lane.frames, lane.rows, lane.columns
            scores = scores + gumbel_noise(step.space.seeds, *places, low, high)
        drafts = step.space.tokens[:, lane.outputs] - low
        return if_any_best(keep_within(scores, drafts, self.tolerance) + low, scores.amax(-1))


class Coupling:
    """The rule of `SpeculativeJacobi`: `couple`; it remembers what drafts were drawn from."""

    def __init__(self, stream: Stream, afresh: bool) -> None:
        self.afresh = afresh
        shape = *stream.tokens.shape, stream.ranges.high - stream.ranges.low
        self.sources = torch.zeros(shape, device=stream.tokens.device)  # (B, slots, V)

    def __call__(self, step: Step, logits: Tensor, lane: Lanes) -> Tensor:
        low, space = step.ranges.low, step.space
        scores = truncated_logits(logits, step.sampling, step.ranges, lane.rows, lane.columns)
        drafts = space.tokens[:, lane.outputs] - low
        target, source = scores.softmax(-1), self.sources[:, lane.outputs]
        self.sources.index_copy_(1, lane.outputs, target)
        drawn = couple(target, source, drafts, space.seeds, lane, self.afresh) + low
        return if_any_best(drawn, scores.amax(-1))


def verify_frames(
    stream: Stream, layout: SequenceLayout, drafts: Drafts, rule: DrawRule | None = None
) -> Iterator[None]:
    """Draft, feed and confirm until all frames are final; yield as each becomes so.

    Args:
        drafts: of this layout, nothing fed.
        rule: what becomes of a draft token; None replaces it by the draw of its place.
    """
    _draft_first(stream, layout)
    table, first_frame, frame = _table(stream, layout), stream.num_generated, 0
    while not drafts.is_done:
        first = drafts.num_verified
        lanes = drafts.choose()
        changed = _feed(stream, table, lanes, drafts.verified, rule)
        accepted = drafts.update(lanes, changed)
        t, i, j = drafts.places[first]
        stream.verified.append(VerifiedStep(first_frame + t, i, j, len(lanes), accepted))
        while drafts.num_verified >= (frame + 1) * layout.slots_per_frame:
            frame += 1
            _draft_next(stream, layout, drafts, frame)
            yield


def step_costs(stream: Stream) -> dict[int, float]:
    """Return the seconds of a step by its lanes (see `costs`); between frames."""
    zero = torch.zeros(1, dtype=torch.int64)
    here, scratch = zero + max(stream.num_used, 1) - 1, zero + stream.scratch
    lane = Lanes(here, scratch, stream.slots_at(here), scratch, zero, zero, zero, zero)
    table, verified = torch.stack(lane), [0] * stream.batch_size

    def dry_step(num_lanes: int) -> None:
        _feed(stream, table, [0] * num_lanes, verified, None)

    before = stream.num_steps, stream.num_fed, stream.fed_at.clone()
    costs = measure_costs(stream.model, (stream.batch_size, stream.runner), dry_step)
    stream.num_steps, stream.num_fed, fed_at = before
    stream.fed_at.copy_(fed_at)
    return costs


@torch.inference_mode()
def _draft_first(stream: Stream, layout: SequenceLayout) -> None:
    """Let the newest frame be the first draft of all frames."""
    base, num_actions, grid = stream.num_used, layout.num_action_tokens, layout.grid
    slots = stream.slots_between(base, base + layout.num_slots)
    visual = slots.view(-1, layout.slots_per_frame)[:, num_actions:]
    if layout.context_frames:
        newest = stream.tokens[:, stream.slots_between(base - grid.tokens_per_frame, base)]
        stream.tokens[:, visual] = newest[:, None]
    else:
        stream.tokens[:, visual] = stream.ranges.low


@torch.inference_mode()
def _draft_next(stream: Stream, layout: SequenceLayout, drafts: Drafts, frame: int) -> None:
    """Let drafts of a frame that no draw has replaced be the frame before, which is now final."""
    fresh = drafts.unfed(frame)
    if fresh:
        base = stream.num_used - (frame - 1) * layout.slots_per_frame
        positions = torch.tensor(fresh, device=stream.tokens.device) + base
        newest = stream.tokens[:, stream.slots_at(positions - layout.slots_per_frame)]
        stream.tokens[:, stream.slots_at(positions)] = newest


@torch.inference_mode()
def _feed(
    stream: Stream,
    table: Tensor,
    chosen: list[int],
    verified: list[int],
    rule: DrawRule | None,
) -> list[list[bool]]:
    """Feed lanes, replace drafts by draws, and return (B, L) where they differ.

    Args:
        table: (8, all lanes) on the CPU, the fields of `Lanes`.
        verified: lanes of each row of the batch that are final.
    """
    count, indices = len(chosen), torch.tensor(chosen)
    lanes = table[:, indices]
    lane = Lanes.of(lanes)
    lane.steps.fill_(stream.num_steps)
    end = int(lane.positions[-1]) + 1
    if stream.pad:
        padding = lanes[:, :1].repeat(1, padded_width(count) - count)
        of_padding = Lanes.of(padding)
        of_padding.slots.fill_(stream.scratch)
        of_padding.outputs.fill_(stream.scratch)
        lanes = torch.cat([lanes, padding], dim=1)
    lanes = lanes.to(stream.tokens.device)
    lane = Lanes.of(lanes[:, :count])
    stream.fed_at[lane.slots] = stream.num_steps
    drafted = stream.tokens[:, lane.outputs]
    stream.feed(lanes, count, end, rule)
    drawn = stream.tokens[:, lane.outputs]
    if len(verified) > 1:  # what is final in a row stays, though other rows are behind
        final = (indices < torch.tensor(verified)[:, None]).to(drawn.device)
        drawn = torch.where(final, drafted, drawn)
        stream.tokens[:, lane.outputs] = drawn
    return (drawn != drafted).cpu().numpy().tolist()


def _table(stream: Stream, layout: SequenceLayout) -> Tensor:
    """Return (8, all lanes) int64 on the CPU, the fields of `Lanes`."""
    lanes = torch.arange(layout.num_slots)
    positions, zero = lanes + stream.num_used - 1, torch.zeros_like(lanes)
    within = lanes % layout.slots_per_frame - layout.num_action_tokens
    cells = within.clamp(min=0)
    slots = stream.slots_at(positions)
    outputs = torch.where(within < 0, SCRATCH, positions + 1)
    fields = Lanes(
        positions=positions,
        slots=slots,
        inputs=slots,
        outputs=stream.slots_at(outputs),
        steps=zero,
        frames=lanes // layout.slots_per_frame + stream.num_generated,
        rows=cells // layout.grid.width,
        columns=cells % layout.grid.width,
    )
    return torch.stack(fields)
