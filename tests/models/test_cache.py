import pytest
import torch

from diagd.backends.native.model import NativeModel
from tests.models.tiny import tiny_model


def test_written_slots_are_read_back_and_the_others_stay_zero():
    cache = tiny_model().make_cache(1, 6)
    keys, values = torch.randn(2, 1, 2, 2, 8)
    cache.write(1, torch.tensor([4, 1]), keys, values)
    read_keys, read_values = cache.read(1, 5)
    assert read_keys.shape == (1, 2, 5, 8)
    assert torch.equal(read_keys[:, :, [4, 1]], keys)
    assert torch.equal(read_values[:, :, [4, 1]], values)
    assert read_keys[:, :, [0, 2, 3]].count_nonzero() == 0
    assert cache.read(0, 5)[0].count_nonzero() == 0


def test_reading_copies_nothing():
    cache = tiny_model().make_cache(2, 6)
    assert cache.read(0, 3)[0].data_ptr() == cache.keys[0].data_ptr()


def test_a_cache_that_never_fits_is_refused_before_it_is_allocated():
    for model in (tiny_model(), NativeModel(tiny_model()), NativeModel(tiny_model(), "bfloat16")):
        message = (
            r"a cache of batch_size=3 and num_slots=1099511627776 would take .* GB, this machine"
        )
        with pytest.raises(ValueError, match=message):
            model.make_cache(3, 2**40)
