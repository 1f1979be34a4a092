import pytest
import torch

from diagd.backends.native.model import NativeModel
from diagd.models.attention import Lanes, rows_at
from tests.models.tiny import tiny_model


def put(cache, layer: int, slots: torch.Tensor, first: int, num_slots: int, *states: torch.Tensor):
    """Store a layer's keys and values at slots; return what may be read of so many."""
    rows = rows_at(cache.keys[0], slots, first)
    lanes = Lanes(rows=rows, first=first, num_slots=num_slots)
    return cache.put(layer, lanes, None, torch.empty(len(slots), 0), *states)[1:]


def test_written_slots_are_read_back_and_the_others_stay_zero():
    """Those of the second and the third sequence, each at slots of its own."""
    cache, slots = tiny_model().make_cache(4, 6), torch.tensor([[4, 1], [0, 3]])
    keys, values = torch.randn(2, 2, 2, 2, 8)
    read_keys, read_values = put(cache, 1, slots, 1, 5, keys, values)
    assert read_keys.shape == (2, 2, 5, 8)
    for sequence, (at, others) in enumerate([([4, 1], [0, 2, 3]), ([0, 3], [1, 2, 4])]):
        assert torch.equal(read_keys[sequence][:, at], keys[sequence])
        assert torch.equal(read_values[sequence][:, at], values[sequence])
        assert read_keys[sequence][:, others].count_nonzero() == 0
    assert cache.keys[1][[0, 3]].count_nonzero() == cache.keys[0].count_nonzero() == 0


def test_reading_copies_nothing():
    cache, slots = tiny_model().make_cache(2, 6), torch.tensor([[2], [0]])
    states = torch.randn(2, 2, 2, 1, 8)
    assert put(cache, 0, slots, 0, 3, *states)[0].data_ptr() == cache.keys[0].data_ptr()


def test_a_cache_that_never_fits_is_refused_before_it_is_allocated():
    for model in (tiny_model(), NativeModel(tiny_model()), NativeModel(tiny_model(), "bfloat16")):
        message = (
            r"a cache of batch_size=3 and num_slots=1099511627776 would need .* GB, this machine"
        )
        with pytest.raises(ValueError, match=message):
            model.make_cache(3, 2**40)
