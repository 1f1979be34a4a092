"""ZipAR with an adaptive window (arXiv:2412.04062): a row starts when more context changes little.

ZipAR starts a row once `window` tokens of the row above exist: the spatial schedule with that
row_lag and spatial stand-ins. Here the first token of a row, once drawn from p, waits for a token
more of the row above, is kept with probability min(1, p'(x) / p(x)) under the new p', and otherwise
drawn from max(0, p' - p) to wait again; it is settled at the latest when the row above is whole.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diagd.decoding.engine import DiagonalEngine
from diagd.decoding.layout import SequenceLayout
from diagd.decoding.plan import Lanes
from diagd.decoding.rules import couple
from diagd.decoding.sampling import truncated_logits
from diagd.decoding.schedule import DiagonalSchedule
from diagd.decoding.visibility import NEVER


@dataclass(frozen=True)
class AdaptiveWindow:
    """ZipAR with an adaptive window, as an option of `generate_tokens`.

    Attributes:
        window: tokens of the row above that a row needs before its first token is drawn.
    """

    window: int


class AdaptiveZipAREngine(DiagonalEngine):
    """A stream of frames, rows in parallel, each started when its first token stands.

    Used as a `DiagonalEngine`; of its schedules only the grid matters.

    Args:
        window: see `AdaptiveWindow`.
        (others): as in `DiagonalEngine`; one batch row, runner eager.

    Raises:
        ValueError: a window out of its range, more rows, or another runner.
    """

    def __init__(self, *args: Any, window: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        width = self.frame.grid.width
        if not 1 <= window <= width:
            raise ValueError(f"window must be in [1, width={width}], got {window}")
        if len(self.tokens) > 1 or self.pad:
            raise ValueError("adaptive ZipAR decodes one batch row with the runner eager")
        self.window = window
        self.probabilities = torch.empty(0)  # (1, L, V) of the last pass
        self.guesses = self.tokens[:, :0]  # (1, L) what stood where the last pass wrote

    def _decode_fitting(
        self, schedule: DiagonalSchedule, actions: Tensor
    ) -> Generator[Tensor, None, None]:
        for t in range(schedule.grid.num_frames):
            layout = self._layout(1, min(self.num_held, 1), self.num_used > 0)
            self._decode_frame(layout, actions[:, t])
            yield self._finish(self.num_used + layout.num_slots)

    @torch.inference_mode()
    def _decode_frame(self, layout: SequenceLayout, actions: Tensor) -> None:
        base, grid = self.num_used, layout.grid
        first = base + layout.num_action_tokens  # slot of the frame's first token
        self.fed_at.fill_(NEVER)
        self.fed_at[:base] = -1
        self.tokens[:, base:first] = actions
        slots = list(range(max(base - 1, 0), first))
        scratch = self.max_slots
        # (position, slot whose token is fed, slot written) of each lane
        lanes = [(slot, slot, first if slot == first - 1 else scratch) for slot in slots]
        written = [0] * grid.height  # tokens of each row that are settled
        drawn_from: dict[int, Tensor] = {}  # rows whose first token waits: (V,)
        while True:
            packed = self._pass(lanes, first)
            for index, (position, source, output) in enumerate(lanes):
                if output == scratch:
                    continue
                row, column = divmod(output - first, grid.width)
                whole = source == position  # nothing more of the row above will come
                if column == 0 and row and not (whole and row not in drawn_from):
                    kept = self._reconsider(packed[:, index : index + 1], index, drawn_from, row)
                    if not (kept or whole):
                        continue
                written[row] = column + 1
            if written[-1] == grid.width:
                return
            lanes = self._next_lanes(written, first)

    def _next_lanes(self, written: list[int], first: int) -> list[tuple[int, int, int]]:
        """Feed the newest token of each row under way; let rows that may start, stand in."""
        width = self.frame.grid.width
        lanes: list[tuple[int, int, int]] = []
        for row, count in enumerate(written):
            start = first + row * width
            below = row + 1 < len(written) and written[row + 1] == 0
            newest = start + count - 1
            if count and (count < width or self.fed_at[newest] == NEVER or below):
                ends = count == width
                output = newest + 1 if not ends or below else self.max_slots
                lanes.append((newest, newest, output))
            if below and self.window <= count < width:
                lanes.append((start + width - 1, newest, start + width))
        return lanes

    def _pass(self, chosen: list[tuple[int, int, int]], first: int) -> Tensor:
        positions, sources, outputs = torch.tensor(chosen).T
        places = (outputs - first) % self.frame.grid.tokens_per_frame
        rows, columns = places // self.frame.grid.width, places % self.frame.grid.width
        steps = torch.full_like(positions, self.num_steps)
        frames = torch.full_like(positions, self.num_generated)
        fields = Lanes(positions, positions, sources, outputs, steps, frames, rows, columns)
        packed = torch.stack(fields).to(self.tokens.device)
        self.fed_at[packed[0, positions == sources]] = self.num_steps
        self.guesses = self.tokens[:, packed[3]]
        self.run(packed, int(positions.max()) + 1)
        self.num_steps += 1
        self.num_fed += len(chosen)
        return packed

    def _reconsider(
        self, lane: Tensor, index: int, drawn_from: dict[int, Tensor], row: int
    ) -> bool:
        """Look again at a first token that waits; return whether it was kept."""
        target = self.probabilities[:, index : index + 1]
        source = drawn_from.get(row)
        drawn_from[row] = target[0, 0]
        if source is None:
            return False  # drawn for the first time in this pass
        guess = self.guesses[:, index : index + 1] - self.ranges.low
        new = couple(target, source[None, None], guess, self.seeds, Lanes(*lane), False)
        self.tokens[:, lane[3]] = new + self.ranges.low
        return bool((new == guess).all())

    def _draw(self, logits: Tensor, lane: Lanes) -> Tensor:
        drawn = super()._draw(logits, lane)
        scores = truncated_logits(logits, self.sampling, self.ranges, lane.rows, lane.columns)
        if self.sampling.temperature == 0:
            ids = (drawn - self.ranges.low)[..., None]
            self.probabilities = torch.zeros_like(scores).scatter_(-1, ids, 1.0)
        else:
            self.probabilities = scores.softmax(-1)
        return drawn
