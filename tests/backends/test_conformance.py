"""`tests/backends/conformance.py` over every backend there is, and over one from outside."""

import pytest
import torch

from diagd.backends.linears import merge_linears
from diagd.backends.prepare import BACKENDS, prepare
from diagd.models.huggingface import HuggingFaceModel, llama_of
from tests.backends.conformance import (
    ACTIONS,
    UnderTest,
    a_fused_step_is_its_parts,
    a_stream_goes_on_after_a_full_context,
    checks_of,
    decode,
    its_likeliest_tokens_are_those_of_the_plain_model,
    its_tokens_are_those_of_the_plain_model,
    streams_come_and_go_and_write_what_they_write_alone,
)
from tests.backends.recomputing import Recomputing
from tests.backends.webgpu.adapter import on_device, on_webgpu
from tests.models.tiny import tiny_model

# inductor's own; the second on GPUs that could multiply float32 in 19 bits, which we do not ask for
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32"),
]


def prepared(name, int8=False):
    return lambda model: prepare(model, name, int8)[0]


# bfloat16 and int8 keep 8 bits of weights and cache, eager also of all between; logits reach 10
CPU = {
    "native": UnderTest(prepared("native"), tolerance=5e-6, steadfast=True),
    "native, bfloat16": UnderTest(
        prepared("native"),
        dtype=torch.bfloat16,
        tolerance=0.06,
        rounds=True,
        steadfast=True,
    ),
    "native, int8": UnderTest(
        prepared("native", int8=True), tolerance=0.08, rounds=True, steadfast=True
    ),
    "eager": UnderTest(prepared("eager")),
    "eager, bfloat16": UnderTest(
        prepared("eager"), dtype=torch.bfloat16, tolerance=0.3, rounds=True
    ),
    # each kind is compiled anew for many shapes
    "compile": UnderTest(prepared("compile"), kinds=("llama", "wham")),
    "plain Transformer": UnderTest(lambda model: model),
    "merged linears, not packed": UnderTest(lambda model: merge_linears(model, False)),
    "Hugging Face": UnderTest(
        lambda model: HuggingFaceModel(llama_of(model)),
        kinds=("llama", "multi-head", "multi-query", "world"),
        buffers=lambda cache: [b for layer in cache.layers for b in (layer.keys, layer.values)],
    ),
    # the shaders of a kind take long to compile for a CPU; test_model.py there has the others
    "webgpu": UnderTest(on_webgpu, kinds=("llama",), sequences=1, buffers=on_device),
    "without a cache": UnderTest(Recomputing, kinds=("world",), buffers=lambda cache: []),
}
CUDA = {
    "eager": UnderTest(prepared("eager"), device="cuda"),
    "compile": UnderTest(prepared("compile"), device="cuda"),
    "cuda-graph": UnderTest(prepared("cuda-graph"), device="cuda"),
    "triton": UnderTest(prepared("triton"), device="cuda"),
    "compiled-graph": UnderTest(prepared("compiled-graph"), device="cuda"),
    "triton, int8": UnderTest(
        prepared("triton", int8=True), device="cuda", tolerance=0.3, rounds=True
    ),
}


# a sampling is compiled for a minute or two; tests/gpu/test_compiled.py has a stream, too
SLOW = (
    ("compile", its_tokens_are_those_of_the_plain_model),
    ("webgpu", a_fused_step_is_its_parts),
    ("compile", a_stream_goes_on_after_a_full_context),
    ("compile", its_likeliest_tokens_are_those_of_the_plain_model),
    ("compile", streams_come_and_go_and_write_what_they_write_alone),
)


def cases(backends):
    return [
        pytest.param(
            backend,
            check,
            id=f"{name}-{check.__name__}",
            marks=[pytest.mark.slow] * ((name, check) in SLOW),
        )
        for name, backend in backends.items()
        for check in checks_of(backend)
    ]


@pytest.mark.parametrize(("backend", "check"), cases(CPU))
def test_a_backend_conforms(backend, check):
    check(backend)


def test_a_step_of_one_layer_is_compiled_to_the_tokens_of_the_plain_model():
    plain, compiled = tiny_model(num_layers=1), prepared("compile")(tiny_model(num_layers=1))
    own, other = (decode(m, ["k=1"], ACTIONS)[0] for m in (compiled, plain))
    assert torch.equal(own, other)


def test_what_decodes_one_sequence_refuses_more():
    model = on_webgpu(tiny_model())
    message = r"^backend webgpu decodes one sequence at a time, got 2: use another --backend"
    with pytest.raises(ValueError, match=message):
        decode(model, ["k=1"], ACTIONS)


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "check"), cases(CUDA))
def test_a_backend_conforms_on_cuda(backend, check):
    check(backend)


def test_every_backend_of_the_table_is_a_case():
    assert set(BACKENDS) <= {*CPU, *CUDA}
