"""A cache for models of transformers that is written by slot.

The stock caches append, or write at a running index. This one writes where the step says and hands
attention a prefix of the buffer, so a model can be fed in any order.
"""

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, each (B, heads, num_slots, D), written by slot."""

    is_compileable = True

    def __init__(self, batch_size: int, num_slots: int) -> None:
        super().__init__()
        self.batch_size, self.num_slots = batch_size, num_slots
        self.slots: Tensor | None = None
        self.num_visible = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeroed buffers for the heads and sizes seen in (B, heads, L, D) states."""
        self.keys, self.values = (
            states.new_zeros(self.batch_size, states.shape[1], self.num_slots, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (B, heads, L, D) states at the step's slots; return the visible prefix."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        assert self.slots is not None
        self.keys.index_copy_(2, self.slots, key_states)
        self.values.index_copy_(2, self.slots, value_states)
        return self.keys[:, :, : self.num_visible], self.values[:, :, : self.num_visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys attention sees, and the offset of the first."""
        return self.num_visible, 0

    def get_seq_length(self) -> int:
        """Return how many keys attention sees; transformers' word for it."""
        return self.num_visible

    def get_max_length(self) -> int:
        """Return num_slots."""
        return self.num_slots


class SlotCache(Cache):
    """Cache of a transformers model, written by slot in any order; the last slot is scratch."""

    def __init__(self, num_layers: int, batch_size: int, num_slots: int) -> None:
        """Make empty layers; each allocates its buffers at the first step, once, full size."""
        self.slot_layers = [SlotCacheLayer(batch_size, num_slots) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))

    def begin_step(self, slots: Tensor, num_visible: int) -> None:
        """Say where the coming step writes, (L,) int64, and how many slots it reads.

        transformers passes neither to `update`, so the layers have to be told beforehand.
        """
        for layer in self.slot_layers:
            layer.slots, layer.num_visible = slots, num_visible

    def renew(self) -> None:
        """Empty the buffers, where they stand."""
        for layer in self.slot_layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys.zero_()
                layer.values.zero_()
