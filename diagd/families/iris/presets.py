"""The size of IRIS (arXiv:2209.00588): Atari in frames of 4 x 4 tokens."""

from diagd.models.config import ModelConfig

NUM_HEADS = 4  # a checkpoint does not tell
ATARI = (
    *("noop", "fire", "up", "right", "left", "down", "upright", "upleft", "downright", "downleft"),
    *("upfire", "rightfire", "leftfire", "downfire"),
    *("uprightfire", "upleftfire", "downrightfire", "downleftfire"),
)
_NUM_CODES, _SIDE, _FRAMES = 512, 4, 20

PRESETS = {
    "iris": ModelConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_layers=10,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_HEADS,
        head_dim=64,
        vocab_size=_NUM_CODES + len(ATARI),
        image_vocab_size=_NUM_CODES,
        max_positions=_FRAMES * (_SIDE * _SIDE + 1),
        grid_height=_SIDE,
        grid_width=_SIDE,
        num_action_tokens=1,
        norm="layer",
        mlp="exact_gelu",
        bias=True,
        position="learned",
        head_size=256,
    )
}
