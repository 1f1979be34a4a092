"""`diagd/backends/triton/products.py`, as `layers.py` launches it, against float64."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diagd.backends.linears import merge_linears, round_to_int8
from diagd.models.rotary import rotate
from tests.backends.triton.interpreter import DEVICE, multiply_bfloat16
from tests.models.tiny import KINDS, tiny_model

from diagd.backends.triton import layers, products  # isort: skip
from diagd.backends.triton.layers import Layers, Linear, Norm  # isort: skip
from diagd.backends.triton.tiles import MAX_SPLITS, Tile, tile_of  # isort: skip

# the interpreter's, for a sigmoid of much below zero, which is zero
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
F32, BF16 = torch.float32, torch.bfloat16
DTYPES = F32, torch.float16, BF16
NORMS = "none", "rms", "layer", "layer without shifts", "layer of nothing"
ACTIVATIONS = {"none": products.NONE} | layers.ACTIVATIONS


@pytest.fixture(autouse=True)
def _bfloat16(monkeypatch):
    multiply_bfloat16(monkeypatch)


@pytest.fixture
def tiled(monkeypatch):
    """Return a function that sets the tile of every product."""

    def set_tile(outputs, lanes, chunk, splits):
        tile = Tile(outputs, lanes, chunk, splits, num_warps=4, num_stages=3)
        monkeypatch.setattr(layers, "tile_of", lambda *_: tile)

    return set_tile


def amid(drawn: Tensor, dtype: torch.dtype) -> Tensor:
    """Put numbers between others that nobody may read."""
    beside = 127 if dtype == torch.int8 else torch.nan
    around = torch.full((drawn.numel() + 32,), beside, dtype=dtype, device=DEVICE)
    around[16:-16] = drawn.flatten()
    return around[16:-16].view(drawn.shape)


def numbers(*shape: int, seed: int = 0, mean: float = 0.0, dtype: torch.dtype = F32) -> Tensor:
    """Draw numbers of half a deviation."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 2
    return amid(drawn + mean, dtype)


def draw_norm(name: str, size: int, dtype: torch.dtype = F32) -> Norm:
    """Draw a norm's parameters."""
    if name == "none":
        return layers.NO_NORM
    kind = products.RMS if name == "rms" else products.LAYER
    gains = None if name == "layer of nothing" else numbers(size, seed=1, mean=1, dtype=dtype)
    shifts = numbers(size, seed=2, dtype=dtype) if name == "layer" else None
    return Norm(kind, gains, shifts, 1e-5)


def draw_linear(
    rows: int, size: int, dtype: torch.dtype = F32, int8: bool = False, bias: bool = True
) -> Linear:
    """Draw a linear layer's parameters."""
    biases = numbers(rows, seed=4, dtype=dtype) if bias else None
    weight = numbers(rows, size, seed=3, dtype=dtype)
    if not int8:
        return Linear(weight, None, biases)
    whole, scales = round_to_int8(weight.float())
    return Linear(amid(whole, torch.int8), amid(scales, F32), biases)


@cache
def small() -> Layers:
    """Make what launches kernels, of any layers."""
    return Layers(merge_linears(tiny_model().to(DEVICE), pack=False))


def exactly(x: Tensor, linear: Linear, norm: Norm, activation: str) -> Tensor:
    """Compute in float64 what a product should be."""
    x, weight = x.double(), linear.weight.double()
    weight = weight if linear.scales is None else weight * linear.scales.double()[:, None]
    if norm.kind is products.LAYER:
        x = x - x.mean(1, keepdim=True)
    if norm.kind is not products.PLAIN:
        x = x * (x.square().mean(1, keepdim=True) + norm.eps).rsqrt()
    x = x if norm.gains is None else x * norm.gains.double()
    x = x if norm.shifts is None else x + norm.shifts.double()
    x = F.linear(x, weight, None if linear.bias is None else linear.bias.double())
    if activation == "swiglu":
        gates, ups = x.chunk(2, 1)
        return F.silu(gates) * ups
    if activation == "none":
        return x
    return F.gelu(x, approximate="none" if activation == "exact_gelu" else "tanh")


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compare, to rounding: of sums in another order, or of a normed input and of the output."""
    allowed = (8 if dtype == F32 else 2) * torch.finfo(dtype).eps
    error = (actual.double() - expected).abs().amax()
    assert error <= allowed * expected.abs().amax(), error


def check(
    dtype: torch.dtype,
    norm: str,
    activation: str,
    int8: bool,
    bias: bool = True,
    adds: bool = False,
    lanes: int = 5,
    outputs: int = 37,
    size: int = 34,
) -> None:
    """Compare a product with float64's, twice; nothing beside it is written."""
    own, normed = small(), draw_norm(norm, size, dtype)
    rows = 2 * outputs if activation == "swiglu" else outputs
    linear = draw_linear(rows, size, dtype, int8, bias)
    x = numbers(lanes, size, seed=5, mean=1, dtype=dtype)
    before = numbers(lanes, outputs, dtype=dtype)
    given = x, linear, normed, ACTIVATIONS[activation]
    found = [own._project(*given, added_to=before.clone() if adds else None) for _ in range(2)]
    assert torch.equal(*found)
    assert not own.counters.any()
    expected = exactly(x, linear, normed, activation)
    assert_near(found[0], expected + before.double() if adds else expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_product_is_that_of_float64(dtype, norm, activation, tiled):
    for int8, splits in ((False, 2), (True, 1)):
        tiled(16, 16, 16, splits)
        check(dtype, norm, activation, int8)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("splits", [1, 2, 4, MAX_SPLITS])
@pytest.mark.parametrize(("lanes", "outputs"), [(1, 1), (16, 32), (37, 70)])
def test_lanes_outputs_and_splits_may_be_any(dtype, splits, lanes, outputs, tiled):
    """The inner dimension has fewer chunks than there may be splits."""
    tiled(16, 16, 16, splits)
    check(dtype, "rms", "none", False, False, True, lanes, outputs, 70)
    check(dtype, "layer", "swiglu", True, True, False, lanes, outputs, 70)


@pytest.mark.parametrize(("lanes", "dtype"), [(1, BF16), (20, F32), (40, BF16), (130, BF16)])
def test_the_tiles_of_the_table_give_the_same(lanes, dtype):
    check(dtype, "rms", "swiglu", False, lanes=lanes, outputs=50, size=150)


def test_nothing_beside_the_outputs_is_written(tiled):
    tiled(16, 16, 16, 2)
    own, linear = small(), draw_linear(37, 50)
    whole = numbers(9, 37).clone()
    before = whole.clone()
    own._project(numbers(5, 50), linear, added_to=whole[2:7])
    changed = (whole != before).any(1)
    assert changed.tolist() == [False] * 2 + [True] * 5 + [False] * 2


@pytest.mark.parametrize("splits", [1, 4])
def test_how_many_lanes_share_a_step_does_not_change_a_bit_where_tiles_are_the_same(splits, tiled):
    tiled(16, 16, 16, splits)
    own, norm = small(), draw_norm("rms", 70)
    linear, x = draw_linear(37, 70), numbers(37, 70)
    together = own._project(x, linear, norm)
    for lane in (0, 20, 36):
        alone = own._project(x[lane : lane + 1], linear, norm)
        assert torch.equal(alone, together[lane : lane + 1])


def test_what_the_buffers_of_parts_held_changes_nothing(tiled, monkeypatch):
    """As a kernel that starts early finds them: written by nobody yet."""
    tiled(16, 16, 16, 4)
    check(F32, "layer", "gelu", False)
    new_empty = Tensor.new_empty

    def poisoned(self, *shape, **settings):
        empty = new_empty(self, *shape, **settings)
        return empty.fill_(torch.nan) if empty.is_floating_point() else empty

    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    check(F32, "layer", "gelu", False)


def test_a_residual_takes_a_normed_product():
    own, linear = small(), draw_linear(37, 50, bias=False)
    norm, x, before = draw_norm("rms", 37), numbers(5, 50), numbers(5, 37, seed=9)
    out = before.clone()
    own._add(x, linear, norm, out)
    product = exactly(x, linear, layers.NO_NORM, "none")
    spread = (product.square().mean(1, keepdim=True) + norm.eps).rsqrt()
    assert norm.gains is not None
    assert_near(out, before.double() + product * spread * norm.gains.double(), F32)


HEADS = "llama", "world", "cosmos", "chameleon", "wham", "glm-image"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", HEADS)
def test_heads_are_normed_turned_and_stored_and_nothing_beside_them(kind, dtype, tiled):
    """Of two sequences, the first of which is not the cache's; at slots that are no row."""
    fields = {**KINDS[kind], "head_dim": 20}
    model = merge_linears(tiny_model(**fields).to(DEVICE, dtype), pack=False)
    own, config = Layers(model), model.config
    tiled(16, 16, 16, 2)
    layer, count, lanes, num_slots = own.layers[1], 2, 9, 12
    x = numbers(count * lanes, config.hidden_size, seed=1, mean=1, dtype=dtype)
    angles = numbers(count * lanes, 10, seed=2)
    turns, generator = torch.stack([angles.cos(), angles.sin()]), torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(num_slots, generator=generator) for _ in range(count)])
    slots = order.to(DEVICE)[:, 1 : 1 + lanes]  # of wider rows
    shape = 2, 4, config.num_kv_heads, num_slots, 20
    keys, values = torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)
    found = [own._heads(x, layer, turns, slots, keys, values, 1) for _ in range(2)]
    assert torch.equal(*found)
    assert not own.counters.any()

    block, norm = model.model.blocks[1].self_attn, layer.norm
    projected = exactly(x, layer.heads, norm, "none").view(count, lanes, -1)
    parts = projected.split(block.widths, -1)
    expected = [part.unflatten(-1, (-1, 20)).transpose(1, 2) for part in parts]
    expected[:2] = block.q_norm.double()(expected[0]), block.k_norm.double()(expected[1])
    if model.model.rotary is not None:
        turned = [turn.double().view(count, lanes, 10) for turn in turns]
        expected[:2] = [rotate(part, *turned) for part in expected[:2]]
    at = torch.arange(1, 3, device=DEVICE)[:, None], slice(None), slots
    stored = [buffer[at] for buffer in (keys, values)]  # (B, L, heads, D)
    for actual, exact in zip((found[0], *stored), expected, strict=True):
        assert_near(actual, exact.transpose(1, 2), dtype)
    for buffer in (keys, values):
        buffer[at] = torch.nan
        assert buffer.isnan().all()  # the slots and sequences beside


@pytest.mark.parametrize("item_size", [2, 4])
@pytest.mark.parametrize("lanes", [1, 16, 17, 33, 65, 500])
def test_a_tile_holds_a_whole_head_and_splits_until_a_gpu_is_busy(lanes, item_size):
    few, many = (tile_of(lanes, pairs, 4096, item_size, 64) for pairs in (64 * 3, 64 * 5000))
    assert (few.OUTPUTS, many.OUTPUTS) == (64, 64)
    assert (few.SPLITS > 1, many.SPLITS) == (True, 1)
    assert min(lanes, 32) <= few.LANES
    assert tile_of(lanes, 8, 20, item_size).SPLITS == 1
