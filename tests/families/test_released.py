"""Checkpoints in the released wrappings: recognised, read with their side files, or refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from diagd.families.checkpoints import find_model, load_model
from tests.golden import FIXTURES


@pytest.mark.parametrize(
    ("name", "family"),
    [("cosmos_tiny_b", "Cosmos"), ("wham_tiny", "WHAM"), ("mineworld_tiny", "MineWorld")],
)
def test_a_folder_or_a_file_is_recognised_and_said_what_it_is(name, family, caplog):
    with caplog.at_level("INFO", logger="diagd"):
        load_model(FIXTURES / name)
    assert f": {family}" in caplog.text
    file = next(path for path in (FIXTURES / name).iterdir() if path.suffix in (".pt", ".ckpt"))
    assert find_model(file).config == find_model(FIXTURES / name).config


def test_without_a_side_file_the_sizes_come_from_the_shapes(tmp_path):
    for name in ("cosmos_tiny_a/model.pt", "mineworld_tiny/model.ckpt", "wham_tiny/model.ckpt"):
        (tmp_path / Path(name).name).unlink(missing_ok=True)
        shutil.copy(FIXTURES / name, tmp_path)
    cosmos = find_model(tmp_path / "model.pt").config
    assert (cosmos.hidden_size, cosmos.num_layers, cosmos.num_heads) == (64, 3, 4)
    assert (cosmos.grid_height, cosmos.grid_width, cosmos.max_positions) == (40, 64, 12800)
    with pytest.raises(ValueError, match=r"WHAM checkpoint: nothing tells the number of heads of"):
        find_model(tmp_path / "model.ckpt")


def test_the_side_file_may_be_elsewhere(tmp_path):
    shutil.copy(FIXTURES / "wham_tiny" / "model.ckpt", tmp_path)
    (tmp_path / "heads.json").write_text('{"n_head": 2}')
    found = find_model(tmp_path / "model.ckpt", tmp_path / "heads.json").config
    assert found == find_model(FIXTURES / "wham_tiny").config  # the file itself tells the rest


def test_angles_in_an_older_checkpoint_are_left_out(tmp_path):
    folder = shutil.copytree(FIXTURES / "mineworld_tiny", tmp_path / "older")
    content = torch.load(folder / "model.ckpt", weights_only=True)
    angles = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    content["state_dict"] |= {f"transformer.{name}": angle for name, angle in angles.items()}
    torch.save(content, folder / "model.ckpt")
    expected = load_model(FIXTURES / "mineworld_tiny").state_dict()
    loaded = load_model(folder).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in loaded | expected)


def change(name, edit, tmp_path):
    """Copy a Cosmos checkpoint with other tensors."""
    weights = torch.load(FIXTURES / name / "model.pt", weights_only=True)
    edit(weights)
    torch.save(weights, tmp_path / "model.pt")
    shutil.copy(FIXTURES / name / "config.json", tmp_path)
    return tmp_path / "model.pt"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda w: w.pop("model.layers.1.feed_forward.w2.weight"),
            r"model\.pt: Cosmos checkpoint: 1 missing tensor: layers\.1\.feed_forward\.w2\.weight$",
        ),
        (
            lambda w: w.update({"model.layers.1.extra.weight": torch.zeros(2)}),
            r"model\.pt: Cosmos checkpoint: 1 unknown tensor: layers\.1\.extra\.weight$",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(3)}),
            r"mis-shaped tensor: model\.norm\.weight \(expected \(64,\), got \(3,\)\)",
        ),
        (
            lambda w: [w.pop(name) for name in list(w) if "tok_emb" in name],
            r"model\.pt: expected a checkpoint of WHAM, IRIS, LlamaGen, .*, Janus, .*, MineWorld, ",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_family_is_named(edit, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_model(change("cosmos_tiny_a", edit, tmp_path))


def test_a_folder_of_several_checkpoints_asks_which(tmp_path):
    for name in ("a.ckpt", "b.ckpt"):
        shutil.copy(FIXTURES / "wham_tiny" / "model.ckpt", tmp_path / name)
    with pytest.raises(ValueError, match=r"several checkpoints \(a\.ckpt, b\.ckpt\): name one of"):
        find_model(tmp_path)


def test_a_yaml_side_file_builds_no_objects(tmp_path):
    shutil.copy(FIXTURES / "mineworld_tiny" / "model.ckpt", tmp_path)
    evil = f"!!python/object/apply:pathlib.Path.touch [{tmp_path}/pwned]"
    (tmp_path / "config.yaml").write_text(evil)
    with pytest.raises(ValueError, match=r"config\.yaml: not valid YAML: could not determine"):
        find_model(tmp_path)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "content",
    [
        {},
        *(
            {"weight_map": files}
            for files in ({}, [], {"a": ["b"]}, {"a": None}, {"a": 3}, {"a": "../b.safetensors"})
        ),
    ],
)
def test_an_index_that_names_no_files_beside_it_is_refused(content, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"index\.json: expected a weight_map that names files"):
        find_model(index)
