"""The tokenizer of LlamaGen in miniature against a plain reading of its public facts."""

from pathlib import Path

import pytest
import torch

from diagd.tokenizers.vq import VQTokenizer, read_vqgan
from diagd.weight_files import read_tensors
from tests.families.llamagen.plain import PlainTokenizer, Tensors, random_tokenizer
from tests.worlds import smooth_frames

CHANNELS, NUM_CODES = (32, 32, 64), 40


@pytest.fixture(scope="module")
def weights() -> Tensors:
    return random_tokenizer(CHANNELS, latent_channels=16, num_codes=NUM_CODES, code_size=8)


@pytest.fixture(scope="module")
def released(weights, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("vq") / "vq_ds16_c2i.pt"
    torch.save({"model": weights}, path)
    return path


def llamagen_tokenizer(path: Path) -> VQTokenizer:
    return read_vqgan(read_tensors(path), path, by_direction=True)


def test_ids_are_those_of_the_plain_model(released, weights):
    tokenizer, frames = llamagen_tokenizer(released), smooth_frames(2, 12, 20)
    assert (tokenizer.codebook_size, tokenizer.compression) == (NUM_CODES, 4)
    expected = PlainTokenizer(weights).encode(frames.movedim(-1, 1) / 127.5 - 1)
    assert torch.equal(tokenizer.encode(frames), expected)
    assert expected.shape == (2, 3, 5)
    assert len(expected.unique()) > 3


@pytest.mark.proves("LlamaGen, LlamaGen-T2I", "pixels")
def test_pixels_are_those_of_the_plain_model(released, weights):
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(NUM_CODES, (2, 3, 5), generator=generator)
    expected = (PlainTokenizer(weights).decode(tokens) + 1) * 127.5
    tokenizer = llamagen_tokenizer(released)
    codes = tokenizer.codebook[tokens].movedim(-1, 1)
    with torch.no_grad():
        values = (tokenizer.pixels(codes) + 1) * 127.5
    torch.testing.assert_close(values, expected, atol=1e-2, rtol=0)
    pixels = tokenizer.decode(tokens)
    levels = expected.round().clamp(0, 255).movedim(1, -1)
    assert (pixels.float() - levels).abs().max() <= 1  # what comes to 17.49 may be 17.51
    assert levels.std() > 20


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "quantize.embedding.weight",
            "not a VQ-GAN: missing key 'quantize",
        ),
        (
            "decoder.mid.0.norm1.bias",
            "1 missing tensor: decoder",
        ),
    ],
)
def test_a_file_without_a_tensor_is_refused_in_one_line(name, message, weights, tmp_path):
    path = tmp_path / "vq_ds16_c2i.pt"
    torch.save({"model": {other: value for other, value in weights.items() if other != name}}, path)
    with pytest.raises(ValueError, match=rf"vq_ds16_c2i\.pt: .*{message}") as caught:
        llamagen_tokenizer(path)
    assert "\n" not in str(caught.value)
