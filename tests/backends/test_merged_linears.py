import pytest
import torch

from diagd.backends.linears import MergedLinear, can_pack, merge_linears
from diagd.backends.prepare import prepare
from diagd.families.checkpoints import load_model, save_model
from diagd.models.transformer import Transformer
from tests.models.tiny import KINDS, random_tokens, tiny_model


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_logits_equal_plain_logits(kind, pack):
    model, tokens = tiny_model(**KINDS[kind]), random_tokens(2, 30)
    with torch.no_grad():
        plain = model.logits(tokens)
    merged = merge_linears(model, pack)
    assert merged is model
    # another order of float32 summation, logits of size 10
    torch.testing.assert_close(merged.logits(tokens), plain, atol=2e-5, rtol=0)


def test_projections_of_one_input_become_one_product():
    model = merge_linears(tiny_model(), pack=False)
    linears = [name for name, m in model.named_modules() if type(m) is torch.nn.Linear]
    merged = [name for name, m in model.named_modules() if isinstance(m, MergedLinear)]
    assert [name.split(".")[-1] for name in merged] == ["qkv_proj", "gate_up_proj"] * 2
    assert [name.split(".")[-1] for name in linears] == ["o_proj", "down_proj"] * 2 + ["lm_head"]


def test_packed_weights_are_kept_twice_in_float32_only():
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model().to(dtype)
        if not can_pack(model):  # bfloat16, on a processor that does not multiply it
            continue
        merged = merge_linears(model, pack=True)
        assert merged.lm_head is not None
        assert (merged.lm_head.weight is None) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("kind", ["llama", "world"])
def test_a_merged_model_saves_its_plain_weights(kind, pack, tmp_path):
    model = tiny_model(**KINDS[kind]).to(torch.bfloat16 if kind == "llama" else torch.float32)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    save_model(merge_linears(model, pack and can_pack(model)), tmp_path)
    loaded = load_model(tmp_path, dtype=model.dtype).state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_a_merged_model_cannot_be_moved_or_cast():
    with pytest.raises(ValueError, match="cannot be moved or cast: do that before merge_linears"):
        merge_linears(tiny_model(), pack=True).bfloat16()


def test_what_onednn_cannot_multiply_here_is_not_packed(monkeypatch):
    """As on a processor without AVX-512, where oneDNN raises instead."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    model, tokens = tiny_model().bfloat16(), random_tokens(2, 30)
    with torch.no_grad():
        plain = model.logits(tokens)
    merged, _ = prepare(model, "eager")
    assert isinstance(merged, Transformer)
    torch.testing.assert_close(merged.logits(tokens), plain, atol=0.2, rtol=0)


def test_a_torch_without_onednn_packs_nothing(monkeypatch):
    """As on macOS, where its operators do not exist."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", object(), raising=False)
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(prepare(tiny_model().to(dtype), "eager")[0], Transformer)
