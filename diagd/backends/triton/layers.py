"""The layers of a decoder for a step of few lanes: five launches each, by our kernels.

Norm, projection, head norms, rotation and the store of keys and values; attention; projection and
residual; norm, projection and activation; projection and residual. What few models have between
them (cross-attention, a table of positions) stays PyTorch's.
"""

# Triton is optional: without it, nothing imports this module, and it cannot be type-checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn

from diagd.backends.linears import Int8Linear
from diagd.backends.triton import products
from diagd.backends.triton.attention import attend_slots
from diagd.backends.triton.lanes import read_lanes
from diagd.backends.triton.launching import MAX_COUNTERS, launch_settings, starts_early
from diagd.backends.triton.tiles import Tile, Tiles, tile_of
from diagd.decoding.visibility import Seen
from diagd.models.attention import HeadNorm, StaticKVCache, SwiGLU
from diagd.models.transformer import Block, Transformer

ACTIVATIONS = {"swiglu": products.SWIGLU, "gelu": products.TANH_GELU}
ACTIVATIONS |= {"exact_gelu": products.EXACT_GELU}


class Norm(NamedTuple):
    """A norm, as arguments of a kernel: none, RMSNorm or LayerNorm."""

    kind: Any = products.PLAIN
    gains: Tensor | None = None
    shifts: Tensor | None = None
    eps: float = 0.0

    @classmethod
    def of(cls, module: nn.Module) -> "Norm":
        if isinstance(module, nn.Identity):
            return cls()
        is_layer = isinstance(module, nn.LayerNorm | HeadNorm)
        kind = products.LAYER if is_layer else products.RMS
        weights = getattr(module, "weight", None), getattr(module, "bias", None)
        return cls(kind, *weights, float(getattr(module, "eps", 0.0)))


NO_NORM = Norm()


class Linear(NamedTuple):
    """A linear layer, as arguments of a kernel."""

    weight: Tensor  # (outputs, inner), in the model's type or int8
    scales: Tensor | None  # (outputs,) float32, of int8
    bias: Tensor | None

    @classmethod
    def of(cls, module: Any) -> "Linear":
        scales = module.scales if isinstance(module, Int8Linear) else None
        return cls(module.weight, scales, module.bias)


class Layer:
    """The parts of a block, as arguments of our kernels."""

    def __init__(self, block: Block) -> None:
        self.block, attention, mlp = block, block.self_attn, block.mlp
        self.index = attention.layer
        self.heads, self.out = Linear.of(attention.qkv_proj), Linear.of(attention.o_proj)
        self.norm = Norm.of(block.input_layernorm)
        self.query_norm, self.key_norm = Norm.of(attention.q_norm), Norm.of(attention.k_norm)
        self.up = Linear.of(mlp.gate_up_proj if isinstance(mlp, SwiGLU) else mlp.up_proj)
        self.down, self.mlp_norm = Linear.of(mlp.down_proj), Norm.of(block.post_attention_layernorm)
        after = block.post_self_attn_layernorm, block.post_mlp_layernorm
        self.after_attention, self.after_mlp = (Norm.of(one) for one in after)


class Layers:
    """A decoder's layers by our kernels, over merged weights (see `merge_linears`).

    Args:
        dependent: start kernels early; None: where the device can.
    """

    def __init__(self, model: Transformer, dependent: bool | None = None) -> None:
        self.config, stack, device = model.config, model.model, model.device
        self.stack, self.tiles = stack, Tiles(device)
        self.dependent = starts_early(device) if dependent is None else dependent
        self.counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
        self.layers = [Layer(block) for block in stack.blocks]
        self.norm, self.activation = Norm.of(stack.norm), ACTIVATIONS[model.config.mlp]
        self.head_proj = None if model.head_proj is None else Linear.of(model.head_proj)
        tied = Linear(stack.embed_tokens.weight[: model.config.vocab_size], None, None)
        self.head = tied if model.lm_head is None else Linear.of(model.lm_head)

    def run(
        self,
        tokens: Tensor,
        inputs: Tensor,
        positions: Tensor,
        slots: Tensor,
        seen: Seen,
        cache: StaticKVCache,
        first: int,
        coordinates: Tensor | None,
    ) -> Tensor:
        """Feed lanes; return the stream after the last layer, (S' * L, hidden_size).

        Args:
            tokens: (S', n) int64. inputs: (S', L), the place in it of each lane's token.
            The rest is that of `CausalModel.forward`, all of it (S', L).
        """
        stack, (count, lanes) = self.stack, slots.shape
        table = stack.embed_positions
        hidden, turns = read_lanes(
            tokens,
            inputs,
            stack.embed_tokens.weight,
            None if table is None else table.weight,
            stack.rotary,
            positions,
            coordinates,
            self.config.head_dim,
            self.dependent,
        )
        own, text = slice(first, first + count), cache.text_of(first, count)
        near, added = seen.within(self.config.sliding_window), None
        if stack.position_table is not None:
            assert coordinates is not None
            added = stack.position_table(positions, coordinates, hidden.dtype).view_as(hidden)
        for layer in self.layers:
            if added is not None:
                hidden += added
            keys, values = cache.keys[layer.index], cache.values[layer.index]
            queries = self._heads(hidden, layer, turns, slots, keys, values, first)
            own_keys, own_values = (of[own, :, : seen.shape[1]] for of in (keys, values))
            shown = near if layer.index in self.config.sliding_layers else seen
            attended = attend_slots(
                queries, own_keys, own_values, shown, self.counters, self.dependent
            )
            self._add(attended.view(count * lanes, -1), layer.out, layer.after_attention, hidden)
            block = layer.block
            if block.cross_attn is not None and block.cross_attention_layernorm is not None:
                assert text is not None
                normed = block.cross_attention_layernorm(hidden).view(count, lanes, -1)
                hidden += block.cross_attn(normed, *text[layer.index]).view_as(hidden)
            inside = self._project(hidden, layer.up, layer.mlp_norm, self.activation)
            self._add(inside, layer.down, layer.after_mlp, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (L, vocab_size) of lanes (L, hidden_size)."""
        if self.head_proj is None:
            return self._project(hidden, self.head, self.norm)
        hidden = self._project(hidden, self.head_proj, self.norm, products.EXACT_GELU)
        return self._project(hidden, self.head)

    def _add(self, x: Tensor, linear: Linear, norm: Norm, hidden: Tensor) -> None:
        """hidden += norm(x @ weight.T + bias), in place."""
        if norm.kind is products.PLAIN:
            self._project(x, linear, added_to=hidden)
            return
        size = hidden.shape[1]
        products.add_normed[len(hidden),](
            self._project(x, linear),
            norm.gains,
            hidden,
            norm.eps,
            SIZE=size,
            WIDTH=triton.next_power_of_2(size),
            DEPENDENT=self.dependent,
            num_warps=8,
            **launch_settings(self.dependent),
        )

    def _project(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm = NO_NORM,
        activation: Any = products.NONE,
        added_to: Tensor | None = None,
    ) -> Tensor:
        """Return activation(norm(x) @ weight.T + bias) of lanes (L, inner), or add it in place."""
        is_gated, adds = activation is products.SWIGLU, added_to is not None
        outputs = len(linear.weight) // (2 if is_gated else 1)
        pairs = outputs if is_gated else triton.cdiv(outputs, 2)
        out = x.new_empty(len(x), outputs) if added_to is None else added_to

        def run(tile: Tile, out: Tensor = out) -> None:
            self._launch(
                products.project,
                tile,
                triton.cdiv(pairs, tile.OUTPUTS),
                x,
                linear,
                norm,
                out=out,
                NUM_OUTPUTS=outputs,
                ACTIVATION=activation,
                ADDS=adds,
            )

        tile = tile_of(len(x), pairs, x.shape[1], x.itemsize)
        name = f"{x.dtype} by {linear.weight.dtype} {(outputs, x.shape[1], adds)}"
        name += f" {norm.kind.value} {activation.value}"
        # a trial adds to something else
        run(self.tiles.choose(name, tile, lambda one: run(one, out.clone() if adds else out)))
        return out

    def _heads(
        self,
        x: Tensor,
        layer: Layer,
        turns: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        first: int,
    ) -> Tensor:
        """Store lanes' keys and values, rotated, at slots; return queries (S', L, heads, D)."""
        config, linear = self.config, layer.heads
        half, heads = config.head_dim // 2, config.num_heads + 2 * config.num_kv_heads
        queries = x.new_empty(*slots.shape, config.num_heads, config.head_dim)
        slots = slots if slots.stride(-1) == 1 else slots.contiguous()

        def run(tile: Tile) -> None:
            self._launch(
                products.project_heads,
                tile,
                heads * triton.cdiv(half, tile.OUTPUTS),
                x,
                linear,
                layer.norm,
                query_gains=layer.query_norm.gains,
                query_shifts=layer.query_norm.shifts,
                key_gains=layer.key_norm.gains,
                key_shifts=layer.key_norm.shifts,
                turns=turns,
                slots=slots,
                queries=queries,
                keys=keys,
                values=values,
                num_of_sequence=slots.shape[1],
                first_sequence=first,
                slot_stride=slots.stride(0),
                cache_strides=keys.stride()[:3],
                HEADS=config.num_heads,
                KV_HEADS=config.num_kv_heads,
                HALF=half,
                HEAD_NORM=layer.query_norm.kind,
                ROTATES=self.stack.rotary is not None,
            )

        whole = max(16, triton.next_power_of_2(half)) if config.qk_norm else None
        tile = tile_of(len(x), heads * half, x.shape[1], x.itemsize, whole)
        name = f"{heads} heads of {half} pairs of {x.dtype} by {linear.weight.dtype} {x.shape[1]}"
        run(self.tiles.choose(name, tile, run))
        return queries

    def _launch(
        self,
        kernel: Any,
        tile: Tile,
        programs: int,
        x: Tensor,
        linear: Linear,
        norm: Norm,
        **others: Any,
    ) -> None:
        """Launch a kernel of products, with programs for so many tiles of outputs."""
        lanes, inner = x.shape
        grid = programs, tile.SPLITS, triton.cdiv(lanes, tile.LANES)
        parts = x if tile.SPLITS == 1 else x.new_empty(
            *grid, 2, tile.OUTPUTS, tile.LANES, dtype=torch.float32
        )  # fmt: skip
        kernel[grid](
            weights=linear.weight,
            scales=linear.scales,
            biases=linear.bias,
            x=x,
            gains=norm.gains,
            shifts=norm.shifts,
            parts=parts,
            counters=self.counters,
            num_lanes=lanes,
            eps=norm.eps,
            INNER=inner,
            SCALE=linear.scales is not None,
            BIAS=linear.bias is not None,
            NORM=norm.kind,
            GAIN=norm.gains is not None,
            SHIFT=norm.shifts is not None,
            DEPENDENT=self.dependent,
            enable_fp_fusion=True,
            **tile._asdict(),
            **launch_settings(self.dependent),
            **others,
        )
