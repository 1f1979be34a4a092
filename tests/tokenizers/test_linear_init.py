import pytest
import torch

from diagd.tokenizers.linear_init import choose_patch, k_means, linear_tokenizer_model
from diagd.tokenizers.vq import VQTokenizer, normalise
from tests.tokenizers.rectangles import rectangles


def patches(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pixel_unshuffle(values, 8).movedim(1, -1).flatten(0, -2)


@pytest.mark.parametrize("width", [16, 48])
def test_the_network_starts_as_a_projection_on_principal_components(width):
    frames = rectangles(40)
    tokenizer = VQTokenizer(linear_tokenizer_model(frames, codes=8, seed=0, width=width))
    with torch.no_grad():
        painted = patches(tokenizer.pixels(tokenizer.latents(frames)))
    data = patches(normalise(frames))
    mean = data.mean(dim=0)
    _, _, components = torch.linalg.svd(data - mean, full_matrices=False)
    kept = components[: 6 * width // 16]
    expected = mean + (data - mean) @ kept.T @ kept
    error = (painted - expected).square().mean() / (data - mean).square().mean()
    assert error < 1e-3  # group norm still rescales a frame a little, by its own variance


def test_codes_at_the_start_already_paint_the_frames():
    frames = rectangles(40)
    errors = []
    for codes in (2, 128):
        tokenizer = VQTokenizer(linear_tokenizer_model(frames, codes, seed=0, width=48))
        painted = tokenizer.decode(tokenizer.encode(frames))
        errors.append((painted.float() - frames.float()).square().mean().item())
    variance = frames.float().var().item()
    assert errors[1] < 0.2 * variance < 0.5 * errors[0]


def test_the_start_is_a_function_of_the_seed():
    frames = rectangles(8)
    first, second, other = (
        linear_tokenizer_model(frames, 8, seed, width=16).state_dict() for seed in (3, 3, 4)
    )
    assert all(value.equal(second[name]) for name, value in first.items())
    assert not first["encoder.conv_in.weight"].equal(other["encoder.conv_in.weight"])


def test_frames_of_one_colour_are_no_trouble():
    frames = torch.full((2, 8, 16, 3), 77, dtype=torch.uint8)
    tokenizer = VQTokenizer(linear_tokenizer_model(frames, codes=4, seed=0, width=16))
    assert tokenizer.decode(tokenizer.encode(frames)).equal(frames)


def test_k_means_finds_clusters_that_are_plain_to_see():
    generator = torch.Generator().manual_seed(0)
    corners = torch.tensor([[0.0, 0.0], [0.0, 9.0], [9.0, 0.0]])
    vectors = corners.repeat(50, 1) + 0.1 * torch.randn(150, 2, generator=generator)
    centres = k_means(vectors, 12, generator)
    assert (torch.cdist(corners, centres).min(dim=1).values < 0.2).all()


@pytest.mark.parametrize(
    ("size_px", "patch"),
    [
        ((112, 192), 8),  # 14 x 24 tokens
        ((64, 64), 8),
        ((84, 84), 7),  # 12 x 12
        ((96, 128), 8),
        ((210, 160), 10),  # 21 x 16; 5 px would be too many
        ((224, 384), 16),  # 14 x 24
        ((36, 48), 6),  # 6 x 8; 12 px would be too few
        ((24, 20), 4),  # few whatever is done
    ],
)
def test_a_patch_divides_the_frame_into_a_sensible_number_of_tokens(size_px, patch):
    assert choose_patch(*size_px) == patch


@pytest.mark.parametrize(
    ("size_px", "advice"), [((66, 70), "64x64"), ((480, 640), "136x184"), ((14, 254), "16x248")]
)
def test_frames_that_no_patch_fits_are_refused_with_a_size_that_fits(size_px, advice):
    height, width = size_px
    message = rf"frames are {height}x{width} px .*: use a size such as --size {advice}"
    with pytest.raises(ValueError, match=message):
        choose_patch(*size_px)
    choose_patch(*map(int, advice.split("x")))


def test_patches_of_other_sizes_are_codes_as_well():
    frames = rectangles(20, size=(30, 50))
    tokenizer = VQTokenizer(linear_tokenizer_model(frames, 64, seed=0, width=32, patch_px=5))
    assert (tokenizer.compression, tokenizer.encode(frames).shape) == (5, (20, 6, 10))
    painted = tokenizer.decode(tokenizer.encode(frames))
    assert (painted.float() - frames.float()).square().mean() < 0.3 * frames.float().var()
