import inspect
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    XGLMConfig,
    XGLMForCausalLM,
)

import diagd
from diagd.decoding.visibility import Seen
from diagd.models.huggingface import HuggingFaceModel
from tests import oracles
from tests.models.architectures import ARCHITECTURES, architecture
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
def test_feeding_out_of_order_equals_one_step_under_the_same_rule(name, attention):
    theirs = make(name, attn_implementation=attention)
    model, tokens = HuggingFaceModel(theirs), random_tokens(2, 41)
    torch.testing.assert_close(model.logits(tokens), theirs(tokens).logits, **TOLERANCE)
    for steps in (torch.arange(41) // 7, scrambled_steps(41, num_steps=6)):
        hidden = ~visible_under(steps)
        mask = torch.zeros(41, 41).masked_fill(hidden, torch.finfo(torch.float32).min)
        expected = theirs(tokens, attention_mask=mask[None, None]).logits
        torch.testing.assert_close(feed(model, tokens, steps), expected, **TOLERANCE)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_raster_order_writes_what_generate_writes(name):
    model, prompt = architecture(name), random_tokens(2, 4, vocab_size=40)
    plain = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
    )
    raster = diagd.DiagonalSchedule.raster(diagd.TokenGrid(2, 3, 5))
    out = diagd.generate_tokens(HuggingFaceModel(model), prompt, raster, context_frames=0)
    assert torch.equal(out.tokens.flatten(1), plain[:, 4:])


@pytest.mark.parametrize(
    ("name", "row_lag", "frame_lag"),
    [*zip(ARCHITECTURES, (1, 2, 3, 1, 2), (3, 4, 11, 3, 4), strict=True), ("gpt2", 3, 11)],
)
def test_diagonals_write_what_the_cache_free_reference_writes(name, row_lag, frame_lag):
    model, prompt = architecture(name), random_tokens(2, 4 + 15, vocab_size=40)
    schedule = diagd.DiagonalSchedule(diagd.TokenGrid(2, 3, 5), row_lag, frame_lag)
    expected = oracles.diagonal_reference(
        oracles.llama_logits(model), prompt, 2, 3, 5, row_lag, frame_lag, context_frames=1
    )
    out = diagd.generate_tokens(HuggingFaceModel(model), prompt, schedule)
    assert torch.equal(out.tokens, expected)


def causal(slots: torch.Tensor) -> Seen:
    return Seen(slots, slots, slots, slots)


@torch.no_grad()
def test_batch_rows_may_see_and_stand_differently():
    model, tokens = HuggingFaceModel(make("gpt2")), random_tokens(2, 4)
    slots, tril = torch.arange(4), torch.ones(4, 4, dtype=torch.bool).tril()
    positions = torch.stack([slots, slots + 3])
    visible = torch.stack([tril, tril & (slots != 1) | torch.eye(4, dtype=torch.bool)])
    seen = Seen.of_mask(visible, positions, slots)
    both = model.forward(tokens, positions, slots, seen, model.make_cache(2, 5))
    for row in range(2):
        cache, seen = model.make_cache(1, 5), Seen.of_mask(visible[row], positions[row], slots)
        alone = model.forward(tokens[row : row + 1], positions[row], slots, seen, cache)
        torch.testing.assert_close(both[row : row + 1], alone, **TOLERANCE)


@torch.no_grad()
def test_the_mask_has_all_batch_rows():
    """XGLM refuses one that stands for several."""
    config = XGLMConfig(vocab_size=50, d_model=24, ffn_dim=40, num_layers=2, attention_heads=4)
    model, tokens = HuggingFaceModel(XGLMForCausalLM(config)), random_tokens(2, 6)
    slots = torch.arange(6)
    fed = model.forward(tokens, slots, slots, causal(slots), model.make_cache(2, 6))
    torch.testing.assert_close(fed, model.logits(tokens), **TOLERANCE)


def test_logits_to_keep_may_name_lanes():
    model, tokens, keep = HuggingFaceModel(make("llama")), random_tokens(2, 4), torch.tensor([1, 3])
    lanes = torch.arange(4)
    kept = model.forward(tokens, lanes, lanes, causal(lanes), model.make_cache(2, 5), keep)
    torch.testing.assert_close(kept, model.logits(tokens)[:, keep], **TOLERANCE)


def test_logits_may_have_fewer_columns_than_the_embedding_has_rows():
    theirs, prompt = make("llama", initializer_range=0.4), random_tokens(2, 4)
    theirs.lm_head = torch.nn.Linear(24, 30, bias=False)
    model = HuggingFaceModel(theirs)
    assert (model.vocab_size, model.num_embeddings) == (30, 50)
    drawn = diagd.SamplingOptions(1.0, top_p=0.9)
    grid = diagd.TokenGrid(2, 3, 5)
    out = diagd.generate_tokens(model, prompt, "k=2", None, 0, sampling=drawn, grid=grid)
    assert out.tokens.max() < 30


def test_long_rope_holds_what_its_short_angles_reach():
    """Beyond, its forward turns the coming tokens by other angles than those in the cache."""
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 4.0}
    model = HuggingFaceModel(make("llama", rope_parameters=rope))
    assert model.max_positions == 16
    prompt, grid = random_tokens(2, 4), diagd.TokenGrid(1, 3, 5)
    with pytest.raises(
        ValueError, match="prompt and one frame need 19 slots, the context holds 16"
    ):
        diagd.generate_tokens(model, prompt, "k=2", context_frames=0, grid=grid)


def test_an_offloaded_model_writes_what_it_writes_in_memory():
    prompt, grid = random_tokens(2, 4), diagd.TokenGrid(2, 3, 5)
    written = [
        diagd.generate_tokens(HuggingFaceModel(model), prompt, "k=2", context_frames=0, grid=grid)
        for model in (make("llama"), cpu_offload(make("llama"), torch.device("cpu")))
    ]
    assert torch.equal(written[0].tokens, written[1].tokens)


def test_the_cache_allocates_once():
    model, lanes = HuggingFaceModel(make("llama")), torch.arange(3)
    cache = model.make_cache(3, 7)
    pointers = set()
    for first in range(2):
        model.forward(random_tokens(1, 3), lanes, lanes, causal(lanes), cache, 0, first)
        layer: Any = cache.layers[0]
        keys = layer.keys
        assert keys is not None
        assert keys.shape == (3, 2, 7, 8)  # sequences, kv heads, slots, head_dim
        pointers.add(keys.data_ptr())
    assert len(pointers) == 1


def test_wrong_calls_are_refused():
    model = HuggingFaceModel(make("llama"))
    with pytest.raises(ValueError, match="tokens must be at most max_positions=64 long, got 65"):
        model.logits(random_tokens(1, 65))


def unsupported_models():
    sliding = MistralConfig(**SIZES, sliding_window=8)
    bloom = BloomConfig(vocab_size=50, hidden_size=24, n_layer=1, n_head=4)
    falcon = FalconConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=1, num_attention_heads=4, alibi=True
    )
    mamba = MambaConfig(vocab_size=50, hidden_size=24, num_hidden_layers=1)
    t5 = T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    sections = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
    spatial = {"text_config": {**SIZES, "pad_token_id": 0, "rope_parameters": sections}}
    eyes = {"depth": 1, "hidden_size": 16, "embed_dim": 16, "num_heads": 2}
    with torch.device("meta"):
        return {
            "model must be a transformers causal LM, got Linear": torch.nn.Linear(2, 2),
            "model must be a transformers causal LM, got LlamaModel": LlamaModel(
                LlamaConfig(**SIZES)
            ),
            "model must be a transformers causal LM, got T5For": T5ForConditionalGeneration(t5),
            "BloomForCausalLM cannot be fed out of order: its forward has no position_ids": (
                BloomForCausalLM(bloom)
            ),
            r"FalconForCausalLM cannot be .* has no position_ids \(it uses ALiBi\)": (
                FalconForCausalLM(falcon)
            ),
            "MambaForCausalLM cannot be .* is recurrent": (MambaForCausalLM(mamba)),
            "JambaForCausalLM cannot be .* is recurrent": (
                JambaForCausalLM(JambaConfig(**{**SIZES, "head_dim": None}))
            ),
            "needs full attention in every layer, got .* with sliding_window=8": (
                MistralForCausalLM(sliding)
            ),
            "LlamaForCausalLM cannot be used: its tokens have three positions": (
                make("llama", rope_parameters=sections)
            ),
            "Qwen2VLForConditionalGeneration cannot be used: its tokens have three positions": (
                Qwen2VLForConditionalGeneration(Qwen2VLConfig(**spatial, vision_config=eyes))
            ),
            "LlamaForCausalLM cannot be used: its weights are on the meta device": make("llama"),
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


def test_a_model_that_brings_a_mask_of_its_own_is_found_out():
    """GPT-Neo lays its causal mask over the slots, whatever stands there."""
    config = GPTNeoConfig(
        vocab_size=50,
        hidden_size=24,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global"], 2]],
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPTNeoForCausalLM(config)
    with pytest.raises(
        ValueError,
        match=r"GPTNeoForCausalLM cannot be .* ignores the mask, the positions or .* \d\d% off",
    ):
        HuggingFaceModel(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rounding_is_not_taken_for_another_order(name, dtype):
    model = HuggingFaceModel(make(name, initializer_range=0.4).to(dtype))
    assert model.dtype == dtype


def test_a_model_whose_forward_bans_ids_is_refused():
    class Banning(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            assert out.logits is not None
            out.logits[..., 20:28] = torch.finfo(out.logits.dtype).min
            return out

    Banning.forward.__signature__ = inspect.signature(LlamaForCausalLM.forward)
    with pytest.raises(ValueError, match="Banning cannot be used: its forward masks 8 ids"):
        HuggingFaceModel(Banning(LlamaConfig(**SIZES)))
