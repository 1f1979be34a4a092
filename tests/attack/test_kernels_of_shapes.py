"""Models of odd shapes in our kernels: a step is PyTorch's, in whatever number of threads.

Run under the sanitizers (`make asan`), nothing outside of a buffer is touched on the way.
"""

import random
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from diagd.backends.native.model import NativeModel
from diagd.models.transformer import Transformer
from tests.models.feeding import causal
from tests.models.tiny import KINDS, tiny_model

pytestmark = pytest.mark.slow

SHAPES = 60
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.2, "int8": 0.4}  # of the largest logit


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Allow as many threads as are asked for, on whatever number of cores."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def odd_shape(chance: random.Random) -> dict[str, Any]:
    kind = chance.choice(list(KINDS))
    learned = {"llama", "wham", "wham-v2"}
    groups = chance.choice((1, 2, 3, 5))
    head_dim = chance.choice((1, 2, 3, 7, 8, 31, 33, 64, 127, 129, 255, 511, 512, 513))
    position = {"position": "learned"} if head_dim % 2 else {}
    if kind not in learned:
        head_dim, position = chance.choice((12, 36, 132, 516)), {}
    return KINDS[kind] | {
        "num_kv_heads": groups,
        "num_heads": groups * chance.choice((1, 2, 3, 7)),
        "head_dim": head_dim,
        "hidden_size": chance.choice((1, 3, 17, 32, 65)),
        "intermediate_size": chance.choice((1, 5, 16, 63)),
        "vocab_size": (vocab := chance.choice((1, 2, 31, 33, 100))),
        "image_vocab_size": vocab,
        "max_positions": 16_384,
        **position,
    }


def step_of(model: Transformer, native: NativeModel, batch: int, lanes: int) -> tuple[Tensor, ...]:
    both: tuple[Any, ...] = model, native
    tokens = torch.randint(model.vocab_size, (batch, lanes))
    at = torch.arange(lanes)
    with torch.inference_mode():
        return tuple(
            one.forward(tokens, at, at, causal(at, at), one.make_cache(batch, lanes + 1), 3)
            for one in both
        )


def is_close(found: Tensor, expected: Tensor, weights: str) -> bool:
    allowed = TOLERANCE[weights] * expected.abs().max().clamp(min=1)
    return bool(((found - expected).abs() <= allowed).all())


@pytest.mark.parametrize("number", range(SHAPES))
def test_a_step_of_an_odd_shape_is_that_of_pytorch(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(number)
    torch.manual_seed(number)
    shape, weights = odd_shape(chance), chance.choice(("float32", "bfloat16", "int8"))
    model = tiny_model(number, **shape)
    if weights == "int8" and shape["head_dim"] > 512:
        with pytest.raises(ValueError, match="native int8 kernels need head_dim <= 512"):
            NativeModel(model, weights)
        return
    if number % 2:  # activations of int8 have two digits
        monkeypatch.setattr("diagd.backends.native.weights.HIGHEST_GAIN", 0)
    native = NativeModel(model, weights)
    native.max_threads = chance.choice((1, 2, 3, 64))
    torch.set_num_threads(native.max_threads)
    batch, lanes = chance.choice(((1, 1), (1, 19), (3, 7), (64, 2), (1, 300), (2, 1000)))
    expected, found = step_of(model, native, batch, lanes)
    assert found.isfinite().all()
    assert is_close(found, expected, weights)


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_ten_thousand_lanes_are_a_step_and_none_is_refused(weights: Any) -> None:
    model = tiny_model(max_positions=16_384)
    native = NativeModel(model, weights)
    lanes = torch.arange(10_000)
    seen = causal(lanes, torch.arange(100))
    tokens = torch.ones(1, 10_000, dtype=torch.int64)
    logits = native.forward(tokens, lanes, lanes % 100, seen, native.make_cache(1, 101))
    assert logits.isfinite().all()
    none = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"and S \* L from 1 to"):
        native.forward(none[None], none, none, seen, native.make_cache(1, 101))


def test_two_models_in_two_threads_do_not_meet() -> None:
    models = [tiny_model(seed, **KINDS[kind]) for seed, kind in enumerate(("llama", "wham"))]
    pairs: list[Any] = [(NativeModel(model), model) for model in models]
    wrong = list[int]()

    def work(which: int) -> None:
        generator = torch.Generator().manual_seed(which)
        for lanes in (1, 20, 3, 50) * 10:
            at = torch.arange(lanes)
            tokens = torch.randint(44, (2, lanes), generator=generator)
            found, expected = (
                one.forward(tokens, at, at, causal(at, at), one.make_cache(2, lanes + 1))
                for one in pairs[which]
            )
            wrong.extend([which] * (not is_close(found, expected, "float32")))

    with torch.inference_mode():
        crew = [Thread(target=work, args=(which,)) for which in range(2)]
        for one in crew:
            one.start()
        for one in crew:
            one.join()
    assert not wrong
