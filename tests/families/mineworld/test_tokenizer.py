import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from diagd.families.checkpoints import find_model
from diagd.families.family import Checkpoint
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
            r"^the tokenizer: does not match the config: 1 missing tensor: quantize\.embed",
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


@pytest.fixture
def released(tmp_path):
    """A function that lays a checkpoint out as it is released, its YAML naming some paths.

    It has no tokenizer inside; the folder `vae` is where it is told to be.
    """
    (tmp_path / "checkpoints").mkdir()
    content = torch.load(MINEWORLD / "model.ckpt", weights_only=True)
    weights = content["state_dict"]
    plain = {name: weights[name] for name in weights if not name.startswith("tokenizer.")}
    torch.save({"state_dict": plain}, tmp_path / "checkpoints" / "300M_16f.ckpt")

    def write(params: Any, vae: str = "checkpoints/vae") -> Checkpoint:
        shutil.copytree(MINEWORLD / "vae", tmp_path / vae)
        config = yaml.safe_load((MINEWORLD / "config.yaml").read_text())
        config["model"]["params"]["tokenizer_config"]["params"] = params
        (tmp_path / "checkpoints" / "config.yaml").write_text(yaml.safe_dump(config))
        return find_model(Path("checkpoints", "300M_16f.ckpt"))

    with contextlib.chdir(tmp_path):
        yield write


def tokenizer_of(found: Checkpoint) -> Any:
    assert found.family.tokenizer
    return found.family.tokenizer(found)


@pytest.mark.parametrize(
    ("params", "vae"),
    [
        # from the root of its makers' repository, as the released file has them
        (["checkpoints/vae/config.json", "checkpoints/vae/vae.ckpt"], "checkpoints/vae"),
        (["models/vae/config.json", "models/vae/vae.ckpt"], "models/vae"),
        (["models/vae/config.json", "models/vae/vae.ckpt"], "checkpoints/vae"),  # beside the file
        (["vae/config.json", "vae/vae.ckpt"], "checkpoints/vae"),
    ],
)
def test_the_tokenizer_is_found_where_the_yaml_names_it_or_beside(params, vae, released, tmp_path):
    found = released(dict(zip(("config_path", "ckpt_path"), params, strict=True)), vae)
    tokens = golden("mineworld_tiny_v256/vq.safetensors")["vq.tokens"]
    expected = mineworld().decode(tokens)
    assert tokenizer_of(found).decode(tokens).equal(expected)
    with contextlib.chdir(tmp_path / "checkpoints"):
        found = find_model("300M_16f.ckpt")
        assert tokenizer_of(found).decode(tokens).equal(expected)


@pytest.mark.parametrize(
    ("params", "missing"),
    [
        (None, "config_path"),
        ({}, "config_path"),
        ({"config_path": None}, "config_path"),
        ({"config_path": ["vae/config.json"]}, "config_path"),
        ({"config_path": "vae/config.json"}, "ckpt_path"),
        ("vae", "config_path"),
    ],
)
def test_a_yaml_that_names_no_tokenizer_is_one_line(params, missing, released):
    found = released(params)
    message = (
        rf"300M_16f\.ckpt: tokenizer not found: give its folder .* or its {missing} in the YAM"
    )
    with pytest.raises(ValueError, match=message):
        tokenizer_of(found)


def test_a_tokenizer_that_is_nowhere_is_named(released, tmp_path):
    found = released({"config_path": "checkpoints/vae/config.json", "ckpt_path": "vae/vae.ckpt"})
    for name, what in (("vae.ckpt", "vae.ckpt"), ("config.json", "config.json")):
        (tmp_path / "checkpoints" / "vae" / name).unlink()
        with pytest.raises(FileNotFoundError, match=rf"not found: checkpoints.vae.{what}$"):
            tokenizer_of(found)
