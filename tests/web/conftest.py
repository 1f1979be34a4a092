import os
import shutil

import pytest


@pytest.fixture(scope="module")
def browser():
    """Start the system's Chromium, headless, or skip the test."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[test]'")
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("NO BROWSER TESTS: no chromium found (apt-get install chromium)")
    arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        playwright.expect.set_options(timeout=60_000)  # machines of tests are slow at times
        browser = driver.chromium.launch(executable_path=chromium, args=arguments)
        yield browser
        browser.close()
