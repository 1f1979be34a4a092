import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from diagd.families.wham.tokenizer import (
    TOKENIZER_PREFIX,
    ViTVQGAN,
    ViTVQGANConfig,
    WHAMTokenizer,
    wham_tokenizer_from_weights,
)
from tests.golden import (
    every_wham,
    golden,
    wham_config,
    wham_frames,
    wham_tokenizer,
    wham_weights,
)

SIZES = ViTVQGANConfig(
    height_px=7,
    width_px=11,
    patch_size=3,
    hidden_size=12,
    num_layers=1,
    head_dim=4,
    code_dim=5,
    codebook_size=9,
)


def small_tokenizer(batch_size: int = 8) -> WHAMTokenizer:
    torch.manual_seed(0)
    tokenizer = WHAMTokenizer(ViTVQGAN(SIZES))
    tokenizer.batch_size = batch_size
    return tokenizer


def build(**changes) -> WHAMTokenizer:
    """Load wham_tiny_v2 from weights that lack the names given as None and hold the others."""
    weights = {n.removeprefix(TOKENIZER_PREFIX): w for n, w in wham_weights("wham_tiny_v2").items()}
    weights |= {name: weight for name, weight in changes.items() if weight is not None}
    kept = {n: w for n, w in weights.items() if n not in changes or changes[n] is not None}
    return wham_tokenizer_from_weights(kept, 18, 28, 8)


@every_wham
def test_ids_and_pixels_are_those_of_the_original(name):
    config, tokenizer = wham_config(name), wham_tokenizer(name)
    tokens = tokenizer.encode(wham_frames(name))
    assert tokens.dtype == torch.int64
    assert tokens.shape[1:] == (config["grid_rows"], config["grid_cols"])
    indices = golden(f"{name}/golden_tokenizer.safetensors")["indices"]
    assert tokens.flatten(1).equal(indices.flatten(0, 1))
    difference = tokenizer.decode(tokens).int() - wham_frames(name, "decoded_u8").int()
    assert int(difference.abs().max()) <= 1  # float noise where a pixel is nearly whole
    assert float((difference != 0).float().mean()) < 1e-3


@every_wham
def test_latents_and_unrounded_pixels_are_those_of_the_original(name):
    values, tokenizer = golden(f"{name}/golden_tokenizer.safetensors"), wham_tokenizer(name)
    mean, deviation = (
        torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    pictures = (values["images_u8"][:, :2].flatten(0, 1) / 255 - mean) / deviation
    with torch.no_grad():
        latents = tokenizer.model.latents(pictures)
        painted = tokenizer.model.pixels(tokenizer.model.nearest(latents))
    expected = values["encoder_embeddings"].flatten(0, 1)
    torch.testing.assert_close(latents.flatten(1, 2), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(painted, values["decoder_output"].flatten(0, 1), atol=1e-5, rtol=0)


def test_sizes_come_from_the_weights():
    tokenizer = wham_tokenizer("wham_tiny")
    assert tokenizer.model.config == ViTVQGANConfig(30, 40, 5, 24, 2, 12, 8, 64)
    assert (tokenizer.codebook_size, tokenizer.compression) == (64, 5)
    assert tokenizer.temporal_compression == 1


def test_a_padded_picture_is_smaller_than_its_grid():
    tokenizer = wham_tokenizer("wham_tiny_v2")
    assert tokenizer.frame_size_px(4, 6) == (18, 28)
    with pytest.raises(ValueError, match=r"^a frame must be 4x6 tokens, got 6x4$"):
        tokenizer.frame_size_px(6, 4)


def test_the_released_size_is_a_grid_of_18_rows_and_30_columns():
    assert ViTVQGANConfig(180, 300, 10, 1024, 12, 64, 32, 16384).grid == (18, 30)


def test_the_prefix_may_be_missing_and_the_rest_of_the_checkpoint_is_left_out():
    frames, tokens = wham_frames("wham_tiny"), wham_tokenizer("wham_tiny").encode
    weights = wham_weights("wham_tiny")
    for given in (
        {name.removeprefix(TOKENIZER_PREFIX): weight for name, weight in weights.items()},
        weights | {"predictor.gpt_model.lm_head.weight": torch.zeros(3, 2)},
        weights | {f"{TOKENIZER_PREFIX}patch_gan.0.weight": torch.zeros(2)},
    ):
        again = wham_tokenizer_from_weights(given, 30, 40, head_size=12)
        assert again.encode(frames).equal(tokens(frames))


def test_layers_that_a_config_only_claims_are_not_built(tmp_path):
    wham_tokenizer("wham_tiny").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_layers": 10**9}))
    with pytest.raises(ValueError, match=r"config\.json: num_layers must be at most the \d+ tens"):
        WHAMTokenizer.from_pretrained(tmp_path)


def test_mini_batches_change_nothing():
    frames = torch.randint(0, 256, (5, 7, 11, 3), dtype=torch.uint8)
    tokens = small_tokenizer(batch_size=2).encode(frames)
    assert tokens.shape == (5, 3, 4)
    assert tokens.equal(small_tokenizer().encode(frames))
    painted = small_tokenizer(batch_size=2).decode(tokens)
    assert (painted.shape, painted.is_contiguous()) == ((5, 7, 11, 3), True)
    assert int((painted.int() - small_tokenizer().decode(tokens.int()).int()).abs().max()) <= 1


def test_a_saved_tokenizer_loads_again_bit_by_bit(tmp_path):
    first = wham_tokenizer("wham_tiny_v2")
    first.save_pretrained(tmp_path / "new" / "folder", torch.float32)
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    second = WHAMTokenizer.from_pretrained(folder)
    assert second.model.config == first.model.config
    weights = second.model.state_dict()
    assert all(weights[name].equal(value) for name, value in first.model.state_dict().items())
    tokens = second.encode(wham_frames("wham_tiny_v2"))
    assert second.decode(tokens).equal(first.decode(tokens))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"encoder.proj1.weight": None},
            r"the WHAM tokenizer has no matrix encoder\.proj1\.weight",
        ),
        (
            {"vq_vae._embedding.weight": torch.zeros(3)},
            r"the WHAM tokenizer has no matrix vq_vae\._embedding\.weight",
        ),
        (
            {"decoder.output_ln.bias": None},
            r"the WHAM tokenizer: does not match its patches, .*: 1 missing tensor: "
            r"decoder\.output_norm\.bias",
        ),
        (
            {"decoder.vit.1.ln_1.weight": torch.zeros(24)},
            r"1 unknown tensor: decoder\.vit\.1\.ln_1\.weight",
        ),
        (
            {"encoder.vit.0.mlp.c_fc.weight": torch.zeros(24, 24)},
            r"encoder\.blocks\.0\.up_proj\.weight \(expected \(96, 24\), got \(24, 24\)\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=rf"^.*{message}.*$"):
        build(**changes)


def test_frames_of_other_sizes_or_heads_are_refused():
    weights = wham_weights("wham_tiny_v2")
    message = (
        r"^the WHAM tokenizer has 24 positions, but frames of 18x36 px have 4x8 patches of 5x5 px$"
    )
    with pytest.raises(ValueError, match=message):
        wham_tokenizer_from_weights(weights, 18, 36, 8)
    with pytest.raises(ValueError, match=r"^head_dim must divide hidden_size=24, got 64$"):
        wham_tokenizer_from_weights(weights, 18, 28, 64)
    with pytest.raises(ValueError, match=r"^height_px must be a positive integer, got 0$"):
        wham_tokenizer_from_weights(weights, 0, 28, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"head_dim": 5},
            r"config\.json describes no wham-vit-vqgan: head_dim must divide hidden_size=12",
        ),
        ({"head_dim": "4"}, "head_dim must be a positive integer, got '4'$"),
        ({"depth": 5}, "describes no wham-vit-vqgan: .*unexpected keyword argument 'depth'"),
        ({"codebook_size": 8}, r"codebook\.weight \(expected \(8, 5\), got \(9,"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, changes, message):
    small_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message) as error:
        WHAMTokenizer.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    small_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"^file not found: .*{name}$"):
        WHAMTokenizer.from_pretrained(tmp_path)


def test_stored_weights_must_be_complete(tmp_path):
    small_tokenizer().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["encoder.positions.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 missing tensor: encoder\.positions\.weight$"):
        WHAMTokenizer.from_pretrained(tmp_path)
