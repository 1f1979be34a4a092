import json

import pytest
import torch

from diagd.families.checkpoints import load_tokenizer
from diagd.families.cosmos import CosmosTokenizer
from diagd.families.wham import WHAMTokenizer
from diagd.tokenizers.vq import VideoTokenizer, VQTokenizer
from tests.families.cosmos.scripts import write_scripts
from tests.golden import wham_tokenizer
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
    with pytest.raises(ValueError, match=r"cosmos holds TorchScript, which runs code when it is"):
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
