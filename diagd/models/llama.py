"""The same weights as a transformers LlamaForCausalLM: the baseline everybody has.

Our LLaMA-like decoders carry LLaMA's weight names, so only the rotary angles have to be handed over
where positions are (frame, row, column).
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from diagd.models.transformer import Transformer


class _GivenRotary(nn.Module):
    """Stands where LLaMA computes its rotary embedding, and asks ours."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        assert model.model.rotary is not None
        self.rotary = model.model.rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(position_ids, x.dtype)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


def llama_of(model: Transformer) -> LlamaForCausalLM:
    """Copy the weights into a LlamaForCausalLM with the same logits.

    Raises:
        ValueError: the model is not LLaMA-like.
    """
    config = model.config
    if (
        config.norm != "rms"
        or config.mlp != "swiglu"
        or config.qk_norm
        or config.position == "learned"
        or config.extra_embeddings
        or config.context_size
        or config.position_table
    ):
        raise ValueError("only LLaMA-like models have a Hugging Face LLaMA: use --baseline none")
    llama_config = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        attention_bias=config.bias,
        mlp_bias=config.bias,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        llama = LlamaForCausalLM(llama_config)
    llama.model.rotary_emb = _GivenRotary(model)  # pyright: ignore[reportAttributeAccessIssue]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])  # tied
    llama.load_state_dict(weights, assign=True)
    llama.tie_weights()
    return llama.eval()
