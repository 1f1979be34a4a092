"""Architecture of a decoder: one frozen record for all families.

Field names are Hugging Face's without `num_hidden_`/`attention_` padding. Invalid values and
combinations are rejected when a record is built, so layers do not check again.
"""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from diagd.checks import brief
from diagd.decoding.schedule import FrameFormat

_MAX_SIZE = 2**28  # products of two such sizes fit in 64 bits
_MAX_NUMBER = 1e12  # results computed from such numbers are finite in float32


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one decoder; 3-D rotary positions are computed from its grid."""

    hidden_size: int  # width of the residual stream
    intermediate_size: int  # width inside the MLP
    num_layers: int  # blocks
    num_heads: int  # query heads
    num_kv_heads: int  # key and value heads; divides num_heads
    head_dim: int  # size of one head; num_heads * head_dim may differ from hidden_size
    vocab_size: int  # columns of the logits
    image_vocab_size: int  # visual ids are [0, image_vocab_size); the rest are action ids
    max_positions: int  # longest sequence, in tokens
    grid_height: int  # token rows of a frame
    grid_width: int  # token columns of a frame
    num_action_tokens: int = 0  # conditioning tokens of each generated frame, before it
    num_seam_tokens: int = 0  # of them, those between the two halves of a frame's rows: two cameras
    prefix_length: int = 0  # tokens before the first frame (BOV, text)
    extra_embeddings: int = 0  # rows beyond vocab_size: input-only ids
    norm: Literal["rms", "layer"] = "rms"  # RMSNorm or LayerNorm
    post_norms: bool = False  # what attention and MLP add to the stream is normed before
    norm_affine: bool = True  # norms inside the blocks have parameters (the final one always has)
    norm_eps: float = 1e-5  # added to the variance
    # gated SiLU, or GELU, tanh-approximated or exact
    mlp: Literal["swiglu", "gelu", "exact_gelu"] = "swiglu"
    bias: bool = False  # linear layers and layer norms have biases (the output layer has not)
    qk_norm: bool = False  # RMSNorm over head_dim on queries and keys, before the rotation
    head_norm: bool = False  # a LayerNorm instead, with weights and biases for each head
    # rotary of 1 to 3 dimensions (rotary.py), or a learned table
    position: Literal["rope", "rope2d", "rope3d", "mrope", "learned"] = "rope"
    rotary_sections: tuple[int, ...] = ()  # of mrope: pairs that turn by frame, row and column
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_step: float = 1.0  # radians of the fastest frequency per position, frame, row or column
    yarn_factor: float = 1.0  # YaRN stretch of 3-D rotary frequencies; 1: none
    yarn_frames: int = 3  # frames of the grid YaRN stretches from
    yarn_height: int = 40  # rows (and columns) of the grid YaRN stretches from
    tie_embeddings: bool = False  # the output layer is the embedding table
    head_size: int = 0  # width of a GELU layer before the output layer, both with biases; 0: none
    context_size: int = 0  # width of the text that blocks attend to; 0: no text
    position_table: bool = False  # a fixed (frame, row, column) table is added before every block
    sliding_window: int = 0  # positions that a token sees in sliding layers, its own included
    sliding_layers: tuple[int, ...] = ()  # indices of sliding layers; the others see everything
    visual_mlp_layers: tuple[int, ...] = ()  # with a second MLP, for ids below vocab_size
    stand_in: bool = False  # the last extra embedding was learnt to stand in at row starts

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_value(field, getattr(self, field.name))
        for name in ("sliding_layers", "rotary_sections", "visual_mlp_layers"):  # JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        heads, groups, head_dim = self.num_heads, self.num_kv_heads, self.head_dim
        width, codes, prefix = heads * head_dim, self.image_vocab_size, self.prefix_length
        position, is_odd, ties = self.position, head_dim % 2, self.tie_embeddings
        is_3d, extra, last = position == "rope3d", self.extra_embeddings, self.head_size
        _refuse(heads % groups, f"num_heads must be a multiple of num_kv_heads={groups}", heads)
        _refuse(width > _MAX_SIZE, f"num_heads * head_dim must be at most {_MAX_SIZE}", width)
        _refuse(
            self.tokens_per_frame > _MAX_SIZE,
            f"grid_height * grid_width must be at most {_MAX_SIZE}",
            self.tokens_per_frame,
        )
        rule = f"image_vocab_size must be at most vocab_size={self.vocab_size}"
        _refuse(codes > self.vocab_size, rule, codes)
        seam, rows = self.num_seam_tokens, self.grid_height
        rule = f"num_seam_tokens must be at most num_action_tokens={self.num_action_tokens}"
        _refuse(seam > self.num_action_tokens, rule, seam)
        _refuse(seam and rows % 2, "num_seam_tokens need an even grid_height", rows)
        _refuse(seam and self.on_grid, "num_seam_tokens need positions in one dimension", position)
        _refuse(self.stand_in and extra <= prefix, "stand_in needs an extra embedding", extra)
        rule = f"prefix_length must be below max_positions={self.max_positions}"
        _refuse(prefix >= self.max_positions, rule, prefix)
        _refuse(is_odd and position == "rope", "position='rope' needs an even head_dim", head_dim)
        rule = "position='rope3d' needs an even head_dim of at least 6"
        _refuse(is_3d and (is_odd or head_dim < 6), rule, head_dim)
        rule = "position_table=True needs an even hidden_size"
        _refuse(self.position_table and self.hidden_size % 2, rule, self.hidden_size)
        rule = "position='rope2d' needs head_dim to be a multiple of 4"
        _refuse(position == "rope2d" and head_dim % 4, rule, head_dim)
        sections, pairs = self.rotary_sections, head_dim // 2
        is_shared = position == "mrope"
        fits = len(sections) == 3 and min(sections) >= 0 and 0 < sum(sections) <= pairs
        rule = f"position='mrope' needs rotary_sections, three counts of {pairs} pairs"
        _refuse(is_shared and (is_odd or not fits), rule, list(sections))
        rule = "rotary_sections need position='mrope'"
        _refuse(bool(sections) and not is_shared, rule, repr(position))
        rule = f"yarn_factor={self.yarn_factor} needs position='rope3d'"
        _refuse(self.yarn_factor != 1.0 and not is_3d, rule, repr(position))
        rule = "norm_affine=False needs norm='layer'"
        _refuse(self.norm == "rms" and not self.norm_affine, rule, "norm='rms'")
        rule = "head_norm=True needs qk_norm=True"
        _refuse(self.head_norm and not self.qk_norm, rule, "qk_norm=False")
        _refuse(ties and last, "tie_embeddings needs head_size=0", last)
        _refuse(ties and extra, "tie_embeddings needs extra_embeddings=0", extra)
        for name in ("sliding_layers", "visual_mlp_layers"):
            layers = getattr(self, name)
            rule = f"{name} must be different layers below num_layers={self.num_layers}"
            known = {layer for layer in layers if 0 <= layer < self.num_layers}
            _refuse(len(known) < len(layers), rule, list(layers))
        layers, window = self.sliding_layers, self.sliding_window
        rule = "sliding_layers and sliding_window must both be given or neither"
        _refuse(bool(layers) != bool(window), rule, f"{list(layers)} and {window}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Build a config from parsed JSON; fields with a default may be missing."""
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        required = [name for name, one in defaults.items() if one is dataclasses.MISSING]
        wrong = {
            "unknown": sorted(str(name)[:40] for name in values if name not in defaults)[:9],
            "missing": [name for name in required if name not in values],
        }
        problems = [f"{kind} fields: {', '.join(names)}" for kind, names in wrong.items() if names]
        if problems:
            raise ValueError(f"model config has {'; '.join(problems)}")
        return cls(**values)

    @property
    def frames_held(self) -> int:
        """Frames that fit in the context, with the actions between them."""
        slots = self.max_positions + self.num_leading - self.prefix_length
        return slots // (self.tokens_per_frame + self.num_action_tokens)

    @property
    def on_grid(self) -> bool:
        """Whether positions are frames, rows and columns."""
        return self.position in ("rope2d", "rope3d", "mrope") or self.position_table

    @property
    def is_llama(self) -> bool:
        """Whether Hugging Face's LLaMA computes the same, given the rotary angles."""
        is_one = (self.norm, self.mlp) == ("rms", "swiglu") and self.position != "learned"
        added = self.qk_norm, self.extra_embeddings, self.head_size, self.context_size
        added += self.position_table, self.sliding_layers, self.post_norms, self.visual_mlp_layers
        return is_one and not any(added)

    @property
    def frame(self) -> FrameFormat:
        actions = self.num_action_tokens, self.num_seam_tokens
        return FrameFormat(self.grid_height, self.grid_width, *actions)

    @property
    def num_leading(self) -> int:
        return self.num_action_tokens - self.num_seam_tokens

    @property
    def prefix_ids(self) -> range:  # before the first frame (Cosmos' BOV), the last of all ids
        return range(self.vocab_size, self.vocab_size + self.prefix_length)

    @property
    def tokens_per_frame(self) -> int:
        return self.grid_height * self.grid_width


def _refuse(is_wrong: object, rule: str, got: object) -> None:
    if is_wrong:
        raise ValueError(f"{rule}, got {got if isinstance(got, str) else brief(got, 20)}")


def _check_value(field: dataclasses.Field[Any], value: Any) -> None:
    name, is_bool, shown = field.name, isinstance(value, bool), brief(value, 20)
    if isinstance(field.default, tuple):
        is_wrong = not isinstance(value, list | tuple) or not all(type(one) is int for one in value)
        _refuse(is_wrong, f"{name} must be a list of integers", shown)
    elif choices := get_args(field.type):
        rule = f"{name} must be one of {', '.join(map(repr, choices))}"
        _refuse(value not in choices, rule, shown)
    elif field.type is bool:
        _refuse(not is_bool, f"{name} must be true or false", shown)
    elif field.type is float:
        is_number = isinstance(value, int | float) and not is_bool
        is_wrong = not is_number or not 0 < value <= sys.float_info.max
        _refuse(is_wrong, f"{name} must be a finite number above 0", shown)
        _refuse(value > _MAX_NUMBER, f"{name} must be at most {_MAX_NUMBER:g}", shown)
    else:
        lowest = 0 if field.default == 0 else 1
        is_wrong = is_bool or not isinstance(value, int) or value < lowest
        _refuse(is_wrong, f"{name} must be an integer of at least {lowest}", shown)
        _refuse(value > _MAX_SIZE, f"{name} must be at most {_MAX_SIZE}", shown)
