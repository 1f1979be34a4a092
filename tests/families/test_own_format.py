import json

import pytest

from diagd.data.actions import ActionVocabulary
from diagd.families.checkpoints import read_actions_file, save_tokenizer, write_actions_file
from diagd.families.cosmos import CosmosTokenizer
from diagd.families.defaults import GenerationDefaults
from diagd.families.mineworld import MinecraftActions
from diagd.families.wham.family import WHAMActions
from diagd.pipeline.world_folder import load_parts
from tests.golden import FIXTURES
from tests.worlds import NAMES, write_world


def test_defaults_are_read_where_there_are_any(tmp_path):
    write_world(tmp_path)
    assert load_parts(tmp_path).defaults == GenerationDefaults()
    (tmp_path / "generation.json").write_text('{"fps": 12, "row_lag": 2}')
    assert load_parts(tmp_path).defaults == GenerationDefaults(fps=12, row_lag=2)


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
        ('{"kind": "Pong"}', " is no action vocabulary"),
        ('{"kind": ["WHAM"]}', " is no action vocabulary"),
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


def test_torchscript_is_not_copied_into_a_folder(tmp_path):
    with pytest.raises(ValueError, match="a CosmosTokenizer cannot be stored in"):
        save_tokenizer(tmp_path, CosmosTokenizer.__new__(CosmosTokenizer))
