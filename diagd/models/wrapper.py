"""Models before other models: what is guided, compiled, captured or timed is one of these."""

from typing import Any, Generic, TypeVar

from torch import Tensor

from diagd.decoding.model import Buffers, CausalModel, ModelShape, Step, StepFunction
from diagd.decoding.sampling import Draw

Behind = TypeVar("Behind", bound=CausalModel)


class ModelWrapper(CausalModel, Generic[Behind]):
    """A model that stands before another one, and is it in all that a subclass does not say itself.

    A subclass that feeds or draws in a way of its own has its steps run part by part, and one that
    makes caches of its own gets none that were used.
    """

    def __init__(self, model: Behind) -> None:
        self.model = model

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    @property
    def replays(self) -> bool:
        return self.model.replays

    @property
    def embeddings(self) -> Tensor:
        return self.model.embeddings

    @property
    def capture_seconds(self) -> float:
        return self.model.capture_seconds

    def check_prompt(self, prompt: Tensor, context_frames: int) -> None:
        self.model.check_prompt(prompt, context_frames)

    def make_cache(self, batch_size: int, num_slots: int, context: Tensor | None = None) -> Any:
        return self.model.make_cache(batch_size, num_slots, context)

    def renew_cache(self, cache: Any, context: Tensor | None = None) -> bool:
        return not self._overrides("make_cache") and self.model.renew_cache(cache, context)

    def make_buffers(self, batch_size: int, num_slots: int, context: Tensor | None) -> Buffers:
        if self._overrides("make_cache"):
            return super().make_buffers(batch_size, num_slots, context)
        return self.model.make_buffers(batch_size, num_slots, context)

    def make_step(self, step: Step) -> StepFunction:
        parts = self._overrides("see", "forward", "sample")
        return step.run if parts else self.model.make_step(step.of(self.model))

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(ModelWrapper, name) for name in names)

    def see(self, positions: Tensor, steps: Tensor, held: Tensor, fed_at: Tensor) -> Any:
        return self.model.see(positions, steps, held, fed_at)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.model.forward(*args, **kwargs)

    def sample(self, logits: Tensor, draw: Draw) -> Tensor:
        return self.model.sample(logits, draw)
