"""`diagd/decoding/model.py`; that all write the same tokens: `tests/backends/conformance.py`.

CUDA graphs: `tests/gpu/test_graphs.py`.
"""

import pytest
import torch

from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.graphs import Graphs
from diagd.decoding.model import CAPTURING, make_runner
from tests.decoding.cases import Case, model_of

GRAPHS = Graphs(torch.device("cpu"), scratch=9)


def test_unknown_runner_is_an_error_that_names_the_choices():
    message = r"^runner must be one of eager, compile, cuda-graph, compiled-graph, got 'fast'$"
    with pytest.raises(ValueError, match=message):
        make_runner("fast", lambda lanes, num_slots: None, GRAPHS, None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", CAPTURING)
def test_cuda_graphs_need_cuda(name):
    with pytest.raises(ValueError, match=f"^runner {name} needs a CUDA device, got cpu$"):
        make_runner(name, lambda lanes, num_slots: None, GRAPHS, None)


@pytest.mark.parametrize("num_slots", [1, 64, 65, 200])
def test_a_step_reads_at_least_the_slots_in_use(num_slots):
    calls = []
    runner = make_runner("eager", lambda lanes, read: calls.append((lanes, read)), GRAPHS, None)
    lanes = torch.zeros(8, 3, dtype=torch.int64)
    runner(lanes, num_slots)
    assert calls[0][0] is lanes
    assert calls[0][1] >= num_slots


def test_padded_steps_write_what_bare_steps_write():
    for case in (Case(num_frames=4), Case(row_lag=1, frame_lag=3, num_action_tokens=2)):
        written, fed = [], []
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
            fed.append(engine.num_fed)
        assert torch.equal(*written)
        assert fed[0] == fed[1]  # padding is not counted
