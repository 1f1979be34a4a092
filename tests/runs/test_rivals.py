"""runs/rivals.py: each keeps what it promises, raster's distribution or a bound on what stays."""

import itertools
import math
from typing import Any, cast

import pytest
import torch

import diagd
from diagd.backends.native.model import NativeModel
from diagd.decoding.sampling import Draw, ValidRanges
from runs.rivals import Coupling, Watched, couple, keep_within, parse
from tests.decoding.cases import Case, Passing, model_of
from tests.models.tiny import tiny_model

SAMPLES = 20000


def draw_of(seeds: torch.Tensor) -> tuple[Draw, torch.Tensor]:
    """A draw of one lane, and its step."""
    zero = torch.zeros(1, dtype=torch.int64)
    return Draw(diagd.SamplingOptions(1.0), ValidRanges(0, 4, None), seeds, zero, zero, zero), zero


def test_a_draft_stays_within_the_tolerance_only():
    scores = torch.tensor([[[0.0, -0.6, -0.8, -math.inf]]])
    for tolerance, staying in ((1.0, {0}), (2.0, {0, 1}), (3.0, {0, 1, 2})):
        for draft in (-3, 0, 1, 2, 3, 4, 9):
            kept = keep_within(scores, torch.tensor([[draft]]), tolerance)
            assert kept.item() == (draft if draft in staying else 0)


class Tied(Passing):
    """A model whose likeliest ids often tie."""

    def forward(self, *args, **kwargs):
        return (self.model.forward(*args, **kwargs) / 4).round()


def test_a_tolerance_of_one_writes_raster_s_tokens_where_ids_tie():
    case, model = Case(), Watched(cast(Any, Tied(model_of("own"))))
    raster, tolerant = (
        diagd.generate_tokens(model, case.prompt, parse(strategy), grid=case.grid).tokens
        for strategy in ("raster", "tolerance=1,lanes=9")
    )
    assert torch.equal(raster, tolerant)


def test_what_drafts_were_drawn_from_is_kept_for_the_lanes_of_a_step_only():
    case = Case()
    grid = case.grid
    engine = diagd.DecodingEngine(
        model_of("own"), diagd.FrameFormat(grid.height, grid.width), batch_size=2
    )
    rule = Coupling(engine.stream, num_lanes=7, afresh=True)
    assert rule.sources.shape == (1, 7, model_of("own").vocab_size)


def test_a_coupled_draw_never_has_an_id_of_no_probability():
    certain = torch.tensor([[[0.0, 0.0, 0.0, 1.0]]])
    seed = torch.tensor([14616057])  # its uniform rounds to 1
    assert couple(certain, certain, torch.tensor([[3]]), *draw_of(seed), True).item() == 3


@pytest.mark.parametrize("afresh", [True, False])
@pytest.mark.parametrize("drawn", [True, False])
def test_a_coupled_draw_has_the_target_distribution(drawn, afresh):
    """Drafts from q become draws from p; with a certain draft, too."""
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    q = torch.tensor([0.1, 0.3, 0.2, 0.4])
    generator = torch.Generator().manual_seed(0)
    drafts = torch.multinomial(q, SAMPLES, True, generator=generator)[:, None]
    source = q.expand(SAMPLES, 1, 4) if drawn else torch.zeros(SAMPLES, 1, 4)
    seeds = torch.arange(SAMPLES)
    new = couple(p.expand(SAMPLES, 1, 4), source, drafts, *draw_of(seeds), afresh)
    frequencies = torch.bincount(new[:, 0], minlength=4) / SAMPLES
    if drawn:
        assert torch.allclose(frequencies, p, atol=0.015)  # four standard deviations
        kept = (new == drafts).float().mean().item()
        assert kept == pytest.approx(torch.minimum(p, q).sum().item(), abs=0.015)
    else:
        for draft in range(4):
            given = new[drafts[:, 0] == draft, 0]
            share = torch.bincount(given, minlength=4) / len(given)
            assert torch.allclose(share, p, atol=0.05)


@pytest.mark.parametrize("strategy", ["jacobi,lanes=4", "sjd,lanes=4", "mc-sjd,lanes=4"])
def test_lossless_rules_write_the_distribution_of_the_model(strategy):
    """A video of 4 tokens out of 3 ids, 81 in all, against their exact probabilities."""
    model = tiny_model(grid_height=1, grid_width=2, num_action_tokens=0)
    sampling = diagd.SamplingOptions(temperature=1.5, valid_range=(0, 3))
    prompt = torch.tensor([[7]])
    videos = torch.tensor(list(itertools.product(range(3), repeat=4)))
    sequences = torch.cat([prompt.expand(81, 1), videos], 1)
    with torch.no_grad():
        logits = model.logits(sequences)[:, :-1, :3] / sampling.temperature
    chosen = logits.log_softmax(-1).gather(-1, videos[..., None])
    exact = chosen.sum((1, 2)).exp()
    batch = 1500
    out = diagd.generate_tokens(
        Watched(model),
        prompt.expand(batch, 1).contiguous(),
        parse(strategy),
        context_frames=0,
        sampling=sampling,
        grid=diagd.TokenGrid(2, 1, 2),
    )
    weights = 3 ** torch.arange(3, -1, -1)
    counts = torch.bincount((out.tokens.flatten(1) * weights).sum(1), minlength=81)
    chi_square = ((counts - batch * exact) ** 2 / (batch * exact)).sum().item()
    assert chi_square < 137  # 80 degrees of freedom: exceeded once in 10,000
    assert exact.max() < 0.5


def steps_of(model: Watched, strategy: str, seed: int) -> int:
    out = diagd.generate_tokens(
        model,
        torch.arange(15)[None],
        parse(strategy),
        sampling=diagd.SamplingOptions(temperature=0.5),
        seed=seed,
        grid=diagd.TokenGrid(2, 3, 5),
    )
    return out.stats.num_steps


def test_tolerance_and_coupling_save_steps():
    strategies = ("exact,lanes=15", "tolerance=20,lanes=15", "sjd,lanes=15", "mc-sjd,lanes=15")
    model = Watched(NativeModel(tiny_model(num_action_tokens=0)))
    steps = {name: sum(steps_of(model, name, seed) for seed in range(12)) for name in strategies}
    assert steps["tolerance=20,lanes=15"] < steps["exact,lanes=15"]
    assert steps["mc-sjd,lanes=15"] < steps["sjd,lanes=15"]


CASE = Case(batch_size=1, num_action_tokens=2)
SAMPLED = diagd.SamplingOptions(temperature=1.0)


def decode(
    case: Case, window: int, sampling: diagd.SamplingOptions | None = None, seed: int = 0
) -> diagd.GeneratedTokens:
    return diagd.generate_tokens(
        Watched(model_of("native")),
        case.prompt,
        parse(f"zipar-adaptive={window}"),
        case.actions(),
        case.context_frames,
        case.grid,
        sampling,
        seed,
    )


@pytest.mark.parametrize("sampling", [None, SAMPLED])
@pytest.mark.parametrize("num_action_tokens", [0, 2])
def test_an_adaptive_window_of_a_whole_row_is_raster(sampling, num_action_tokens):
    case = Case(batch_size=1, num_action_tokens=num_action_tokens)
    schedule = diagd.DiagonalSchedule.raster(case.grid)
    raster = diagd.generate_tokens(
        model_of("native"), case.prompt, schedule, case.actions(), sampling=sampling
    )
    found = decode(case, case.width, sampling)
    assert torch.equal(found.tokens, raster.tokens)
    assert found.stats.num_steps == raster.stats.num_steps
    assert found.stats.num_fed == raster.stats.num_fed


def test_a_row_waits_at_least_one_token_and_at_most_for_the_row_above():
    for window, seed in itertools.product((1, 2, 3), range(4)):
        steps = decode(CASE, window, SAMPLED, seed).stats.num_steps
        frame_least = (CASE.height - 1) * min(window + 1, CASE.width) + CASE.width
        most = CASE.height * CASE.width
        assert CASE.num_frames * frame_least <= steps <= CASE.num_frames * most


def test_a_wider_adaptive_window_takes_more_steps():
    steps = [sum(decode(CASE, w, SAMPLED, s).stats.num_steps for s in range(6)) for w in (1, 3, 5)]
    assert steps == sorted(steps)
    assert steps[0] < steps[-1]


@pytest.mark.parametrize("name", ["tolerance=3,lanes=9", "mc-sjd,lanes=9", "zipar-adaptive=2"])
def test_a_batch_is_its_rows_one_by_one(name):
    case = Case(batch_size=2, num_action_tokens=1)
    actions = case.actions()
    assert actions is not None

    def written(own: slice) -> torch.Tensor:
        return diagd.generate_tokens(
            Watched(model_of("native")),
            case.prompt[own],
            parse(name),
            actions[own],
            grid=case.grid,
            sampling=SAMPLED,
            seed=own.start,
        ).tokens

    assert torch.equal(written(slice(0, 2)), torch.cat([written(slice(r, r + 1)) for r in (0, 1)]))


def test_what_a_rival_cannot_do_is_refused():
    engine = diagd.DecodingEngine(
        Watched(model_of("own")), diagd.FrameFormat(4, 5, 2, num_seam_tokens=1)
    )
    engine.prefill(CASE.prompt, 0)
    with pytest.raises(ValueError, match="zipar-adaptive=1 decodes frames of one image"):
        next(engine.decode(parse("zipar-adaptive=1"), CASE.actions()))
    with pytest.raises(ValueError, match="give them the model as Watched"):
        diagd.generate_tokens(
            model_of("own"), CASE.prompt, parse("sjd"), CASE.actions(), 1, CASE.grid, SAMPLED
        )
    with pytest.raises(ValueError, match="sjd needs a temperature above 0"):
        diagd.generate_tokens(
            Watched(model_of("own")), CASE.prompt, parse("sjd"), CASE.actions(), 1, CASE.grid
        )
