import pytest
import torch

from diagd.models.config import ModelConfig
from diagd.models.rotary import grid_coordinates, rotate
from diagd.models.transformer import Transformer
from diagd.training.setup import OFFSETS, aim_heads
from tests.models.tiny import tiny_fields


def config_of(**changes):
    fields = {"num_heads": 5, "num_kv_heads": 5, "head_dim": 24, "num_layers": 5, "bias": True}
    fields |= {"position": "rope3d", "rope_theta": 100.0, "rope_step": 3.14159}
    size = {"grid_height": 5, "grid_width": 7, "num_action_tokens": 1, "max_positions": 107}
    return ModelConfig(**tiny_fields(**{**fields, **size, **changes}))


def test_every_aimed_head_looks_at_its_place_and_nowhere_else():
    config = config_of()
    model = aim_heads(Transformer.random(config))
    positions = torch.arange(config.max_positions)
    coordinates = grid_coordinates(config, positions)
    assert coordinates is not None
    places = {tuple(place): position for position, place in enumerate(coordinates.T.tolist())}
    here = places[2, 2, 2]
    assert model.model.rotary is not None
    rotary = model.model.rotary(positions, coordinates, torch.float32)
    for layer, offsets in zip(model.model.blocks, OFFSETS, strict=False):
        biases = layer.self_attn.q_proj.bias, layer.self_attn.k_proj.bias
        shape = (5, config.max_positions, 24)
        queries, keys = (b.view(5, 1, 24).expand(shape).unsqueeze(0) for b in biases)
        queries, keys = rotate(queries, *rotary), rotate(keys, *rotary)
        scores = queries[0, :, here] @ keys[0].mT / 24**0.5  # (heads, heads, positions)
        for head, offset in enumerate(offsets):
            target = tuple(a + b for a, b in zip((2, 2, 2), offset, strict=True))
            attention = scores[head, head, : here + 1].softmax(-1)
            assert attention.argmax() == places[target], (offset, target)
            assert attention.max() > 0.3
        for head in range(len(offsets), 5):
            assert not biases[0].view(5, 24)[head].any()
    assert not any(layer.self_attn.v_proj.bias.any() for layer in model.model.blocks)


@pytest.mark.parametrize(
    "changes", [{"bias": False}, {"position": "rope", "rope_step": 1.0}, {"num_kv_heads": 1}]
)
def test_models_without_such_heads_are_refused(changes):
    with pytest.raises(ValueError, match="aim_heads needs position='rope3d', bias=True and num_kv"):
        aim_heads(Transformer.random(config_of(**changes)))
