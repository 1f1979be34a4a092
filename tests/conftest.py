"""One thread: the tiny models of the tests are slower with more, and CI machines differ.

Fixtures shared by the tests of commands: the command line in this process, and a tiny world model.
"""

import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tests.quick", "tests.processes"]
gc.disable()  # until all tests are collected, of which nothing is garbage
os.environ.pop("COLUMNS", None)  # a pipe has no width, whatever pytest-xdist's processes are told


# Files of a minute or two begin first, so that two processes end together
LONGEST = {"test_page", "test_compiler", "test_conformance", "test_browser_engine", "test_builds"}
LONGEST |= {"test_hard_times", "test_variants", "test_tokens", "test_compiled", "test_gpu_report"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    import torch  # slow, and pytest-xdist's processes begin only when this file is read

    from diagd.backends import prepare

    torch.set_num_threads(1)
    prepare.BUSY_SHARE = 1.0  # or processes that test at once would time steps again and again
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@dataclass(frozen=True)
class Outcome:
    """What a command did: its exit code and all that was written to the two streams."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Parse stdout, which is one document of strict JSON (no NaN) and nothing else."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is no JSON")

        return json.loads(self.out, parse_constant=refuse)

    @property
    def said(self) -> str:
        """What it printed for people: with `--json` on stderr, else on stdout."""
        return self.out + self.err

    def assert_refused(self, message: str) -> None:
        """Exit code 2 and exactly one line on stderr, `error: ` and something that matches."""
        assert (self.code, self.err.count("\n")) == (2, 1), self
        assert re.fullmatch(rf"error: .*{message}.*\n", self.err), self.err


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Run `diagd` with arguments, in this process."""
    from diagd.cli import main

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["diagd", *map(str, arguments)])
        capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        written = capfd.readouterr()
        return Outcome(code, str(written.out), str(written.err))

    return run


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Only what nothing refers to is freed, at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random world model; to be read only."""
    from tests.worlds import write_world  # slow to import, and most tests need no world

    return write_world(tmp_path_factory.mktemp("world"))
