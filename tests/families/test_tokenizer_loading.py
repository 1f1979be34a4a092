import json
import shutil

import pytest
import torch

from diagd.families.checkpoints import find_model, load_tokenizer, tokenizer_of
from diagd.families.cosmos import CosmosTokenizer
from diagd.families.wham.tokenizer import WHAMTokenizer
from diagd.tokenizers.vq import VideoTokenizer, VQTokenizer
from diagd.weight_files import read_torch_file, tensors_of
from tests.families.cosmos.scripts import write_scripts
from tests.golden import FIXTURES, wham_tokenizer
from tests.tokenizers.rectangles import rectangles, small_tokenizer


@pytest.fixture
def scripts(tmp_path):
    return write_scripts(tmp_path / "cosmos")


def round_trip(tokenizer: VideoTokenizer, height: int, width: int) -> None:
    """Do what the pipeline does, whatever the tokenizer."""
    height_px, width_px = tokenizer.frame_size_px(height, width)
    num_frames = 1 + tokenizer.temporal_compression
    frames = rectangles(num_frames, size=(height_px, width_px))
    tokens = tokenizer.to("cpu").encode(frames)
    assert (tokens.shape, tokens.dtype) == ((2, height, width), torch.int64)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.codebook_size
    assert -(-height_px // tokenizer.compression) == height
    assert tokenizer.decode(tokens).shape == frames.shape


def test_a_folder_of_diffusers_is_recognised(tmp_path):
    small_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, VQTokenizer)
    round_trip(tokenizer, 3, 5)


def test_a_wham_folder_is_recognised(tmp_path):
    wham_tokenizer("wham_tiny_v2").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, WHAMTokenizer)
    round_trip(tokenizer, 4, 6)


def test_a_cosmos_folder_is_recognised_when_torchscript_is_allowed(scripts):
    tokenizer = load_tokenizer(scripts, allow_torchscript=True)
    assert isinstance(tokenizer, CosmosTokenizer)
    round_trip(tokenizer, 2, 3)


def test_torchscript_is_not_loaded_unless_allowed(scripts):
    small_tokenizer().save_pretrained(scripts)  # nothing else in the folder changes that
    (scripts / "decoder.jit").unlink()
    with pytest.raises(ValueError, match=r"cosmos holds TorchScript, which executes code when"):
        load_tokenizer(scripts)
    with pytest.raises(FileNotFoundError, match=r"^file not found: .*decoder\.jit$"):
        load_tokenizer(scripts, allow_torchscript=True)


@pytest.mark.parametrize(
    ("config", "got"),
    [({}, "None"), ({"kind": "vae"}, "'vae'"), ({"_class_name": "VAE"}, "'VAE'")],
)
def test_another_kind_is_refused(tmp_path, config, got):
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = rf"expected kind wham-vit-vqgan, emu3_vqgan or _class_name VQModel, got {got}$"
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^tokenizer folder not found: .*none$"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"^file not found: .*config\.json$"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("fixture", "part", "message"),
    [
        (
            "wham_tiny",
            "decoder.output_ln.bias",
            r"the WHAM tokenizer: does not match .*: 1 missing",
        ),
        (
            "mineworld_tiny_v256",
            "quantize.embedding.weight",
            r"the tokenizer: does not .*: 1 missing",
        ),
    ],
)
def test_a_damaged_tokenizer_inside_a_checkpoint_names_the_file(fixture, part, message, tmp_path):
    shutil.copytree(FIXTURES / fixture, tmp_path / "world")
    path = tmp_path / "world" / "model.ckpt"
    weights = tensors_of(read_torch_file(path))
    kept = {name: weight.clone() for name, weight in weights.items() if not name.endswith(part)}
    assert len(kept) == len(weights) - 1
    torch.save({"state_dict": kept}, path)
    with pytest.raises(ValueError, match=rf"world.model\.ckpt: its tokenizer: {message}"):
        tokenizer_of(find_model(path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("down_block_types", [1]),
        ("up_block_types", [None]),
        ("act_fn", 1),
        ("block_out_channels", []),
        ("layers_per_block", "x"),
        ("down_block_types", ["DownEncoderBlock2D"] * 1000),
        ("latent_channels", {"x": 1}),
        ("pixel_rounding", []),
    ],
)
def test_settings_of_a_wrong_type_are_one_line_that_names_the_file(name, value, tmp_path):
    small_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(ValueError, match=r"config\.json[: ]") as failure:
        load_tokenizer(tmp_path)
    assert "\n" not in str(failure.value)
