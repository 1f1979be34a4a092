"""The decoder of all families: embedding, blocks, final norm and output layer."""

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diagd.decoding.model import CausalModel, ModelShape
from diagd.decoding.schedule import Section
from diagd.decoding.visibility import Seen
from diagd.models.attention import (
    GELU,
    Attend,
    Attention,
    CrossAttention,
    Lanes,
    StaticKVCache,
    SwiGLU,
    Text,
    attend,
    check_length,
    check_sizes,
    keep_lanes,
    make_norm,
    refuse_context,
    rows_at,
)
from diagd.models.config import ModelConfig
from diagd.models.rotary import PositionTable, Rotary, grid_coordinates

Attends = tuple[Attend, Attend]  # in layers that see everything, and in sliding ones


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, config.norm_affine)
        self.self_attn = Attention(config, layer)
        has_text = config.context_size > 0
        self.cross_attention_layernorm = make_norm(config, config.norm_affine) if has_text else None
        self.cross_attn = CrossAttention(config, config.context_size) if has_text else None
        self.post_attention_layernorm = make_norm(config, config.norm_affine)
        kind = SwiGLU if config.mlp == "swiglu" else GELU
        self.mlp, is_two = kind(config), layer in config.visual_mlp_layers
        self.visual_mlp = kind(config) if is_two else None
        after = [make_norm(config) if config.post_norms else nn.Identity() for _ in range(2)]
        self.post_self_attn_layernorm, self.post_mlp_layernorm = after

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        attend: Attend,
        lanes: Lanes | None,
        cache: StaticKVCache | None,
        text: Text | None,
        is_visual: Tensor | bool,
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), rotary, attend, lanes, cache)
        x = x + self.post_self_attn_layernorm(attended)
        if self.cross_attn is not None and self.cross_attention_layernorm is not None:
            assert text is not None
            normed = self.cross_attention_layernorm(x)
            x = x + self.cross_attn(normed, *text[self.self_attn.layer])
        normed = self.post_attention_layernorm(x)
        if self.visual_mlp is None or is_visual is False:
            added = self.mlp(normed)
        elif is_visual is True:
            added = self.visual_mlp(normed)
        else:
            added = torch.where(is_visual, self.visual_mlp(normed), self.mlp(normed))
        return x + self.post_mlp_layernorm(added)


def _embedding(rows: int, size: int) -> nn.Embedding:
    weight = torch.empty(rows, size)  # on the meta device `normal_` imports Dynamo, for seconds
    return nn.Embedding(rows, size, _weight=weight if weight.is_meta else None)


class DecoderStack(nn.Module):
    """Embedding, blocks and final norm, named like the weights; not called itself."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, num_embeddings = config.hidden_size, config.vocab_size + config.extra_embeddings
        is_learned = config.position == "learned"
        self.embed_tokens = _embedding(num_embeddings, size)
        self.embed_positions = _embedding(config.max_positions, size) if is_learned else None
        self.rotary = None if is_learned else Rotary(config)
        self.position_table = PositionTable(config) if config.position_table else None
        self.layers = nn.ModuleList([Block(config, layer) for layer in range(config.num_layers)])
        self.recomputes = False  # activations of blocks are computed again in the backward pass
        self.norm = make_norm(config)

    @property
    def blocks(self) -> list[Block]:
        return [layer for layer in self.layers if isinstance(layer, Block)]


_INIT_STD = 0.02


class Transformer(
    nn.Module, PyTorchModelHubMixin, CausalModel, library_name="diagd", tags=["video"]
):
    """Decoder-only transformer of a `ModelConfig`; `push_to_hub` publishes it in our format."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderStack(config)
        self.lm_head = self.head_proj = None
        size, has_layer = config.hidden_size, config.head_size > 0
        if has_layer:
            self.head_proj = nn.Linear(size, config.head_size)
        if not config.tie_embeddings:
            size = config.head_size or size
            self.lm_head = nn.Linear(size, config.vocab_size, bias=has_layer)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "Transformer":
        """Build a model with seeded random weights, reproducible on one kind of device.

        Matrices that write to the residual stream are smaller; norms are one, biases zero.
        """
        with torch.device("meta"):
            model = cls(config)
        generator = torch.Generator(device).manual_seed(seed)
        weights = {}
        for name, meta in model.state_dict().items():
            weight = torch.empty(meta.shape, device=device, dtype=dtype)
            if weight.dim() == 1:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = _INIT_STD / math.sqrt(2 * config.num_layers) if is_residual else _INIT_STD
                weight.normal_(0.0, std, generator=generator)
            weights[name] = weight
        model.load_state_dict(weights, assign=True)
        return model.to(device)

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.config, self.model.embed_tokens.weight.device)

    @property
    def embeddings(self) -> Tensor:
        return self.model.embed_tokens.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    def coordinates(
        self, positions: Tensor, sections: Sequence[Section] | None = None
    ) -> Tensor | None:
        return grid_coordinates(self.config, positions, sections)

    def make_cache(
        self, batch_size: int, num_slots: int, context: Tensor | None = None
    ) -> StaticKVCache:
        check_sizes(batch_size, num_slots)
        text = self._read_text(context, batch_size)
        return StaticKVCache(self.config, batch_size, num_slots, self.embeddings, text)

    def renew_cache(self, cache: StaticKVCache, context: Tensor | None = None) -> bool:
        return cache.renew(self._read_text(context, len(cache.keys[0])))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        slots: Tensor | None = None,
        seen: Seen | None = None,
        cache: StaticKVCache | None = None,
        logits_to_keep: int | Tensor = 0,
        first: int = 0,
        coordinates: Tensor | None = None,
        text: Text | None = None,
        attends: Attends | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Run a decoding step (see `CausalModel.forward`), or the plain model without a cache.

        Args:
            positions: without a cache, None means 0 .. L-1.
            text: without a cache, the input of cross-attention; a cache holds its own.
            attends: attention functions, for layers that see everything and for sliding ones,
                instead of `attend` under the masks of `seen`, or without a cache causally.
            states: gets the input of each layer, and the output of the last one.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        if attends is None:
            attends = self._attends(seen, positions)
        lanes = None
        if cache is not None:
            if slots is None or seen is None:
                raise ValueError("slots and seen must be given with a cache, got None")
            slots, text = slots.expand(tokens.shape), cache.text_of(first, len(tokens))
            rows = rows_at(cache.keys[0], slots, first)
            lanes = Lanes(rows, first, seen.shape[1])
        stack = self.model
        hidden = stack.embed_tokens(tokens)
        if stack.embed_positions is not None:
            hidden = hidden + stack.embed_positions(positions)
        dtype, table = hidden.dtype, stack.position_table
        if coordinates is None:
            coordinates = self.coordinates(positions)
        rotary = None if stack.rotary is None else stack.rotary(positions, coordinates, dtype)
        added = None if table is None else table(positions, coordinates, dtype)
        whole, near = attends
        is_visual = self._are_visual(tokens)
        for index, layer in enumerate(stack.layers):
            hidden = hidden if added is None else hidden + added
            if states is not None:
                states.append(hidden)
            masked = near if index in self.config.sliding_layers else whole
            run = partial(checkpoint, layer, use_reentrant=False) if stack.recomputes else layer
            hidden = run(hidden, rotary, masked, lanes, cache, text, is_visual)
        if states is not None:
            states.append(hidden)
        hidden = stack.norm(keep_lanes(hidden, logits_to_keep))
        if self.head_proj is not None:
            hidden = F.gelu(self.head_proj(hidden))
        if self.lm_head is None:
            return F.linear(hidden, stack.embed_tokens.weight)
        return self.lm_head(hidden)

    def _are_visual(self, tokens: Tensor) -> Tensor | bool:
        """Return which lanes take `visual_mlp`, (B, L, 1); one value if all lanes agree.

        On a GPU, or compiled, a step must not wait for ids: there, both MLPs run.
        """
        if not self.config.visual_mlp_layers:
            return False
        are_visual = (tokens < self.config.vocab_size)[..., None]
        if tokens.is_cpu and not torch.compiler.is_compiling():
            if are_visual.all():
                return True
            if not are_visual.any():
                return False
        return are_visual

    def _attends(self, seen: Seen | None, positions: Tensor) -> Attends:
        window = self.config.sliding_window
        if seen is None and not window:
            causal = partial(attend, visible=None)
            return causal, causal
        if seen is None:
            seen = Seen(positions, positions, positions, positions)
        whole = partial(attend, visible=seen.mask())
        return whole, partial(attend, visible=seen.within(window).mask()) if window else whole

    def logits(
        self,
        tokens: Tensor,
        context: Tensor | None = None,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Run the model without a cache, differentiably, on tokens (B, N): (B, N, vocab_size).

        Args:
            context: (1 or B, M, context_size), text of a model with cross-attention.
            positions: (N,) int64; None means 0 .. N-1, below max_positions.
            visible: (N, N) bool, True = may attend; None means causal.
        """
        text = self._read_text(context, len(tokens))
        if positions is None:
            check_length(tokens, self.max_positions)
        seen = None
        if visible is not None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            places = places if positions is None else positions
            seen = Seen.of_mask(visible, places, places)
        return self(tokens, positions, seen=seen, text=text)

    @torch.inference_mode()
    def hidden_states(self, tokens: Tensor, layers: Sequence[int] = (-1,)) -> Tensor:
        """Run one causal pass over tokens (B, N), and average some of its hidden states.

        Args:
            layers: as transformers counts them: 0 is the embedding, n the output of layer n - 1,
                and -1, the output of the last one, is normed.

        Returns:
            (B, N, hidden_size), of the model's dtype.
        """
        check_length(tokens, self.max_positions)
        count = self.config.num_layers
        if not layers or not all(-count <= layer + 1 and layer <= count for layer in layers):
            raise ValueError(f"layers must be in [{-count - 1}, {count}], got {[*layers]}")
        states = list[Tensor]()
        self(tokens, logits_to_keep=1, states=states)
        states[-1] = self.model.norm(states[-1])
        return torch.stack([states[layer] for layer in layers]).mean(0)

    def _read_text(self, context: Tensor | None, batch_size: int) -> Text | None:
        if not (size := self.config.context_size):
            refuse_context(context)
            return None
        given = () if context is None else tuple(context.shape)
        fits = len(given) == 3 and given[0] in (1, batch_size) and given[2] == size
        if context is None or not fits:
            expected = f"({batch_size} or 1, M, {size})"
            raise ValueError(f"context must be this model's text, {expected}, got {given}")
        context = context.to(self.device, self.dtype)
        layers = [block.cross_attn for block in self.model.blocks]
        return [layer.project(context) for layer in layers if layer is not None]


def shape_of(config: ModelConfig, device: torch.device) -> ModelShape:
    rotated = config.position != "learned" and not config.position_table
    ids = config.vocab_size, config.vocab_size + config.extra_embeddings
    stand_in = ids[1] - 1 if config.stand_in else None
    return ModelShape(*ids, config.max_positions, device, rotated, config.on_grid, stand_in)


def num_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in Transformer(config).parameters())
