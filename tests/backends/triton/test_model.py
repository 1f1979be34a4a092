"""`TritonModel` keeps what every backend keeps, and what refuses to run says why."""

from dataclasses import replace

import pytest
import torch

from diagd.backends.linears import merge_linears
from diagd.backends.triton import model
from diagd.backends.triton.model import TritonModel
from diagd.models.config import ModelConfig
from tests.backends import conformance
from tests.backends.conformance import UnderTest, checks_of
from tests.backends.triton.interpreter import DEVICE
from tests.models.tiny import KINDS, tiny_fields, tiny_model

from diagd.backends.triton import attention  # isort: skip

KINDS_RUN = tuple(kind for kind in KINDS if kind != "mammothmoda2")  # it has second MLPs
BACKEND = UnderTest(
    lambda plain: TritonModel(merge_linears(plain, pack=False)), ("llama",), device=DEVICE.type
)
OF_EVERY = (
    conformance.fed_in_any_order_and_pieces_it_equals_the_full_forward,
    conformance.lanes_turn_by_the_coordinates_that_they_are_told,
)
ELSEWHERE = (  # thousands of draws, which `test_sampling.py` has a few of
    conformance.it_draws_what_the_sampler_draws,
    conformance.where_logits_are_broken_nothing_is_drawn,
)


@pytest.mark.parametrize("check", [one for one in checks_of(BACKEND) if one not in ELSEWHERE])
def test_it_conforms(check):
    check(BACKEND)


@pytest.mark.parametrize("kind", KINDS_RUN)
@pytest.mark.parametrize("check", OF_EVERY)
def test_every_kind_conforms(check, kind):
    check(replace(BACKEND, kinds=(kind,)))


def check_kernels(kind="llama", dtype=torch.float32, int8=False):
    model.check_kernels.cache_clear()
    model.check_kernels(ModelConfig(**tiny_fields(**KINDS[kind])), dtype, DEVICE, int8)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", ["llama", "chameleon", "wham", "glm-image"])
def test_kernels_pass_their_test(kind, int8):
    check_kernels(kind, int8=int8)


def test_kernels_that_are_wrong_are_found_before_the_first_step(monkeypatch):
    monkeypatch.setattr(attention, "LOG2_E", 1.0)
    message = r"^Triton kernels failed their test \(a step differs by .* of .*, allowed .*\)$"
    with pytest.raises(OSError, match=message):
        check_kernels()
    model.check_kernels.cache_clear()


def test_kernels_that_do_not_run_are_found_before_the_first_step(monkeypatch):
    """As where there is no C compiler, which Triton needs as well."""
    monkeypatch.setattr(attention, "tiling_of", lambda *_: attention.Tiling(3, 5))
    with pytest.raises(OSError, match=r"^Triton kernels do not run here \(.*\)$"):
        check_kernels()
    model.check_kernels.cache_clear()


def test_a_model_with_two_mlps_a_layer_is_refused():
    why = model.why_not(tiny_model(**KINDS["mammothmoda2"]))
    assert why == "visual_mlp_layers: our kernels run one MLP a layer"
