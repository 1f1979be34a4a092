import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from diagd.families.cosmos import CosmosTokenizer
from tests.families.cosmos.scripts import indices_to_codes, write_scripts
from tests.tokenizers.rectangles import rectangles

SIZE = (32, 48)  # 2 x 3 tokens


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny encoder.jit and decoder.jit; to be read only."""
    return write_scripts(tmp_path_factory.mktemp("cosmos"))


@pytest.fixture
def tokenizer(scripts: Path) -> CosmosTokenizer:
    return CosmosTokenizer.from_jit(scripts)


def clip(num_frames: int, seed: int = 0) -> Tensor:
    return rectangles(num_frames, seed, SIZE)


@pytest.mark.parametrize(
    ("num_frames", "num_grids"),
    [(1, 1), (9, 2), (17, 3), (33, 5), (34, 6), (42, 7), (66, 10), (67, 11)],
)
def test_frames_become_grids_and_as_many_frames_again(tokenizer, num_frames, num_grids):
    tokens = tokenizer.encode(clip(num_frames))
    assert (tokens.shape, tokens.dtype) == ((num_grids, 2, 3), torch.int64)
    painted = tokenizer.decode(tokens)
    assert (painted.shape, painted.dtype) == ((num_frames, *SIZE, 3), torch.uint8)
    assert painted.is_contiguous()
    if num_frames <= 33:
        assert num_frames == 1 + (num_grids - 1) * tokenizer.temporal_compression


def test_sizes(tokenizer):
    assert (tokenizer.codebook_size, tokenizer.compression) == (64000, 16)
    assert tokenizer.frame_size_px(40, 64) == (640, 1024)


def test_ids_are_those_the_encoder_gives(tokenizer):
    frames = clip(33)
    values = (frames.movedim(-1, 0).float() / 127.5 - 1)[None]
    ids, codes, _ = tokenizer.encoder(values)
    tokens = tokenizer.encode(frames)
    assert tokens.equal(ids[0].long())
    assert indices_to_codes(tokens[None]).equal(codes)
    assert len(tokens.unique()) > 15  # else the test would compare next to nothing


def test_a_short_clip_has_the_first_ids_of_a_long_one(tokenizer):
    frames = clip(33)
    tokens = tokenizer.encode(frames)
    for num_frames, num_grids in ((1, 1), (9, 2), (25, 4)):
        assert tokenizer.encode(frames[:num_frames]).equal(tokens[:num_grids])


def test_few_grids_are_the_first_frames_of_many(tokenizer):
    tokens = tokenizer.encode(clip(33))
    frames = tokenizer.decode(tokens)
    for num_frames, num_grids in ((1, 1), (9, 2), (25, 4)):
        assert tokenizer.decode(tokens[:num_grids]).equal(frames[:num_frames])


def test_windows_know_nothing_of_each_other(tokenizer):
    first, second = clip(33, seed=1), clip(9, seed=2)
    tokens = tokenizer.encode(torch.cat([first, second]))
    assert tokens.equal(torch.cat([tokenizer.encode(first), tokenizer.encode(second)]))
    frames = tokenizer.decode(tokens)
    assert frames.equal(torch.cat([tokenizer.decode(tokens[:5]), tokenizer.decode(tokens[5:])]))


def test_inside_a_window_later_frames_matter_to_later_grids_only(tokenizer):
    frames = clip(33)
    tokens = tokenizer.encode(frames)
    for changed, first_grid in ((0, 0), (1, 1), (8, 1), (9, 2), (32, 4)):
        other = frames.clone()
        other[changed] = 255 - other[changed]
        differs = (tokenizer.encode(other) != tokens).flatten(1).any(dim=1)
        assert int(differs.nonzero()[0]) == first_grid


def test_pixels_are_rounded_down_and_clamped(tokenizer):
    for value, expected in ((2.0, 255), (-2.0, 0), (1.0, 255), (0.0, 127), (0.003, 127)):
        tokenizer.decoder = lambda ids, value=value: torch.full((1, 3, 33, 32, 48), value)
        painted = tokenizer.decode(torch.zeros(1, 2, 3, dtype=torch.int64))
        assert painted.unique().tolist() == [expected]


def test_the_type_of_numbers_may_be_chosen(tokenizer):
    tokenizer.to("cpu", torch.bfloat16)
    assert {value.dtype for value in tokenizer.encoder.parameters()} == {torch.bfloat16}
    tokens = tokenizer.encode(clip(9))
    assert tokenizer.decode(tokens).shape == (9, *SIZE, 3)
    assert tokenizer.to("cpu") is tokenizer
    assert {value.dtype for value in tokenizer.decoder.parameters()} == {torch.float32}


@pytest.mark.gpu
def test_on_a_gpu_numbers_are_bfloat16(tokenizer):
    frames = clip(34)
    tokens = tokenizer.encode(frames)
    painted = tokenizer.decode(tokens).int()
    tokenizer.to("cuda")
    assert {value.dtype for value in tokenizer.encoder.parameters()} == {torch.bfloat16}
    assert tokenizer.encode(frames).device.type == "cpu"
    assert tokenizer.encode(frames.cuda()).device.type == "cuda"
    assert float((tokenizer.encode(frames) == tokens).float().mean()) > 0.5  # 8 bits of precision
    assert float((tokenizer.decode(tokens).int() - painted).abs().float().mean()) < 2


@pytest.mark.parametrize("num_frames", [2, 8, 10, 32, 35])
def test_clips_between_two_grids_are_refused(tokenizer, num_frames):
    message = (
        r"^clip must have 1, 9, 17, 25 or 33 frames, or whole windows of 33 and then as many, "
        rf"got {num_frames}$"
    )
    with pytest.raises(ValueError, match=message):
        tokenizer.encode(clip(num_frames))


def test_networks_of_another_kind_are_refused(tokenizer):
    """A continuous tokenizer, say, or one of another compression."""
    for answer, said in (
        (torch.zeros(1, 16, 5, 2, 3), r"\(1, 16, 5, 2, 3\)"),
        ((torch.zeros(1, 5, 4, 6), torch.zeros(1, 6, 5, 4, 6)), r"\(\(1, 5, 4, 6\), \(1, 6, 5, 4"),
        ((None,), r"\(NoneType\)"),
    ):
        other = CosmosTokenizer(lambda _, answer=answer: answer, tokenizer.decoder)
        message = rf"^encoder must return \(ids, codes \(1, 6, 5, 2, 3\)\), got {said}"
        with pytest.raises(ValueError, match=message):
            other.encode(clip(1))
    other = CosmosTokenizer(tokenizer.encoder, lambda ids: torch.zeros(1, 3, 49, 16, 24))
    message = r"^decoder must return \(1, 3, 33, 32, 48\), got \(1, 3, 49, 16, 24\)$"
    with pytest.raises(ValueError, match=message):
        other.decode(torch.zeros(1, 2, 3, dtype=torch.int64))


@pytest.mark.parametrize("content", [b"", b"no script", None])
def test_what_is_no_script_is_refused(scripts, tmp_path, content):
    broken = tmp_path / "encoder.jit"
    broken.write_bytes((scripts / "encoder.jit").read_bytes()[:999] if content is None else content)
    message = r"encoder\.jit: not a TorchScript file \(corrupt\?\): \w"
    with pytest.raises(ValueError, match=message) as error:
        CosmosTokenizer.from_jit(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [(45, 81), (81, 45), (32, 48), (33, 48), (20, 300), (64, 96)])
def test_frames_are_scaled_to_cover_and_cropped_in_the_middle(size):
    frames = rectangles(9, size=size)
    fitted = CosmosTokenizer(None, None).fit_frames(frames, *SIZE)
    assert (fitted.shape, fitted.dtype) == ((9, *SIZE, 3), torch.uint8)
    scale = max(SIZE[0] / size[0], SIZE[1] / size[1])
    scaled = math.ceil(size[0] * scale), math.ceil(size[1] * scale)
    values = frames.movedim(-1, 1).float() / 255 * 2 - 1  # as Cosmos does: first to [-1, 1]
    values = functional.interpolate(
        values, scaled, mode="bilinear", antialias=True, align_corners=False
    )
    top, left = (round((have - want) / 2) for have, want in zip(scaled, SIZE, strict=True))
    values = values[:, :, top : top + SIZE[0], left : left + SIZE[1]].movedim(1, -1)
    assert float((fitted / 127.5 - 1 - values).abs().max()) <= 1 / 255 + 1e-5


def test_frames_of_the_right_size_are_left_as_they_are():
    frames = clip(2)
    assert CosmosTokenizer(None, None).fit_frames(frames, *SIZE).equal(frames)
