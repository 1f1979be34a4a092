"""runs/gpu_estimates.py: what it counts is what bench counts, and its ranges hold on a CPU."""

import json
from pathlib import Path

import pytest

from diagd.benchmark.steps import Ceilings
from diagd.decoding.strategies.table import parse_strategy
from diagd.families.presets import PRESETS
from runs.gpu_estimates import (
    ASSUMPTIONS,
    BEST,
    GPUS,
    WORST,
    Options,
    Work,
    main,
    over_raster,
    seconds,
    work,
)

DOCS = Path(__file__).parents[2] / "docs"
# The only rows that are faster than estimated: the machine read at more than the best share of the
# bandwidth that it had measured
FASTER = {("mc-ar-300m", "float32", "raster"), ("cosmos-4b", "bfloat16", "raster")}


def measured(name, model):
    """Return the documents of a model in a file of results."""
    lines = (DOCS / "results" / name).read_text().splitlines()
    return [doc for doc in map(json.loads, lines) if doc["options"]["model"] == model]


@pytest.mark.parametrize(
    ("name", "model", "apart"),
    [
        ("bench_cpu.jsonl", "mc-ar-300m", 1e-9),
        ("true_size_cpu.jsonl", "cosmos-4b", 0.05),  # sixteen steps stood for all
    ],
)
def test_the_ranges_hold_what_was_measured_on_a_cpu(name, model, apart):
    """There, a step is one call of the native kernels: no launches."""
    (document,) = measured(name, model)
    config, (frames, *_) = PRESETS[model], document["grid"]
    context_frames = 2 if model == "cosmos-4b" else 1
    faster, took, times = set(), {}, {}
    for row in document["rows"]:
        if row["backend"] != "native":
            continue
        word = row["strategy"]
        strategy = parse_strategy(word)
        assert strategy.has_schedule
        steps = work(config, strategy, frames, context_frames, row["dtype"], pad=False)
        assert len(steps) == row["steps"]
        for field, part in (("megabytes_per_step", "num_bytes"), ("megaflops_per_step", "flops")):
            mean = sum(getattr(step, part) for step in steps) / len(steps) / 1e6
            assert mean == pytest.approx(row[field], rel=apart)
        ceilings = Ceilings(**document["ceilings"][row["dtype"]])
        key = model, row["dtype"], word
        took[key] = [seconds(steps, ceilings, one) for one in ASSUMPTIONS]
        times[key] = row["ms_per_step"] * len(steps) / 1000
        assert times[key] <= max(took[key])
        if times[key] < min(took[key]):
            faster.add(key)
            assert row["bandwidth_share"] > BEST.bandwidth_share
    assert faster == {key for key in FASTER if key[0] == model}
    for model, dtype, word in took:
        raster = model, dtype, "raster"
        low, high = over_raster(took[raster], took[model, dtype, word])
        assert low <= times[raster] / times[model, dtype, word] <= high


def test_a_step_takes_what_it_reads_and_computes_and_its_launches():
    machine, steps = Ceilings(100.0, 1000.0), [Work(90.0, 70.0), Work(9.0, 1400.0)]
    best = BEST._replace(launch_seconds=0.5)
    assert seconds(steps, machine, best, 3) == pytest.approx(1 + 2 + 2 * 3 * 0.5)
    worst = WORST._replace(launch_seconds=0.0)
    assert seconds(steps, machine, worst, 3) == pytest.approx((99 / 60) + (1470 / 300))
    assert len(ASSUMPTIONS) == 16
    all_of_it = [seconds(steps, machine, one, 3) for one in ASSUMPTIONS]
    assert min(all_of_it) == seconds(steps, machine, BEST, 3)
    assert max(all_of_it) == seconds(steps, machine, WORST, 3)


def test_the_published_estimates_are_those_of_the_script_and_say_what_they_are(tmp_path):
    main(Options(tmp_path))
    for name in ("gpu_estimates.md", "gpu_estimates.json"):
        assert (tmp_path / name).read_text() == (DOCS / "results" / name).read_text()
    page = (tmp_path / "gpu_estimates.md").read_text()
    assert page.splitlines()[0] == "# Estimates for GPUs, nothing here is measured"
    ranges = [part for part in page.split("\n\n") if " to " in part and part.startswith("|")]
    assert len(ranges) == 2
    guide = (DOCS / "gpu.md").read_text()
    for part in ranges:
        header = part.splitlines()[0].strip("| ").split(" | ")
        assert len(header) == 1 + len(GPUS)
        assert all("estimate" in cell for cell in header)
        assert part in guide
    for row in json.loads((tmp_path / "gpu_estimates.json").read_text())["estimates"]:
        for key, value in row.items():
            assert isinstance(value, list) == key.endswith("_estimate")
        low, high = row["over_raster_estimate"]
        assert low <= high
