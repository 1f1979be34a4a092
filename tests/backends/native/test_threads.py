"""Threads of the kernels: how many, who leads them, and that they change no bit."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diagd.backends.native import trained_attention
from diagd.backends.native.model import NativeModel
from diagd.decoding.visibility import Seen
from tests.models.feeding import feed
from tests.models.tiny import random_tokens, tiny_model

FORK = """
import os, torch
from tests.backends.native.test_threads import fed, some_threads, tiny_model, NativeModel
model = NativeModel(tiny_model())
with some_threads(model, 3):
    before = fed(model)
    child = os.fork()
    same = torch.equal(fed(model), before)
    if child == 0:
        os._exit(0 if same else 3)
    assert os.waitpid(child, 0)[1] == 0 and same
"""


@contextmanager
def some_threads(model: NativeModel, count: int) -> Iterator[None]:
    """Have the kernels use so many threads, more than there are cores if need be."""
    usual, model.max_threads = torch.get_num_threads(), count
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(usual)


def fed(model: NativeModel) -> torch.Tensor:
    """Feed the same tokens as every time."""
    return feed(model, random_tokens(2, 30), torch.arange(30) // 5)


@pytest.mark.parametrize("threads", [2, 3, 7, 32])
def test_the_number_of_threads_changes_no_bit(threads):
    """A team that is kept from running works with fewer: that must not be seen."""
    model = NativeModel(tiny_model(num_kv_heads=2))
    with some_threads(model, 1):
        alone = fed(model)
    with some_threads(model, threads):
        for _ in range(20):
            assert torch.equal(fed(model), alone)


def test_callers_on_many_threads_have_a_team_each():
    model = NativeModel(tiny_model())
    with some_threads(model, 3), ThreadPoolExecutor(5) as callers:
        first, *others = callers.map(lambda _: fed(model), range(20))
    assert all(torch.equal(other, first) for other in others)


def test_callers_may_change_the_number_of_threads_under_each_other():
    """The number belongs to a step: one shared by all once sized its memory, and another ran it."""
    native = NativeModel(tiny_model(max_positions=300, hidden_size=512, num_layers=1))
    native.max_threads = 8  # as on a machine of eight cores
    tokens, usual = random_tokens(1, 256), torch.get_num_threads()

    def step(lanes: int) -> torch.Tensor:
        slots = torch.arange(lanes)
        seen = Seen(slots, slots, slots, slots)
        return native.forward(tokens[:, :lanes], slots, slots, seen, native.make_cache(1, 300))

    def hammer(lanes: int) -> bool:
        same = True
        for turn in range(6):
            torch.set_num_threads(1 + turn % 2 * 7 if lanes == 64 else 8 - turn % 2 * 7)
            same &= torch.equal(step(lanes), expected[lanes])
        return same

    expected = {lanes: step(lanes) for lanes in (64, 256)}
    try:
        for _ in range(40):  # callers that are new have no memory yet, and make it while others run
            with ThreadPoolExecutor(2) as callers:
                assert all(callers.map(hammer, expected))
    finally:
        torch.set_num_threads(usual)


@pytest.mark.skipif(sys.platform == "win32", reason="no fork on Windows")
def test_a_forked_process_makes_threads_of_its_own():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)


def test_attention_trains_on_no_more_threads_than_may_be_used(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(trained_attention, "_most_threads", lambda: 2)
    calls = []
    library: Any = SimpleNamespace(
        attend_forward=lambda record: calls.append(record._obj.threads) or 0
    )
    states = torch.zeros(1, 4, 1, 32, dtype=torch.bfloat16)
    mask = trained_attention.trained_mask(torch.ones(4, 4, dtype=torch.bool))
    trained_attention.run_forward(library, states, states, states, *mask)
    assert calls == [2]
