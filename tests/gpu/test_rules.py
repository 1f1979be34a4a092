"""The pretended GPU catches what a real one would: without that, its tests would prove nothing.

First its rules by themselves, then errors planted in the decoder, each of which the tests of this
folder would see.
"""

import contextlib

import pytest
import torch

import diagd
from diagd.backends import replay
from diagd.decoding import step
from diagd.decoding.engine import Batch, Stream
from diagd.decoding.model import CausalModel
from diagd.decoding.sampling import sample
from diagd.decoding.visibility import Seen
from diagd.models.attention import StaticKVCache
from diagd.models.transformer import Transformer
from tests.decoding.cases import Case
from tests.gpu.test_tokens import (
    SAMPLINGS,
    by_place,
    decode,
    prepare_for,
    tiny,
)

SAMPLED = SAMPLINGS["sampled"]
CASE = Case(num_frames=3, num_action_tokens=2)
CAPTURING = "operation not permitted when stream is capturing: "


def captured(run, **settings):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **settings):
        run()
    return graph


def test_numbers_are_those_of_the_cpu(gpus):
    a, b = torch.randn(3, 5), torch.randn(5, 4)
    assert torch.equal((a.to("cuda") @ b.to("cuda")).cpu(), a @ b)
    assert torch.arange(4, device="cuda").tolist() == [0, 1, 2, 3]
    assert (torch.ones(2, device="cuda:1").device, torch.ones(2).device.type) == (
        torch.device("cuda:1"),
        "cpu",
    )
    with torch.cuda.device(1):
        assert torch.zeros(1, device="cuda").device.index == 1
    assert torch.tensor([3.0], device="cuda").device.index == 0


def test_what_is_copied_to_another_device_is_another_memory(gpus):
    x = torch.ones(3, device="cuda")
    others = [x.to("cuda:1"), x.cpu(), torch.ones(3).to("cuda")]
    x.zero_()
    assert all(other.tolist() == [1, 1, 1] for other in others)
    assert x.to("cuda") is x
    assert gpus.live_bytes == 3 * x.nbytes


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.where(torch.tensor([True, False, True]), x, 0.0),
        lambda x: x.index_copy_(0, torch.tensor([1]), x[:1]),
        lambda x: torch.cat([x, torch.ones(1)]),
        lambda x: x + x.to("cuda:1"),
    ],
)
def test_operands_are_on_one_device(mix, gpus):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        mix(torch.ones(3, device="cuda"))


WAITS = {
    "_local_scalar_dense": lambda x: x.sum().item(),
    "is_nonzero|_local_scalar_dense": lambda x: bool((x > 0).all()),
    "nonzero": lambda x: x.nonzero(),
    "index by a mask": lambda x: x[x > 0],
    "index by indices of the host": lambda x: x[torch.tensor([0])],
    "copy to cpu": lambda x: x.cpu(),
    "copy to cuda:0": lambda x: x.copy_(torch.ones(3)),
    "copy to cuda:1": lambda x: x.to("cuda:1"),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("what", WAITS)
def test_what_makes_the_host_wait_is_counted_and_cannot_be_captured(what, gpus):
    x = torch.ones(3, device="cuda")
    before = gpus.waits.total()
    WAITS[what](x)
    assert gpus.waits.total() == before + 1
    with pytest.raises(RuntimeError, match=f"{CAPTURING}({what})"):
        captured(lambda: WAITS[what](x))


def test_a_capture_runs_nothing_and_a_replay_runs_in_the_same_memory(gpus):
    x, y = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")
    graph = captured(lambda: y.copy_(x * 2 + 1))
    assert y.tolist() == [0, 0, 0]
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [9, 9, 9]


def test_numbers_of_the_host_are_baked_in(gpus):
    x, host = torch.zeros(3, device="cuda"), torch.tensor(1.0)
    number = 2
    graph = captured(lambda: x.add_(host * number))
    number = 3
    host.fill_(10)
    graph.replay()
    assert x.tolist() == [2, 2, 2]


def test_what_a_graph_has_allocated_is_spoilt(gpus):
    x, made = torch.ones(3, device="cuda"), []
    first = captured(lambda: made.append(x + 1))
    assert made[0].tolist() != [2, 2, 2]
    first.replay()
    assert made[0].tolist() == [2, 2, 2]
    second = captured(lambda: made.append(x + 2), pool=first.pool())
    second.replay()
    assert made[0].tolist() != [2, 2, 2]  # they share memory


def test_memory_that_is_gone_is_missed(gpus):
    given, y = [torch.ones(3, device="cuda")], torch.ones(3, device="cuda")
    graph = captured(lambda: y.add_(given[0]))
    graph.replay()
    given.clear()
    with pytest.raises(RuntimeError, match="reads or writes 1 tensors that are gone"):
        graph.replay()


def test_a_pool_ends_with_its_last_graph(gpus):
    x = torch.ones(3, device="cuda")
    graph = captured(lambda: x.add_(1))
    pool = graph.pool()
    del graph
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
        captured(lambda: x.add_(1), pool=pool)


def test_a_capture_sees_the_kernels_of_its_own_device(gpus):
    x, y = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda:1")

    def run():
        x.add_(1)
        y.add_(1)

    graph = captured(run)
    graph.replay()
    graph.replay()
    assert (x.item(), y.item()) == (2, 1)  # the other one ran at once, and never again


def test_times_are_known_after_waiting(gpus):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0


def equals_the_cpu(device="cuda", strategy="k=1", sampling=SAMPLED, runs=1, is_captured=True):
    """Say whether tokens are those of the CPU, or with which error it ends."""
    expected = decode(tiny(), CASE, strategy, sampling).tokens
    model = prepare_for(tiny(), device)
    model = model if is_captured else model.model
    found = [decode(model, CASE, strategy, sampling, device) for _ in range(runs)]
    return torch.equal(found[-1].tokens.cpu(), expected)


def a_value_on_the_host(monkeypatch):
    forward = Transformer.forward

    def planted(self, tokens, positions, *arguments, **settings):
        assert int(positions.max()) >= 0
        return forward(self, tokens, positions, *arguments, **settings)

    monkeypatch.setattr(Transformer, "forward", planted)


def an_index_by_a_mask(monkeypatch):
    def planted(self, logits, *arguments):
        logits[logits.isnan()] = 0.0
        return sample(logits, *arguments)

    monkeypatch.setattr(CausalModel, "sample", planted)


def a_mask_of_the_host(monkeypatch):
    mask = Seen.mask
    monkeypatch.setattr(Seen, "mask", lambda self: mask(self).cpu())


@pytest.mark.parametrize("plant", [a_value_on_the_host, an_index_by_a_mask, a_mask_of_the_host])
def test_a_step_that_waits_is_caught(plant, monkeypatch, gpus):
    plant(monkeypatch)
    with pytest.raises(RuntimeError, match=f"{CAPTURING}|on the same device"):
        equals_the_cpu()


def a_baked_number(monkeypatch):
    """The step is counted by the host: the same in eager steps."""
    run, mask, now = Batch.run, Seen.mask, list[int]()

    def counted(self, asking):
        now[:] = [asking[0][0].num_steps]
        run(self, asking)
        now.clear()

    def planted(self):
        steps = torch.full_like(self.steps, now[0]) if now else self.steps
        return mask(self._replace(steps=steps))

    monkeypatch.setattr(replay.Captured, "steps_at_once", 1)
    monkeypatch.setattr(Batch, "run", counted)
    monkeypatch.setattr(Seen, "mask", planted)


def a_rebound_buffer(monkeypatch):
    """Keys move to new memory with every step: the same in eager steps."""

    put, old = StaticKVCache.put, []

    def planted(self, layer, *arguments):
        keys = self.keys
        old.append(keys[layer])
        keys[layer] = keys[layer].clone()
        return put(self, layer, *arguments)

    monkeypatch.setattr(StaticKVCache, "put", planted)


def tokens_that_are_replaced(monkeypatch):
    """The buffer of tokens moves."""
    run = step.run_step

    def planted(model, taken, *arguments):
        run(model, taken, *arguments)
        taken.buffers.tokens = taken.buffers.tokens.clone()

    monkeypatch.setattr(step, "run_step", planted)


@pytest.mark.parametrize("plant", [a_baked_number, a_rebound_buffer])
def test_what_a_replay_does_not_see_is_caught(plant, monkeypatch, gpus):
    plant(monkeypatch)
    assert equals_the_cpu(is_captured=False)
    with contextlib.suppress(RuntimeError):  # memory is gone, where it is not merely stale
        assert not equals_the_cpu()


def test_a_buffer_that_moves_is_caught(monkeypatch, gpus):
    tokens_that_are_replaced(monkeypatch)
    with pytest.raises(RuntimeError, match="tensors that are gone"):
        equals_the_cpu(runs=2)


def test_ranges_that_nobody_keeps_are_caught(monkeypatch, gpus):
    run = replay.Graphs.run

    def planted(self, kind, *arguments, **settings):
        return run(self, str(kind), *arguments, **settings)

    monkeypatch.setattr(replay.Graphs, "run", planted)
    places = diagd.SamplingOptions(1.0, valid_range=by_place(CASE))
    with pytest.raises(RuntimeError, match="tensors that are gone"):
        equals_the_cpu(sampling=places, runs=2)


def test_a_capture_on_the_wrong_device_is_caught(monkeypatch, gpus):
    class Nowhere:
        def __init__(self, device):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(torch.cuda, "device", Nowhere)
    assert equals_the_cpu()
    assert not equals_the_cpu("cuda:1")


def test_an_engine_in_a_circle_is_caught(monkeypatch, no_collection, gpus):
    model = prepare_for(tiny(), "cuda").model
    before = gpus.live_bytes
    decode(model, CASE, "k=1", SAMPLED, "cuda")
    assert gpus.live_bytes == before
    make = Stream.set_sampling

    def planted(self, sampling):
        make(self, sampling)
        self.of_itself = self.resume

    monkeypatch.setattr(Stream, "set_sampling", planted)
    decode(model, CASE, "k=1", SAMPLED, "cuda")
    assert gpus.live_bytes > before
