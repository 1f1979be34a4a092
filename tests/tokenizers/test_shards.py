import json

import pytest
import torch
from safetensors.torch import save_file

from diagd.data.actions import ActionVocabulary, write_actions
from diagd.data.video import read_video, write_video
from diagd.tokenizers.shards import STILL, actions_of, read_shards, write_shards
from diagd.tokenizers.vq import VQTokenizer
from tests.tokenizers.rectangles import rectangles, small_tokenizer, write_clips

WALK = ActionVocabulary(("none", "forward", "left"))
GOOD = {"codebook_size": "20", "action_names": '["none", "forward"]'}


def write_shard(folder, number=0, tokens=None, actions=None, **metadata):
    tokens = torch.zeros(1, 4, 3, 5, dtype=torch.int16) if tokens is None else tokens
    actions = torch.zeros(1, 4, dtype=torch.int16) if actions is None else actions
    path = folder / f"shard_{number:05d}.safetensors"
    save_file({"tokens": tokens, "actions": actions}, path, GOOD | metadata)
    return path


def test_shards_hold_the_tokens_and_actions_of_the_clips(tmp_path):
    paths = write_clips(tmp_path / "clips", num_clips=3)
    tokenizer = small_tokenizer()
    write_shards(tokenizer, paths, tmp_path / "shards", WALK, clips_per_shard=2)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) == 2
    clips = read_shards(tmp_path / "shards")
    assert (clips.tokens.shape, clips.tokens.dtype) == ((3, 4, 3, 5), torch.int16)
    for path, tokens in zip(paths, clips.tokens, strict=True):
        assert tokens.equal(tokenizer.encode(read_video(path).frames).short())
    assert clips.actions.tolist() == [[0, 1, 2, 1]] * 3
    assert (clips.codebook_size, clips.action_names) == (20, WALK.names)


def test_large_codebooks_take_32_bits(tmp_path):
    paths = write_clips(tmp_path / "clips", num_clips=1)
    model = small_tokenizer().model
    model.quantize.embedding = torch.nn.Embedding(2**15 + 1, 6)
    write_shards(VQTokenizer(model), paths, tmp_path / "shards", WALK)
    assert read_shards(tmp_path / "shards").tokens.dtype == torch.int32


def test_writing_goes_on_where_it_was_killed(tmp_path):
    paths = write_clips(tmp_path / "clips", num_clips=3)
    tokenizer, folder = small_tokenizer(), tmp_path / "shards"
    write_shards(tokenizer, paths, folder, WALK, clips_per_shard=1)
    whole = read_shards(folder)
    (folder / "shard_00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shards has 2 of 3 shards: run the same diagd tokenize"):
        read_shards(folder)
    kept = (folder / "shard_00000.safetensors").stat().st_mtime_ns
    write_shards(tokenizer, paths, folder, WALK, clips_per_shard=1)
    assert read_shards(folder).tokens.equal(whole.tokens)
    assert (folder / "shard_00000.safetensors").stat().st_mtime_ns == kept


def test_shards_of_other_clips_or_another_tokenizer_are_left_alone(tmp_path):
    paths = write_clips(tmp_path / "clips", num_clips=2)
    folder = tmp_path / "shards"
    write_shards(small_tokenizer(), paths, folder, WALK, clips_per_shard=1)
    with pytest.raises(ValueError, match=r"shard_00000.*: made from other clips, actions or"):
        write_shards(small_tokenizer(seed=1), [*paths, *paths], folder, WALK, clips_per_shard=1)
    assert len(read_shards(folder).tokens) == 2  # of two, as before
    with pytest.raises(ValueError, match=r"shard_00001.*: not of these 1 clips, use another fol"):
        write_shards(small_tokenizer(), paths[:1], folder, WALK, clips_per_shard=1)


@pytest.mark.parametrize("suffix", [".mp4", ".jsonl"])
def test_shards_of_clips_that_have_changed_since_are_not_taken_for_theirs(tmp_path, suffix):
    paths = write_clips(tmp_path / "clips", num_clips=1)
    folder = tmp_path / "shards"
    write_shards(small_tokenizer(), paths, folder, WALK)
    if suffix == ".mp4":
        write_video(paths[0], rectangles(4, seed=9))
    else:
        write_actions(paths[0].with_suffix(suffix), ["none", "left", "left", "left"])
    with pytest.raises(ValueError, match=r"shard_00000.*: made from other clips, actions or"):
        write_shards(small_tokenizer(), paths, folder, WALK)


def test_actions_must_match_the_frames(tmp_path):
    paths = write_clips(tmp_path, num_clips=1)
    write_actions(paths[0].with_suffix(".jsonl"), ["none"])
    with pytest.raises(ValueError, match=r"clip_000000\.jsonl: expected 4 actions"):
        write_shards(small_tokenizer(), paths, tmp_path / "shards", WALK)


def test_clips_without_actions_stand_still(tmp_path):
    paths = write_clips(tmp_path, num_clips=2, actions=False)
    assert actions_of(paths) is STILL
    write_shards(small_tokenizer(), paths, tmp_path / "shards", STILL)
    clips = read_shards(tmp_path / "shards")
    assert (clips.action_names, clips.actions.unique().tolist()) == (("none",), [0])


def test_the_order_of_actions_is_given_or_found_or_made(tmp_path):
    paths = write_clips(tmp_path, num_clips=2)
    assert actions_of(paths).names == ("none", "forward", "left")
    ActionVocabulary(("left", "forward", "none")).save(tmp_path / "actions.json")
    assert actions_of(paths).names == ("left", "forward", "none")
    assert actions_of(paths, WALK) is WALK
    (tmp_path / "actions.json").unlink()
    line = '\ufeff{"action": "up\u2028down"}\r\n'
    paths[0].with_suffix(".jsonl").write_text(line, newline="")
    assert actions_of(paths).names[-1] == "up\u2028down"


@pytest.mark.parametrize("line", ['{"a":' * 100_000, '{"action": ' + "9" * 5000 + "}"])
def test_a_line_that_json_cannot_hold_names_no_action(tmp_path, line):
    (path,) = write_clips(tmp_path, num_clips=1)
    path.with_suffix(".jsonl").write_text('{"action": "left"}\n' + line)
    assert actions_of([path]).names == ("none", "left")


def test_actions_for_some_clips_only_are_refused(tmp_path):
    paths = write_clips(tmp_path, num_clips=2)
    paths[1].with_suffix(".jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"not found \(other .*\): .*clip_000001\.jsonl$"):
        actions_of(paths)


def test_a_folder_without_shards_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no token shards \(shard_\*\.safetensors\) in /"):
        read_shards(tmp_path)


def test_a_truncated_shard_is_refused(tmp_path):
    path = write_shard(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"shard_00000\.safetensors: not a token shard \(corrupt"):
        read_shards(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"codebook_size": "many"}, "not a token shard"),
        ({"action_names": "5"}, "not a token shard"),
        ({"tokens": torch.zeros(4, 3, 5)}, r"tokens must be \(clips, T, height, width\), got \(4,"),
        (
            {"tokens": torch.full((1, 4, 3, 5), 20, dtype=torch.int16)},
            r"tokens must be in \[0, codebook_size=20\), got 20 to 20",
        ),
        (
            {"tokens": torch.zeros(1, 4, 3, 5, dtype=torch.uint16)},
            r"tokens must be signed integers or uint8, got torch\.uint16",
        ),
        ({"tokens": torch.full((1, 4, 3, 5), 1.5)}, "signed integers or uint8, got torch.float32"),
        ({"actions": torch.zeros(1, 4).bool()}, r"actions must be signed .*, got torch\.bool"),
        (
            {"actions": torch.zeros(1, 5, dtype=torch.int16)},
            r"actions must be \(1, 4\) as the tokens, got \(1, 5\)",
        ),
        (
            {"actions": torch.full((1, 4), 2, dtype=torch.int16)},
            r"actions must be in \[0, 2\), got 2 to 2",
        ),
    ],
)
def test_a_shard_with_wrong_contents_is_refused(tmp_path, wrong, message):
    write_shard(tmp_path, **wrong)
    with pytest.raises(ValueError, match=message):
        read_shards(tmp_path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"codebook": "f00"}, "expected codebook  as in shard_00000.*, got f00"),
        ({"codebook_size": "30"}, "expected codebook_size 20 as in shard_00000.*, got 30"),
        ({"action_names": json.dumps(["none"])}, r"expected action_names .*, got \('none',\)"),
        (
            {"tokens": torch.zeros(1, 4, 5, 3, dtype=torch.int16)},
            "expected 4 frames of 3x5 tokens as in shard_00000.*, got 4 frames of 5x3 tokens",
        ),
    ],
)
def test_shards_that_do_not_belong_together_are_refused(tmp_path, other, message):
    write_shard(tmp_path, 0)
    write_shard(tmp_path, 1, **other)
    with pytest.raises(ValueError, match=rf"shard_00001\.safetensors: {message}"):
        read_shards(tmp_path)
