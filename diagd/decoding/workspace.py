"""What steps read and write, and one step over it: gather, forward, sample, scatter.

A workspace knows neither its stream nor its model. Where steps are captured as CUDA graphs, it
outlives the stream: the model's next one that fits takes it over, with the graphs, which are then
replayed from the first step on. One such workspace waits for each model, never more.
"""

import dataclasses
import weakref
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from diagd.decoding.graphs import BLOCK, Graphs
from diagd.decoding.plan import Lanes
from diagd.decoding.runner import (
    CAPTURING,
    CausalModel,
    FusesSteps,
    RunnerName,
    StepFunction,
    make_runner,
)
from diagd.decoding.sampling import SamplingOptions, ValidRanges
from diagd.decoding.visibility import NEVER

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
