import pytest
import torch

from diagd.models.checkpoints import load_model, save_model
from diagd.models.packed import PackedLinear, pack_linears
from tests.models.feeding import feed
from tests.models.tiny import KINDS, random_tokens, tiny_model


@pytest.mark.parametrize("kind", ["llama", "wham"])
def test_packed_logits_equal_plain_logits(kind):
    model, tokens = tiny_model(**KINDS[kind]), random_tokens(2, 30)
    steps = torch.arange(30) // 4
    with torch.no_grad():
        plain = model.logits(tokens)
    packed = pack_linears(model)
    assert packed is model
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    # another order of float32 summation, logits of size 10
    torch.testing.assert_close(packed.logits(tokens), plain, atol=2e-5, rtol=0)
    torch.testing.assert_close(feed(packed, tokens, steps), plain, atol=2e-5, rtol=0)


def test_packing_works_in_bfloat16():
    model, tokens = tiny_model().bfloat16(), random_tokens(2, 9)
    with torch.no_grad():
        plain = model.logits(tokens)
    # bfloat16 keeps 8 bits, and logits reach 10
    torch.testing.assert_close(pack_linears(model).logits(tokens), plain, atol=0.3, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "wham"])
def test_a_packed_model_saves_its_plain_weights(kind, tmp_path):
    model = tiny_model(**KINDS[kind])
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    save_model(pack_linears(model), tmp_path)
    loaded = load_model(tmp_path).state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_packed_weights_are_held_once():
    linear = torch.nn.Linear(6, 4)
    packed = PackedLinear(linear)
    assert not list(packed.parameters())
    assert [name for name, _ in packed.named_buffers()] == ["bias"]


def test_a_packed_model_cannot_be_moved_or_cast():
    with pytest.raises(ValueError, match="cannot be moved or cast: do that before pack_linears"):
        pack_linears(tiny_model()).bfloat16()


def test_packing_refuses_other_dtypes_and_devices():
    message = "packing needs a model on the cpu in float32 or bfloat16, got torch.float16 on cpu"
    model = tiny_model().half()
    with pytest.raises(ValueError, match=message):
        pack_linears(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    with pytest.raises(ValueError, match=r"got torch\.float32 on meta"):
        pack_linears(torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta")))
