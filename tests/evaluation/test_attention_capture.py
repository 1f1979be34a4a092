import pytest
import torch

from diagd.evaluation.attention import capture_attention
from tests.models.test_huggingface import make
from tests.models.tiny import KINDS, random_tokens, tiny_model

LENGTH, FIRST = 23, 9
# Probabilities are at most 1; float32 rounding of the scores differs by a few 1e-6.
TOLERANCE = {"atol": 1e-5, "rtol": 0}


def captured(model, tokens, first=FIRST, chunk=4):
    """Return (layers, B, heads, N - first, N) probabilities, put together from the chunks."""
    parts = []
    capture_attention(model, tokens, first, lambda *part: parts.append(part), chunk)
    length = tokens.shape[1]
    layers = 1 + max(layer for layer, _, _ in parts)
    whole = torch.zeros(layers, *parts[0][2].shape[:2], length - first, length)
    for layer, query, probabilities in parts:
        assert probabilities.shape[2] <= chunk
        end = query + probabilities.shape[2]
        assert probabilities.shape[3] == end
        whole[layer, :, :, query - first : end - first, :end] = probabilities
    return whole


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_our_own_probabilities_weigh_the_values_as_the_fused_kernel_does(kind):
    """Attention is linear in the values: the module's output must follow from what we captured."""
    model, tokens = tiny_model(**KINDS[kind]), random_tokens(2, LENGTH)
    attention = model.model.blocks[0].self_attn
    seen = {}
    handle = attention.register_forward_hook(
        lambda _module, inputs, output: seen.update(x=inputs[0], out=output)
    )
    model.logits(tokens)
    handle.remove()
    values = attention.v_proj(seen["x"]).unflatten(-1, (-1, 8)).transpose(1, 2)
    values = values.repeat_interleave(4 // values.shape[1], dim=1)
    mixed = captured(model, tokens)[0] @ values
    out = attention.o_proj(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, seen["out"][:, FIRST:], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_our_layers_tell_what_a_llama_of_the_same_weights_tells():
    model = tiny_model()
    eps = model.config.norm_eps
    theirs = make("llama", attn_implementation="eager", rms_norm_eps=eps)
    theirs.load_state_dict(model.state_dict())
    tokens = random_tokens(1, LENGTH)
    expected = torch.stack(theirs.eval()(tokens, output_attentions=True).attentions)
    torch.testing.assert_close(captured(model, tokens), expected[:, :, :, FIRST:], **TOLERANCE)


@pytest.mark.parametrize("first", [0, 4, 22])
def test_chunks_do_not_matter(first):
    model, tokens = tiny_model(), random_tokens(1, LENGTH)
    whole = captured(model, tokens, first, chunk=64)
    torch.testing.assert_close(captured(model, tokens, first, chunk=3), whole, **TOLERANCE)


def test_no_hook_stays_behind_even_after_an_error():
    model = tiny_model()

    def fail(*_part):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        capture_attention(model, random_tokens(1, LENGTH), FIRST, fail)
    assert not any(module._forward_hooks for module in model.modules())


def test_what_cannot_be_told_is_refused():
    model = tiny_model()
    for first, length in ((5, 5), (-1, 5), (0, 65)):
        with pytest.raises(
            ValueError, match=rf"<= max_positions=64, got first {first} of {length} tokens"
        ):
            captured(model, random_tokens(1, length), first)
