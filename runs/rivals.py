"""Rivals of exact decoding, built on public names, for the chart that compares them.

    tolerance=1.5   a draft stays that 1.5 times its probability would draw
    sjd  mc-sjd     speculative Jacobi decoding (arXiv:2410.01699), with maximal coupling
                    (arXiv:2510.24211): tokens of raster's distribution, by other noise
    zipar-adaptive  ZipAR whose rows start when more context changes little (arXiv:2412.04062)

Each is a strategy like ours, which looks at the logits of its steps: decode a model with them as
`Watched(model)`. `runs/exact.py` measures them; docs/exact.md says what came of it.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from diagd.decoding.engine import NextStep, Stream
from diagd.decoding.generate_tokens import decode
from diagd.decoding.model import CausalModel, ModelWrapper
from diagd.decoding.sampling import (
    UNDRAWN,
    Draw,
    gumbel_noise,
    if_any_best,
    lowest_id_of,
    truncated_logits,
)
from diagd.decoding.schedule import SCRATCH, SequenceLayout
from diagd.decoding.step import Lanes
from diagd.decoding.strategies.exact import exact
from diagd.decoding.strategies.table import Exact, Strategy, parse_strategy
from diagd.decoding.visibility import NEVER

# lanes (L,) of a step, logits (1, L, V), how they are drawn, drafts (1, L) -> tokens (1, L)
AcceptanceRule = Callable[[Lanes, Tensor, Draw, Tensor], Tensor]
LANES = 32  # what is written depends on the lanes, so that it does not on the machine
_NOISE_STRIDE = 4096  # the noise of a coupling at step n is that of frame n * stride + frame


class Watched(ModelWrapper[CausalModel]):
    """A model that remembers the logits of its newest step, and how they were drawn."""

    def forward(self, *args: Any, **named: Any) -> Tensor:
        self._first, self._newest = named.get("first", args[6] if len(args) > 6 else 0), []
        return self.model.forward(*args, **named)

    def sample(self, logits: Tensor, draw: Draw) -> Tensor:
        self._newest.append((logits, draw))
        return self.model.sample(logits, draw)

    def newest_of(self, stream: Stream, lanes: slice) -> tuple[Tensor, Draw]:
        """Return the logits (1, n, V) of some lanes of a stream, and how they were drawn.

        All streams of the batch are guided alike.
        """
        row = (stream.first - self._first) // stream.num_sequences
        for logits, draw in self._newest:
            if row < len(logits):
                own = slice(row, row + 1)
                places = (field[own, lanes] for field in (draw.frames, draw.rows, draw.columns))
                draw = Draw(draw.options, draw.ranges, draw.seeds[own], *places)
                return logits[own, lanes], draw
            row -= len(logits)
        raise AssertionError("the stream took no part in the newest step")


@dataclass(frozen=True)
class Tolerant(Strategy):
    """`Exact`, but a draft stays that `tolerance` times its probability would have drawn."""

    word, examples = "tolerance", ("tolerance=1.5",)
    tolerance: Annotated[str, "="]
    num_lanes: Annotated[int, ",lanes="] = LANES

    @classmethod
    def read(cls, text: str) -> "Tolerant | None":
        match = re.fullmatch(r"tolerance=([\d.]+)(?:,lanes=(\d+))?", text)
        return match and cls(match[1], int(match[2] or LANES))


@dataclass(frozen=True)
class SpeculativeJacobi(Strategy):
    """Speculative Jacobi decoding; what follows the first change has no regard to its draft."""

    word, examples = "sjd", ("sjd",)
    num_lanes: Annotated[int, ",lanes="] = LANES


@dataclass(frozen=True)
class CoupledJacobi(Strategy):
    """Speculative Jacobi decoding with a maximal coupling."""

    word, examples = "mc-sjd", ("mc-sjd",)
    num_lanes: Annotated[int, ",lanes="] = LANES


@dataclass(frozen=True)
class AdaptiveZipAR(Strategy):
    """Rows in parallel, each started when its first token stands; frame by frame."""

    word, examples = "zipar-adaptive", ("zipar-adaptive=4",)
    window: Annotated[int, "="]  # tokens of the row above, before a row's first is drawn


RIVALS = (Tolerant, SpeculativeJacobi, CoupledJacobi, AdaptiveZipAR)


def parse(text: str) -> Strategy:
    """Read a strategy, of a rival or ours, from its name."""
    found = (rival.read(text) for rival in RIVALS)
    return next((one for one in found if one is not None), None) or parse_strategy(text)


def check_draws(strategy: Strategy, temperature: float) -> None:
    """Refuse, with a ValueError, to decode greedily by what only draws."""
    if temperature == 0 and isinstance(strategy, SpeculativeJacobi | CoupledJacobi):
        raise ValueError(f"{strategy} needs a temperature above 0: greedy decoding draws nothing")


@decode.register
def _(how: Tolerant, stream: Stream, layout: SequenceLayout) -> Iterator[NextStep]:
    steps = exact(Exact(how.num_lanes), stream, layout)
    if (tolerance := float(how.tolerance)) <= 1:
        return steps
    return accepting(steps, stream, KeepWithin(tolerance))


@decode.register(SpeculativeJacobi)
@decode.register(CoupledJacobi)
def _(
    how: SpeculativeJacobi | CoupledJacobi, stream: Stream, layout: SequenceLayout
) -> Iterator[NextStep]:
    check_draws(how, stream.sampling.temperature)
    rule = Coupling(stream, how.num_lanes, afresh=isinstance(how, SpeculativeJacobi))
    return accepting(exact(Exact(how.num_lanes, draft_lag=0), stream, layout), stream, rule)


def accepting(
    steps: Iterator[NextStep], stream: Stream, rule: AcceptanceRule
) -> Iterator[NextStep]:
    """Let a rule say which of the drafts that a step has drawn anew stay."""
    watched = _watched(stream)
    for step in steps:
        lane = Lanes.of(step.lanes[:, 0, : step.num_fed])
        drafts = stream.tokens[:1, lane.outputs]
        yield step
        with torch.inference_mode():
            newest = watched.newest_of(stream, slice(step.num_fed))
            stream.write(lane.outputs, rule(lane, *newest, drafts)[0])


def _watched(stream: Stream) -> Watched:
    if not isinstance(stream.model, Watched):
        raise ValueError("rivals look at logits: give them the model as Watched(model)")
    return stream.model


@dataclass(frozen=True)
class KeepWithin:
    """The rule of `Tolerant`: a draft stays that f times its probability would have drawn.

    Every draw of a place uses that place's noise g, so that is where p(draft) * exp(g(draft)) is at
    least p(draw) * exp(g(draw)) / f (greedy: without g).
    """

    tolerance: float

    def __call__(self, lane: Lanes, logits: Tensor, draw: Draw, drafts: Tensor) -> Tensor:
        low, scores = draw.ranges.low, truncated_logits(logits, draw)
        if draw.options.temperature > 0:
            scores = scores + gumbel_noise(draw, low, draw.ranges.high)
        kept = keep_within(scores, drafts - low, self.tolerance)
        return if_any_best(kept + low, scores.amax(-1))


class Coupling:
    """The rule of speculative Jacobi: `couple`; it remembers what drafts were drawn from.

    Lanes are consecutive, so of so many places no two meet in a step.
    """

    def __init__(self, stream: Stream, num_lanes: int, afresh: bool) -> None:
        self.afresh, device = afresh, stream.tokens.device
        shape = 1, num_lanes, stream.ranges.high - stream.ranges.low
        self.sources = torch.zeros(shape, device=device)
        self.held = torch.full(shape[1:2], -2, device=device)  # the positions of their lanes

    def __call__(self, lane: Lanes, logits: Tensor, draw: Draw, drafts: Tensor) -> Tensor:
        low, scores = draw.ranges.low, truncated_logits(logits, draw)
        target, at = scores.softmax(-1), lane.positions % len(self.held)
        source = self.sources[:, at] * (self.held[at] == lane.positions)[:, None]
        self.sources[:, at], self.held[at] = target, lane.positions
        drawn = couple(target, source, drafts - low, draw, lane.steps, self.afresh) + low
        return if_any_best(drawn, scores.amax(-1))


def keep_within(scores: Tensor, drafts: Tensor, tolerance: float) -> Tensor:
    """Return the best ids, or the drafts (B, L) where they are within log(tolerance) of the best.

    Scores are (B, L, V) float32, log p + noise; a draft out of [0, V) never stays.
    """
    best = scores.amax(-1)
    known = (drafts >= 0) & (drafts < scores.shape[-1])
    score = scores.gather(-1, torch.where(known, drafts, 0)[..., None])[..., 0]
    stays = known & (score >= best - math.log(tolerance))
    return torch.where(stays, drafts, lowest_id_of(best, scores))


def couple(
    target: Tensor, source: Tensor, drafts: Tensor, draw: Draw, steps: Tensor, afresh: bool
) -> Tensor:
    """Turn drafts drawn from `source` into draws from `target`, changing as few as possible.

    A draft x, (B, L) int64, is kept with probability min(1, target(x) / source(x)), else replaced
    by a draw from max(0, target - source); out of [0, V) it never stays. Both are (B, L, V)
    float32; a source of zeros stands for a draft that was not drawn. The noise is that of the steps
    (L,) as well. Drawn `afresh`, what follows the first change has no regard to its draft.
    """
    size = target.shape[-1]
    known = (drafts >= 0) & (drafts < size)
    ids = torch.where(known, drafts, 0)[..., None]
    certain = torch.zeros_like(source).scatter_(-1, ids, 1.0)
    source = torch.where(source.sum(-1, keepdim=True) > 0, source, certain)
    frames = draw.frames + (steps + 1) * _NOISE_STRIDE
    noise = gumbel_noise(replace(draw, frames=frames), 0, size + 1)
    uniform = torch.exp(-torch.exp(-noise[..., size]))
    keep = known & (uniform * source.gather(-1, ids)[..., 0] < target.gather(-1, ids)[..., 0])
    after = (~keep).cumsum(-1) - (~keep).long() > 0 if afresh else torch.zeros_like(keep)
    residual = (target - source).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)  # uniform was 1
    weights = torch.where(after[..., None], target, residual)
    drawn = (weights.log() + noise[..., :size]).argmax(-1)
    return torch.where(keep & ~after, drafts, drawn)


@decode.register
def _(how: AdaptiveZipAR, stream: Stream, layout: SequenceLayout) -> Iterator[NextStep]:
    if layout.num_seam_tokens:
        raise ValueError(f"{how} decodes frames of one image")
    base, frame = stream.num_used, stream.num_generated
    for number in range(layout.grid.num_frames):
        start = base + number * layout.slots_per_frame
        yield from AdaptiveFrame(stream, layout, how.window, start, frame + number).steps(number)


# positions: where the lane stands, of the token that is fed, and of the one written, or SCRATCH
_Lane = tuple[int, int, int]


class AdaptiveFrame:
    """One frame of `AdaptiveZipAR` under way.

    The first token of a row, once drawn from p, waits for a token more of the row above, is kept
    with probability min(1, p'(x) / p(x)) under the new p', and otherwise drawn from max(0, p' - p)
    to wait again; it is settled at the latest when the row above is whole.
    """

    def __init__(
        self, stream: Stream, layout: SequenceLayout, window: int, start: int, frame: int
    ) -> None:
        self.stream, self.grid, self.window = stream, layout.grid, window
        self.start, self.frame = start, frame  # position of its first slot; number in the stream
        self.first = start + layout.num_action_tokens  # position of its first token
        self.written = [0] * self.grid.height  # tokens of each row that are settled
        self.drawn_from: dict[int, Tensor] = {}  # of a row whose first token waits: (V,)

    def steps(self, num_whole: int) -> Iterator[NextStep]:
        """Step until the last row is whole."""
        first, width, stream = self.first, self.grid.width, self.stream
        known = range(max(self.start - 1, 0), first)
        lanes = [(at, at, first if at == first - 1 else SCRATCH) for at in known]
        while True:
            fields = self._fields(lanes)
            lane = Lanes.of(fields[:, 0])
            before = stream.tokens[:1, lane.outputs]
            yield NextStep(fields, len(lanes), max(at for at, _, _ in lanes) + 1, num_whole)
            probabilities, draw = self._newest(len(lanes))
            for index, (position, source, output) in enumerate(lanes):
                if output == SCRATCH:
                    continue
                row, column = divmod(output - first, width)
                whole = source == position  # nothing more of the row above will come
                if column == 0 and row and not (whole and row not in self.drawn_from):
                    at = slice(index, index + 1)
                    one, alone = Lanes.of(fields[:, 0, at]), _draw_of(draw, at)
                    kept = self._reconsider(one, alone, probabilities[:, at], before[:, at], row)
                    if not (kept or whole):
                        continue
                self.written[row] = column + 1
            if self.written[-1] == width:
                return
            lanes = self._next_lanes()

    def _next_lanes(self) -> list[_Lane]:
        """Feed the newest token of each row under way; let rows that may start, stand in."""
        width, written, stream = self.grid.width, self.written, self.stream
        lanes: list[_Lane] = []
        for row, count in enumerate(written):
            start = self.first + row * width
            below = row + 1 < len(written) and written[row + 1] == 0
            newest = start + count - 1
            fed_at = stream.fed_at[0, stream.slots_between(newest, newest + 1)]
            if count and (count < width or fed_at == NEVER or below):
                output = newest + 1 if count < width or below else SCRATCH
                lanes.append((newest, newest, output))
            if below and self.window <= count < width:
                lanes.append((start + width - 1, newest, start + width))
        return lanes

    @torch.inference_mode()
    def _fields(self, lanes: list[_Lane]) -> Tensor:
        """Return lanes (8, sequences, L), and hide what they do not write from earlier ones."""
        stream = self.stream
        positions, sources, outputs = torch.tensor(lanes).T
        places = (outputs - self.first) % self.grid.tokens_per_frame
        steps = torch.full_like(positions, stream.num_steps)
        frames = torch.full_like(positions, self.frame - stream.num_generated)
        rows, columns = places // self.grid.width, places % self.grid.width
        at, inputs = positions - stream.num_used, sources - stream.num_used
        written = torch.where(outputs == SCRATCH, SCRATCH, outputs - stream.num_used)
        fields = Lanes(at, at, inputs, written, steps, frames, rows, columns)
        placed = stream.place(torch.stack(fields[:8])).to(stream.tokens.device)
        slots = Lanes.of(placed).slots[0]
        stream.feed_at(slots[(positions == sources).to(slots.device)], stream.num_steps)
        return placed

    def _newest(self, count: int) -> tuple[Tensor, Draw]:
        """Return what the first lanes of the newest step drew from: (1, count, V)."""
        logits, draw = _watched(self.stream).newest_of(self.stream, slice(count))
        scores = truncated_logits(logits, draw)
        if draw.options.temperature == 0:
            best = lowest_id_of(scores.amax(-1), scores)[..., None]
            return torch.zeros_like(scores).scatter_(-1, best, 1.0), draw
        return scores.softmax(-1), draw

    @torch.inference_mode()
    def _reconsider(
        self, lane: Lanes, draw: Draw, target: Tensor, before: Tensor, row: int
    ) -> bool:
        """Look again at a first token that waits; return whether it was kept."""
        stream, low = self.stream, draw.ranges.low
        source = self.drawn_from.get(row)
        self.drawn_from[row] = target[0, 0]
        if source is None:
            return False  # drawn for the first time in this step
        token = before - low
        new = couple(target, source[None, None], token, draw, lane.steps, afresh=False)
        drawn = stream.tokens[:1, lane.outputs]
        stream.write(lane.outputs, torch.where(drawn == UNDRAWN, UNDRAWN, new + low)[0])
        return bool((new == token).all())


def _draw_of(draw: Draw, at: slice) -> Draw:
    """Return the draw of some of its lanes."""
    frames, rows, columns = (of[:, at] for of in (draw.frames, draw.rows, draw.columns))
    return replace(draw, frames=frames, rows=rows, columns=columns)
