"""ImageNet classes as actions, and the sizes of LlamaGen's models (arXiv:2406.06525)."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from diagd.models.config import ModelConfig

NUM_CLASSES = 1000
HEAD_DIM = 64  # of all models but the 3B one
NUM_CODES, PATCH_PX = 16384, 16


@dataclass(frozen=True)
class ImageNetClasses:
    """The class of an image, one token before it; the last id stands for no class."""

    names = (*(f"class {number}" for number in range(NUM_CLASSES)), "none")
    num_tokens = 1
    num_ids = NUM_CLASSES + 1
    combines = False

    def tokens_of(self, action: str) -> tuple[int, ...]:
        """Return the id of `class 207`, also written `207`, or of `none`."""
        if action == "none":
            return (NUM_CLASSES,)
        match = re.fullmatch(r"(?:class )?([0-9]{1,3})", action)
        if not match:
            raise ValueError(f"unknown class {action!r}, expected class 0 to class 999, or none")
        return (int(match[1]),)

    def action_of(self, record: dict[str, Any]) -> str:
        action = record.get("action")
        if not isinstance(action, str):
            raise ValueError(f'expected {{"action": CLASS}}, got {json.dumps(record)[:60]}')
        self.tokens_of(action)
        return action


def llamagen(
    hidden_size: int, num_layers: int, num_heads: int, side: int, places: int = 0
) -> ModelConfig:
    """Describe a model over images of side x side tokens, behind a class or `places` of a text."""
    classes = ImageNetClasses
    num_ids, num_actions = (0, 0) if places else (classes.num_ids, classes.num_tokens)
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=math.ceil(hidden_size * 8 // 3 / 256) * 256,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=NUM_CODES + num_ids,
        image_vocab_size=NUM_CODES,
        max_positions=side * side + places + num_actions,
        grid_height=side,
        grid_width=side,
        num_action_tokens=num_actions,
        prefix_length=places,
        extra_embeddings=2 * places,
        position="rope2d",
    )


NUM_PLACES = 120  # of a text
# The two small ones were released for 384 px as well.
PRESETS = {
    "llamagen-b": llamagen(768, 12, 12, 16),
    "llamagen-l": llamagen(1024, 24, 16, 16),
    "llamagen-xl": llamagen(1280, 36, 20, 24),
    "llamagen-xxl": llamagen(1536, 48, 24, 24),
    "llamagen-3b": llamagen(3200, 24, 32, 24),
}
TEXT_PRESETS = {
    "llamagen-t2i-256": llamagen(1280, 36, 20, 16, NUM_PLACES),
    "llamagen-t2i-512": llamagen(1280, 36, 20, 32, NUM_PLACES),
}
