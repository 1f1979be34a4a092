"""`TritonModel` keeps what every backend keeps, and what refuses to run says why."""

from typing import Any

import pytest
import torch

from diagd.backends.linears import merge_linears
from diagd.backends.triton import model
from diagd.backends.triton.model import TritonModel
from diagd.decoding.visibility import Seen
from diagd.models.config import ModelConfig
from tests.backends import conformance
from tests.backends.conformance import UnderTest, causal_step, checks_of
from tests.backends.triton.interpreter import DEVICE
from tests.models.tiny import KINDS, tiny_fields, tiny_model

from diagd.backends.triton import attention  # isort: skip

KINDS_RUN = tuple(kind for kind in KINDS if kind != "mammothmoda2")  # it has second MLPs
BACKEND = UnderTest(
    lambda plain: TritonModel(merge_linears(plain, pack=False)), ("llama",), device=DEVICE.type
)
ELSEWHERE = (  # thousands of draws, which `test_sampling.py` has a few of
    conformance.it_draws_what_the_sampler_draws,
    conformance.where_logits_are_broken_nothing_is_drawn,
)


SLOW = (  # hundreds of steps, of a second each on the interpreter
    conformance.fed_in_any_order_and_pieces_it_equals_the_full_forward,
    conformance.a_lane_does_not_care_who_shares_its_step,
    conformance.a_fused_step_is_its_parts,
    conformance.a_stream_goes_on_after_a_full_context,
    conformance.sequences_of_a_step_stand_where_they_like,
    conformance.streams_come_and_go_and_write_what_they_write_alone,
    conformance.its_tokens_are_those_of_the_plain_model,
    conformance.its_likeliest_tokens_are_those_of_the_plain_model,
)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=[pytest.mark.slow] * (check in SLOW))
        for check in checks_of(BACKEND)
        if check not in ELSEWHERE
    ],
)
def test_it_conforms(check):
    check(BACKEND)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS_RUN)
def test_a_step_of_every_kind_is_that_of_the_plain_model(kind):
    """Of two sequences, at coordinates of their own, and by what a causal pass would see."""
    own: Any = BACKEND.model(kind)
    plain, step = tiny_model(**KINDS[kind]), causal_step(own, 2, 17)
    told = torch.randint(-1, 9, (3, 2, 7), generator=torch.Generator().manual_seed(0))
    step["coordinates"] = told.to(DEVICE) if own.config.on_grid else None
    logits = own.forward(**step, cache=own.make_cache(2, 9))
    step["seen"] = Seen(*(one.cpu() for one in step["seen"][:4]))
    for name in set(step) - {"seen"}:
        step[name] = None if step[name] is None else step[name].cpu()
    expected = plain.forward(**step, cache=plain.make_cache(2, 9))
    BACKEND.assert_close(logits, expected, kind)


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
