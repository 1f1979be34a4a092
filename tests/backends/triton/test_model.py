"""`TritonModel` keeps what every backend keeps, and what refuses to run says why."""

import pytest

from diagd.backends.linears import merge_linears
from diagd.backends.triton import model
from diagd.backends.triton.model import TritonModel
from tests.backends import conformance
from tests.backends.conformance import UnderTest, checks_of
from tests.backends.triton.interpreter import DEVICE
from tests.models.tiny import tiny_model

from diagd.backends.triton import attention  # isort: skip

BACKEND = UnderTest(
    lambda plain: TritonModel(merge_linears(plain, pack=False)),
    ("llama", "wham"),
    device=DEVICE.type,
)
ELSEWHERE = (  # thousands of draws, which `test_sampling.py` has a few of
    conformance.it_draws_what_the_sampler_draws,
    conformance.where_logits_are_broken_nothing_is_drawn,
)


@pytest.mark.parametrize("check", [one for one in checks_of(BACKEND) if one not in ELSEWHERE])
def test_it_conforms(check):
    check(BACKEND)


def test_kernels_that_are_wrong_are_found_before_the_first_step(monkeypatch):
    monkeypatch.setattr(attention, "LOG2_E", 1.4)
    model.check_kernels.cache_clear()
    message = r"^Triton kernels failed their test \(attention differs by .*, allowed .*\)$"
    with pytest.raises(OSError, match=message):
        TritonModel(tiny_model().to(DEVICE))
    model.check_kernels.cache_clear()


def test_kernels_that_do_not_run_are_found_before_the_first_step(monkeypatch):
    """As where there is no C compiler, which Triton needs as well."""
    monkeypatch.setattr(attention, "tiling_of", lambda *_: attention.Tiling(3, 5))
    model.check_kernels.cache_clear()
    with pytest.raises(OSError, match=r"^Triton kernels do not run here \(.*\)$"):
        TritonModel(tiny_model().to(DEVICE))
    model.check_kernels.cache_clear()
