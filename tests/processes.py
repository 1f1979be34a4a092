"""Processes that tests start, and how to be rid of them."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process, as `kill -9` does, and all that it has started; wait for its end."""
    if process.poll() is None:
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for each in started:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python with arguments; what a test leaves running is killed."""
    running: list[subprocess.Popen[str]] = []

    def run(*arguments: object, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield run
    for process in running:
        with process:  # closes its pipes
            kill(process)
