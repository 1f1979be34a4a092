"""What comes in from outside is checked here, before any work starts."""

import dataclasses
import weakref
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, int64

from diagd.decoding.graphs import BLOCK, Graphs
from diagd.decoding.model import (
    CAPTURING,
    CausalModel,
    FusesSteps,
    RunnerName,
    StepFunction,
    make_runner,
)
from diagd.decoding.plan import SCRATCH, DecodePlan, Lanes
from diagd.decoding.sampling import UNDRAWN, SamplingOptions, ValidRanges
from diagd.decoding.schedule import SequenceLayout, TokenGrid, whole
from diagd.decoding.visibility import NEVER


def check_prompt(
    prompt: Tensor, layout: SequenceLayout, batch_size: int, max_slots: int, num_embeddings: int
) -> None:
    """Refuse a prompt of another shape, with foreign ids, or without room for one frame.

    Args:
        layout: of one frame after the prompt, with its context frames.
    """
    if prompt.ndim != 2 or prompt.shape[0] != batch_size or prompt.dtype != int64:
        raise ValueError(
            f"prompt must be int64 of shape (batch={batch_size}, P), "
            f"got {prompt.dtype} of shape {tuple(prompt.shape)}"
        )
    if prompt.shape[1] < layout.context_slots:
        raise ValueError(
            f"context_frames={layout.context_frames} take {layout.context_slots} tokens, "
            f"got a prompt of {prompt.shape[1]}"
        )
    if prompt.shape[1] + layout.num_slots > max_slots:
        raise ValueError(
            f"prompt and one frame take {prompt.shape[1] + layout.num_slots} slots, "
            f"the context holds {max_slots}"
        )
    check_ids(prompt, num_embeddings, "prompt")


def check_room(layout: SequenceLayout, num_prefix: int, max_slots: int) -> None:
    """Refuse a stream that would be stuck once its context is full.

    Args:
        layout: of one frame after those that stay when old ones are dropped.
    """
    kept = layout.context_frames
    slots = num_prefix + layout.context_slots + layout.slots_per_frame
    if slots > max_slots:
        raise ValueError(
            f"keep_frames={kept} and one more frame take {slots} slots, "
            f"the context holds {max_slots} slots"
        )
    if not kept and not num_prefix and not layout.num_action_tokens:
        raise ValueError("keep_frames must be at least 1 without prefix and actions, got 0")


def check_grid(grid: TokenGrid, frame: TokenGrid) -> None:
    """Refuse a schedule for frames of another size."""
    if (grid.height, grid.width) != (frame.height, frame.width):
        raise ValueError(
            f"schedule must be for frames of {frame.height}x{frame.width}, "
            f"got {grid.height}x{grid.width}"
        )


def check_actions(
    actions: Tensor | None, layout: SequenceLayout, batch_size: int, num_embeddings: int
) -> None:
    """Refuse actions of another shape or with foreign ids; None is right where there are none."""
    shape = (batch_size, layout.grid.num_frames, layout.num_action_tokens)
    if actions is None and not layout.num_action_tokens:
        return
    if actions is None or actions.shape != shape or actions.dtype != int64:
        given = None if actions is None else f"{actions.dtype} of shape {tuple(actions.shape)}"
        raise ValueError(
            f"actions must be int64 of shape (batch, frames, tokens) = {shape}, got {given}"
        )
    check_ids(actions, num_embeddings, "actions")


def check_seeds(seed: int | list[int], batch_size: int) -> list[int]:
    """Return one seed for each batch row."""
    given = seed if isinstance(seed, list) else [whole(seed, "seed") + b for b in range(batch_size)]
    seeds = [whole(value, "seed") for value in given]
    if len(seeds) != batch_size:
        raise ValueError(f"expected one seed for each of {batch_size} batch rows, got {len(seeds)}")
    for value in seeds:
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"seed must fit 64 bits, got {value}")
    return seeds


def check_ids(ids: Tensor, limit: int, name: str) -> None:
    """Refuse what are no int64 ids, or foreign ones."""
    if ids.dtype != int64:
        raise ValueError(f"{name} must be int64, got {ids.dtype}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        raise ValueError(
            f"{name} ids must be in [0, {limit}), got {int(ids.min())}..{int(ids.max())}"
        )


# the step, logits (B, L, V) and their lanes -> ids (B, L); equal rules draw the same
DrawRule = Callable[["Step", Tensor, Lanes], Tensor]
_WAITING: WeakKeyDictionary[CausalModel, "Workspace"] = WeakKeyDictionary()


class Workspace:
    """The memory of a stream: it is allocated once, and nothing in it moves.

    Args:
        model: what makes the cache.
        batch_size: rows.
        num_slots: with scratch, which is the last one.
        context: cross-attention input for models that have one.

    Attributes:
        tokens: (B, slots) int64.
        held: (slots) int64, the position in raster order that each slot holds, or -1.
        fed_at: (slots) int64, the step at which each slot's true token was or will be fed.
        seeds: (B,) int64.
        cache: what the model keeps.
        graphs: steps captured over all this.
    """

    def __init__(
        self, model: CausalModel, batch_size: int, num_slots: int, context: Tensor | None
    ) -> None:
        device = model.device
        self.cache = model.make_cache(batch_size, num_slots, context)
        self.tokens = torch.zeros(batch_size, num_slots, dtype=torch.int64, device=device)
        self.held = torch.full((num_slots,), -1, dtype=torch.int64, device=device)
        self.fed_at = torch.full_like(self.held, NEVER)
        self.seeds = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.graphs = Graphs(device, num_slots - 1)

    def renew(
        self, model: CausalModel, batch_size: int, num_slots: int, context: Tensor | None
    ) -> bool:
        """Become as new for another stream of the model; return whether it fits that one."""
        if len(self.tokens) != batch_size or len(self.held) < num_slots:
            return False
        self.tokens.zero_()
        self.held.fill_(-1)
        self.fed_at.fill_(NEVER)
        return model.renew_cache(self.cache, context)


def workspace_for(
    stream: object,
    model: CausalModel,
    runner: RunnerName,
    batch_size: int,
    num_slots: int,
    context: Tensor | None,
) -> Workspace:
    """Return a workspace for a stream; with CUDA graphs, the one that waits, where it fits.

    Args:
        stream: when it is gone, its workspace with graphs waits for the next one.
        num_slots: at least, with scratch.
    """
    if runner not in CAPTURING:
        return Workspace(model, batch_size, num_slots, context)
    space = _WAITING.pop(model, None)
    if space is None or not space.renew(model, batch_size, num_slots, context):
        space = None  # gone before another one is made: the memory may not hold two
        space = Workspace(model, batch_size, -(-num_slots // BLOCK) * BLOCK, context)
    weakref.finalize(stream, _wait, weakref.ref(model), space).atexit = False
    return space


def _wait(model: "weakref.ref[CausalModel]", space: Workspace) -> None:
    alive = model()
    if alive is not None:
        _WAITING[alive] = space


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One step of decoding.

    Attributes:
        model, space: what runs, and over what.
        sampling, ranges: how tokens are drawn, and among which.
        rule: what turns logits into tokens; None is `draw`.
    """

    model: CausalModel
    space: Workspace
    sampling: SamplingOptions
    ranges: ValidRanges
    rule: DrawRule | None = None

    def take(self, lanes: Tensor, num_slots: int) -> None:
        """Gather, forward, sample, scatter.

        Args:
            lanes: (8, L) int64 (see `Lanes`).
            num_slots: of the cache, to read.
        """
        lane, space, model = Lanes.of(lanes), self.space, self.model
        held, fed_at = space.held[:num_slots], space.fed_at[:num_slots]
        visible = model.see(lane.positions, lane.steps, held, fed_at)
        # UNDRAWN is no id: it is found in `Stream.finish_frame`
        tokens = space.tokens[:, lane.inputs].clamp_(min=0)
        logits = model.forward(tokens, lane.positions, lane.slots, visible, space.cache)
        drawn = self.draw(logits, lane) if self.rule is None else self.rule(self, logits, lane)
        space.tokens.index_copy_(1, lane.outputs, drawn)

    def draw(self, logits: Tensor, lane: Lanes) -> Tensor:
        """Draw a token for every lane, (B, L) int64, from logits (B, L, V)."""
        places = lane.frames, lane.rows, lane.columns
        return self.model.sample(logits, self.sampling, self.ranges, self.space.seeds, *places)

    def runner(self, name: RunnerName) -> StepFunction:
        """Return what runs it again and again, by the runner of that name."""
        # it keeps what a capture reads besides the workspace: ranges, and what the rule holds
        sampling = dataclasses.replace(self.sampling, valid_range=None)
        kind = sampling, self.ranges, self.rule
        step = (self._fused() if name == "eager" else None) or self.take
        return make_runner(name, step, self.space.graphs, kind)

    def _fused(self) -> StepFunction | None:
        if self.rule is not None or not isinstance(self.model, FusesSteps):
            return None
        space = self.space
        memory = space.tokens, space.held, space.fed_at, space.seeds, space.cache
        return self.model.fused_step(*memory, self.sampling, self.ranges)


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
