import json
from dataclasses import replace

import pytest
import torch

from diagd.data.actions import ActionVocabulary
from diagd.families.checkpoints import (
    find_model,
    read_actions_file,
    save_tokenizer,
    write_actions_file,
)
from diagd.families.cosmos import CosmosTokenizer
from diagd.families.defaults import GenerationDefaults
from diagd.families.mineworld import MinecraftActions
from diagd.families.wham.actions import WHAMActions
from diagd.pipeline.world_folder import load_parts, save_checkpoint
from tests.families.cosmos.scripts import write_scripts
from tests.golden import FIXTURES
from tests.worlds import NAMES, write_world


def test_defaults_are_read_where_there_are_any(tmp_path):
    write_world(tmp_path)
    assert load_parts(tmp_path).defaults == GenerationDefaults()
    (tmp_path / "generation.json").write_text('{"fps": 12, "row_lag": 2}')
    assert load_parts(tmp_path).defaults == GenerationDefaults(fps=12, row_lag=2)


def test_a_bad_file_of_defaults_is_named_once(tmp_path):
    write_world(tmp_path)
    (tmp_path / "generation.json").write_text("[12]")
    with pytest.raises(ValueError, match=r"^[^:]*generation\.json: expected a JSON object, got li"):
        load_parts(tmp_path)


def test_conversion_writes_the_defaults_of_the_family(command, tmp_path):
    outcome = command("convert", FIXTURES / "wham_tiny", tmp_path / "ours", "--json")
    assert outcome.document["parts"] == ["actions.json", "generation.json", "tokenizer/"]
    written = json.loads((tmp_path / "ours" / "generation.json").read_text())
    assert GenerationDefaults(**written) == load_parts(FIXTURES / "wham_tiny").defaults


@pytest.mark.parametrize("codec", [ActionVocabulary(NAMES), WHAMActions(), MinecraftActions()])
def test_an_actions_file_says_whose_actions_they_are(codec, tmp_path):
    write_actions_file(tmp_path / "actions.json", codec)
    assert read_actions_file(tmp_path / "actions.json") == codec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", ": not valid JSON"),
        ("[]", ": expected a JSON object, got list"),
        ('{"kind": "Pong"}', ": expected an action vocabulary"),
        ('{"kind": ["WHAM"]}', ": expected an action vocabulary"),
    ],
)
def test_an_actions_file_of_nobody_is_named(text, message, tmp_path):
    (tmp_path / "actions.json").write_text(text)
    with pytest.raises(ValueError, match=rf"actions\.json{message}"):
        read_actions_file(tmp_path / "actions.json")


def test_a_folder_of_ours_converts_to_itself(command, tmp_path):
    world = write_world(tmp_path / "world")
    outcome = command("convert", world, tmp_path / "again", "--json")
    assert (outcome.code, outcome.document["family"]) == (0, "diagd"), outcome.err
    before, after = load_parts(world), load_parts(tmp_path / "again")
    assert (after.vocabulary, after.defaults) == (before.vocabulary, before.defaults)
    assert "licence" not in outcome.said


@pytest.mark.parametrize("flags", [(), ("--tokenizer", "cosmos")])
def test_a_folder_whose_tokenizer_is_elsewhere_converts_to_itself(
    flags, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_scripts(tmp_path / "cosmos")
    assert command("convert", FIXTURES / "cosmos_tiny_a", "ours").code == 0
    outcome = command("convert", "ours", "again", *flags, "--json")
    assert (outcome.code, outcome.document["parts"]) == (0, ["generation.json"]), outcome.err
    assert not (tmp_path / "again" / "tokenizer").exists()
    assert find_model("again").config == find_model("ours").config


def test_a_tokenizer_given_to_a_folder_without_comes_along(command, tmp_path):
    world = write_world(tmp_path / "world")
    (world / "tokenizer").rename(tmp_path / "elsewhere")
    flags = "--tokenizer", tmp_path / "elsewhere"
    outcome = command("convert", world, tmp_path / "again", *flags, "--json")
    assert outcome.document["parts"] == ["actions.json", "generation.json", "tokenizer/"]
    assert load_parts(tmp_path / "again").tokenizer.codebook_size == 20


def test_torchscript_does_not_replace_the_tokenizer_of_a_folder(command, tmp_path):
    world, scripts = write_world(tmp_path / "world"), write_scripts(tmp_path / "cosmos")
    refused = command("convert", world, tmp_path / "again", "--tokenizer", scripts)
    refused.assert_refused("CosmosTokenizer cannot be stored in")


def test_weights_that_cannot_be_stored_are_refused_before_anything_is(tmp_path):
    write_world(tmp_path / "world")
    found = find_model(tmp_path / "world")
    weights = {**found.weights, "model.norm.weight": torch.zeros(32, dtype=torch.complex64)}
    with pytest.raises(ValueError, match=r"norm\.weight cannot be stored in torch\.complex64"):
        save_checkpoint(replace(found, weights=weights), tmp_path / "again", None)
    assert not (tmp_path / "again").exists()


def test_torchscript_is_not_copied_into_a_folder(tmp_path):
    with pytest.raises(ValueError, match="CosmosTokenizer cannot be stored in"):
        save_tokenizer(tmp_path, CosmosTokenizer.__new__(CosmosTokenizer))
