"""Architectures of transformers in miniature, drawn so wide that every visible token matters."""

from functools import cache
from typing import Any

import torch
from transformers import (
    Emu3Config,
    Emu3ForConditionalGeneration,
    Emu3TextConfig,
    Emu3VQVAEConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.oracles import NO_STOP, TINY, tiny_llama

VOCAB_SIZE, NUM_VISUAL = 40, 24
SEPARATOR, FIRST_VISUAL = 5, 10  # Emu3: ends every row; ids [10, 34) are visual
SIZES = {**TINY, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 160}
ARCHITECTURES = ("llama", "qwen3", "mistral", "gpt2", "emu3")


@cache
def architecture(name: str) -> Any:
    """Return a seeded tiny model; to be left as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _random(name).eval()


def _random(name: str) -> Any:
    if name == "llama":
        return tiny_llama(VOCAB_SIZE, 160)
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, **NO_STOP, head_dim=8))
    if name == "mistral":
        return MistralForCausalLM(MistralConfig(**SIZES, **NO_STOP, sliding_window=None))
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB_SIZE,
                n_positions=160,
                n_embd=32,
                n_layer=2,
                n_head=4,
                initializer_range=0.4,
                **NO_STOP,
            )
        )
    return _emu3()


def _emu3() -> Emu3ForConditionalGeneration:
    """Text, image start, rows of visual tokens with a separator each; a VQ model for pixels."""
    visual = {f"<|visual token {n:06d}|>": FIRST_VISUAL + n for n in range(NUM_VISUAL)}
    text = Emu3TextConfig(**SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    pixels = Emu3VQVAEConfig(
        codebook_size=NUM_VISUAL,
        base_channels=32,
        channel_multiplier=(1, 1),
        num_res_blocks=1,
        hidden_size=32,
        attn_resolutions=(),
    )
    config = Emu3Config(
        vq_config=pixels,
        text_config=text,
        vocabulary_map={"<image>": 3, "<|extra_200|>": SEPARATOR, **visual},
    )
    return Emu3ForConditionalGeneration(config)
