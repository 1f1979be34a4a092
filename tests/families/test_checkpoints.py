import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from diagd.families import presets
from diagd.families.checkpoints import (
    available_models,
    load_model,
    model_path,
    read_config,
    save_model,
)
from tests.models.tiny import KINDS, random_tokens, tiny_fields, tiny_model


@pytest.fixture
def folder(tmp_path):
    save_model(tiny_model(), tmp_path / "model")
    return tmp_path / "model"


def edit_weights(folder, **changes):
    weights = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors")


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_loads_with_the_same_weights_and_logits(kind, tmp_path):
    model, tokens = tiny_model(**KINDS[kind]), random_tokens(2, 20)
    save_model(model, tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.config == model.config
    assert torch.equal(loaded.logits(tokens), model.logits(tokens))


def test_loading_casts_to_the_dtype_asked_for(folder):
    assert load_model(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_loaded_model_can_be_trained(folder):
    model = load_model(folder)
    model.logits(random_tokens(1, 5)).mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_saving_keeps_other_files_and_leaves_no_temporary_ones(folder):
    (folder / "actions.json").write_text("{}")
    save_model(tiny_model(seed=1), folder)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["actions.json", "config.json", "model.safetensors"]


def test_another_config_file_can_be_given(folder, tmp_path):
    (folder / "config.json").rename(tmp_path / "side.json")
    assert load_model(folder, config=tmp_path / "side.json").config.num_layers == 2


@pytest.mark.parametrize("kind", ["llama", "llamagen"])
@pytest.mark.parametrize("name", ["mine.safetensors", "model.ckpt"])
def test_weights_of_our_config_under_another_name_are_of_no_family(kind, name, tmp_path):
    """A model of LlamaGen was read as one of MineWorld, with other heads and positions."""
    save_model(tiny_model(**KINDS[kind]), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (torch.save if name.endswith("ckpt") else save_file)(weights, tmp_path / name)
    with pytest.raises(
        ValueError,
        match=rf"{name}: weights beside a config of ours must be named model.safetensors",
    ):
        load_model(tmp_path / name)


@pytest.mark.parametrize("kind", ["world", "llamagen"])
def test_the_weights_of_our_folder_named_alone_are_ours(kind, folder, tmp_path):
    """Their names are a LLaMA's, for which MineWorld would be asked: of other rotary positions."""
    model, tokens = tiny_model(**KINDS[kind]), random_tokens(1, 20)
    save_model(model, folder)
    loaded = load_model(folder / "model.safetensors")
    assert loaded.config == model.config
    assert torch.equal(loaded.logits(tokens), model.logits(tokens))
    (folder / "config.json").rename(tmp_path / "side.json")
    given = load_model(folder / "model.safetensors", config=tmp_path / "side.json")
    assert given.config == model.config


def test_bundled_models_go_by_name(folder, monkeypatch):
    monkeypatch.setattr(presets, "ASSETS", folder.parent)
    assert available_models() == ["model"]
    assert model_path("model") == folder
    assert load_model("model").vocab_size == 50


def test_presets_are_not_weights():
    with pytest.raises(ValueError, match="'cosmos-4b' is a preset without weights: use Transf"):
        load_model("cosmos-4b")


def test_an_unknown_name_lists_the_choices(monkeypatch, tmp_path):
    monkeypatch.setattr(presets, "ASSETS", tmp_path)
    message = r"no model at 'doomed': expected a folder .* \(none installed\), or user/name"
    with pytest.raises(FileNotFoundError, match=message):
        load_model("doomed")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(name, folder):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"^file not found: .*model/{name}$"):
        load_model(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json: not valid JSON: Expecting property name"),
        ("\udcff", r"config\.json: expected a text file in UTF-8$"),
        ("[1]", r"config\.json: expected a JSON object, got list"),
        (
            '{"depth": 3}',
            r"config\.json: model config has unknown fields: depth; missing field",
        ),
    ],
)
def test_a_bad_config_file_is_named(text, message, folder):
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_a_bad_config_value_names_the_file(folder):
    edit_config(folder, num_heads=5)
    with pytest.raises(ValueError, match=r"config\.json: num_heads must be a multiple of"):
        load_model(folder)


@pytest.mark.parametrize("data", [None, b"", b"{}", b"\x80\x04pickle", b"\xff" * 64])
def test_a_truncated_or_tampered_weight_file_is_refused_in_one_line(data, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100] if data is None else data)
    message = r"model\.safetensors: not a valid safetensors file: "
    with pytest.raises(ValueError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_missing_and_unknown_tensors_are_counted_and_named(folder):
    edit_weights(folder, lm_head__weight=None, model__norm__weight=None, spare=torch.ones(1))
    message = (
        r"model\.safetensors: does not match the config: 2 missing tensors: model\.norm\.weight, "
        r"lm_head\.weight; 1 unknown tensor: spare$"
    )
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_only_the_first_names_are_shown(folder):
    edit_config(folder, num_layers=3)
    with pytest.raises(ValueError, match=r"9 missing tensors: [^,]+, [^,]+, [^,]+, \.\.\.$"):
        load_model(folder)


def test_a_mis_shaped_tensor_tells_both_shapes(folder):
    edit_weights(folder, lm_head__weight=torch.ones(24, 50))
    message = r"1 mis-shaped tensor: lm_head\.weight \(expected \(50, 24\), got \(24, 50\)\)"
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_integer_weights_are_refused(folder):
    edit_weights(folder, model__norm__weight=torch.ones(24, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"1 non-float tensor: model\.norm\.weight"):
        load_model(folder)


def test_the_hub_mixin_writes_and_reads_the_same_folder(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert loaded.config == again.config == model.config
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
        assert torch.equal(again.state_dict()[name], weight)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(folder, number):
    weight = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    weight[3, 7] = number
    edit_weights(folder, model__layers__1__mlp__up_proj__weight=weight)
    message = r"model\.safetensors: model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_weights_that_nobody_computes_with_are_refused(folder):
    packed = torch.zeros(24, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)  # two in a byte
    edit_weights(folder, model__norm__weight=packed)
    with pytest.raises(ValueError, match=r"model\.norm\.weight in torch\.float4.* cannot be used"):
        load_model(folder)


def test_weights_that_a_type_cannot_hold_are_refused(folder):
    weight = load_file(folder / "model.safetensors")["model.norm.weight"]
    edit_weights(folder, model__norm__weight=weight * 1e6)
    load_model(folder)
    with pytest.raises(ValueError, match=r"model\.norm\.weight .* \(in torch\.float16\)"):
        load_model(folder, dtype=torch.float16)


@pytest.mark.parametrize(
    "name",
    [
        *("rotary_emb.inv_freq", "self_attn.rotary_emb.cos_cached", "attn.masked_bias"),
        *("attention.bias", "self_attn.causal_mask", "embeddings.position_ids"),
    ],
)
def test_what_older_files_store_and_a_model_computes_is_left_out(name, folder):
    tokens = random_tokens(2, 20)
    expected = load_model(folder).logits(tokens)
    edit_weights(folder, **{f"model.layers.1.{name}": torch.ones(1, 1, 4, 6, dtype=torch.int64)})
    assert torch.equal(load_model(folder).logits(tokens), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_positions": 10**12}, "config.json: max_positions must be at most 268435456, got 10"),
        ({"max_positions": 2**28, "head_dim": 2**20}, "head_dim is 1048576, but there are only"),
        ({"num_layers": 2**28}, "num_layers is 268435456, but there are only 21 tensors"),
        ({"rope_step": 10**29}, r"rope_step must be at most 1e\+12, got 97-bit int"),
        ({"grid_height": 2**16, "grid_width": 2**16}, r"grid_height \* grid_width must be at most"),
        ({"num_layers": 10**6}, "num_layers is 1000000, but there are only 21 tensors"),
        ({"hidden_size": 2**28, "intermediate_size": 2**28}, "mis-shaped tensors"),
        ({"num_heads": 2**27, "num_kv_heads": 2**27}, r"num_heads \* head_dim must be at most"),
        ({"vocab_size": 2**62}, "vocab_size must be at most 268435456"),
        ({"rope_theta": 10**400}, "rope_theta must be a finite number above 0, got 1329-bit int"),
    ],
)
def test_sizes_that_lie_are_refused_before_anything_is_allocated(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message) as failure:
        load_model(folder)
    assert len(str(failure.value)) < 800


LETTERS = "abcdefghijklmnopqrst"
DOUBLED = ", ".join(["&a [x]", *(f"&{b} [*{a}, *{a}]" for a, b in pairwise(LETTERS))])
MERGED = "\n".join(
    ["a: &a {x: 1}", *(f"{b}: &{b} {{<<: [*{a}, *{a}]}}" for a, b in pairwise(LETTERS))]
)
OTHERS = "".join(f"\n{name}: {value}" for name, value in tiny_fields().items() if name[:2] != "hi")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"hidden_size: [{DOUBLED}]", "aliases expand to more than 65536 values"),
        (MERGED, "aliases expand to more than 65536 values"),
        ("&a [*a]", "aliases expand to more than 65536 values"),
        (
            f"hidden_size: 0x{'f' * 5000}{OTHERS}",
            "hidden_size must be at most 268435456, got 20000",
        ),
        ("1: 2\n~: 3\nx: 4", "model config has unknown fields: 1, None, x; missing fields: hid"),
        ("x" * 2**19, "expected at most 262144 characters, got 524288"),
        ("", "expected a YAML object, got NoneType"),
    ],
)
def test_a_config_of_yaml_is_refused_in_a_line_that_names_it(text, message, tmp_path):
    (tmp_path / "model.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"model\.yaml: .*{message}") as failure:
        read_config(tmp_path / "model.yaml")
    assert len(str(failure.value)) < 400


def test_aliases_of_yaml_stand_for_what_they_name(tmp_path):
    (tmp_path / "model.yaml").write_text(f"hidden_size: &a 24\nhead_size: *a{OTHERS}")
    assert read_config(tmp_path / "model.yaml").head_size == 24


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8, None])
def test_a_dtype_that_is_no_floating_point_type_is_one_clear_line(dtype):
    with pytest.raises(ValueError, match=r"^dtype must be a floating-point type of torch, such as"):
        load_model("doom", dtype=dtype)
