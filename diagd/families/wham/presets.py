"""The shapes of Microsoft's WHAM models, 200M and 1.6B."""

from diagd.families.wham.actions import WHAMActions
from diagd.models.config import ModelConfig

SIZE_PX = (180, 300)  # height and width of the frames of both models
_PATCH_PX = 10
_NUM_CODES = 16384
_FRAMES = 10  # that the models hold


def _wham(hidden_size: int, num_layers: int, num_heads: int, norm_affine: bool) -> ModelConfig:
    height, width = (size // _PATCH_PX for size in SIZE_PX)
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=_NUM_CODES + WHAMActions.num_ids,
        image_vocab_size=_NUM_CODES,
        max_positions=_FRAMES * (height * width + WHAMActions.num_tokens),
        grid_height=height,
        grid_width=width,
        num_action_tokens=WHAMActions.num_tokens,
        norm="layer",
        norm_affine=norm_affine,
        mlp="gelu",
        bias=True,
        position="learned",
        tie_embeddings=True,
    )


PRESETS = {
    "wham-200m": _wham(hidden_size=1024, num_layers=16, num_heads=16, norm_affine=False),
    "wham-1.6b": _wham(hidden_size=2304, num_layers=24, num_heads=18, norm_affine=True),
}
