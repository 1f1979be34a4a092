"""Decode the raster video, token for token, in fewer passes.

The noise of a draw is bound to its place, so the raster sample is the fixed point of "guess, feed all
guesses causally, draw again". A pass feeds guesses at the front and drafts ahead of it
(`diagd.decoding.frontier`); a draw replaces the guess it was to confirm. What stands before the first
change is final, for it was drawn after final tokens only: at least one token a pass (Jacobi decoding,
arXiv:2305.10427, with shared noise). Keys and values of final tokens stay, the others are overwritten.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diagd.decoding.engine import DiagonalEngine
from diagd.decoding.frontier import Frontier
from diagd.decoding.layout import SequenceLayout
from diagd.decoding.plan import Lanes
from diagd.decoding.schedule import DiagonalSchedule
from diagd.decoding.visibility import NEVER


@dataclass(frozen=True)
class ExactOptions:
    """How exact decoding spends its passes; what it writes does not depend on these.

    Attributes:
        num_lanes: most lanes of a pass.
        draft: draft ahead of the front along diagonals, with the schedule's row_lag; otherwise all
            lanes are at the front, one after the other (plain Jacobi decoding).
        draft_width: columns by which the drafts of a row advance in a pass.
    """

    num_lanes: int = 32
    draft: bool = True
    draft_width: int = 2

    def __post_init__(self) -> None:
        for name in ("num_lanes", "draft_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


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

    Used as a `DiagonalEngine`; its schedules say how many frames to write and, with their row_lag,
    how drafts are made. Frames overlap wherever their actions are known. Batch rows share their
    lanes, so a pass advances all to the front of the slowest.

    Equal means bit for bit where the model gives a lane the same logits whoever shares its pass, as
    the native kernels do. Elsewhere rounding may turn a tie.

    Args:
        options: how passes are spent.
        (others): as in `DiagonalEngine`; row_start is not used.
    """

    def __init__(self, *args: Any, options: ExactOptions | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = options or ExactOptions()
        self.passes: list[Pass] = []  # since the prefill

    def prefill(self, prompt: Tensor, context_frames: int = 1) -> None:
        """Start the stream from a prompt (see `DiagonalEngine.prefill`)."""
        super().prefill(prompt, context_frames)
        self.passes = []

    def _decode_fitting(
        self, schedule: DiagonalSchedule, actions: Tensor
    ) -> Generator[Tensor, None, None]:
        base, height, width = self.num_used, schedule.grid.height, schedule.grid.width
        layout = self._layout(schedule.grid.num_frames, min(self.num_held, 1), base > 0)
        options = self.options
        row_lag = schedule.row_lag if options.draft else 0
        frontier = Frontier(
            layout, len(self.tokens), options.num_lanes, row_lag, options.draft_width
        )
        self._guess(layout, actions)
        first_frame, frame = self.num_generated, 0
        while not frontier.is_done:
            front = frontier.front
            lanes = frontier.choose()
            changed = self._pass(frontier, lanes, base, first_frame)
            accepted = frontier.update(lanes, changed)
            self.num_steps += 1
            self.num_fed += len(lanes)
            place = (frontier.frames[front], frontier.rows[front], frontier.columns[front])
            frame_number, row, column = map(int, place)
            self.passes.append(Pass(first_frame + frame_number, row, column, len(lanes), accepted))
            while frontier.front >= (frame + 1) * layout.slots_per_frame:
                frame += 1
                end = base + frame * layout.slots_per_frame
                self._copy_frame(frontier, end, frame)
                yield self._finish(end)
        assert self.num_used == base + layout.num_slots == base + height * width * frame + (
            layout.num_action_tokens * frame
        )

    @torch.inference_mode()
    def _guess(self, layout: SequenceLayout, actions: Tensor) -> None:
        """Put actions and first guesses (the newest frame's tokens) behind the slots in use."""
        base, grid = self.num_used, layout.grid
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
            slots = torch.from_numpy(fresh).to(self.tokens.device) + base
            self.tokens[:, slots] = self.tokens[:, slots - self.frame.slots_per_frame]

    @torch.inference_mode()
    def _pass(
        self, frontier: Frontier, chosen: np.ndarray, base: int, first_frame: int
    ) -> np.ndarray:
        """Feed lanes, replace guesses by draws, and return (B, L) bool where they differ."""
        scratch = self.max_slots
        padded = 1 << (len(chosen) - 1).bit_length() if self.pad else len(chosen)
        lanes = np.empty((len(Lanes._fields), padded), np.int64)
        slots = chosen + (base - 1)
        outputs = np.where(frontier.is_action[chosen], scratch, chosen + base)
        fields = {
            "positions": slots,
            "slots": slots,
            "inputs": slots,
            "outputs": outputs,
            "steps": self.num_steps,
            "frames": frontier.frames[chosen] + first_frame,
            "rows": frontier.rows[chosen],
            "columns": frontier.columns[chosen],
        }
        for field, name in enumerate(Lanes._fields):
            lanes[field, : len(chosen)] = fields[name]
        lanes[:, len(chosen) :] = lanes[:, :1]
        for name in ("slots", "outputs"):
            lanes[Lanes._fields.index(name), len(chosen) :] = scratch
        packed = torch.from_numpy(lanes).to(self.tokens.device)
        inputs, written = packed[2, : len(chosen)], packed[3, : len(chosen)]
        self.fed_at[inputs] = self.num_steps
        guesses = self.tokens[:, written]
        self.run(packed, int(slots[-1]) + 1)
        if len(frontier.fronts) > 1:  # what is final in a row stays, though others are behind
            fronts = torch.from_numpy(frontier.fronts).to(self.tokens.device)
            final = written < fronts[:, None] + base
            self.tokens[:, written] = torch.where(final, guesses, self.tokens[:, written])
        return (self.tokens[:, written] != guesses).cpu().numpy()
