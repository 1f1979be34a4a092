import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from diagd.backends.native.model import NativeModel
from diagd.web.model_thread import Painter
from tests.models.tiny import tiny_model


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def paint_with(model, paint):
    """Return what painting does, once all threads are gone."""

    async def scenario():
        with ThreadPoolExecutor(1, "model") as thread:
            painter = Painter(model, thread)
            with painter.thread:
                return await painter.submit(paint)

    return asyncio.run(scenario())


def threads_of(model):
    """Return the thread that paints, its number of threads, and the most of the model's."""

    def paint():
        most = getattr(model, "max_threads", None)
        return threading.current_thread().name.split("_")[0], torch.get_num_threads(), most

    return paint_with(model, paint)


def test_the_kernels_leave_a_thread_to_the_painter_while_it_paints(two_threads):
    model = NativeModel(tiny_model())
    model.max_threads = 5
    assert threads_of(model) == ("painter", 1, 1)
    assert model.max_threads == 5
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 2


def test_a_model_without_a_thread_to_spare_paints_between_two_frames(two_threads):
    model = NativeModel(tiny_model())
    model.max_threads = 1
    assert threads_of(model) == ("model", 2, 1)
    assert threads_of(tiny_model()) == ("model", 2, None)


def test_what_fails_gives_the_thread_back(two_threads):
    model = NativeModel(tiny_model())
    most = model.max_threads = 3
    with pytest.raises(ZeroDivisionError):
        paint_with(model, lambda: 1 // 0)
    assert model.max_threads == most
