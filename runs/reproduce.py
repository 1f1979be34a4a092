"""Measure a published table again, and say whether its numbers fall where they should.

    make reproduce                 # list the tables
    make reproduce TABLE=rules     # run one; what it makes is kept in work/reproduce

The clips are recorded again from the same seeds. Likelihoods should agree with the published ones
within two of their standard errors over clips, though training (`arms`) varies with the processor's
rounding; times differ between machines, so their ranges are wide and hold for ratios. Checkpoints
of the arms are not in the repository: each is 9 MB, and `arms` trains them.
"""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runs.report import RULES, arms, exact_runs, rows_of, value

ROOT = Path(__file__).parents[1]
WORK = "work/reproduce"
MAZE = "diagd/assets/maze"
Numbers = dict[str, float]
Ranges = dict[str, tuple[float, float]]

RECORD = (
    f"diagd record --scenario my_way_home --clips 64 --first-seed 1000000 --out {WORK}/heldout",
)
HELDOUT = (
    *RECORD,
    f"diagd record --scenario my_way_home --clips 2 --out {WORK}/few",  # tokenize wants some, too
    f"diagd tokenize --clips {WORK}/few --heldout {WORK}/heldout "
    f"--tokenizer {MAZE}/tokenizer --actions {MAZE}/actions.json --out {WORK}/tokens",
)
TRAINING = (
    f"diagd record --scenario my_way_home --clips 1024 --out {WORK}/train",
    *RECORD,
    f"diagd tokenize --clips {WORK}/train --heldout {WORK}/heldout "
    f"--tokenizer {MAZE}/tokenizer --actions {MAZE}/actions.json --out {WORK}/all-tokens",
)
ARMS = ("raster", "mixture", "k1")
WEIGHTS = ROOT / "docs/results/weights/my_way_home.json"  # true_weights.json of that scenario


@dataclass(frozen=True)
class Table:
    summary: str
    duration: str  # on two cores that do nothing else
    commands: tuple[str, ...]  # each goes on where it was killed, or is short
    read: Callable[[Path], Numbers]  # what they wrote, from the folder WORK
    ranges: Callable[[], Ranges]  # where it should fall, from docs/results


def around(cell: str) -> tuple[float, float]:
    """Allow two standard errors, and 0.005 nats where there is none."""
    number, error = value(cell)
    return number - max(2 * error, 0.005), number + max(2 * error, 0.005)


def read_price(work: Path) -> Numbers:
    rows = json.loads((work / "price/tune.json").read_text(encoding="utf-8"))["rows"]
    return {row["name"]: row["gap"] for row in rows if row["name"] != "raster"}


def price_ranges() -> Ranges:
    rows = rows_of("finetune/finetune.md", header="strategy")
    return {r["strategy"]: around(r["maze"]) for r in rows if r["strategy"] != "raster"}


def read_rules(work: Path) -> Numbers:
    rows = json.loads((work / "rules/gap_study.json").read_text(encoding="utf-8"))["rows"]
    return {f"{r['strategy']}, {r['rule']}": r["gap"] for r in rows if r["rule"] in RULES}


def rules_ranges() -> Ranges:
    rows = rows_of("finetune/gap_study.md", header="schedule")
    kept = [row for row in rows if row["row start"] in ("", "temporal")]
    return {f"{row['schedule']}, {rule}": around(row[rule]) for row in kept for rule in RULES}


def read_exact(work: Path) -> Numbers:
    found = json.loads((work / "exact/exact.json").read_text(encoding="utf-8"))["strategies"]
    numbers = {}
    for name, row in found.items():
        if "lanes" in name:
            numbers[f"{name}, steps a frame"] = row["steps_a_frame"]
            numbers[f"{name}, share of raster's tokens"] = row["tokens_equal_to_raster"]
            numbers[f"{name}, times raster's speed"] = row["over_raster"]
    return numbers


def exact_ranges() -> Ranges:
    ranges = {}
    for name in ("exact,lanes=16", "exact,lanes=32"):
        steps = exact_runs("exact.json")[name]["steps_a_frame"]
        # which drafts are fed first has been changed since
        ranges[f"{name}, steps a frame"] = (0.8 * steps, 1.1 * steps)
        ranges[f"{name}, share of raster's tokens"] = (1.0, 1.0)
        ranges[f"{name}, times raster's speed"] = (1.2, 5.0)
    return ranges


def read_speed(work: Path) -> Numbers:
    rows = json.loads((work / "speed.json").read_text(encoding="utf-8"))["rows"]
    rates = {row["strategy"]: row["frames_per_second"] for row in rows}
    return {
        "raster over Hugging Face": rates["raster"] / rates["hugging face"],
        "k=2 over raster": rates["k=2"] / rates["raster"],
        "k=1 over raster": rates["k=1"] / rates["raster"],
    }


def speed_ranges() -> Ranges:
    return {
        "raster over Hugging Face": (1.5, 8.0),
        "k=2 over raster": (3.0, 6.72),
        "k=1 over raster": (3.0, 9.08),
    }


def read_arms(work: Path) -> Numbers:
    text = (work / "arms/arms.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    found = {(row[1], row[3]): row[4] for row in rows if len(row) > 5 and row[1] in ARMS}
    return {f"{arm}, {name}": value(found[arm, name])[0] for arm, name in JUDGED}


def arms_ranges() -> Ranges:
    """Allow 0.02 nats besides: seeds of one arm differ by as much as that."""
    found = arms("scratch")
    ranges = {}
    for arm, name in JUDGED:
        low, high = around(found[arm, name]["all"])
        ranges[f"{arm}, {name}"] = (low - 0.02, high + 0.02)
    return ranges


def weights_numbers(path: Path) -> dict[str, tuple[float, float]]:
    """Return each number with its standard error over clips; a price of given clips has none."""
    numbers = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        name, (*_, fvd) = f"{row['model']} {row['strategy']}", row["fvd"].values()
        numbers[f"{name}, FVD"] = fvd, row["fvd_error"]
        numbers[f"{name}, ST-LPIPS"] = row["stlpips"], row["stlpips_error"]
        if row["nats"] is not None:
            numbers[f"{name}, nats"] = row["nats"], 0.0
    return numbers


def read_weights(work: Path) -> Numbers:
    found = weights_numbers(work / "weights/true_weights.json")
    return {name: number for name, (number, _) in found.items()}


def weights_ranges() -> Ranges:
    """Allow two standard errors over clips: tokens are drawn anew where rounding differs."""
    found = weights_numbers(WEIGHTS).items()
    margins = {name: max(2 * error, 0.005) for name, (_, error) in found}
    return {name: (number - margins[name], number + margins[name]) for name, (number, _) in found}


JUDGED = tuple((arm, name) for arm in ARMS for name in ("k=1", "k=2", "k=1,d=14"))
TABLES = {
    "price": Table(
        "what k=1, k=2 and k=4 cost the maze world, nats a token above raster",
        "15 minutes",
        (
            *HELDOUT,
            f"diagd tune --tokens {WORK}/tokens/heldout --model maze --clips 24 -k 1 2 4 "
            f"--row-start temporal --out {WORK}/price",
        ),
        read_price,
        price_ranges,
    ),
    "rules": Table(
        "what breaking rules costs: row ends that never reach the cache, 0.19 nats",
        "10 minutes",
        (
            *HELDOUT,
            f"python runs/gap_study.py --tokens {WORK}/tokens/heldout --out {WORK}/rules "
            "--clips 8 --frames 6 --strategy k=1 k=2 k=4",
        ),
        read_rules,
        rules_ranges,
    ),
    "exact": Table(
        "exact decoding: steps, agreement with raster order, speed",
        "10 minutes",
        (
            *RECORD,
            f"python runs/exact.py --clips {WORK}/heldout --out {WORK}/exact --num-clips 4 "
            "--frames 8 --strategy exact,lanes=16 exact,lanes=32",
        ),
        read_exact,
        exact_ranges,
    ),
    "speed": Table(
        "a 42M model: Hugging Face, raster order and diagonals, in float32",
        "5 minutes",
        (f"diagd bench --model mc-ar-42m -k 1 2 --context-frames 1 --json > {WORK}/speed.json",),
        read_speed,
        speed_ranges,
    ),
    "arms": Table(
        "models trained on raster order, on a mixture and on k=1, judged under each",
        "6 hours",
        (
            *TRAINING,
            f"python runs/arms.py --study scratch --arms {' '.join(ARMS)} --minutes 1000 "
            f"--tokens {WORK}/all-tokens --work {WORK}/arms --out {WORK}/arms",
            f"python runs/arms_report.py --studies scratch --results {WORK}/arms",
        ),
        read_arms,
        arms_ranges,
    ),
    "weights": Table(
        "both worlds by published weights (docs/commands.md): FVD, ST-LPIPS, price",
        "1 hour",
        (
            f"diagd record --scenario my_way_home --clips 128 --first-seed 1000000 "
            f"--out {WORK}/real",
            f"python runs/true_weights.py --clips {WORK}/real --out {WORK}/weights",
        ),
        read_weights,
        weights_ranges,
    ),
}


def judge(numbers: Numbers, ranges: Ranges) -> list[str]:
    """Return a line for each number: what it is, its range, and whether it falls there.

    Raises:
        KeyError: a number is missing.
    """
    wide = max(map(len, ranges))
    lines = []
    for name, (low, high) in ranges.items():
        verdict = "ok" if low <= numbers[name] <= high else "OUTSIDE"
        lines.append(f"{name:{wide}}  {numbers[name]:8.4f}  {low:.4f} to {high:.4f}  {verdict}")
    return lines


def main(names: list[str]) -> int:
    if not names:
        for name, table in TABLES.items():
            print(f"{name:6} {table.duration:>10}  {table.summary}")
        return 0
    if len(names) > 1 or names[0] not in TABLES:
        print(f"error: expected one of {', '.join(TABLES)}, got {' '.join(names)}", file=sys.stderr)
        return 2
    table, start = TABLES[names[0]], time.monotonic()
    print(f"about {table.duration} on two cores that do nothing else", flush=True)
    (ROOT / WORK).mkdir(parents=True, exist_ok=True)
    for command in table.commands:
        print(f"$ {command}", flush=True)
        program, _, rest = command.partition(" ")
        module = "-m diagd" if program == "diagd" else ""
        line = f"{shlex.quote(sys.executable)} {module} {rest}"
        subprocess.run(line, shell=True, cwd=ROOT, check=True)
    print(f"took {(time.monotonic() - start) / 60:.0f} minutes")
    lines = judge(table.read(ROOT / WORK), table.ranges())
    print("\n".join(lines))
    return int(any(line.endswith("OUTSIDE") for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
