import dataclasses
import itertools
import json

import pytest
import torch

from diagd.families.presets import WORLD_SIZES
from diagd.models.transformer import Transformer, num_parameters
from diagd.training import train
from diagd.training.setup import fit_config
from diagd.training.train import RunPlan, plan_run
from tests.worlds import clips_of

CLIPS = clips_of(num_clips=50, num_frames=40)  # 14,000 tokens
SECONDS = 600


def weights_of(name, options):
    return num_parameters(fit_config(name, CLIPS, options.frames))


@pytest.fixture
def speed(monkeypatch):
    """Return a function that sets how many tokens a second models of any size are trained at."""

    def set_speed(tokens_per_second):
        monkeypatch.setattr(
            train,
            "_probe",
            lambda options, clips, name, limit: (weights_of(name, options), 1 / tokens_per_second),
        )

    return set_speed


@pytest.fixture
def timed(options):
    """Return a function that makes options for ten minutes."""
    return lambda **changes: options(
        **{"model": None, "steps": None, "minutes": SECONDS / 60, "warmup_steps": None, **changes}
    )


def test_the_model_is_the_largest_that_sees_three_tokens_a_weight(timed, speed, monkeypatch):
    monkeypatch.setattr(train, "MAX_PASSES", 10**9)
    monkeypatch.setattr(train, "WORTH_OF_PASSES", 1e9)  # passes are as good as new data
    for number, name in enumerate(WORLD_SIZES):
        run = timed(out=str(number))
        speed(3.01 * weights_of(name, run) / SECONDS)
        plan = plan_run(run, CLIPS)
        assert plan.model == name
        assert plan.weights == weights_of(name, run)
        assert plan.worth == pytest.approx(3.01 * plan.weights, rel=1e-3)


def test_a_slow_machine_gets_the_smallest_model_and_few_clips_are_not_read_for_ever(timed, speed):
    speed(10.0)
    assert plan_run(timed(out="slow"), CLIPS).model == "mc-ar-128x3"
    speed(1e9)
    plan = plan_run(timed(out="fast"), CLIPS)
    assert plan.model == "mc-ar-128x3"  # 14,000 tokens are worth no more, however often read
    assert plan.passes == pytest.approx(40, abs=0.4)  # to the end of a step
    run = timed()
    assert plan.steps == -(-40 * plan.data_tokens // (run.batch_of(CLIPS) * run.length_of(CLIPS)))
    told = plan.describe(SECONDS)
    assert "40.0 passes over the 14k of the clips" in told
    assert "it ends after 40 passes" in told
    assert "more clips would help more than more time" in told


def test_what_passes_are_worth():
    plan = RunPlan("mc-ar-128x3", 1, True, 1, 500.0, 1000)
    assert plan.worth == 500  # half a pass
    assert dataclasses.replace(plan, tokens=1000.0).worth == 1000
    twice = dataclasses.replace(plan, tokens=2000.0).worth
    assert 1950 < twice < 2000  # almost as good as new
    assert dataclasses.replace(plan, tokens=1e9).worth == pytest.approx(16_000)


def test_a_model_that_is_named_is_kept_and_so_is_the_plan_of_a_killed_run(
    timed, speed, monkeypatch
):
    speed(100.0)
    run = timed(model="mc-ar-192x4")
    plan = plan_run(run, CLIPS)
    assert plan.model == "mc-ar-192x4"
    assert "the largest with" not in plan.describe(SECONDS)
    monkeypatch.delattr(train, "_probe")
    assert plan_run(timed(), CLIPS) == plan
    assert json.loads((run.out / "plan.json").read_text())["model"] == "mc-ar-192x4"


def test_a_model_that_is_named_anew_is_planned_anew(timed, speed):
    speed(100.0)
    first = plan_run(timed(), CLIPS)
    second = plan_run(timed(model="mc-ar-192x4"), CLIPS)
    assert (first.model, first.sized) == ("mc-ar-128x3", True)
    assert (second.model, second.sized) == ("mc-ar-192x4", False)
    assert second.weights == weights_of("mc-ar-192x4", timed()) != first.weights
    assert json.loads((timed().out / "plan.json").read_text()) == dataclasses.asdict(second)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_several_processes_have_one_budget_however_long_each_measured(
    rank, timed, speed, monkeypatch
):
    """Their learning rates and their end follow from it."""
    speed(100.0)
    given = []
    monkeypatch.setattr(train, "_train", lambda command, options, *rest: given.append(options))
    monkeypatch.setattr(train, "monotonic", itertools.count(0, 7).__next__)  # seconds
    run = timed(model="mc-ar-tiny")
    train.pretrain(alone := dataclasses.replace(run, out=run.out / "alone"))
    train.pretrain(alone)  # killed, and resumed with the plan that was made
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    train.pretrain(run)
    assert [options.seconds for options in given] == pytest.approx(
        [SECONDS - 7, SECONDS - 7, SECONDS]
    )
    assert (run.out / "plan.json").is_file() == (rank == "0")


def test_several_processes_are_not_measured(timed, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="model must be given for several processes"):
        plan_run(timed(), CLIPS)
    assert not timed().out.exists()


def test_several_processes_read_more_and_end_after_as_many_passes(timed, speed, monkeypatch):
    speed(10.0)
    alone = plan_run(timed(out="one", model="mc-ar-128x3"), CLIPS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    both = plan_run(timed(out="two", model="mc-ar-128x3"), CLIPS)
    assert both.tokens == pytest.approx(2 * alone.tokens, rel=1e-2)  # less what measuring took
    assert both.steps == -(-alone.steps // 2)


def test_the_probe_measures_real_steps(timed):
    weights, seconds = train._probe(timed(), CLIPS, "mc-ar-128x3", 60.0)
    config = fit_config("mc-ar-128x3", CLIPS, 3)
    assert weights == num_parameters(config)
    assert weights == sum(weight.numel() for weight in Transformer.random(config, 0).parameters())
    assert 0 < seconds < 1
    assert torch.is_grad_enabled()


def test_measuring_is_a_part_of_the_time_and_ends_with_it(timed, monkeypatch):
    """On a machine whose every step takes longer than measuring may: one step of one model."""
    steps, probe = [], train.draw_batch
    monkeypatch.setattr(train, "draw_batch", lambda *given: steps.append(given) or probe(*given))
    monkeypatch.setattr(train, "PROBE_SHARE", 1e-9)
    plan = plan_run(timed(), CLIPS)
    assert len(steps) == 1
    assert plan.tokens <= 40.1 * plan.data_tokens


def test_a_plan_of_another_version_is_named(timed):
    run = timed()
    run.out.mkdir()
    (run.out / train.PLAN_FILE).write_text('{"model": "mc-ar-128x3"}')
    with pytest.raises(ValueError, match=r"plan\.json: from another version, delete it: .*missing"):
        plan_run(run, CLIPS)


def test_speeds_lie_on_a_line_through_what_was_measured():
    costs = [(100, 1.0), (300, 2.0)]
    for weights, seconds in ((100, 1.0), (200, 1.5), (300, 2.0), (500, 3.0)):
        assert train._seconds_per_token(costs, weights) == pytest.approx(seconds)
    noise = [(100, 1.0), (300, 0.9)]  # no speed-up
    assert train._seconds_per_token(noise, 500) == 1.0
    assert train._seconds_per_token([(100, 1.0)], 100) == 1.0
