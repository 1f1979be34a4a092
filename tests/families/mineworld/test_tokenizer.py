from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diagd.families.mineworld import mineworld_tokenizer
from diagd.tokenizers.vq import CONFIG_NAME, VQTokenizer
from tests.golden import MINEWORLD, golden


def mineworld(weights: Any = MINEWORLD / "vae" / "vae.ckpt") -> VQTokenizer:
    return mineworld_tokenizer(MINEWORLD / "vae" / CONFIG_NAME, weights)


def mineworld_weights() -> dict[str, torch.Tensor]:
    return torch.load(MINEWORLD / "vae" / "vae.ckpt", weights_only=True)["state_dict"]


def test_mineworld_ids_and_pixels_are_those_of_the_original():
    values, tokenizer = golden("mineworld_tiny_v256/vq.safetensors"), mineworld()
    assert (tokenizer.codebook_size, tokenizer.compression) == (256, 16)
    low = values["vq.frames_low"].movedim(1, -1)
    frames = low.repeat_interleave(32, dim=1).repeat_interleave(32, dim=2)
    assert tokenizer.encode(frames).equal(values["vq.tokens"])
    pixels, theirs = tokenizer.decode(values["vq.tokens"][:1])[0], values["vq.decoded_uint8"]
    differing = (pixels.int() - theirs.int()).abs()
    # numbers are rounded down: what comes to 17.9999 by one processor's kernels is 18 by another's
    assert differing.max() <= 1
    assert (differing > 0).float().mean() < 0.01


def test_mineworld_weights_come_in_several_wrappings(tmp_path):
    weights, tokens = mineworld_weights(), golden("mineworld_tiny_v256/vq.safetensors")["vq.tokens"]
    frames = mineworld().decode(tokens)
    bare = {name.removeprefix("model."): weight for name, weight in weights.items()}
    main = {f"tokenizer.{name}": weight for name, weight in weights.items()}
    main["transformer.model.norm.weight"] = torch.ones(3)
    save_file(bare, tmp_path / "vae.safetensors")
    torch.save({"state_dict": main, "step": 3}, tmp_path / "main.ckpt")
    torch.save(weights, tmp_path / "vae.bin")
    files = [tmp_path / name for name in ("vae.safetensors", "main.ckpt", "vae.bin")]
    for given in (weights, bare, main, *files):
        tokenizer = mineworld(given)
        assert tokenizer.pixel_rounding == "down"
        assert tokenizer.decode(tokens).equal(frames)


def test_a_mineworld_tokenizer_can_be_saved(tmp_path):
    first, tokens = mineworld(), golden("mineworld_tiny_v256/vq.safetensors")["vq.tokens"]
    first.save_pretrained(tmp_path, torch.float32)
    assert VQTokenizer.from_pretrained(tmp_path).decode(tokens).equal(first.decode(tokens))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda weights: weights.pop("model.quantize.embedding.weight"),
            r"^the tokenizer: does not fit the config: 1 missing tensor: quantize\.embed",
        ),
        (
            lambda weights: weights.update({"model.loss": torch.zeros(1)}),
            r"1 unknown tensor: loss$",
        ),
        (
            lambda weights: weights.update({"model.quant_conv.bias": torch.zeros(7)}),
            r"quant_conv\.bias \(expected \(64,\), got \(7,\)\)$",
        ),
    ],
)
def test_mineworld_weights_that_do_not_fit_are_named(edit, message):
    weights = mineworld_weights()
    edit(weights)
    with pytest.raises(ValueError, match=message):
        mineworld(weights)
