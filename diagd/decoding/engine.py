"""The loop: prefill a prompt, then step through a plan and hand out frames as they become whole.

A session is a stream. After any number of frames it goes on with new actions. When the model's
context is full, the session drops its oldest frames: the prompt's prefix (what stands before the
first context frame) and the newest `keep_frames` frames are prefilled again from slot 0, and
decoding goes on. Each drop is logged and counted.
"""

import logging
from collections.abc import Generator

import torch
from torch import Tensor

from diagd.decoding.inputs import check_actions, check_grid, check_prompt, check_room, check_seeds
from diagd.decoding.layout import SequenceLayout
from diagd.decoding.plan import SCRATCH, DecodePlan, Lanes, RowStart, check_row_start, make_plan
from diagd.decoding.runner import CausalModel, RunnerName, make_runner
from diagd.decoding.sampling import SamplingOptions, ValidRanges, sample
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.decoding.visibility import NEVER, visible_slots

logger = logging.getLogger("diagd.engine")
PREFILL_LANES = 256


class DiagonalEngine:
    """A stream of frames from a raster-order model, diagonal by diagonal.

    Args:
        model: what to decode with (see `CausalModel`).
        height, width: tokens of a frame.
        num_action_tokens: conditioning tokens before each generated frame.
        batch_size: videos decoded side by side.
        max_slots: longest sequence to hold, at most the model's context (the default).
        keep_frames: frames that stay when the context is full; default half of what it holds.
        seed: one number (batch row b uses seed + b) or one for each row.
        context: cross-attention input for models that have one.

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
        row_start: RowStart = "temporal",
        sampling: SamplingOptions | None = None,
        seed: int | list[int] = 0,
        runner: RunnerName = "eager",
        context: Tensor | None = None,
    ) -> None:
        check_row_start(row_start)
        self.model, self.row_start = model, row_start
        self.runner: RunnerName = runner
        self.frame = SequenceLayout(TokenGrid(1, height, width), num_action_tokens)
        self.max_slots = min(n for n in (max_slots, model.max_positions) if n is not None)
        held = (self.max_slots + num_action_tokens) // self.frame.slots_per_frame
        self.keep_frames = max(1, held // 2) if keep_frames is None else keep_frames
        if self.keep_frames < 0:
            raise ValueError(f"keep_frames must be 0 or more, got {keep_frames}")
        device = model.device
        self.seeds = torch.tensor(check_seeds(seed, batch_size), device=device)
        self.sample = getattr(model, "sample", sample)  # a model may bring faster kernels for it
        self.cache = model.make_cache(batch_size, self.max_slots + 1, context)
        self.tokens = torch.zeros(batch_size, self.max_slots + 1, dtype=torch.int64, device=device)
        self.fed_at = torch.full((self.max_slots + 1,), NEVER, dtype=torch.int64, device=device)
        self.pad = runner != "eager"  # others prepare something for every width of a step
        self.set_sampling(sampling or SamplingOptions())
        self.num_used = 0  # slots that hold the sequence so far
        self.num_prefix = 0  # of them, slots before the first context frame
        self.num_held = 0  # frames in the sequence
        self.num_generated = 0  # frames since the stream began
        self.num_dropped_frames = 0
        self.num_steps: int = 0
        self.num_fed: int = 0  # lanes of these steps
        self.stream: Generator[Tensor, None, None] | None = None  # the frames under way

    def set_sampling(self, sampling: SamplingOptions) -> None:
        """Draw otherwise from the next frame on; what was captured or compiled is made anew."""
        grid, model = self.frame.grid, self.model
        where = grid.height, grid.width, model.vocab_size, model.device
        self.sampling, self.ranges = sampling, ValidRanges.resolve(sampling.valid_range, *where)
        self.run = torch.inference_mode()(make_runner(self.runner, self._step, model.device))

    def prefill(self, prompt: Tensor, context_frames: int = 1) -> None:
        """Start the stream from a prompt, forgetting what was there.

        Args:
            prompt: (B, P) int64, ending with the last token of its last context frame; P may be 0
                where actions stand before the first frame.
            context_frames: whole frames at its end, with the actions between them.

        Raises:
            ValueError: a prompt of another shape, with foreign ids, or too long.
        """
        layout = self._layout(1, context_frames, prompt.ndim < 2 or prompt.shape[1] > 0)
        check_prompt(prompt, layout, len(self.tokens), self.max_slots, self.model.num_embeddings)
        self.num_prefix = prompt.shape[1] - layout.context_slots
        self.num_held = context_frames
        self.num_generated = self.num_dropped_frames = self.num_steps = self.num_fed = 0
        self._prefill(prompt.to(self.tokens.device))

    def decode(
        self, schedule: DiagonalSchedule, actions: Tensor | None = None
    ) -> Generator[Tensor, None, None]:
        """Generate the schedule's frames, each yielded as soon as its last token exists.

        The stream is advanced frame by frame: closing the generator early keeps the frames yielded
        so far and forgets the one under way; the next call of `decode` closes it, too. Where not
        all frames fit the context, the schedule runs over as many at a time as do.

        Args:
            actions: (B, T, num_action_tokens) int64; actions[:, t] stands before frame t. None
                where there are none.

        Returns:
            A generator of (B, height, width) int64.

        Raises:
            ValueError: a grid, actions or a context that do not fit.
        """
        layout = self._layout(schedule.grid.num_frames, 0, self.num_used > 0)
        check_grid(schedule.grid, self.frame.grid)
        check_actions(actions, layout, len(self.tokens), self.model.num_embeddings)
        if actions is None:
            actions = self.tokens.new_empty(len(self.tokens), schedule.grid.num_frames, 0)
        if self.num_used + layout.num_slots > self.max_slots:
            check_room(self._layout(1, self.keep_frames), self.num_prefix, self.max_slots)
        if self.stream is not None:
            self.stream.close()
        self.stream = self._decode(schedule, actions.to(self.tokens.device))
        return self.stream

    def _decode(self, schedule: DiagonalSchedule, actions: Tensor) -> Generator[Tensor, None, None]:
        grid, done = schedule.grid, 0
        while done < grid.num_frames:
            fitting = (self.max_slots - self.num_used) // self.frame.slots_per_frame
            if not fitting:
                self._drop_oldest()
                continue
            num_frames = min(fitting, grid.num_frames - done)
            part = DiagonalSchedule(
                TokenGrid(num_frames, grid.height, grid.width), schedule.row_lag, schedule.frame_lag
            )
            yield from self._decode_fitting(part, actions[:, done : done + num_frames])
            done += num_frames

    def _decode_fitting(
        self, schedule: DiagonalSchedule, actions: Tensor
    ) -> Generator[Tensor, None, None]:
        base = self.num_used
        held = min(self.num_held, 2)  # stand-ins reach 2 frames back
        layout = self._layout(schedule.grid.num_frames, held, base > 0)
        known = self.ranges.row_ends is not None
        plan = make_plan(schedule, layout, self.row_start, self.pad, known)
        lanes = self._place(plan, actions)
        frame = 0
        for step in range(plan.num_steps):
            self.run(lanes[:, plan.starts[step] : plan.starts[step + 1]], base + plan.ends[step])
            self.num_steps += 1
            self.num_fed += plan.starts[step + 1] - plan.starts[step]
            if step == plan.frame_done(frame):
                frame += 1
                yield self._finish(base + frame * layout.slots_per_frame)

    def _finish(self, num_used: int) -> Tensor:
        self.num_used = num_used
        self.num_held += 1
        self.num_generated += 1
        grid = self.frame.grid
        visual = self.tokens[:, num_used - grid.tokens_per_frame : num_used]
        return visual.reshape(-1, grid.height, grid.width).clone()

    @torch.inference_mode()
    def _place(self, plan: DecodePlan, actions: Tensor) -> Tensor:
        """Put the plan behind the slots in use: feed times, actions, and its lanes (returned)."""
        base, layout = self.num_used, plan.layout
        end = base + layout.num_slots
        self.fed_at.fill_(NEVER)
        self.fed_at[:base] = -1
        self.fed_at[base:end] = plan.fed_at.to(self.fed_at.device)
        frames = self.tokens[:, base:end].view(len(self.tokens), -1, layout.slots_per_frame)
        frames[:, :, : layout.num_action_tokens] = actions
        if self.ranges.row_ends is not None:  # separators are known before they are written
            width = layout.grid.width
            frames[:, :, layout.num_action_tokens + width - 1 :: width] = self.ranges.row_ends
        lanes = plan.lanes.clone()
        lanes[:4] = torch.where(lanes[:4] == SCRATCH, self.max_slots, lanes[:4] + base)
        lanes[Lanes._fields.index("frames")] += self.num_generated
        return lanes.to(self.tokens.device)

    def _step(self, lanes: Tensor, num_slots: int) -> None:
        """Gather, forward, sample, scatter."""
        lane = Lanes(*(lanes[field] for field in range(len(Lanes._fields))))
        visible = visible_slots(lane.positions, lane.steps, self.fed_at[:num_slots])
        logits = self.model.forward(
            self.tokens[:, lane.inputs], lane.positions, lane.slots, visible, self.cache
        )
        self.tokens.index_copy_(1, lane.outputs, self._draw(logits, lane))

    def _draw(self, logits: Tensor, lane: Lanes) -> Tensor:
        return self.sample(
            logits, self.sampling, self.ranges, self.seeds, lane.frames, lane.rows, lane.columns
        )

    @torch.inference_mode()
    def _prefill(self, sequence: Tensor) -> None:
        """Feed all but the last token of a sequence, causally; the last is fed at step 0."""
        length = sequence.shape[1]
        self.tokens[:, :length] = sequence
        self.num_used = length
        for start in range(0, length - 1, PREFILL_LANES):
            slots = torch.arange(start, min(start + PREFILL_LANES, length - 1)).to(sequence.device)
            end = start + len(slots)
            visible = slots[:, None] >= torch.arange(end, device=sequence.device)
            self.model.forward(
                sequence[:, start:end], slots, slots, visible, self.cache, logits_to_keep=1
            )

    def _drop_oldest(self) -> None:
        """Make room: keep the prefix and the newest frames, and prefill them again."""
        kept = min(self.keep_frames, self.num_held)
        newest = self.num_used - self._layout(1, kept).context_slots
        sequence = torch.cat(
            [self.tokens[:, : self.num_prefix], self.tokens[:, newest : self.num_used]], dim=1
        )
        dropped = self.num_held - kept
        logger.warning(
            "context of %d slots is full: dropped the %d oldest frames, prefilled the newest %d",
            self.max_slots,
            dropped,
            kept,
        )
        self.num_dropped_frames += dropped
        self.num_held = kept
        self._prefill(sequence)

    def _layout(
        self, num_frames: int, context_frames: int, has_prompt: bool = True
    ) -> SequenceLayout:
        grid = TokenGrid(num_frames, self.frame.grid.height, self.frame.grid.width)
        return SequenceLayout(grid, self.frame.num_action_tokens, context_frames, has_prompt)
