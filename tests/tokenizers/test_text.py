"""Texts become the ids of tokenizer.json, whatever class tokenizer_config.json names."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import T5Config, T5EncoderModel

from diagd.tokenizers.text import read_words, text_ids, text_states

SPECIAL = ["</s>", "<pad>", "<bos>", "<unk>"]  # an end that is no class's default


def bytes_of_a_text():
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return words, trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=SPECIAL, initial_alphabet=alphabet
    )


def pieces_of_a_text():
    words = Tokenizer(models.Unigram())
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    return words, trainers.UnigramTrainer(
        vocab_size=60, show_progress=False, special_tokens=SPECIAL, unk_token="<unk>"
    )


def write_words(folder, made, **fields):
    """Train a tokenizer and write it; what its class would add is in none of its files."""
    words, trainer = made()
    words.train_from_iterator(["a red house by the sea, A Big House!"] * 20, trainer)
    words.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | fields))
    return words


@pytest.mark.parametrize("made", [bytes_of_a_text, pieces_of_a_text])
@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "GPT2Tokenizer", "T5Tokenizer", None])
def test_a_text_is_begun_and_keeps_its_spaces(name, made, tmp_path):
    plain = write_words(tmp_path, made, tokenizer_class=name, add_bos_token=True)
    words, text = read_words(tmp_path), "a red house"
    ids = plain.encode(text).ids
    assert len(ids) > 2
    assert text_ids(words, text) == [2, *ids]
    assert text_ids(words, "<bos>" + text) == text_ids(words, text)
    assert words.decode(ids).split() == text.split()


@pytest.mark.parametrize(
    ("side", "message"),
    [
        ({"text_config": {"bos_token_id": 7}}, "'<bos>' is 7 in the model's config.json but 2 in"),
        ({"vocabulary_map": {"<pad>": 6, "<eol>": 9}}, "'<pad>' is 6 in the .* different models$"),
    ],
)
def test_ids_that_the_model_knows_otherwise_are_refused(side, message, tmp_path):
    write_words(tmp_path, bytes_of_a_text)
    with pytest.raises(ValueError, match=message):
        read_words(tmp_path, side)
    (tmp_path / "config.json").write_text(json.dumps(side))
    with pytest.raises(ValueError, match=message):
        read_words(tmp_path)


@pytest.fixture
def t5(tmp_path):
    """Write an encoder whose end of a text is id 0."""
    sizes = {"vocab_size": 300, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = T5EncoderModel(T5Config(**sizes, num_heads=2, eos_token_id=0)).eval()
    encoder.save_pretrained(tmp_path)
    return encoder


@torch.no_grad()
def test_a_text_for_t5_is_ended_also_when_it_is_cut(t5, tmp_path):
    plain = write_words(tmp_path, pieces_of_a_text, tokenizer_class="T5Tokenizer")
    ids = plain.encode("a red house").ids
    for length, kept in ((20, ids), (3, ids[:2])):
        expected = t5(torch.tensor([[*kept, 0]])).last_hidden_state[0]
        torch.testing.assert_close(text_states("a red house", tmp_path, length), expected)


def test_an_end_that_t5_knows_otherwise_is_refused(t5, tmp_path):
    write_words(tmp_path, pieces_of_a_text, eos_token="<pad>")
    with pytest.raises(ValueError, match=r": not a T5 encoder: '<pad>' is 0 in the model's conf"):
        text_states("a red house", tmp_path, 20)
