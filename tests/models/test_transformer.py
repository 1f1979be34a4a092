import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from diagd.decoding.visibility import Seen
from diagd.models.config import ModelConfig
from diagd.models.huggingface import llama_of
from diagd.models.transformer import Transformer
from tests.models.test_huggingface import SIZES
from tests.models.tiny import KINDS, random_tokens, tiny_fields, tiny_model

# Float32 logits of size about 10; two orders of summation differ by a few 1e-6.
TOLERANCE = {"atol": 2e-5, "rtol": 0}


@torch.no_grad()
def test_sliding_layers_equal_those_of_hugging_face_on_the_same_weights():
    model = tiny_model(qk_norm=True, sliding_window=7, sliding_layers=(1,))
    qwen = Qwen3ForCausalLM(
        Qwen3Config(
            **SIZES,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            use_sliding_window=True,
            sliding_window=7,
            layer_types=["full_attention", "sliding_attention"],
        )
    ).eval()
    qwen.load_state_dict(model.state_dict(), strict=True)
    tokens = random_tokens(2, 37)
    logits = model.logits(tokens)
    torch.testing.assert_close(logits, qwen(tokens).logits, **TOLERANCE)
    whole = tiny_model(qk_norm=True).logits(tokens)
    assert torch.equal(logits[:, :7], whole[:, :7])
    assert (logits[:, 7:] - whole[:, 7:]).abs().max() > 1


@torch.no_grad()
def test_logits_equal_hugging_face_gpt2_on_the_same_weights():
    model = tiny_model(**KINDS["wham"], hidden_size=32, head_dim=8)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=4, n_inner=40)
    ).eval()
    gpt2.load_state_dict(as_gpt2(model.state_dict()), strict=False)
    tokens = random_tokens(2, 37)
    torch.testing.assert_close(model.logits(tokens), gpt2(tokens).logits, **TOLERANCE)


def as_gpt2(weights):
    """Rename LLaMA-style weights to GPT-2's, whose Conv1D stores (in, out) and fuses q, k, v."""
    out = {
        "transformer.wte.weight": weights["model.embed_tokens.weight"],
        "transformer.wpe.weight": weights["model.embed_positions.weight"],
        "lm_head.weight": weights["model.embed_tokens.weight"],
    }
    for kind in ("weight", "bias"):
        out[f"transformer.ln_f.{kind}"] = weights[f"model.norm.{kind}"]
        for layer in range(2):
            ours, theirs = f"model.layers.{layer}.", f"transformer.h.{layer}."
            qkv = [weights[f"{ours}self_attn.{name}_proj.{kind}"] for name in "qkv"]
            out[f"{theirs}attn.c_attn.{kind}"] = transposed(torch.cat(qkv))
            for name, renamed in {
                "self_attn.o_proj": "attn.c_proj",
                "mlp.up_proj": "mlp.c_fc",
                "mlp.down_proj": "mlp.c_proj",
                "input_layernorm": "ln_1",
                "post_attention_layernorm": "ln_2",
            }.items():
                out[f"{theirs}{renamed}.{kind}"] = transposed(weights[f"{ours}{name}.{kind}"])
    return out


def transposed(weight):
    return weight.T if weight.dim() == 2 else weight


@torch.no_grad()
def test_logits_take_positions():
    model = tiny_model(**KINDS["wham"])
    tokens = random_tokens(1, 4)
    moved = model.logits(tokens, positions=torch.tensor([3, 9, 1, 0]))
    assert not torch.allclose(moved, model.logits(tokens), atol=1e-2)
    same = model.logits(tokens, positions=torch.arange(4))
    assert torch.equal(same, model.logits(tokens))


@torch.no_grad()
def test_logits_to_keep_may_name_lanes():
    model, tokens, keep = tiny_model(), random_tokens(2, 4), torch.tensor([1, 3])
    lanes = torch.arange(4)
    seen = Seen(lanes, lanes, lanes, lanes)
    kept = model(tokens, lanes, lanes, seen, model.make_cache(2, 5), keep)
    torch.testing.assert_close(kept, model.logits(tokens)[:, keep], **TOLERANCE)


def test_every_parameter_gets_a_gradient():
    for kind, changes in KINDS.items():
        model = tiny_model(**changes)
        tokens = random_tokens(2, 9)
        tokens[0, 0] = model.num_embeddings - 1  # a word, where there are any
        model.logits(tokens).logsumexp(-1).mean().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, (kind, name)


def test_autocast_runs_the_matrices_in_bfloat16():
    model, tokens = tiny_model(), random_tokens(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.logits(tokens)
    assert logits.dtype == torch.bfloat16
    # bfloat16 keeps 8 bits, and logits reach 10
    torch.testing.assert_close(logits.float(), model.logits(tokens), atol=0.3, rtol=0)


def test_random_repeats_its_seed_and_keeps_its_scales():
    config = ModelConfig(
        **tiny_fields(hidden_size=64, intermediate_size=256, bias=True, norm="layer")
    )
    first, again, other = (Transformer.random(config, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    up, down = (first[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("up", "down"))
    assert float(up.std()) == pytest.approx(0.02, rel=0.05)
    assert float(down.std()) == pytest.approx(0.02 / 2, rel=0.05)  # 1 / sqrt(2 * 2 layers)
    assert torch.equal(first["model.norm.weight"], torch.ones(64))
    assert torch.equal(first["model.layers.0.self_attn.q_proj.bias"], torch.zeros(32))


def test_random_builds_in_the_dtype_asked_for():
    model = Transformer.random(ModelConfig(**tiny_fields()), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.dtype == torch.bfloat16
    assert model.make_cache(1, 4).keys[0].dtype == torch.bfloat16
    assert model.logits(random_tokens(1, 5)).dtype == torch.bfloat16


def test_ids_that_can_only_be_fed_have_no_logits():
    model = tiny_model(extra_embeddings=3)
    assert (model.vocab_size, model.num_embeddings) == (50, 53)
    assert model.logits(torch.tensor([[52]])).shape == (1, 1, 50)


def test_a_text_is_of_one_row_or_of_all():
    model = tiny_model(context_size=8)
    for rows in (1, 2):
        model.make_cache(2, 5, torch.zeros(rows, 3, 8))
    message = r"context must be this model's text, \(2 or 1, M, 8\), got \(3, 3, 8\)"
    with pytest.raises(ValueError, match=message):
        model.make_cache(2, 5, torch.zeros(3, 3, 8))
    with pytest.raises(ValueError, match=message):
        model.logits(random_tokens(2, 4), torch.zeros(3, 3, 8))


@pytest.mark.parametrize(
    "more",
    [
        {"context_size": 8},
        {"sliding_window": 9, "sliding_layers": (1,)},
        {"position": "rope3d", "position_table": True, "max_positions": 32, "prefix_length": 1},
    ],
)
def test_what_a_llama_has_not_is_refused(more):
    with pytest.raises(ValueError, match="baseline hf needs a LLaMA-like model"):
        llama_of(tiny_model(**more))


def test_wrong_calls_are_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="context must be None"):
        model.logits(random_tokens(1, 4), torch.zeros(1, 3, 8))
    with pytest.raises(ValueError, match="tokens must be at most max_positions=64 long, got 65"):
        model.logits(random_tokens(1, 65))
    with pytest.raises(ValueError, match="slots and seen must be given with a cache, got None"):
        model(random_tokens(1, 4), cache=model.make_cache(1, 5))
