"""A real server on a free loopback port over the tiny world, and the world itself."""

import contextlib

import pytest

from tests.web.play.serving import Served, serving


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
