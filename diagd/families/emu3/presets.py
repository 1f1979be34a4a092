"""The size of Emu3 (arXiv:2409.18869)."""

from diagd.models.config import ModelConfig

NUM_CODES, SIDE = 32768, 90  # codes of its tokenizer; tokens of an image of 720 px, each way
_NUM_WORDS = 184622 - NUM_CODES - 1  # ids of text, with those that end a row left out

PRESETS = {
    "emu3": ModelConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=NUM_CODES + 1,
        image_vocab_size=NUM_CODES + 1,
        max_positions=9216,
        grid_height=SIDE,
        grid_width=SIDE + 1,
        prefix_length=1,
        extra_embeddings=_NUM_WORDS,
        rope_theta=1e6,
    )
}
