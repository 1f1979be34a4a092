"""`diagd/decoding/runner.py`; that all write the same tokens: `tests/backends/conformance.py`."""

import contextlib
from unittest.mock import MagicMock

import pytest
import torch

from diagd.decoding.engine import DecodingEngine
from diagd.decoding.runner import CudaGraphRunner, make_runner
from tests.decoding.cases import Case, model_of

CPU = torch.device("cpu")


def test_unknown_runner_is_an_error_that_names_the_choices():
    message = r"^runner must be one of eager, compile, cuda-graph, got 'fast'$"
    with pytest.raises(ValueError, match=message):
        make_runner("fast", lambda lanes, num_slots: None, CPU)  # pyright: ignore[reportArgumentType]


def test_cuda_graphs_need_cuda():
    with pytest.raises(ValueError, match=r"^runner cuda-graph needs a CUDA device, got cpu$"):
        make_runner("cuda-graph", lambda lanes, num_slots: None, CPU)


@pytest.mark.parametrize("num_slots", [1, 64, 65, 200])
def test_a_step_reads_at_least_the_slots_in_use(num_slots):
    calls = []
    runner = make_runner("eager", lambda lanes, read: calls.append((lanes, read)), CPU)
    lanes = torch.zeros(8, 3, dtype=torch.int64)
    runner(lanes, num_slots)
    assert calls[0][0] is lanes
    assert calls[0][1] >= num_slots


def test_padded_steps_write_what_bare_steps_write():
    for case in (Case(num_frames=4), Case(row_lag=1, frame_lag=3, num_action_tokens=2)):
        written = []
        for pad in (False, True):
            engine = DecodingEngine(
                model_of("own"),
                case.height,
                case.width,
                num_action_tokens=case.num_action_tokens,
                batch_size=len(case.prompt),
            )
            engine.pad = pad
            engine.prefill(case.prompt, case.context_frames)
            written.append(torch.stack(list(engine.decode(case.schedule, case.actions()))))
        assert torch.equal(*written)


class FakeGraph:
    """Captures the calls of a step function, and replays them on the same tensors."""

    recording: "FakeGraph | None" = None

    def __init__(self):
        self.calls = []

    def replay(self):
        for step, lanes, num_slots in self.calls:
            step(lanes, num_slots)

    def pool(self):
        return "pool"


@pytest.fixture
def fake_cuda(monkeypatch):
    """Graphs, streams and the capture of torch.cuda, in Python; returns the pools asked for."""
    pools = []

    @contextlib.contextmanager
    def capture(graph, pool=None):
        pools.append(pool)
        FakeGraph.recording = graph
        yield
        FakeGraph.recording = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", MagicMock)
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock)
    return pools


def test_a_graph_is_captured_once_a_shape_and_replayed_on_its_own_lanes(fake_cuda):
    """A capture records without running; a replay runs on the very tensors that were recorded."""
    ran = []

    def step(lanes, num_slots):
        if FakeGraph.recording is not None:
            FakeGraph.recording.calls.append((step, lanes, num_slots))
        else:
            ran.append((lanes.tolist(), num_slots))

    runner = CudaGraphRunner(step)
    first, second = torch.arange(16).view(8, 2), torch.arange(16).view(8, 2) + 100
    wide = torch.arange(32).view(8, 4)
    for lanes, num_slots in ((first, 1), (second, 512), (wide, 512), (first, 513), (second, 2)):
        runner(lanes, num_slots)
    warm_ups = [(first, 512), (wide, 512), (first, 1024)]
    replays = [(first, 512), (second, 512), (wide, 512), (first, 1024), (second, 512)]
    order = [warm_ups[0], *replays[:2], warm_ups[1], replays[2], warm_ups[2], *replays[3:]]
    assert ran == [(lanes.tolist(), num_slots) for lanes, num_slots in order]
    assert set(runner.graphs) == {(2, 512), (4, 512), (2, 1024)}
    assert fake_cuda == [None, "pool", "pool"]  # all graphs share one pool of memory
    assert first.tolist() == torch.arange(16).view(8, 2).tolist()  # the caller's lanes are copied
