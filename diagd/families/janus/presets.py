"""The sizes of Janus-Pro (arXiv:2501.17811)."""

from diagd.models.config import ModelConfig

NUM_CODES, SIDE, TEXT_IDS = 16384, 24, 102400
EPS, MAX_POSITIONS = 1e-6, 16384


def _janus_pro(hidden_size: int, intermediate_size: int, num_layers: int) -> ModelConfig:
    head_dim = 128
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=hidden_size // head_dim,
        num_kv_heads=hidden_size // head_dim,
        head_dim=head_dim,
        vocab_size=NUM_CODES,
        image_vocab_size=NUM_CODES,
        extra_embeddings=TEXT_IDS,
        max_positions=MAX_POSITIONS,
        grid_height=SIDE,
        grid_width=SIDE,
        norm_eps=EPS,
        head_size=hidden_size,
    )


PRESETS = {
    "janus-pro-1b": _janus_pro(2048, 5632, 24),
    "janus-pro-7b": _janus_pro(4096, 11008, 30),
}
