"""A frame of `AdaptiveZipAR` (arXiv:2412.04062), whose rows start when more context changes little.

ZipAR starts a row once `window` tokens of the row above exist. Here the first token of a row, once
drawn from p, waits for a token more of the row above, is kept with probability min(1, p'(x) / p(x))
under the new p', and otherwise drawn from max(0, p' - p) to wait again; it is settled at the latest
when the row above is whole.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from diagd.decoding.engine import Lanes, Step, Stream
from diagd.decoding.sampling import UNDRAWN, truncated_logits
from diagd.decoding.schedule import SCRATCH, SequenceLayout
from diagd.decoding.strategies.exact import couple
from diagd.decoding.strategies.table import AdaptiveZipAR
from diagd.decoding.visibility import NEVER

# positions: where the lane stands, of the token that is fed, and of the one written, or SCRATCH
_Lane = tuple[int, int, int]


def adaptive(strategy: AdaptiveZipAR, stream: Stream, layout: SequenceLayout) -> Iterator[None]:
    for _ in range(layout.grid.num_frames):
        AdaptiveFrame(stream, layout, strategy.window).write()
        yield


class AdaptiveFrame:
    """One frame under way."""

    def __init__(self, stream: Stream, layout: SequenceLayout, window: int) -> None:
        self.stream, self.grid, self.window = stream, layout.grid, window
        self.first = stream.num_used + layout.num_action_tokens  # position of its first token
        self.written = [0] * self.grid.height  # tokens of each row that are settled
        self.drawn_from: dict[int, Tensor] = {}  # of a row whose first token waits: (V,)
        self.newest = _Remembering()

    @torch.inference_mode()
    def write(self) -> None:
        """Step until the last row is whole."""
        first, width = self.first, self.grid.width
        known = range(max(self.stream.num_used - 1, 0), first)
        lanes = [(at, at, first if at == first - 1 else SCRATCH) for at in known]
        while True:
            before, fields = self._feed(lanes)
            for index, (position, source, output) in enumerate(lanes):
                if output == SCRATCH:
                    continue
                row, column = divmod(output - first, width)
                whole = source == position  # nothing more of the row above will come
                if column == 0 and row and not (whole and row not in self.drawn_from):
                    lane = Lanes.of(fields[:, index : index + 1])
                    kept = self._reconsider(index, lane, before[:, index : index + 1], row)
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
            fed_at = stream.fed_at[stream.slots_between(newest, newest + 1)]
            if count and (count < width or fed_at == NEVER or below):
                output = newest + 1 if count < width or below else SCRATCH
                lanes.append((newest, newest, output))
            if below and self.window <= count < width:
                lanes.append((start + width - 1, newest, start + width))
        return lanes

    def _feed(self, lanes: list[_Lane]) -> tuple[Tensor, Tensor]:
        """Take a step; return (1, L) what stood where it wrote, and its lanes (8, L)."""
        stream = self.stream
        positions, sources, outputs = torch.tensor(lanes).T
        places = (outputs - self.first) % self.grid.tokens_per_frame
        slots, inputs, written = map(stream.slots_at, (positions, sources, outputs))
        steps = torch.full_like(positions, stream.num_steps)
        frames = torch.full_like(positions, stream.num_generated)
        rows, columns = places // self.grid.width, places % self.grid.width
        lane = Lanes(positions, slots, inputs, written, steps, frames, rows, columns)
        fields = torch.stack(lane).to(stream.tokens.device)
        stream.fed_at[lane.slots[positions == sources].to(fields.device)] = stream.num_steps
        before = stream.tokens[:, Lanes.of(fields).outputs]
        stream.feed(fields, len(lanes), int(positions.max()) + 1, self.newest)
        return before, fields

    def _reconsider(self, index: int, lane: Lanes, before: Tensor, row: int) -> bool:
        """Look again at a first token that waits; return whether it was kept."""
        stream = self.stream
        target = self.newest.probabilities[:, index : index + 1]
        source = self.drawn_from.get(row)
        self.drawn_from[row] = target[0, 0]
        if source is None:
            return False  # drawn for the first time in this step
        low = stream.ranges.low
        token = before - low
        draw = stream.step.draw_of(lane)
        new = couple(target, source[None, None], token, draw, lane.steps, afresh=False)
        drawn = stream.tokens[:, lane.outputs]
        stream.tokens[:, lane.outputs] = torch.where(drawn == UNDRAWN, UNDRAWN, new + low)
        return bool((new == token).all())


class _Remembering:
    """Draw as always, and remember from what."""

    probabilities = torch.empty(0)  # (1, L, V) of the newest step

    def __call__(self, step: Step, logits: Tensor, lane: Lanes) -> Tensor:
        drawn, low = step.draw(logits, lane), step.ranges.low
        scores = truncated_logits(logits, step.draw_of(lane))
        if step.sampling.temperature == 0:
            ids = (drawn - low).clamp(min=0)[..., None]
            self.probabilities = torch.zeros_like(scores).scatter_(-1, ids, 1.0)
        else:
            self.probabilities = scores.softmax(-1)
        return drawn
