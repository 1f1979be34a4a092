"""Put any causal language model of transformers behind the protocol of our own decoder.

The stock caches append, or write at a running index. `SlotCache` writes where the step says and
returns a prefix of the buffer, and a 4-D mask says who sees whom, so a model that takes position
ids can be fed out of order. Its weights and code stay untouched.
"""

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

_NEEDED_ARGUMENTS = ("attention_mask", "position_ids", "past_key_values", "logits_to_keep")
_MASKED_ATTENTION = ("eager", "sdpa")  # the implementations that honour a 4-D mask


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

    @property
    def bytes(self) -> int:
        """Memory the buffers hold; 0 before the first step."""
        buffers = [b for layer in self.slot_layers for b in (layer.keys, layer.values)]
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)


class HuggingFaceModel:
    """A transformers causal language model that can be decoded out of order.

    Raises:
        ValueError: The model is no causal language model, takes no position ids (ALiBi models),
            limits attention to a window, or runs an attention that ignores a 4-D mask.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap the model and put it in evaluation mode, without which dropout would be active."""
        _check_model(model)
        self.model = model.eval()
        self.config = model.config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the weights."""
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.config.vocab_size

    @property
    def num_embeddings(self) -> int:
        """Ids that may be fed: [0, num_embeddings)."""
        return self.model.get_input_embeddings().get_parameter("weight").shape[0]

    @property
    def max_positions(self) -> int:
        """Longest sequence the model can hold."""
        return int(self.config.max_position_embeddings)

    def make_cache(
        self, batch_size: int, num_slots: int, context: Tensor | None = None
    ) -> SlotCache:
        """Make a cache of num_slots slots, the scratch slot (the last one) included.

        Raises:
            ValueError: A context is given, or a size is below 1.
        """
        _refuse_context(context)
        if batch_size < 1 or num_slots < 1:
            raise ValueError(
                f"batch_size and num_slots must be at least 1, got {batch_size} and {num_slots}"
            )
        return SlotCache(self.config.num_hidden_layers, batch_size, num_slots)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor,
        cache: SlotCache,
        logits_to_keep: int | Tensor = 0,
    ) -> Tensor:
        """Run one decoding step.

        Args:
            tokens: (B, L) int64.
            positions: (L,) int64 in [0, max_positions).
            slots: (L,) int64, cache slot of every lane; written before attention.
            visible: (L, M) bool, True = the lane may attend; the first M cache slots are read.
            cache: From `make_cache`, changed in place.
            logits_to_keep: 0 keeps all lanes, k the last k, a tensor of indices those lanes.

        Returns:
            Logits (B, lanes kept, vocab_size) in the model's dtype.
        """
        cache.begin_step(slots, visible.shape[1])
        never = torch.finfo(self.dtype).min
        mask = torch.zeros_like(visible, dtype=self.dtype).masked_fill(~visible, never)
        out = self.model(
            input_ids=tokens,
            attention_mask=mask[None, None],
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
        return out.logits

    __call__ = forward

    def logits(self, tokens: Tensor, context: Tensor | None = None) -> Tensor:
        """Run the plain causal model on (B, N) int64 tokens; returns (B, N, vocab_size).

        Raises:
            ValueError: A context is given, or N exceeds max_positions.
        """
        _refuse_context(context)
        if tokens.shape[1] > self.max_positions:
            raise ValueError(
                f"tokens must be at most max_positions={self.max_positions} long, "
                f"got {tokens.shape[1]}"
            )
        return self.model(input_ids=tokens, use_cache=False).logits


def _refuse_context(context: Tensor | None) -> None:
    if context is not None:
        raise ValueError("context must be None: this model has no cross-attention")


def _check_model(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"expected a transformers causal LM, got {type(model).__name__}")
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder or not model.can_generate():
        raise ValueError(f"expected a transformers causal LM, got {name}")
    parameters = inspect.signature(model.forward).parameters
    missing = [argument for argument in _NEEDED_ARGUMENTS if argument not in parameters]
    if missing or getattr(config, "alibi", False):
        missing = missing or ["position_ids (it uses ALiBi)"]
        raise ValueError(f"{name} cannot be fed out of order: it takes no {', '.join(missing)}")
    if not hasattr(config, "max_position_embeddings"):
        raise ValueError(f"{name} cannot be used: its config has no max_position_embeddings")
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (window or 0) > 0:
        raise ValueError(
            f"{name} cannot be used: it needs full attention in every layer, "
            f"got {', '.join(sorted(kinds))} with sliding_window={window}"
        )
    if config._attn_implementation not in _MASKED_ATTENTION:
        raise ValueError(
            f"{name} must run {' or '.join(_MASKED_ATTENTION)} attention, "
            f"which honours a 4-D mask, got {config._attn_implementation!r}"
        )
