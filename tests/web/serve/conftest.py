"""A real server on a free loopback port, over image models and worlds in miniature."""

import contextlib
from pathlib import Path

import pytest

from diagd.families.checkpoints import write_defaults
from diagd.families.defaults import image_defaults
from diagd.pipeline.generator import VideoGenerator
from tests.web.serve.serving import Served, serving
from tests.worlds import write_world


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """Return the folder of a model that makes guided images of 3 x 5 tokens of its actions."""
    folder = write_world(tmp_path_factory.mktemp("serve") / "tiny-images")
    write_defaults(folder, image_defaults(guidance=2.0, top_p=0.95))
    return folder


@pytest.fixture(scope="session")
def image_model(images) -> VideoGenerator:
    return VideoGenerator.from_pretrained(images, dtype="float32")


@pytest.fixture(scope="session")
def served(images):
    """Serve the image model to all tests that ask for nothing else."""
    with serving(images) as served:
        yield served


@pytest.fixture
def serve(images):
    """Serve a model, that of images unless another is given, with options of the test's."""
    with contextlib.ExitStack() as stack:

        def start(model: Path = images, **options) -> Served:
            return stack.enter_context(serving(model, **options))

        yield start
