from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from diagd.models.huggingface import HuggingFaceModel
from tests.models.feeding import feed, scrambled_steps, visible_under
from tests.models.tiny import random_tokens

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
# Logits of a fresh random model stay below 1; float32 summation differs by a few 1e-7.
TOLERANCE = {"atol": 2e-6, "rtol": 0}


def make(name, **changes):
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, **changes))
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, **changes))
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=64, n_embd=24, n_layer=2, n_head=4, **changes)
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@torch.no_grad()
def test_feeding_out_of_order_equals_the_full_forward(name, attention):
    theirs = make(name, attn_implementation=attention)
    model = HuggingFaceModel(theirs)
    tokens, steps = random_tokens(2, 41), torch.arange(41) // 7
    full = theirs(tokens).logits
    torch.testing.assert_close(feed(model, tokens, steps), full, **TOLERANCE)
    torch.testing.assert_close(model.logits(tokens), full, **TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@torch.no_grad()
def test_scrambled_feeding_equals_one_pass_under_the_same_rule(name):
    theirs = make(name)
    tokens, steps = random_tokens(2, 41), scrambled_steps(41, num_steps=6)
    mask = torch.zeros(41, 41).masked_fill(~visible_under(steps), torch.finfo(torch.float32).min)
    logits = feed(HuggingFaceModel(theirs), tokens, steps)
    expected = theirs(tokens, attention_mask=mask[None, None]).logits
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("keep", [1, torch.tensor([1, 3])])
@torch.no_grad()
def test_logits_to_keep_drops_lanes(keep):
    model, tokens = HuggingFaceModel(make("llama")), random_tokens(2, 4)
    lanes, visible = torch.arange(4), torch.ones(4, 4, dtype=torch.bool).tril()
    kept = model.forward(tokens, lanes, lanes, visible, model.make_cache(2, 5), keep)
    expected = model.logits(tokens)
    expected = expected[:, keep] if isinstance(keep, torch.Tensor) else expected[:, -keep:]
    torch.testing.assert_close(kept, expected, **TOLERANCE)


def test_the_model_tells_what_the_protocol_asks():
    for name in ("llama", "gpt2"):
        model = HuggingFaceModel(make(name))
        assert (model.vocab_size, model.num_embeddings, model.max_positions) == (50, 50, 64)
        assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)


def test_the_cache_allocates_once():
    model, lanes = HuggingFaceModel(make("llama")), torch.arange(3)
    cache, visible = model.make_cache(1, 7), torch.ones(3, 3, dtype=torch.bool).tril()
    assert cache.bytes == 0
    pointers = set()
    for _ in range(2):
        model.forward(random_tokens(1, 3), lanes, lanes, visible, cache)
        keys = cache.slot_layers[0].keys
        assert keys is not None
        pointers.add(keys.data_ptr())
    assert len(pointers) == 1
    assert cache.bytes == 2 * 2 * (2 * 7 * 8) * 4  # keys and values, layers, kv heads x slots x D


def test_wrong_calls_are_refused():
    model = HuggingFaceModel(make("llama"))
    with pytest.raises(ValueError, match="context must be None: this model has no cross-attention"):
        model.make_cache(1, 4, torch.zeros(1, 3, 8))
    with pytest.raises(
        ValueError, match="batch_size and num_slots must be at least 1, got 0 and 4"
    ):
        model.make_cache(0, 4)
    with pytest.raises(ValueError, match="tokens must be at most max_positions=64 long, got 65"):
        model.logits(random_tokens(1, 65))


def unsupported_models():
    sliding = MistralConfig(**SIZES, sliding_window=8)
    bloom = BloomConfig(vocab_size=50, hidden_size=24, n_layer=1, n_head=4)
    falcon = FalconConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=1, num_attention_heads=4, alibi=True
    )
    t5 = T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with torch.device("meta"):
        return {
            "expected a transformers causal LM, got Linear": torch.nn.Linear(2, 2),
            "expected a transformers causal LM, got LlamaModel": LlamaModel(LlamaConfig(**SIZES)),
            "expected a transformers causal LM, got T5For": T5ForConditionalGeneration(t5),
            "BloomForCausalLM cannot be fed out of order: it takes no position_ids": (
                BloomForCausalLM(bloom)
            ),
            r"FalconForCausalLM cannot be .* takes no position_ids \(it uses ALiBi\)": (
                FalconForCausalLM(falcon)
            ),
            "needs full attention in every layer, got .* with sliding_window=8": (
                MistralForCausalLM(sliding)
            ),
        }


@pytest.mark.parametrize(("message", "model"), unsupported_models().items())
def test_models_that_cannot_be_fed_out_of_order_are_refused(message, model):
    with pytest.raises(ValueError, match=message):
        HuggingFaceModel(model)


def test_an_attention_that_ignores_the_mask_is_refused():
    model = make("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        ValueError, match=r"must run eager or sdpa attention, .* got 'flash_attention_"
    ):
        HuggingFaceModel(model)
