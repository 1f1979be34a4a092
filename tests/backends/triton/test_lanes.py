"""`diagd/backends/triton/lanes.py` against float64: the stream and the angles of a step's lanes."""

import pytest
import torch

from diagd.decoding.sampling import UNDRAWN
from tests.backends.triton.interpreter import DEVICE
from tests.models.tiny import KINDS, tiny_model

from diagd.backends.triton.lanes import read_lanes  # isort: skip

ROTARY = "llama", "world", "cosmos", "llamagen", "glm-image"
YEAR = 17 * 10**9  # positions


@pytest.mark.parametrize("start", [0, YEAR])
@pytest.mark.parametrize("kind", ROTARY)
def test_angles_are_those_of_float64(kind, start):
    """Of two sequences, at coordinates that may be before the first row."""
    model, generator = tiny_model(**KINDS[kind]).to(DEVICE), torch.Generator().manual_seed(0)
    whole = torch.randint(-1, 60, (3, 2, 11), generator=generator).to(DEVICE)
    coordinates, positions = whole[..., 2:9], (whole[0] + 1 + start)[:, 2:9]  # of wider rows
    coordinates = coordinates + torch.tensor([start, 0, 0], device=DEVICE)[:, None, None]
    tokens = torch.randint(0, 50, (2, 20), generator=generator).to(DEVICE)
    tokens[1, 4] = UNDRAWN
    inputs = torch.randint(0, 20, (2, 11), generator=generator).to(DEVICE)[:, 2:9]
    table, rotary = model.embeddings, model.model.rotary
    assert rotary is not None
    given = positions, coordinates if model.config.on_grid else None
    hidden, turns = read_lanes(tokens, inputs, table, None, rotary, *given, model.config.head_dim)
    assert torch.equal(hidden.view(2, 7, -1), table[tokens.gather(1, inputs).clamp(min=0)])
    exact = torch.stack(rotary(*given, torch.float64)).flatten(1, 2)
    # angles themselves are rounded, a year from the start by a millionth
    torch.testing.assert_close(turns.double(), exact, atol=5e-6 if start else 2e-7, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_learned_positions_are_added_and_nothing_turns(dtype):
    model = tiny_model(**KINDS["wham"]).to(DEVICE, dtype)
    positions = torch.tensor([[5, 0, 63]], device=DEVICE)
    tokens, inputs = torch.tensor([[7, 49, 3]], device=DEVICE), torch.tensor([[2, 0, 0]])
    learned = model.model.embed_positions
    assert learned is not None
    given = model.embeddings, learned.weight, None, positions, None, 8
    hidden, _ = read_lanes(tokens, inputs.to(DEVICE), *given)
    expected = model.embeddings[tokens[0, inputs[0]]] + learned.weight[positions[0]]
    # the interpreter cuts digits off where a GPU rounds
    torch.testing.assert_close(hidden, expected, atol=0, rtol=torch.finfo(dtype).eps)
