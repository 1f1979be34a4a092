"""PyTorch's threads follow the cores that others leave free; what the user chose stays."""

import os
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from diagd import threads
from diagd.decoding import engine, step
from diagd.decoding.generate_tokens import generate_tokens
from diagd.decoding.schedule import TokenGrid
from diagd.threads import Neighbours, _Threads
from tests.models.tiny import random_tokens, tiny_model

Times = namedtuple("Times", "user idle iowait guest", defaults=(0.0, 0.0))


class Others:
    """Other programs on four cores, and how much of these they use."""

    cores, used = range(4), 0.0

    def share(self):
        return self.used


@pytest.fixture
def others(monkeypatch):
    """Let every question be a look at four cores, of which this process may use all."""
    monkeypatch.setattr(threads, "LOOK_S", 0.0)
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield Others()
    torch.set_num_threads(before)


@pytest.fixture
def rule(others):
    rule = _Threads()
    rule.is_chosen, rule.neighbours = False, others  # whatever this machine has
    return rule


def numbers(rule, others, *shares):
    """Return PyTorch's threads under each of some shares of the cores that others use."""
    found = []
    for others.used in shares:
        rule.follow()
        found.append(torch.get_num_threads())
    return found


def test_there_are_as_many_threads_as_free_cores_and_at_least_one(rule, others):
    assert numbers(rule, others, 0.0, 0.1, 0.2, 0.25, 0.5, 1.0, 0.0) == [4, 4, 3, 3, 2, 1, 4]
    assert rule.when_idle() == 4


def test_a_quota_is_not_exceeded(rule, others, monkeypatch):
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    assert numbers(rule, others, 0.0) == [2]


def test_a_new_thread_begins_with_the_number_set_last_and_follows_as_well(rule, others):
    assert numbers(rule, others, 0.75) == [1]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(numbers, rule, others, 0.75, 0.25).result() == [1, 3]
    assert numbers(rule, others, 0.25) == [3]


def test_a_number_that_the_user_sets_stays(rule, others):
    assert numbers(rule, others, 0.25) == [3]
    torch.set_num_threads(2)
    assert numbers(rule, others, 1.0, 0.0) == [2, 2]


def test_a_number_that_pytorch_would_not_take_by_itself_is_the_user_s(others, monkeypatch):
    torch.set_num_threads(3 * (os.cpu_count() or 1) + 1)
    assert _Threads().is_chosen
    torch.set_num_threads(os.cpu_count() or 1)
    assert not _Threads().is_chosen
    monkeypatch.setenv("OMP_NUM_THREADS", str(os.cpu_count()))
    assert _Threads().is_chosen


def test_a_fork_which_has_no_threads_is_given_none(rule, others, monkeypatch):
    assert numbers(rule, others, 1.0) == [1]
    monkeypatch.setattr(os, "getpid", lambda: rule.process + 1)
    assert numbers(rule, others, 0.0) == [1]


def test_a_look_is_for_all_threads_and_the_next_one_comes_later(rule, others, monkeypatch):
    monkeypatch.setattr(threads, "LOOK_S", 60.0)
    rule.looked -= 61.0
    assert numbers(rule, others, 0.5, 1.0) == [2, 2]


def test_neighbours_are_what_all_use_but_this_process_with_guests_counted_once(monkeypatch):
    clock, own = [0.0], [0.0]
    times = [Times(5.0, 5.0), Times(7.0, 3.0)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(threads.psutil, "cpu_times", lambda percpu: times)
    monkeypatch.setattr(threads.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(threads.time, "process_time", lambda: own[0])
    neighbours = Neighbours()
    clock[0], own[0] = 10.0, 6.0
    times[:] = [Times(14.0, 5.5, 0.5, 4.0), Times(10.0, 10.0)]  # guests are in 14
    assert neighbours.share() == pytest.approx((9 + 3 - 6) / 20)
    assert neighbours.share() == 0.0


def test_real_clocks_give_a_share():
    assert 0.0 <= Neighbours().share() <= 1.0


@pytest.mark.parametrize("replays", [False, True])
def test_decoding_asks_before_the_prompt_and_every_step_unless_steps_are_compiled(
    replays, monkeypatch
):
    calls = []
    for module in (engine, step):  # prompts; steps
        monkeypatch.setattr(
            module, "follow_free_cores", lambda: calls.append(threading.get_ident())
        )
    model = tiny_model(max_positions=64)
    model.replays = replays
    grid = TokenGrid(1, 2, 5)
    out = generate_tokens(model, random_tokens(1, 11), "k=1", grid=grid, context_frames=1)
    assert len(calls) == (0 if replays else out.stats.num_steps + 1)
