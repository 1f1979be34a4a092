"""Read out whom the tokens of a sequence attend to, layer by layer, a few queries at a time.

A fast attention never holds its probabilities. Here the sequence is fed through the cache in
chunks; while it passes, hooks on the attention modules hand the probabilities of the chunk to the
caller, one layer after the other. Memory is that of one layer and one chunk. The hooks are gone
when the call returns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from diagd.models.attention import Attention
from diagd.models.huggingface import HuggingFaceModel
from diagd.models.rotary import rotate
from diagd.models.transformer import Transformer

# layer, first query, probabilities (B, heads, L, M) float32 of L queries over the tokens [0, M)
Sink = Callable[[int, int, Tensor], None]


@torch.no_grad()
def capture_attention(
    model: Transformer | HuggingFaceModel, tokens: Tensor, first: int, sink: Sink, chunk: int = 64
) -> None:
    """Feed tokens causally and hand out the attention of those from `first` on.

    Args:
        model: our own decoder, or a model of transformers with eager attention.
        tokens: (B, N) int64.
        first: the first query, in [0, N).
        sink: called for every layer of every chunk of at most `chunk` queries.

    Raises:
        ValueError: the model cannot tell, or the sequence does not fit it.
    """
    length = tokens.shape[1]
    if not 0 <= first < length <= model.max_positions:
        raise ValueError(
            f"expected 0 <= first < tokens <= max_positions={model.max_positions}, "
            f"got first {first} of {length} tokens"
        )
    start = 0
    hooks: list[Any] = []
    probabilities = _of_own if isinstance(model, Transformer) else _of_huggingface
    modules = _attention_modules(model)
    cache: Any = model.make_cache(len(tokens), length + 1)

    def listen_to(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            sink(layer, start, probabilities(module, inputs, output))

        return hook

    try:
        while start < length:
            if start >= first and not hooks:
                listeners = enumerate(modules)
                hooks = [m.register_forward_hook(listen_to(layer)) for layer, m in listeners]
            end = min(start + chunk, length if start >= first else first)
            slots = torch.arange(start, end, device=tokens.device)
            visible = torch.arange(end, device=tokens.device) <= slots[:, None]
            model.forward(tokens[:, start:end], slots, slots, visible, cache, logits_to_keep=1)
            start = end
    finally:
        for hook in hooks:
            hook.remove()


def _attention_modules(model: Transformer | HuggingFaceModel) -> list[nn.Module]:
    """Return one module a layer, in order."""
    if isinstance(model, Transformer):
        return [block.self_attn for block in model.model.blocks]
    name, config = type(model.model).__name__, model.config
    if config._attn_implementation != "eager":
        raise ValueError(
            f"{name} must run eager attention, which holds its probabilities: load it with "
            f"attn_implementation='eager', got {config._attn_implementation!r}"
        )
    found: dict[int, nn.Module] = {}
    for module in model.model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and type(module).__name__.endswith("Attention"):
            found[layer] = module
    if sorted(found) != list(range(config.num_hidden_layers)):
        raise ValueError(
            f"{name} has {config.num_hidden_layers} layers, "
            f"found attention modules of layers {sorted(found)}"
        )
    return [found[layer] for layer in sorted(found)]


def _of_huggingface(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Tensor:
    return output[1].float()


def _of_own(module: nn.Module, inputs: tuple[Any, ...], _output: Any) -> Tensor:
    """Compute again what the fused kernel did not keep; the keys are in the cache by now."""
    assert isinstance(module, Attention)
    x, rotary, _, visible, cache = inputs
    queries = module.q_proj(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
    if module.q_norm is not None:
        queries = module.q_norm(queries)
    if rotary is not None:
        queries = rotate(queries, *rotary)
    keys, _ = cache.read(module.layer, visible.shape[1])
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = queries.float() @ keys.float().transpose(2, 3) / module.head_dim**0.5
    return scores.masked_fill(~visible, float("-inf")).softmax(-1)
