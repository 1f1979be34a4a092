"""Models on whatever GPU `wgpu` finds, which may be a CPU (Mesa's lavapipe)."""

from typing import Any, NamedTuple

import pytest
import torch

from diagd.backends.prepare import prepare
from diagd.backends.webgpu.model import WGPU, Device, WebGPUCache, open_device
from diagd.backends.webgpu.shader import bytes_of
from diagd.decoding.model import CausalModel
from diagd.models.transformer import Transformer


def device() -> Device:
    """Open the GPU, or skip the test."""
    try:
        return open_device()
    except (ValueError, OSError) as error:
        pytest.skip(f"NO WEBGPU TESTS: {error} (apt-get install mesa-vulkan-drivers)")


def on_webgpu(model: Transformer, int8: bool = False) -> CausalModel:
    """Prepare a model, or skip the test."""
    device()
    return prepare(model, "webgpu", int8)[0]


class Filled(NamedTuple):
    """A buffer of the device that can be filled as a tensor can."""

    buffer: WGPU

    def fill_(self, value: float) -> None:
        numbers = torch.full((self.buffer.size // 4,), value)
        device().queue.write_buffer(self.buffer, 0, bytes_of(numbers))


def on_device(cache: WebGPUCache) -> list[Any]:
    """Return the buffers of a cache."""
    return [Filled(layer) for layer in cache.layers]
