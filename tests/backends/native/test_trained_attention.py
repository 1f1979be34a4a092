import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diagd.backends.native.library import load_library
from diagd.backends.native.trained_attention import (
    kernels_train,
    mask_kernel,
    masked_attention,
    run_backward,
    run_forward,
    trained_mask,
)
from diagd.decoding.schedule import SequenceLayout, TokenGrid
from diagd.decoding.strategies.table import Diagonal
from diagd.decoding.teacher_forcing import teacher_view
from diagd.models.attention import attend
from diagd.training.mixture import ViewLoss
from tests.models.tiny import random_tokens, tiny_model

pytestmark = [
    pytest.mark.skipif(
        not kernels_train(), reason="no products of bfloat16 here: attention is trained by PyTorch"
    ),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
]


def some_mask(lanes: int, share: float = 0.4) -> Tensor:
    """All see themselves and a share of the others; the 41st and later none of the first 40."""
    mask = torch.rand(lanes, lanes, generator=torch.Generator().manual_seed(lanes)) < share
    mask[40:, :40] = False
    return mask | torch.eye(lanes, dtype=torch.bool)


def draw(batch, heads, kv_heads, lanes, head_dim, scale=1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(head_dim)

    def one(count: int) -> Tensor:
        numbers = torch.randn(batch, count, lanes, head_dim, generator=generator)
        return (scale * numbers).bfloat16()

    return one(heads), one(kv_heads), one(kv_heads)


def with_gradients(attend_to, given, mask):
    """Return what is attended to, and the gradients of a weighted sum of it, as float32."""
    given = [tensor.detach().requires_grad_() for tensor in given]
    out = attend_to(*given, mask)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    found = torch.autograd.grad((out.float() * weights).sum(), given)
    return [tensor.detach().float() for tensor in (out, *found)]


@pytest.mark.parametrize(
    ("shape", "mask"),
    [
        ((1, 2, 2, 70, 32), some_mask(70)),
        ((2, 4, 2, 133, 64), some_mask(133)),
        ((1, 3, 1, 300, 96), torch.ones(300, 300, dtype=torch.bool).tril()),
        ((1, 1, 1, 1, 32), torch.ones(1, 1, dtype=torch.bool)),
        ((3, 2, 2, 64, 128), torch.ones(64, 64, dtype=torch.bool)),
        ((1, 2, 1, 611, 64), some_mask(611, share=0.002)),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_attention_and_its_gradients_are_those_of_float32(shape, mask, scale):
    given = draw(*shape, scale=scale)
    ours = with_gradients(masked_attention, given, trained_mask(mask))
    exact = with_gradients(attend, [tensor.float() for tensor in given], mask)
    theirs = with_gradients(attend, given, mask)
    for our, their, true in zip(ours, theirs, exact, strict=True):
        limit = max(1.2 * (their - true).norm(), 0.004 * true.norm())
        assert (our - true).norm() <= limit


def test_who_sees_nobody_gets_zeros_and_gives_no_gradient():
    mask, given = some_mask(77), draw(2, 2, 1, 77, 32)
    mask[50] = False
    out, *gradients = with_gradients(masked_attention, given, trained_mask(mask))
    assert not out[:, :, 50].any()
    assert not gradients[0][:, :, 50].any()
    assert all(one.isfinite().all() for one in (out, *gradients))


def test_a_hidden_lane_changes_no_bit():
    mask, given = some_mask(100), draw(1, 2, 2, 100, 64)
    mask[:, 60], mask[60, 60] = False, True
    before = with_gradients(masked_attention, given, trained_mask(mask))
    for tensor in given[1:]:
        tensor[:, :, 60] = 1000.0
    others = torch.arange(100) != 60
    after = with_gradients(masked_attention, given, trained_mask(mask))
    for one, other in zip(before[:2], after[:2], strict=True):
        assert torch.equal(one[:, :, others], other[:, :, others])


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(threads):
    mask, given, usual = trained_mask(some_mask(90)), draw(2, 3, 3, 90, 32), torch.get_num_threads()
    expected = with_gradients(masked_attention, given, mask)
    torch.set_num_threads(threads)
    found = with_gradients(masked_attention, given, mask)
    torch.set_num_threads(usual)
    assert all(map(torch.equal, found, expected))


def test_what_the_kernels_do_not_take_is_pytorchs():
    mask = some_mask(50)
    queries, keys, values = draw(1, 4, 2, 50, 32)
    for given in (draw(1, 4, 2, 50, 24), (queries.float(), keys.float(), values.float())):
        assert torch.equal(masked_attention(*given, trained_mask(mask)), attend(*given, mask))


def test_without_kernels_it_says_why_once_and_pytorch_attends(monkeypatch, caplog):
    def fail():
        raise OSError("no C++ compiler found")

    monkeypatch.setattr("diagd.backends.native.trained_attention.load_library", fail)
    kernels_train.cache_clear()
    assert mask_kernel(None, 5) is mask_kernel(some_mask(5), 5) is None
    kernels_train.cache_clear()
    assert caplog.messages == ["no C++ compiler found: training with PyTorch's attention"]


@pytest.mark.parametrize("lanes", [49, 51])
def test_another_mask_is_refused_before_memory_is_read(lanes):
    queries, keys, values = draw(1, 4, 2, 50, 32)
    with pytest.raises(ValueError, match=r"mask \(L, L\), got"):
        masked_attention(queries, keys, values, trained_mask(some_mask(lanes)))
    with pytest.raises(ValueError, match=r"keys and values \(B, kv_heads, L, D\)"):
        masked_attention(queries, keys[:, :, 1:], values, trained_mask(some_mask(50)))
    with pytest.raises(ValueError, match="of one type"):
        masked_attention(queries, keys.float(), values, trained_mask(some_mask(50)))


def test_torch_compile_knows_the_shapes_and_the_gradients():
    given = [one.transpose(1, 2).contiguous().requires_grad_() for one in draw(2, 2, 1, 40, 32)]
    torch.library.opcheck(torch.ops.diagd.masked_attention, (*given, *trained_mask(some_mask(40))))


def test_a_mask_of_none_is_the_causal_one():
    kernel, given = mask_kernel(None, 45), draw(1, 2, 2, 45, 32)
    assert kernel is not None
    out = kernel(*given)
    torch.testing.assert_close(out, attend(*given, None), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("compiled", "window"), [(False, 0), (True, 0), (False, 9)])
def test_a_loss_under_diagonals_and_its_gradients_hardly_change(compiled, window):
    slides = {"sliding_window": window, "sliding_layers": (1,) if window else ()}
    model, layout = tiny_model(head_dim=32, **slides), SequenceLayout(TokenGrid(2, 3, 5), 0, 1)
    view = teacher_view(Diagonal(1).schedule(layout.grid), layout)
    tokens = random_tokens(2, 45)

    def gradients(autocast: bool):
        loss = ViewLoss(view, torch.device("cpu"), compiled and autocast, window)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = loss(model, tokens)
        value.backward()
        weights = [p.grad for p in model.parameters() if p.grad is not None]
        return value.item(), torch.cat([grad.flatten() for grad in weights])

    (rounded, its), (exact, true) = gradients(True), gradients(False)
    assert rounded == pytest.approx(exact, rel=0.01)
    assert F.cosine_similarity(its, true, dim=0) > 0.99


def test_what_they_compute_does_not_depend_on_what_they_computed_before():
    library, mask = load_library(), trained_mask(some_mask(33))
    small = [one.transpose(1, 2).contiguous() for one in draw(1, 2, 2, 33, 32)]
    large = [one.transpose(1, 2).contiguous() for one in draw(1, 2, 2, 200, 64, scale=9.0)]

    def both(given, mask):
        out, masses = run_forward(library, *given, *mask)
        return out, masses, *run_backward(library, out, out, masses, *given, *mask)

    expected = both(small, mask)
    both(large, trained_mask(some_mask(200)))
    assert all(map(torch.equal, both(small, mask), expected))
