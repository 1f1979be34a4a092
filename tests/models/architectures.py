"""Architectures of transformers in miniature, drawn so wide that every visible token matters."""

from functools import cache
from typing import Any

import torch
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    Emu3Config,
    Emu3ForConditionalGeneration,
    Emu3TextConfig,
    Emu3VQVAEConfig,
    GPT2Config,
    GPT2LMHeadModel,
    JanusConfig,
    JanusForConditionalGeneration,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.oracles import NO_STOP, TINY, tiny_llama

VOCAB_SIZE, NUM_VISUAL = 40, 24
SEPARATOR, FIRST_VISUAL = 5, 10  # Emu3: ends every row; ids [10, 34) are visual
PAD, BOS, EOS, IMAGE_START, IMAGE_END = 0, 1, 2, 6, 7  # Janus and Chameleon
SIDE = 6  # Janus: tokens of an image are SIDE * SIDE; its class has square grids alone
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
    return {"emu3": _emu3, "janus": janus_of, "chameleon": chameleon_of}[name]()


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


def janus_of(side: int = SIDE) -> JanusForConditionalGeneration:
    """Text ids [0, 40) and image ids [40, 64), with an embedding, an aligner and a head each."""
    sizes = {**SIZES, "max_position_embeddings": 160 if side == SIDE else 1000}
    text = LlamaConfig(**{**sizes, **NO_STOP, "pad_token_id": PAD})
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    pixels = {
        "embed_dim": 8,
        "num_embeddings": NUM_VISUAL,
        "latent_channels": 8,
        "base_channels": 32,
        "channel_multiplier": [1, 1, 1],
        "num_res_blocks": 1,
        "projection_dim": 32,
        "image_token_embed_dim": 32,
        "initializer_range": 0.4,
    }
    square = {"image_size": 4 * side, "patch_size": 4, "num_image_tokens": side * side}
    config = JanusConfig(
        text_config=text,
        vision_config={**vision, **square, "projection_dim": 32},
        vq_config=pixels,
        image_token_id=3,
        tie_word_embeddings=False,
    )
    model = JanusForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.generation_embeddings.weight)
    for module in (model.model.generation_aligner, model.model.generation_head):
        for weight in module.parameters():
            torch.nn.init.normal_(weight, std=0.4)
    options: Any = model.generation_config
    options.pad_token_id, options.bos_token_id, options.eos_token_id = PAD, BOS, EOS
    options.generation_kwargs = {"boi_token_id": IMAGE_START}
    return model


def chameleon_of(vocab_size: int = VOCAB_SIZE) -> ChameleonForConditionalGeneration:
    """Text and image ids in one vocabulary; ids [10, 34) are visual."""
    letters = "ABCDEFGHIJ"  # the digits of an image id in its name
    names = {
        "IMGIMG" + "".join(letters[int(digit)] for digit in str(n)) + "Z": FIRST_VISUAL + n
        for n in range(NUM_VISUAL)
    }
    pixels = {
        "base_channels": 32,
        "embed_dim": 4,
        "num_embeddings": NUM_VISUAL,
        "latent_channels": 4,
        "resolution": 16,
        "channel_multiplier": [1, 1],
        "num_res_blocks": 1,
    }
    config = ChameleonConfig(
        **{**SIZES, "vocab_size": vocab_size},
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        vq_config=pixels,
        vocabulary_map={"<image>": 3, "<racm3:break>": IMAGE_START, **names},
    )
    return ChameleonForConditionalGeneration(config)
