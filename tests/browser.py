"""The browser of the system, headless, for tests of pages."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# the first one is the others without their windows: half the work
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ON_CPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")  # with WebGPU


@contextmanager
def open_browser(*flags: str) -> Iterator[Any]:
    """Start the browser, or skip the test."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[test]'")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"NO BROWSER TESTS: no chromium found (apt-get install {NAMES[0]})")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        flags = (*flags, "--no-sandbox")
    with playwright.sync_playwright() as driver:
        playwright.expect.set_options(timeout=60_000)  # machines of tests are slow at times
        browser = driver.chromium.launch(executable_path=program, args=list(flags))
        yield browser
        browser.close()
