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
