"""What runs a step, and how: `CausalModel`, and eager, compiled, captured. The same tokens.

Here `decoding` meets `models` and `backends`: CausalModel is all that a stream knows of a model.
`tests/backends/conformance.py` checks that a class keeps to it.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args, runtime_checkable

import torch
from torch import Tensor

from diagd.decoding.graphs import Graphs
from diagd.decoding.sampling import SamplingOptions, ValidRanges, sample
from diagd.decoding.visibility import visible_slots

RunnerName = Literal["eager", "compile", "cuda-graph", "compiled-graph"]
CAPTURING: tuple[RunnerName, ...] = ("cuda-graph", "compiled-graph")
StepFunction = Callable[[Tensor, int], None]  # (lanes (8, L) int64, cache slots to read)


class CausalModel(Protocol):
    """A raster-order model that can be fed any tokens at any slots, in any order.

    Derive from it, and get the default of `sample`, or bring all of it. Logits do not depend on the
    order in which lanes stand, or, but for rounding, on who else shares a step or the batch. With
    runners other than eager, `forward` and `sample` may not wait for the device or branch on data.

    Attributes:
        vocab_size: columns of the logits.
        num_embeddings: input ids are in [0, num_embeddings).
        max_positions: the longest sequence it can hold.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_embeddings(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def device(self) -> torch.device: ...

    @property
    def relative_positions(self) -> bool:
        """Whether only the distance between positions matters, so that they may grow for ever."""
        return False

    def make_cache(self, batch_size: int, num_slots: int, context: Tensor | None = None) -> Any:
        """Allocate keys and values for `num_slots` slots, the last of them scratch.

        Args:
            context: cross-attention input of all lanes, for models that have one.

        Returns:
            whatever `forward` takes. Where it has `keys`, a tensor for each layer, errors can say
            in which layer numbers broke.

        Raises:
            ValueError: a context that does not fit the model, or a size below 1.
        """
        ...

    def renew_cache(self, cache: Any, context: Tensor | None = None) -> bool:
        """Empty a cache for another stream, which saves capturing its steps once more.

        Args:
            cache: from `make_cache`; its memory stays where it is.
            context: as in `make_cache`.

        Returns:
            whether it is as new. By default none ever is, and streams share no cache.
        """
        return False

    def see(self, positions: Tensor, steps: Tensor, held: Tensor, fed_at: Tensor) -> Any:
        """Return what `forward` takes as visible: the mask, unless its kernels make that.

        Arguments and result are those of `diagd.decoding.visibility.visible_slots`.
        """
        return visible_slots(positions, steps, held, fed_at)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Any,
        cache: Any,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Feed lanes: write their keys and values, then attend.

        Args:
            tokens: (B, L) int64.
            positions: (L,) int64, where the lanes stand in raster order: below max_positions,
                unless `relative_positions`.
            slots: (L,) int64, the cache slots to write. Only scratch, which nobody sees, may be
                named more than once: padded lanes write there.
            visible: (L, M) bool over the cache slots [0, M). What hidden slots hold changes
                nothing. The logits of a lane that sees none are any finite numbers.
            cache: from `make_cache`, changed in place.
            logits_to_keep: 0 for all lanes, else only the last so many.

        Returns:
            (B, L, vocab_size) logits.
        """
        ...

    def sample(
        self,
        logits: Tensor,
        options: SamplingOptions,
        ranges: ValidRanges,
        seeds: Tensor,
        frames: Tensor,
        rows: Tensor,
        columns: Tensor,
    ) -> Tensor:
        """Draw one token a lane; a backend with faster kernels for it draws the same tokens.

        Arguments and result are those of `diagd.decoding.sampling.sample`; where logits are broken,
        so that no id is the best, the result is `UNDRAWN`.
        """
        return sample(logits, options, ranges, seeds, frames, rows, columns)


@runtime_checkable
class FusesSteps(Protocol):
    """A model with kernels that take a whole step, where time between kernels counts."""

    def fused_step(
        self,
        tokens: Tensor,
        held: Tensor,
        fed_at: Tensor,
        seeds: Tensor,
        cache: Any,
        options: SamplingOptions,
        ranges: ValidRanges,
    ) -> StepFunction | None:
        """Return a step over the memory of a stream that gathers, runs, draws and scatters at once.

        It does what `see`, `forward` and `sample` of `CausalModel` do one after the other in a
        `diagd.decoding.engine.Step`, to the bit.

        Args:
            tokens: (B, S) int64; held, fed_at: (S,) int64; seeds: (B,) int64, as in
                `diagd.decoding.engine.Workspace`; all of it stays where it is.
            cache: from `make_cache`.

        Returns:
            the step, or None where its parts are to be run one by one.
        """
        ...


Behind = TypeVar("Behind", bound=CausalModel)


class ModelWrapper(CausalModel, Generic[Behind]):
    """A model that stands before another one, and is it in all that a subclass does not say itself.

    Attributes:
        model: the one behind it.
    """

    def __init__(self, model: Behind) -> None:
        self.model = model

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.model.vocab_size

    @property
    def num_embeddings(self) -> int:
        """Ids that may be fed: [0, num_embeddings)."""
        return self.model.num_embeddings

    @property
    def max_positions(self) -> int:
        """The longest sequence."""
        return self.model.max_positions

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def relative_positions(self) -> bool:
        """Whether positions may grow for ever."""
        return self.model.relative_positions

    def make_cache(self, batch_size: int, num_slots: int, context: Tensor | None = None) -> Any:
        """Let the model make its cache."""
        return self.model.make_cache(batch_size, num_slots, context)

    def renew_cache(self, cache: Any, context: Tensor | None = None) -> bool:
        """Let the model empty its cache."""
        return self.model.renew_cache(cache, context)

    def see(self, positions: Tensor, steps: Tensor, held: Tensor, fed_at: Tensor) -> Any:
        """Say who is seen as the model does."""
        return self.model.see(positions, steps, held, fed_at)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the model."""
        return self.model.forward(*args, **kwargs)

    def sample(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draw as the model does."""
        return self.model.sample(*args, **kwargs)


def make_runner(
    name: RunnerName, step: StepFunction, graphs: Graphs, kind: Hashable
) -> StepFunction:
    """Wrap a step function in the runner of that name.

    Args:
        graphs: over the memory that the step works in, where it is captured.
        kind: what else the step depends on: steps of one kind and shape share a graph.

    Raises:
        ValueError: an unknown runner, or CUDA graphs without CUDA.
    """
    if name not in get_args(RunnerName):
        raise ValueError(f"runner must be one of {', '.join(get_args(RunnerName))}, got {name!r}")
    if name in CAPTURING:
        if graphs.device.type != "cuda":
            raise ValueError(f"runner {name} needs a CUDA device, got {graphs.device}")
        return partial(graphs.run, (name, kind), step, compiled=name == "compiled-graph")
    return EagerRunner(step) if name == "eager" else CompiledRunner(step)


class EagerRunner:
    """Call the step as it is, reading few more cache slots than are in use."""

    block = 64

    def __init__(self, step: StepFunction) -> None:
        self.step = step

    def __call__(self, lanes: Tensor, num_slots: int) -> None:
        """Run one step; the cache slots to read are rounded up to whole blocks."""
        self.step(lanes, -(-num_slots // self.block) * self.block)


class CompiledRunner(EagerRunner):
    """Compile the step once, for any number of lanes and slots."""

    block = 256

    def __init__(self, step: StepFunction) -> None:
        compiled = torch.compile(step, dynamic=True)  # pyright: ignore[reportUnknownMemberType]
        super().__init__(compiled)
