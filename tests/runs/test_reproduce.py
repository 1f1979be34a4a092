"""The published tables that `make reproduce` measures again."""

import json
import shlex
import subprocess
import sys

import pytest

from diagd.cli import options_of
from diagd.flags import parse
from runs import reproduce


def run(*names):
    command = [sys.executable, "-m", "runs.reproduce", *names]
    return subprocess.run(command, cwd=reproduce.ROOT, capture_output=True, text=True)


def test_without_a_name_the_tables_are_listed(capsys):
    assert reproduce.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(reproduce.TABLES)
    assert all(len(line) <= 100 for line in lines)


def test_an_unknown_name_is_one_line(capsys):
    assert reproduce.main(["speeds"]) == 2
    told = capsys.readouterr()
    known = "price, rules, exact, speed, arms, weights"
    assert told.err == f"error: expected one of {known}, got speeds\n"
    assert not told.out


@pytest.mark.parametrize("name", reproduce.TABLES)
def test_published_numbers_fall_into_their_ranges(name):
    ranges = reproduce.TABLES[name].ranges()
    assert len(ranges) >= 3
    for low, high in ranges.values():
        assert low <= high
    middles = {key: (low + high) / 2 for key, (low, high) in ranges.items()}
    assert all(line.endswith("ok") for line in reproduce.judge(middles, ranges))


def test_a_number_outside_of_its_range_is_told():
    lines = reproduce.judge({"k=1": 0.3, "k=2": 0.05}, {"k=1": (0.1, 0.2), "k=2": (0.0, 0.1)})
    assert [line.split()[-1] for line in lines] == ["OUTSIDE", "ok"]
    with pytest.raises(KeyError):
        reproduce.judge({"k=1": 0.1}, {"k=1": (0.1, 0.2), "k=2": (0.0, 0.1)})


def test_the_scripts_of_the_tables_exist_and_take_their_flags():
    for table in reproduce.TABLES.values():
        for command in table.commands:
            program, name, *flags = shlex.split(command.split(" > ")[0])
            if program == "diagd":
                options, _ = parse(options_of(name), name, flags)
                assert isinstance(options, options_of(name))
            else:
                assert (reproduce.ROOT / name).is_file()


def test_results_are_read_as_the_commands_write_them(tmp_path):
    rows = [{"name": name, "gap": gap} for name, gap in (("raster", 0.0), ("k=1", 0.2))]
    (tmp_path / "price").mkdir()
    (tmp_path / "price/tune.json").write_text(json.dumps({"rows": rows}))
    assert reproduce.read_price(tmp_path) == {"k=1": 0.2}
    published = (reproduce.ROOT / "docs/results/arms/arms.md").read_text(encoding="utf-8")
    (tmp_path / "arms").mkdir()
    (tmp_path / "arms/arms.md").write_text(published.split("\n## recipe")[0], encoding="utf-8")
    numbers, ranges = reproduce.read_arms(tmp_path), reproduce.arms_ranges()
    assert all(line.endswith("ok") for line in reproduce.judge(numbers, ranges))


@pytest.mark.slow
def test_the_rules_of_the_cache_are_measured_again_as_published():
    pytest.importorskip("vizdoom", reason="the clips are recorded: pip install -e '.[doom]'")
    done = run("rules")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok\n") == 12
