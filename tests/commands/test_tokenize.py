from diagd.tokenizers.shards import read_shards
from tests.tokenizers.rectangles import write_clips


def test_the_command_trains_measures_and_stores_tokens(command, tmp_path):
    clips, tokenizer, shards = (tmp_path / name for name in ("clips", "tokenizer", "shards"))
    write_clips(clips, num_clips=2)
    training = command(
        *("tokenize", "--clips", clips, "--out", tokenizer, "--shards", shards, "--json"),
        *("--heldout", clips, "--steps", 1, "--batch", 2, "--codes", 16, "--frame-stride", 1),
        *("--learning-rate", 1e-5),
    )
    assert training.code == 0, training
    assert training.document["shards_written"] == 1
    assert training.document["psnr"] > 10
    applying = command(
        "tokenize", "--clips", clips, "--tokenizer", tokenizer, "--shards", tmp_path / "again"
    )
    assert applying.code == 0, applying
    first, second = read_shards(shards), read_shards(tmp_path / "again")
    assert first.tokens.equal(second.tokens)
    assert first.action_names == ("none", "forward", "left")


def test_the_command_reports_mistakes_in_one_line(command, tmp_path):
    command("tokenize", "--clips", tmp_path, "--out", tmp_path).assert_refused("no .mp4 clips in")
    command("tokenize", "--clips", tmp_path).assert_refused("nothing to do: give --out to train")
