"""Embedding, blocks and final norm: everything of the decoder but the output layer."""

from torch import Tensor, nn

from diagd.models.attention import Attention, CrossAttention, Visible
from diagd.models.cache import StaticKVCache, Text
from diagd.models.config import ModelConfig
from diagd.models.layers import GELU, SwiGLU, make_norm
from diagd.models.rotary import PositionTable, Rotary


class Block(nn.Module):
    """One pre-norm decoder block."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, config.norm_affine)
        self.self_attn = Attention(config, layer)
        has_text = config.context_size > 0
        self.cross_attention_layernorm = make_norm(config, config.norm_affine) if has_text else None
        self.cross_attn = CrossAttention(config) if has_text else None
        self.post_attention_layernorm = make_norm(config, config.norm_affine)
        self.mlp = SwiGLU(config) if config.mlp == "swiglu" else GELU(config)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        slots: Tensor | None,
        visible: Visible,
        cache: StaticKVCache | None,
        text: Text | None,
    ) -> Tensor:
        """Add attention and MLP to the residual stream x; arguments as in `Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, slots, visible, cache)
        if self.cross_attn is not None and self.cross_attention_layernorm is not None:
            assert text is not None
            normed = self.cross_attention_layernorm(x)
            x = x + self.cross_attn(normed, *text[self.self_attn.layer])
        return x + self.mlp(self.post_attention_layernorm(x))


class DecoderStack(nn.Module):
    """Embedding, blocks and final norm: everything below the output layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        learned = config.position == "learned"
        self.embed_tokens = nn.Embedding(
            config.vocab_size + config.extra_embeddings, config.hidden_size
        )
        self.embed_positions = (
            nn.Embedding(config.max_positions, config.hidden_size) if learned else None
        )
        self.rotary = None if learned else Rotary(config)
        self.position_table = PositionTable(config) if config.position_table else None
        self.layers = nn.ModuleList([Block(config, layer) for layer in range(config.num_layers)])
        self.norm = make_norm(config)

    @property
    def blocks(self) -> list[Block]:
        """The layers, as what they are."""
        return [layer for layer in self.layers if isinstance(layer, Block)]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor | None,
        visible: Visible,
        cache: StaticKVCache | None,
        text: Text | None = None,
    ) -> Tensor:
        """Return the blocks' output (B, L, hidden_size), before the final norm."""
        x = self.embed_tokens(tokens)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        rotary = None if self.rotary is None else self.rotary(positions, x.dtype)
        table = None if self.position_table is None else self.position_table(positions, x.dtype)
        for layer in self.layers:
            x = layer(x if table is None else x + table, rotary, slots, visible, cache, text)
        return x

    def read_text(self, context: Tensor) -> Text:
        """Project a text (B, M, context_size) for every block, once."""
        context = context.to(self.embed_tokens.weight.dtype)
        return [
            block.cross_attn.project(context)
            for block in self.blocks
            if block.cross_attn is not None
        ]
