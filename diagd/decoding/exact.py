"""Decode the raster video, token for token, in fewer passes.

The noise of a draw is bound to its place, so the raster sample is the fixed point of "guess, feed
all guesses causally, draw again". A pass feeds guesses at the front and drafts ahead of it (see
`diagd.decoding.frontier`); a draw replaces the guess it was to confirm. What stands before the
first change is final, for it was drawn after final tokens only: at least one token a pass (Jacobi
decoding, arXiv:2305.10427, with noise bound to the place). Keys and values of final tokens stay,
the others are overwritten.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from diagd.decoding.costs import best_num_lanes, measure_costs
from diagd.decoding.engine import DiagonalEngine
from diagd.decoding.frontier import Frontier
from diagd.decoding.layout import SequenceLayout
from diagd.decoding.plan import Lanes
from diagd.decoding.rules import Rule, couple, keep_within
from diagd.decoding.sampling import gumbel_noise, truncated_logits
from diagd.decoding.schedule import DiagonalSchedule
from diagd.decoding.visibility import NEVER

_POSITIONS, _SLOTS, _OUTPUTS, _STEPS = map(
    Lanes._fields.index, ("positions", "slots", "outputs", "steps")
)
DRAFT_LAG, DRAFTED_LANES = 2, 40  # the best of those tried on the bundled model (docs/exact.md)


@dataclass(frozen=True)
class ExactOptions:
    """How exact decoding spends its passes, and how guesses are confirmed.

    With the rule `coupled` and tolerance 1, the default, what is written depends on none of these.

    Attributes:
        num_lanes: most lanes of a pass; None measures what a pass costs here, and chooses.
        draft_lag: columns that the drafts of a row keep behind those of the row above; 0 drafts
            nothing: all lanes are at the front, one after the other (plain Jacobi decoding). None
            is `DRAFT_LAG` up to `DRAFTED_LANES` lanes and 0 above, where drafts stop to pay.
        draft_width: columns by which the drafts of a row advance in a pass.
        rule: what becomes of a guess (see `diagd.decoding.rules`).
        tolerance: factor by which a guess may be less likely than the draw it replaces, at least 1;
            1 is exact.
    """

    num_lanes: int | None = None
    draft_lag: int | None = None
    draft_width: int = 3
    rule: Rule = "coupled"
    tolerance: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("num_lanes", 1), ("draft_lag", 0), ("draft_width", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.rule not in get_args(Rule):
            raise ValueError(f"rule must be one of {', '.join(get_args(Rule))}, got {self.rule!r}")
        if not 1 <= self.tolerance < float("inf"):
            raise ValueError(f"tolerance must be at least 1 and finite, got {self.tolerance}")
        if self.rule != "coupled" and (self.draft_lag != 0 or self.tolerance != 1):
            raise ValueError(f"rule {self.rule} needs draft_lag 0 and tolerance 1")


@dataclass(frozen=True)
class Pass:
    """One pass of exact decoding.

    Attributes:
        frame, row, column: the token that the slowest batch row waited for; the frame counts from
            the start of the stream.
        num_lanes: lanes fed.
        num_accepted: tokens that became final (actions included).
    """

    frame: int
    row: int
    column: int
    num_lanes: int
    num_accepted: int


class ExactEngine(DiagonalEngine):
    """A stream of frames, each equal to what the raster schedule writes with the same seed.

    Used as a `DiagonalEngine`; of its schedules only the number of frames matters (unless
    `follows_schedules` is set: then it is a `DiagonalEngine` until that is taken back). Frames
    overlap wherever their actions are known. Batch rows share their lanes, so the slowest sets the
    pace.

    Equal means bit for bit where the model gives a lane the same logits whoever shares its pass, as
    the native kernels do. Elsewhere rounding may turn a tie.

    Args:
        options: how passes are spent.
        (others): as in `DiagonalEngine`, with any row_start, for nothing stands in here.

    Raises:
        ValueError: a speculative rule with temperature 0, where there is nothing to speculate on,
            or with a runner that may run a pass twice (to capture it).
    """

    def __init__(self, *args: Any, options: ExactOptions | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = options or ExactOptions()
        if self.options.rule != "coupled" and (self.sampling.temperature == 0 or self.pad):
            raise ValueError(f"rule {self.options.rule} needs temperature above 0, runner eager")
        self.num_lanes = self.options.num_lanes or 0  # 0: measured before the first pass
        self.drafted: Tensor | None = None  # (B, slots, V) what guesses were drawn from
        if self.options.rule != "coupled":
            shape = *self.tokens.shape, self.ranges.high - self.ranges.low
            self.drafted = torch.zeros(shape, device=self.tokens.device)
        self.passes: list[Pass] = []  # since the prefill
        self.follows_schedules = False

    def prefill(self, prompt: Tensor, context_frames: int = 1) -> None:
        """Start the stream from a prompt (see `DiagonalEngine.prefill`)."""
        super().prefill(prompt, context_frames)
        self.passes = []

    def measure_costs(self) -> dict[int, float]:
        """Return the seconds of a pass by its lanes (see `decoding.costs`); between frames."""
        here = max(self.num_used, 1) - 1
        scratch = self.max_slots
        place = here, scratch, here, scratch, 0, 0, 0, 0  # the fields of `Lanes`
        table, fronts = torch.tensor(place)[:, None], np.zeros(len(self.tokens), np.int64)

        def dry_pass(num_lanes: int) -> None:
            self._pass(table, np.zeros(num_lanes, np.int64), fronts)

        return measure_costs(self.model, (len(self.tokens), self.pad), dry_pass)

    def _decode_fitting(
        self, schedule: DiagonalSchedule, actions: Tensor
    ) -> Generator[Tensor, None, None]:
        if self.follows_schedules:
            yield from super()._decode_fitting(schedule, actions)
            return
        base, options = self.num_used, self.options
        layout = self._layout(schedule.grid.num_frames, min(self.num_held, 1), base > 0)
        self.num_lanes = self.num_lanes or best_num_lanes(self.measure_costs())
        self._guess(layout, actions)
        draft_lag = options.draft_lag
        if draft_lag is None:
            draft_lag = DRAFT_LAG if self.num_lanes <= DRAFTED_LANES else 0
        frontier = Frontier(
            layout, len(self.tokens), self.num_lanes, draft_lag, options.draft_width
        )
        table = self._table(frontier)
        first_frame, frame = self.num_generated, 0
        while not frontier.is_done:
            front = frontier.front
            lanes = frontier.choose()
            changed = self._pass(table, lanes, frontier.fronts)
            accepted = frontier.update(lanes, changed)
            self.num_steps += 1
            self.num_fed += len(lanes)
            t, i, j = (int(of[front]) for of in (frontier.frames, frontier.rows, frontier.columns))
            self.passes.append(Pass(first_frame + t, i, j, len(lanes), accepted))
            while frontier.front >= (frame + 1) * layout.slots_per_frame:
                frame += 1
                end = base + frame * layout.slots_per_frame
                self._copy_frame(frontier, end, frame)
                yield self._finish(end)

    @torch.inference_mode()
    def _guess(self, layout: SequenceLayout, actions: Tensor) -> None:
        """Put actions and first guesses (the newest frame's tokens) behind the slots in use."""
        base, grid = self.num_used, layout.grid
        if self.drafted is not None:
            self.drafted.zero_()
        end = base + layout.num_slots
        self.fed_at.fill_(NEVER)
        self.fed_at[:base] = -1
        frames = self.tokens[:, base:end].view(len(self.tokens), -1, layout.slots_per_frame)
        frames[:, :, : layout.num_action_tokens] = actions
        visual = frames[:, :, layout.num_action_tokens :]
        if layout.context_frames:
            visual[:] = self.tokens[:, None, base - grid.tokens_per_frame : base]
        else:
            visual[:] = self.ranges.low

    def _copy_frame(self, frontier: Frontier, end: int, frame: int) -> None:
        """Let guesses of the next frame that no draft has replaced be the frame just finished."""
        cells = frontier.cells[frame * self.frame.grid.height :][: self.frame.grid.height]
        fresh = cells[~frontier.is_fed[cells]]
        if len(fresh):
            base = end - frame * self.frame.slots_per_frame
            slots = torch.as_tensor(fresh).to(self.tokens.device) + base
            self.tokens[:, slots] = self.tokens[:, slots - self.frame.slots_per_frame]

    def _draw(self, logits: Tensor, lane: Lanes) -> Tensor:
        """Draw, or keep the guess where the rule lets it stay."""
        if self.options.rule == "coupled" and self.options.tolerance == 1:
            return super()._draw(logits, lane)
        low, high = self.ranges.low, self.ranges.high
        scores = truncated_logits(logits, self.sampling, self.ranges, lane.rows, lane.columns)
        guesses = self.tokens[:, lane.outputs] - low
        if self.drafted is not None:
            target = scores.softmax(-1)
            source = self.drafted[:, lane.outputs]
            self.drafted.index_copy_(1, lane.outputs, target)
            afresh = self.options.rule == "sjd"
            return couple(target, source, guesses, self.seeds, lane, afresh) + low
        if self.sampling.temperature > 0:
            places = lane.frames, lane.rows, lane.columns
            scores = scores + gumbel_noise(self.seeds, *places, low, high)
        return keep_within(scores, guesses, self.options.tolerance) + low

    @torch.inference_mode()
    def _pass(self, table: Tensor, chosen: np.ndarray, fronts: np.ndarray) -> np.ndarray:
        """Feed lanes, replace guesses by draws, and return (B, L) bool where they differ.

        Args:
            table: (8, all lanes), the fields of `Lanes`.
            fronts: (B,) first lane of each row that is not final.
        """
        count = len(chosen)
        lanes = table[:, torch.as_tensor(chosen)]
        last = int(lanes[0, -1])
        lanes[_STEPS] = self.num_steps
        if self.pad:
            padding = lanes[:, :1].repeat(1, (1 << (count - 1).bit_length()) - count)
            padding[[_SLOTS, _OUTPUTS]] = self.max_slots
            lanes = torch.cat([lanes, padding], dim=1)
        lanes = lanes.to(self.tokens.device)
        self.fed_at[lanes[_POSITIONS, :count]] = self.num_steps
        written = lanes[_OUTPUTS, :count]
        guesses = self.tokens[:, written]
        self.run(lanes, last + 1)
        if len(fronts) > 1:  # what is final in a row stays, though other rows are behind
            final = torch.as_tensor(chosen < fronts[:, None]).to(self.tokens.device)
            self.tokens[:, written] = torch.where(final, guesses, self.tokens[:, written])
        return (self.tokens[:, written] != guesses).cpu().numpy()

    def _table(self, frontier: Frontier) -> Tensor:
        """Return (8, all lanes) int64 on the CPU, the fields of `Lanes`."""
        lanes = np.arange(frontier.size)
        positions = lanes + self.num_used - 1
        outputs = np.where(frontier.is_action, self.max_slots, lanes + self.num_used)
        frames = frontier.frames + self.num_generated
        arrays = (positions, positions, positions, outputs, 0 * lanes, frames)
        fields = map(torch.as_tensor, (*arrays, frontier.rows, frontier.columns))
        return torch.stack(Lanes(*fields))
