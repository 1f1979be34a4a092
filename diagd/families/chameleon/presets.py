"""The size of Chameleon-7B (arXiv:2405.09818) and of Anole, which is finetuned from it."""

from diagd.models.config import ModelConfig

NUM_CODES, SIDE, IDS = 8192, 32, 65536
EPS, HEADS, MAX_POSITIONS = 1e-5, 32, 4096

PRESETS = {
    "chameleon-7b": ModelConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=128,
        vocab_size=NUM_CODES,
        image_vocab_size=NUM_CODES,
        extra_embeddings=IDS,
        max_positions=MAX_POSITIONS,
        grid_height=SIDE,
        grid_width=SIDE,
        norm_eps=EPS,
        qk_norm=True,
        head_norm=True,
    )
}
