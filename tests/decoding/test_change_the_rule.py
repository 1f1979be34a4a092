"""Orders and rules from outside, on any backend; and the notebook that shows how."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import diagd
from diagd.decoding.schedule import RowStart
from diagd.decoding.strategies.table import Strategy
from tests.decoding.cases import MODELS, Case, model_of

CASE = Case(num_action_tokens=2)
NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorials" / "change-the-rule.ipynb"


@dataclass(frozen=True)
class Spelled:
    """The diagonals of k=2, in another's words."""

    grid: diagd.TokenGrid
    row_start: RowStart = "temporal"

    @property
    def num_steps(self) -> int:
        return (self.grid.num_frames - 1) * 9 + 9

    def step_of(self, t: int, i: int, j: int) -> int:
        return 9 * t + 2 * i + j


@dataclass(frozen=True)
class Backwards(Spelled):
    """The last frame first, `idle` steps between two."""

    idle: int = 0

    @property
    def num_steps(self) -> int:
        return self.grid.num_frames * (9 + self.idle) - self.idle

    def step_of(self, t: int, i: int, j: int) -> int:
        return (9 + self.idle) * (self.grid.num_frames - 1 - t) + 2 * i + j


class Words(Strategy):
    word, has_schedule = "words", True

    def schedule(self, grid):
        return Spelled(grid)


def not_later(position, step, other, fed_at):
    return other <= position


def nobody_else(position, step, other, fed_at):
    return torch.zeros_like(position == other)


def generate(name, strategy, **settings):
    given = CASE.prompt, strategy, CASE.actions(), CASE.context_frames
    return diagd.generate_tokens(model_of(name), *given, grid=CASE.grid, **settings).tokens


@pytest.mark.parametrize("name", MODELS)
def test_an_order_and_a_rule_of_ones_own_are_ours_if_they_say_the_same(name):
    expected = generate(name, "k=2")
    assert torch.equal(generate(name, Words()), expected)
    assert torch.equal(generate(name, "k=2", rule=not_later), expected)


def test_an_order_may_end_frames_in_any_order_but_not_rest():
    class Last(Words):
        def schedule(self, grid):
            return Backwards(grid, "temporal", idle)

    idle = 0
    tokens = generate("own", Last())
    assert tokens.shape[1] == CASE.grid.num_frames
    assert not torch.equal(tokens, generate("own", "k=2"))
    idle = 2
    with pytest.raises(ValueError, match="must write tokens in every step, got none in step 10"):
        generate("own", Last())


@pytest.mark.parametrize("name", MODELS)
def test_by_another_rule_other_tokens_are_written_the_same_on_every_backend(name):
    blind = generate("own", "k=2", rule=nobody_else)
    assert torch.equal(generate(name, "k=2", rule=nobody_else), blind)
    assert not torch.equal(blind, generate("own", "k=2"))


def test_the_notebook_runs(capsys):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), namespace)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[:3]] == ["74", "48", "48"]
    assert [line.split()[0] for line in lines[3:]] == ["small", "small", "video", "video"]


def test_the_cell_that_defines_them_is_short():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    first = next(cell for cell in cells if cell["cell_type"] == "code")
    assert sum(bool(line.strip()) for line in first["source"]) <= 15
