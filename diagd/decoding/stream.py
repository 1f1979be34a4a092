"""The stream that strategies drive: tokens, cache, frames, and one operation, "feed these lanes".

A stream outlives what drives it: frame after frame may be written by another strategy. When the
context is full, a frame that begins takes the slots of the oldest, and nothing is read again: the
slots behind the prompt's prefix (what stands before the first context frame) are a ring, and keys
and values stay as they were computed. Where absolute positions matter to the model, or
`keep_frames` says so, the prefix and the newest frames are prefilled again from slot 0 instead.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from diagd.decoding.inputs import check_prompt, check_seeds
from diagd.decoding.layout import SequenceLayout
from diagd.decoding.plan import SCRATCH, DecodePlan, Lanes
from diagd.decoding.runner import CausalModel, RunnerName, StepFunction
from diagd.decoding.sampling import UNDRAWN, SamplingOptions, ValidRanges
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.visibility import NEVER
from diagd.decoding.workspace import DrawRule, Step, workspace_for

# Lanes of a prompt fed at once: on the CPU what the caches of its cores hold, on a GPU what keeps
# it busy while the host launches the next layer.
PREFILL_LANES = {"cpu": 256, "cuda": 4096}


class VerifiedStep(NamedTuple):
    """One step of a strategy that checks draft tokens.

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


class Stream:
    """Tokens of a raster-order model, written by whoever feeds lanes.

    Args:
        model: what to decode with (see `CausalModel`).
        height, width: tokens of a frame.
        num_action_tokens: conditioning tokens before each generated frame.
        batch_size: videos decoded side by side.
        max_slots: longest sequence to hold, at most the model's context (the default).
        keep_frames: frames that are read again when the context is full; default none where only
            the distance between positions matters to the model, else half of what it holds.
        seed: one number (batch row b uses seed + b) or one for each row.
        context: cross-attention input for models that have one.
        around_step: wraps the function that runs a step, for those who time or count steps.

    Attributes:
        tokens: (B, slots + 1) int64, the last slot is scratch.
        held: (slots + 1) int64, the position in raster order that each slot holds, or -1.
        fed_at: (slots + 1) int64, the step at which each slot's true token was or will be fed.
        scratch: the slot that nobody sees.
        num_used: tokens of the sequence so far, those that left included.
        num_prefix: of them, slots before the first context frame.
        num_held: frames that may be seen.
        window: frames that the context holds, the one under way included.
        num_generated: frames since the stream began.
        num_dropped_frames: frames that left a full context.
        num_steps, num_fed: steps since the prefill, and their lanes, padding not counted.
        verified: what steps with draft tokens came to since the newest call of `decode`.

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        model: CausalModel,
        height: int,
        width: int,
        *,
        num_action_tokens: int = 0,
        batch_size: int = 1,
        max_slots: int | None = None,
        keep_frames: int | None = None,
        sampling: SamplingOptions | None = None,
        seed: int | list[int] = 0,
        runner: RunnerName = "eager",
        context: Tensor | None = None,
        around_step: Callable[[StepFunction], StepFunction] | None = None,
    ) -> None:
        self.model, self.around_step = model, around_step
        self.runner: RunnerName = runner
        self.frame = SequenceLayout(TokenGrid(1, height, width), num_action_tokens)
        self.max_slots = min(n for n in (max_slots, model.max_positions) if n is not None)
        fit = (self.max_slots + num_action_tokens) // self.frame.slots_per_frame
        self.keep_frames = max(1, fit // 2) if keep_frames is None else keep_frames
        if self.keep_frames < 0:
            raise ValueError(f"keep_frames must be 0 or more, got {keep_frames}")
        self.reads_again = keep_frames is not None or not model.relative_positions
        seeds = torch.tensor(check_seeds(seed, batch_size))
        num_slots = self.max_slots + num_action_tokens + 1
        self.space = space = workspace_for(self, model, runner, batch_size, num_slots, context)
        self.tokens, self.held, self.fed_at = space.tokens, space.held, space.fed_at
        self.seeds, self.cache = space.seeds.copy_(seeds), space.cache
        self.scratch = len(self.held) - 1
        self.pad = runner != "eager"  # others prepare something for every width of a step
        self.rule: DrawRule | None = None  # of the newest step
        self.set_sampling(sampling or SamplingOptions())
        self.num_used = self.num_prefix = self.num_held = self.window = 0
        self.num_generated = self.num_dropped_frames = 0
        self.num_steps: int = 0
        self.num_fed: int = 0
        self.verified: list[VerifiedStep] = []

    @property
    def batch_size(self) -> int:
        """Videos decoded side by side."""
        return len(self.tokens)

    @property
    def knows_row_ends(self) -> bool:
        """Whether rows end in a separator, which is known before it is written."""
        return self.ranges.row_ends is not None

    def layout(
        self, num_frames: int, context_frames: int, has_prompt: bool = True
    ) -> SequenceLayout:
        """Return the layout of so many frames of this stream."""
        grid = TokenGrid(num_frames, self.frame.grid.height, self.frame.grid.width)
        return SequenceLayout(grid, self.frame.num_action_tokens, context_frames, has_prompt)

    def set_sampling(self, sampling: SamplingOptions) -> None:
        """Draw otherwise from the next step on; what was compiled is made anew."""
        grid, model = self.frame.grid, self.model
        where = grid.height, grid.width, model.vocab_size, model.device
        self.sampling, self.ranges = sampling, ValidRanges.resolve(sampling.valid_range, *where)
        self._make_run()

    def _make_run(self) -> None:
        step = Step(self.model, self.space, self.sampling, self.ranges, self.rule)
        run = torch.inference_mode()(step.runner(self.runner))
        self.run: StepFunction = self.around_step(run) if self.around_step else run

    @property
    def capture_seconds(self) -> float:
        """Seconds since the prefill that went into capturing steps as CUDA graphs."""
        return self.space.graphs.seconds

    def prefill(self, prompt: Tensor, context_frames: int = 1) -> None:
        """Start the stream from a prompt, forgetting what was there.

        Args:
            prompt: (B, P) int64, ending with the last token of its last context frame; P may be 0
                where actions stand before the first frame.
            context_frames: whole frames at its end, with the actions between them.

        Raises:
            ValueError: a prompt of another shape, with foreign ids, or too long.
        """
        layout = self.layout(1, context_frames, prompt.ndim < 2 or prompt.shape[1] > 0)
        check_prompt(prompt, layout, self.batch_size, self.max_slots, self.model.num_embeddings)
        self.num_prefix = prompt.shape[1] - layout.context_slots
        self.num_held = context_frames
        self.window = context_frames + self.room(prompt.shape[1])
        self.num_generated = self.num_dropped_frames = self.num_steps = self.num_fed = 0
        self.verified = []
        self.space.graphs.seconds = 0.0
        self._prefill(prompt.to(self.tokens.device))

    def room(self, num_used: int | None = None) -> int:
        """Return how many frames fit behind so many slots, by default those in use."""
        used = self.num_used if num_used is None else num_used
        return max(0, (self.max_slots - used) // self.frame.slots_per_frame)

    @property
    def is_endless(self) -> bool:
        """Whether a frame that begins in a full context takes the slots of the oldest."""
        return not self.reads_again and self.window > 1

    def slots_at(self, positions: Tensor) -> Tensor:
        """Return the slots of positions: the prefix stays, the rest is a ring; SCRATCH is scratch.

        Args:
            positions: int64 of any shape, in raster order, of the prefix and the newest frames.
        """
        behind = positions - self.num_prefix
        around = self.num_prefix + behind % max(1, self.window * self.frame.slots_per_frame)
        slots = torch.where(behind < 0, positions, around)
        return torch.where(positions == SCRATCH, self.scratch, slots)

    def slots_between(self, first: int, end: int) -> Tensor:
        """Return the slots of the positions from `first` to before `end`."""
        return self.slots_at(torch.arange(first, end, device=self.tokens.device))

    @torch.inference_mode()
    def open(self, layout: SequenceLayout, actions: Tensor) -> None:
        """Lay frames out behind the slots in use: actions and separators known, the rest hidden.

        Args:
            actions: (B, T, num_action_tokens) int64.
        """
        num_actions, width = layout.num_action_tokens, layout.grid.width
        end = self.num_used + layout.num_slots
        slots = self.slots_between(self.num_used, end)
        self.held[slots] = torch.arange(self.num_used, end, device=slots.device)
        before = (self.held >= 0) & (self.held < self.num_used)
        self.fed_at.copy_(torch.where(before, -1, NEVER))
        frames = slots.view(-1, layout.slots_per_frame)
        self.tokens[:, frames[:, :num_actions]] = actions
        if self.ranges.row_ends is not None:
            self.tokens[:, frames[:, num_actions + width - 1 :: width]] = self.ranges.row_ends

    @torch.inference_mode()
    def place(self, plan: DecodePlan) -> Tensor:
        """Put a plan behind the slots in use.

        Returns:
            (8, total) int64 on the model's device, the lanes of all steps (see `DecodePlan.lanes`).
        """
        slots = self.slots_between(self.num_used, self.num_used + len(plan.fed_at))
        self.fed_at[slots] = plan.fed_at.to(self.fed_at.device)
        lanes = plan.lanes.clone()
        lane = Lanes.of(lanes)
        lane.positions.add_(self.num_used)
        for slots in (lane.slots, lane.inputs, lane.outputs):
            slots[slots != SCRATCH] += self.num_used
            slots.copy_(self.slots_at(slots))
        lane.frames.add_(self.num_generated)
        return lanes.to(self.tokens.device)

    def feed(self, lanes: Tensor, num_fed: int, end: int, rule: DrawRule | None = None) -> None:
        """Take one step: feed lanes and write what they predict.

        Args:
            lanes: (8, L) int64 on the model's device (see `Lanes`).
            num_fed: how many of them are no padding.
            end: one past the last position that they may see.
            rule: what turns logits into tokens; None is `Step.draw`.
        """
        if rule != self.rule:
            self.rule = rule
            self._make_run()
        self.run(lanes, min(end, self.scratch))
        self.num_steps += 1
        self.num_fed += num_fed

    @torch.inference_mode()
    def _prefill(self, sequence: Tensor) -> None:
        """Feed all but the last token of a sequence, causally; the last is fed at step 0."""
        length = sequence.shape[1]
        self.tokens[:, :length] = sequence
        self.held.fill_(-1)
        self.held[:length] = torch.arange(length, device=self.held.device)
        self.num_used = length
        most = PREFILL_LANES[sequence.device.type]
        for start in range(0, length - 1, most):
            end = min(start + most, length - 1)
            slots = torch.arange(start, end, device=sequence.device)
            visible = slots[:, None] >= torch.arange(end, device=sequence.device)
            self.model.forward(
                sequence[:, start:end], slots, slots, visible, self.cache, logits_to_keep=1
            )

    def finish_frame(self, num_used: int) -> Tensor:
        """Count the frame that ends before position `num_used`; return it, (B, height, width).

        Here, once a frame, is looked whether every token could be drawn; on a GPU, it waits for it.

        Raises:
            ValueError: the logits of a token had no best id; says which.
        """
        grid = self.frame.grid
        visual = self.tokens[:, self.slots_between(num_used - grid.tokens_per_frame, num_used)]
        undrawn = (visual == UNDRAWN).any(0)
        if undrawn.any():
            row, column = divmod(int(undrawn.int().argmax()), grid.width)
            raise ValueError(
                f"no token can be drawn at frame {self.num_generated}, row {row}, column {column} "
                f"(seen after step {self.num_steps}): the model's logits there are NaN or infinite"
                + self._first_broken_layer()
            )
        self.num_used = num_used
        self.num_generated += 1
        self.num_dropped_frames += self.num_held == self.window
        self.num_held = min(self.num_held + 1, self.window)
        return visual.view(-1, grid.height, grid.width)

    def _first_broken_layer(self) -> str:
        """Say in which layer numbers broke, as far as its keys show."""
        for layer, keys in enumerate(getattr(self.cache, "keys", ())):
            if not keys.isfinite().all():
                return f", broken from layer {layer} on"
        return ""

    def drop_oldest(self) -> None:
        """Make room: keep the prefix and the newest frames, and prefill them again."""
        kept = min(self.keep_frames, self.num_held)
        newest = self.num_used - self.layout(1, kept).context_slots
        prefix, frames = self.tokens[:, : self.num_prefix], self.tokens[:, newest : self.num_used]
        self.num_dropped_frames += self.num_held - kept
        self.num_held = kept
        self._prefill(torch.cat([prefix, frames], dim=1))
        self.window = kept + self.room()  # no actions stand before the first frame kept
