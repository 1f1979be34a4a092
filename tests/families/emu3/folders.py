"""Emu3 in miniature as transformers saves it: random weights, words as ids, images of 3 x 5."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    Emu3Config,
    Emu3ForConditionalGeneration,
    Emu3ImageProcessor,
    Emu3Processor,
    Emu3TextConfig,
    Emu3VQVAEConfig,
    PreTrainedTokenizerFast,
)

from tests.oracles import TINY

HEIGHT, WIDTH, NUM_CODES = 3, 5, 24
NAMES = {
    "pad_token": "<pad>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
}
EXTRA = {
    "image_token": "<image>",
    "boi_token": "<|image start|>",
    "eoi_token": "<|image end|>",
    "image_wrapper_token": "<|image token|>",
    "eof_token": "<|extra_201|>",
}
ROW_END = "<|extra_200|>"


def vocabulary() -> dict[str, int]:
    """Codes among the words, downwards: no order may be taken for granted."""
    words = [*NAMES.values(), *EXTRA.values(), "a", "red", "house", "3", "*", "5"]
    ids = {word: place for place, word in enumerate(words)}
    first = len(ids) + NUM_CODES
    ids |= {f"<|visual token {code:06d}|>": first - code for code in range(NUM_CODES)}
    return ids | {ROW_END: first + 1, "blue": first - NUM_CODES, "big": first + 2}


def processor() -> Emu3Processor:
    ids = vocabulary()
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [word for word in ids if word.startswith("<")]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **NAMES, extra_special_tokens=EXTRA, padding_side="left"
    )
    return Emu3Processor(Emu3ImageProcessor(), fast)


def emu3() -> Emu3ForConditionalGeneration:
    ids = vocabulary()
    sizes = {**TINY, "vocab_size": len(ids), "max_position_embeddings": 32}
    text = Emu3TextConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    pixels = Emu3VQVAEConfig(
        codebook_size=NUM_CODES,
        base_channels=32,
        channel_multiplier=(1, 1, 1),
        num_res_blocks=1,
        hidden_size=32,
        attn_resolutions=(),
    )
    config = Emu3Config(vq_config=pixels, text_config=text, vocabulary_map=ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Emu3ForConditionalGeneration(config).eval()


def write_emu3(
    folder: Path, model: Emu3ForConditionalGeneration, max_shard_size: str = "1GB"
) -> Path:
    """Save it with its processor, and the size of its images in its config."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    processor().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    size = {"grid_height": HEIGHT, "grid_width": WIDTH}
    (folder / "config.json").write_text(json.dumps({**config, **size}))
    return folder
