"""A real server on a free loopback port over the tiny world, and the world itself."""

import contextlib
import gc

import pytest

from tests.web.play.serving import Served, serving
from tests.worlds import write_scenes, write_world


@pytest.fixture(scope="module", autouse=True)
def collections():
    """As `diagd play` does, and for good: each dream would collect all that tests have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Return the folder of a tiny random world model with five start scenes."""
    return write_scenes(write_world(tmp_path_factory.mktemp("played")))


@pytest.fixture(scope="session")
def generator(world):
    """Return the tiny world, loaded once."""
    from diagd.pipeline.generator import VideoGenerator

    return VideoGenerator.from_pretrained(world)


@pytest.fixture
def serve(world):
    """Serve the tiny world with options of the test's; all servers end with the test."""
    with contextlib.ExitStack() as stack:

        def start(**options) -> Served:
            return stack.enter_context(serving(world, **options))

        yield start


def loud(said):
    blocked = "blocked by Playwright"  # a worker, as the test has asked
    return said.type in ("error", "warning") and blocked not in said.text


@pytest.fixture
def visit(browser, serve):  # whose servers outlive the pages
    """Open pages, each with a profile of its own; errors and warnings fail a quiet one's test."""
    complaints = []
    with contextlib.ExitStack() as stack:

        def visit(url, quiet=True, **options):
            context = browser.new_context(**options)
            stack.callback(context.close)
            context.set_default_timeout(60_000)  # the machine may be busy
            page = context.new_page()
            page.on("pageerror", lambda error: complaints.append(str(error)))
            if quiet:
                page.on("console", lambda said: loud(said) and complaints.append(said.text))
            page.goto(url)
            return page

        yield visit
    assert not complaints
