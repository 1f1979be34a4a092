"""The shapes of MineWorld's models, which are the paper's MC-AR, and of a smaller one."""

from diagd.families.mineworld.actions import MinecraftActions
from diagd.models.config import ModelConfig

GRID = (14, 24)  # rows and columns of a frame
HEAD_DIM = 64
FRAMES = 16  # that the models hold
_NUM_CODES = 8192


def positions_of(height: int, width: int, num_action_tokens: int) -> int:
    """Return the positions that the frames of a context take, each with an action."""
    return FRAMES * (height * width + num_action_tokens)


def _mc_ar(
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_layers: int = 20,
    num_kv_heads: int = 4,
    vocab_size: int = _NUM_CODES + MinecraftActions.num_ids,
) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        vocab_size=vocab_size,
        image_vocab_size=_NUM_CODES,
        max_positions=positions_of(*GRID, MinecraftActions.num_tokens),
        grid_height=GRID[0],
        grid_width=GRID[1],
        num_action_tokens=MinecraftActions.num_tokens,
    )


PRESETS = {
    "mc-ar-42m": _mc_ar(512, 2048, num_heads=8, num_layers=8, num_kv_heads=8, vocab_size=8448),
    "mc-ar-300m": _mc_ar(1024, 4096, num_heads=16),
    "mc-ar-700m": _mc_ar(2048, 4096, num_heads=32),
    "mc-ar-1.2b": _mc_ar(2048, 8192, num_heads=32),
}
