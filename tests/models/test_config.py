import dataclasses
import re

import pytest

from diagd.models.config import ModelConfig
from tests.models.tiny import tiny_fields


def test_fields_with_a_default_may_be_absent_from_json():
    assert ModelConfig.from_dict(tiny_fields()).norm == "rms"


def test_tokens_per_frame_is_the_area_of_the_grid():
    assert ModelConfig(**tiny_fields()).tokens_per_frame == 15


def test_unknown_and_missing_fields_are_named():
    fields = tiny_fields(dim=3, colour="red")
    del fields["num_heads"], fields["vocab_size"]
    with pytest.raises(
        ValueError,
        match=r"has unknown fields: colour, dim; missing fields: num_heads, vocab_size$",
    ):
        ModelConfig.from_dict(fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
        ({"hidden_size": "512"}, "hidden_size must be an integer of at least 1, got '512'"),
        ({"num_layers": 2.0}, "num_layers must be an integer of at least 1, got 2.0"),
        ({"num_layers": True}, "num_layers must be an integer of at least 1, got True"),
        ({"prefix_length": -1}, "prefix_length must be an integer of at least 0, got -1"),
        ({"norm": "batch"}, "norm must be one of 'rms', 'layer', got 'batch'"),
        ({"norm": ["rms"]}, "norm must be one of 'rms', 'layer', got "),
        ({"mlp": "relu"}, "mlp must be one of 'swiglu', 'gelu', 'exact_gelu', got 'relu'"),
        (
            {"position": "alibi"},
            "position must be one of 'rope', 'rope2d', 'rope3d', 'mrope', 'learned', got 'alibi'",
        ),
        *(
            (
                {"position": "mrope", "rotary_sections": sections},
                f"position='mrope' needs rotary_sections, three counts of 4 pairs, got {sections}",
            )
            for sections in ([], [1, 1], [2, 2, 1], [0, 0, 0], [2, -1, 1])
        ),
        ({"rotary_sections": [1, 1, 2]}, "rotary_sections need position='mrope', got 'rope'"),
        ({"bias": 1}, "bias must be true or false, got 1"),
        ({"norm_eps": 0}, "norm_eps must be a finite number above 0, got 0"),
        ({"rope_theta": "1e4"}, "rope_theta must be a finite number above 0, got '1e4'"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number above 0, got nan"),
        ({"num_heads": 5}, "num_heads must be a multiple of num_kv_heads=2, got 5"),
        ({"image_vocab_size": 51}, "image_vocab_size must be at most vocab_size=50, got 51"),
        ({"prefix_length": 64}, "prefix_length must be below max_positions=64, got 64"),
        ({"head_dim": 7}, "position='rope' needs an even head_dim, got 7"),
        (
            {"position": "rope3d", "head_dim": 4},
            "position='rope3d' needs an even head_dim of at least 6, got 4",
        ),
        (
            {"position": "rope2d", "head_dim": 6},
            "position='rope2d' needs head_dim to be a multiple of 4, got 6",
        ),
        ({"yarn_factor": 2.0}, "yarn_factor=2.0 needs position='rope3d', got 'rope'"),
        ({"norm_affine": False}, "norm_affine=False needs norm='layer', got norm='rms'"),
        ({"head_norm": True}, "head_norm=True needs qk_norm=True, got qk_norm=False"),
        ({"tie_embeddings": True, "head_size": 8}, "tie_embeddings needs head_size=0, got 8"),
        (
            {"tie_embeddings": True, "extra_embeddings": 2},
            "tie_embeddings needs extra_embeddings=0, got 2",
        ),
        (
            {"position": "rope3d", "grid_height": 4, "num_seam_tokens": 1},
            "num_seam_tokens need positions in one dimension, got rope3d",
        ),
        ({"sliding_layers": 1}, "sliding_layers must be a list of integers, got 1"),
        ({"sliding_layers": ["0"]}, "sliding_layers must be a list of integers, got ['0']"),
        *(
            (
                {name: layers, "sliding_window": 9},
                f"{name} must be different layers below num_layers=2, got {layers}",
            )
            for name in ("sliding_layers", "visual_mlp_layers")
            for layers in ([0, 2], [1, 1], [-1])
        ),
        (
            {"sliding_layers": [1]},
            "sliding_layers and sliding_window must both be given or neither, got [1] and 0",
        ),
    ],
)
def test_illegal_values_say_what_was_expected_and_given(changes, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        ModelConfig(**tiny_fields(**changes))


def test_a_config_cannot_be_changed():
    config = ModelConfig(**tiny_fields())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 3  # pyright: ignore[reportAttributeAccessIssue]
