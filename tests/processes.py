"""Processes that tests start, and how to be rid of them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import httpx
import psutil
import pytest


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process, as `kill -9` does, and all that it has started; wait for its end."""
    if process.poll() is None:
        first = psutil.Process(process.pid)
        first.suspend()  # it starts nothing more
        for each in (*first.children(recursive=True), first):
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


def interrupt_a_server(process: subprocess.Popen[str]) -> tuple[str, str, str]:
    """Wait until a process serves at the address that it says, and press Ctrl-C.

    Returns:
        The address, and all that was written to stdout and, after the address, to stderr.
    """
    assert process.stderr is not None
    said = iter(process.stderr.readline, "")
    url = next(found[0] for line in said if (found := re.search(r"http://\S+", line)))
    end = time.monotonic() + 60
    while True:
        try:
            assert httpx.get(url).status_code == 200
            break
        except httpx.ConnectError:
            assert time.monotonic() < end
    process.send_signal(signal.SIGINT)
    return url, *process.communicate(timeout=60)
