"""Adapters on six-token frames: trained beside a frozen base, merged where a model is loaded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diagd.backends.linears import round_linears
from diagd.decoding.strategies.table import parse_strategy
from diagd.decoding.teacher_forcing import strategy_nll
from diagd.families.adapters import weights_sha256
from diagd.families.checkpoints import find_model, load_model, save_model
from diagd.files import read_json_object
from diagd.pipeline.world_folder import check_strategy
from diagd.training.adapters import AdapterFolder, attach
from diagd.training.memory import estimate_memory
from diagd.training.options import TuneOptions
from diagd.training.sequences import draw_batch
from diagd.training.train import FinetuneOptions, finetune
from diagd.training.tuning import main as tune
from tests.training.runs import log_of, options_maker, run_killed
from tests.worlds import clips_of, model_config, random_model, write_shard_model


@pytest.fixture
def options(tmp_path):
    """Return a function that makes options for a run of eight steps beside a tiny model."""
    init = str(write_shard_model(tmp_path / "init"))
    plain = {"init": init, "frames": 4, "steps": 8, "log_every": 1, "lora": 2}
    return options_maker(FinetuneOptions, tmp_path, **plain)


def losses_of(out: Path) -> list[float]:
    return [line["loss"] for line in log_of(out)]


def tensors_of(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "adapter.safetensors")


def mean_nll(model, run, strategy: str, num_batches: int = 8) -> float:
    """Return the price of the first batches, through the cache."""
    seeds = range(num_batches)
    tokens = torch.cat([draw_batch(clips_of(), run.frames, run.batch_size, seed) for seed in seeds])
    frames = torch.cat([tokens.new_zeros(len(tokens), 1), tokens], 1).unflatten(1, (-1, 7))
    given = frames[..., 1:].unflatten(2, (2, 3)), frames[..., :1], parse_strategy(strategy)
    return strategy_nll(model, *given).mean().item()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("adapter", [{}, {"stand_in": True}, {"lora": None, "stand_in": True}])
def test_the_loss_falls_and_a_loaded_model_pays_it_while_the_base_stays(
    adapter, optimizer, options
):
    run = options(steps=60, strategy=("raster", "k=1"), optimizer=optimizer, **adapter)
    run = replace(run, validation=run.tokens)  # so small a model learns little that is general
    before = (Path(run.init) / "model.safetensors").read_bytes()
    report = finetune(run)
    assert (Path(run.init) / "model.safetensors").read_bytes() == before
    about = read_json_object(run.out / "adapter.json")
    k1 = "k=1/learnt" if run.stand_in else "k=1"
    rows = {row.pop("strategy"): row for row in about["nats_per_token"]}
    assert set(rows) == {"raster", k1}
    assert rows[k1]["after"] < rows[k1]["before"] - 0.1
    base, tuned = load_model(run.init), load_model(run.init, adapter=run.out)
    assert rows[k1]["before"] == pytest.approx(mean_nll(base, run, "k=1"), abs=1e-4)
    assert rows[k1]["after"] == pytest.approx(mean_nll(tuned, run, k1), abs=1e-4)
    assert report["validation_loss_by_strategy"] == {name: rows[name]["after"] for name in rows}
    assert f"| `{k1}` | {rows[k1]['before']:.4f} |" in (run.out / "README.md").read_text()
    if not run.lora:  # raster order feeds no stand-in
        assert rows["raster"]["before"] == rows["raster"]["after"]
        assert [*tensors_of(run.out)] == ["stand_in"]


def test_the_first_loss_is_the_base_s_under_the_strategy(options):
    run = options(steps=1, warmup_steps=0, strategy=("k=1",))
    finetune(run)
    assert losses_of(run.out) == [
        pytest.approx(mean_nll(load_model(run.init), run, "k=1", 1), abs=1e-5)
    ]


def test_all_linear_layers_of_blocks_change_and_a_stand_in_is_an_id_more(options):
    run = options(stand_in=True)
    finetune(run)
    plain, merged = load_model(run.init), load_model(run.init, adapter=run.out)
    assert merged.shape.stand_in == merged.num_embeddings - 1 == plain.num_embeddings
    assert merged.vocab_size == plain.vocab_size
    weights = merged.state_dict()
    changed = [
        name
        for name, weight in plain.state_dict().items()
        if not torch.equal(weight, weights[name])
    ]
    assert len(changed) == 2 * 7 + 1  # of two blocks, and the embedding, which has one row more


def test_a_killed_run_goes_on_to_the_same_bits(options):
    whole, killed = (
        options(out, stand_in=True, strategy=("raster", "k=1"), save_minutes=0.0)
        for out in ("whole", "killed")
    )
    finetune(whole)
    run_killed(finetune, killed, 5)
    (state,) = killed.out.glob("training/step_*/model.safetensors")
    assert all("lora" in name or "stand_in" in name for name in load_file(state))
    finetune(killed)
    assert log_of(killed.out) == log_of(whole.out)
    ours, theirs = tensors_of(killed.out), tensors_of(whole.out)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_beside_another_base_or_of_another_rank_is_refused(options):
    finetune(options(steps=1, warmup_steps=0))
    with pytest.raises(ValueError, match="run holds a run of another model, tokenizer or schedule"):
        finetune(options(lora=3))
    run = options()
    model = random_model(load_model(run.init).config, seed=1)
    save_file(model.state_dict(), Path(run.init) / "model.safetensors")
    with pytest.raises(ValueError, match="run holds a run of another model, tokenizer or schedule"):
        finetune(run)


def test_recomputed_blocks_change_no_bit(options):
    runs = [options(str(choice), recompute=choice) for choice in (False, True)]
    for run in runs:
        finetune(run)
    assert losses_of(runs[0].out) == losses_of(runs[1].out)


def test_frozen_weights_in_int8_cost_what_a_rounded_model_costs(options):
    run = options(int8=True, steps=1, warmup_steps=0, strategy=("k=1",))
    finetune(run)
    rounded = round_linears(load_model(run.init), torch.float32)
    assert losses_of(run.out) == [pytest.approx(mean_nll(rounded, run, "k=1", 1), abs=1e-5)]


def test_under_bfloat16_frozen_weights_are_those_of_autocast(options):
    run = options(steps=1, warmup_steps=0, precision="bf16", strategy=("k=1",))
    finetune(run)
    whole = options(
        "whole", lora=None, steps=1, warmup_steps=0, precision="bf16", strategy=("k=1",)
    )
    finetune(whole)
    assert losses_of(run.out) == losses_of(whole.out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": 0}, "lora must be at least 1, got 0"),
        ({"lora": None, "int8": True}, "int8 needs frozen weights: give --lora or --stand-in"),
        ({"stand_in": True, "strategy": ("raster",)}, "stand_in needs diagonals among the strat"),
    ],
)
def test_options_that_cannot_be_are_refused(changes, message, options):
    with pytest.raises(ValueError, match=message):
        options(**changes)


def test_without_a_stand_in_its_row_start_is_refused_before_anything_is_written(options):
    run = options(strategy=("k=1/learnt",))
    with pytest.raises(ValueError, match="row start learnt needs a model with a learnt stand-in"):
        finetune(run)
    assert not run.out.exists()


@pytest.fixture
def trained(options):
    """The options of a finished run with factors and a stand-in."""
    run = options(stand_in=True, strategy=("raster", "k=1", "k=2"), steps=4)
    finetune(run)
    return run


def test_an_adapter_of_another_base_is_refused(trained, tmp_path):
    other = write_shard_model(tmp_path / "other", frames=5)
    weights = load_model(other).state_dict()
    weights["model.norm.weight"][0] += 1
    save_file(weights, other / "model.safetensors")
    match = r"run: its base is .*init with weights of SHA-256 \w{12}, .*other/model.* has \w{12}$"
    with pytest.raises(ValueError, match=match):
        load_model(other, adapter=trained.out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 3}, r"does not fit its base: model.layers.0.mlp.down_proj expected factors "),
        ({"rank": None}, "not an adapter of diagd finetune"),
        ({"base_sha256": "0" * 64}, "its base is .* SHA-256 000000000000, "),
    ],
)
def test_a_damaged_adapter_is_refused_with_its_folder(changes, message, trained):
    path = trained.out / "adapter.json"
    path.write_text(json.dumps(read_json_object(path) | changes))
    with pytest.raises(ValueError, match=f"run: {message}"):
        load_model(trained.init, adapter=trained.out)


def test_a_stand_in_of_another_width_and_a_missing_folder_are_refused(trained, tmp_path):
    tensors = tensors_of(trained.out)
    save_file(tensors | {"stand_in": torch.zeros(31)}, trained.out / "adapter.safetensors")
    with pytest.raises(ValueError, match=r"base: stand_in expected \(32,\), got \(31,\)"):
        load_model(trained.init, adapter=trained.out)
    with pytest.raises((ValueError, OSError), match=r"adapter folder .*nowhere"):
        load_model(trained.init, adapter=tmp_path / "nowhere")


def test_the_folder_stands_for_its_base_with_it_and_begins_by_its_strategy(trained):
    found = find_model(trained.out)
    assert found.path == Path(trained.init) / "model.safetensors"
    assert found.defaults.decoding == "k=1/learnt"
    check_strategy(found, parse_strategy("k=1/learnt"))
    with pytest.raises(ValueError, match="row start learnt needs"):
        check_strategy(find_model(trained.init), parse_strategy("k=1/learnt"))
    ours, theirs = load_model(trained.out), load_model(trained.init, adapter=trained.out)
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))


def test_its_folder_is_no_model_to_finetune_nor_to_write_a_choice_into(trained, options):
    message = r"needs a whole model, got the adapter .*run: diagd convert --adapter merges it"
    before = sorted(Path(trained.init).iterdir())
    with pytest.raises(ValueError, match=f"init {message}"):
        finetune(options("again", init=str(trained.out)))
    chosen = TuneOptions(trained.tokens, str(trained.out), make_default=True)
    with pytest.raises(ValueError, match=f"make_default {message}"):
        tune(chosen)
    assert sorted(Path(trained.init).iterdir()) == before


def test_factors_are_merged_in_float32_before_weights_are_cast(trained):
    name, tensors = "model.layers.1.self_attn.q_proj", tensors_of(trained.out)
    product = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    base = find_model(trained.init).weights[f"{name}.weight"]
    merged = load_model(trained.init, adapter=trained.out, dtype=torch.bfloat16)
    expected = (base + 8 / trained.lora**0.5 * product).bfloat16()
    assert torch.equal(merged.state_dict()[f"{name}.weight"], expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "learned", "norm": "layer", "mlp": "gelu", "bias": True},
        {"qk_norm": True, "tie_embeddings": True},
        {"num_kv_heads": 1, "head_size": 16},
        {"visual_mlp_layers": (1,), "sliding_window": 20, "sliding_layers": (1,)},
    ],
    ids=["WHAM", "Cosmos", "Janus", "MammothModa2"],
)
def test_in_every_family_a_loaded_model_is_the_one_that_was_trained(changes, options, tmp_path):
    config = replace(model_config(), **changes)
    model, init = random_model(config), tmp_path / "family"
    save_model(model, init)
    run = options(init=str(init), stand_in=True)
    folder = AdapterFolder(run, weights_sha256(find_model(init).weights))
    attach(model, run, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = torch.randn(weight.shape, generator=generator) / 4
    run.out.mkdir()
    folder(model.state_dict())
    loaded = load_model(init, adapter=run.out)
    tokens = torch.randint(config.vocab_size, (2, 30), generator=generator)
    tokens[:, ::6] = loaded.num_embeddings - 1
    torch.testing.assert_close(loaded.logits(tokens), model.logits(tokens), rtol=1e-4, atol=1e-4)
    assert loaded.config == model.config


def test_a_hash_is_of_names_types_shapes_and_contents_in_any_order():
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    told = weights_sha256(weights)
    assert told == weights_sha256(dict(reversed(weights.items())))
    for changed in (
        {"a": weights["a"].view(3, 2)},
        {"a": weights["a"] + 1},
        {"b": weights["b"].bfloat16()},
    ):
        assert weights_sha256(weights | changed) != told


def test_adapters_need_less_memory_than_finetuning_and_int8_and_recomputing_less_again(options):
    config = load_model(options().init).config
    choices = {"lora": None}, {}, {"recompute": True}, {"recompute": True, "int8": True}
    bf16 = (options(precision="bf16", **choice) for choice in choices)
    totals = [estimate_memory(config, run, 2, 30).total for run in bf16]
    assert totals == sorted(totals, reverse=True)
    assert len({*totals}) == 4
