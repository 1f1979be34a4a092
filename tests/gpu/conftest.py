"""The pretended machine as a fixture."""

from collections.abc import Iterator

import pytest
import torch

from diagd.backends import replay
from tests.gpu.guard import exchange_device
from tests.gpu.machine import Machine, pretended_gpus


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Two pretended GPUs."""
    if torch.version.cuda is not None:
        pytest.skip("pretends only where torch is built without CUDA")
    try:
        exchange_device()
    except OSError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(replay, "_SIDE_STREAMS", {})
    with pretended_gpus() as machine:
        yield machine
