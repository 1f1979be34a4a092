import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diagd.system import process_peak_bytes
from diagd.tokenizers.vq import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    VQTokenizer,
    load_lazily,
    vq_model_class,
)
from tests.tokenizers.rectangles import rectangles, small_tokenizer


def convolutional_model(**changes):
    """A VQModel of the usual kind: four resolutions, full-size feature maps."""
    torch.manual_seed(0)
    config = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (4, 4, 8, 8),
        "latent_channels": 4,
        "num_vq_embeddings": 12,
        "norm_num_groups": 2,
    }
    return vq_model_class()(**(config | changes))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    small_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_frames_become_a_grid_of_ids_and_frames_again():
    tokenizer = small_tokenizer(codes=20)
    assert (tokenizer.codebook_size, tokenizer.compression) == (20, 8)
    assert (tokenizer.temporal_compression, tokenizer.frame_size_px(3, 5)) == (1, (24, 40))
    tokens = tokenizer.encode(rectangles(3))
    assert (tokens.shape, tokens.dtype) == ((3, 3, 5), torch.int64)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 20
    frames = tokenizer.decode(tokens)
    assert (frames.shape, frames.dtype) == ((3, 24, 40, 3), torch.uint8)
    assert frames.is_contiguous()


def test_the_usual_vq_models_work_unfolded():
    tokenizer = VQTokenizer(convolutional_model())
    assert (tokenizer.patch_size, tokenizer.compression) == (1, 8)
    tokens = tokenizer.encode(rectangles(2))
    assert tokens.shape == (2, 3, 5)
    assert tokenizer.decode(tokens).shape == (2, 24, 40, 3)


def test_encoding_follows_the_quantizer_of_diffusers():
    tokenizer = VQTokenizer(convolutional_model())
    frames = rectangles(2)
    with torch.no_grad():
        latents = tokenizer.latents(frames)
        _, _, (_, _, ids) = tokenizer.model.quantize(latents)
    assert tokenizer.encode(frames).flatten().equal(ids)


def test_the_lowest_id_wins_a_tie():
    tokenizer = small_tokenizer(codes=20)
    tokens = tokenizer.encode(rectangles(4))
    with torch.no_grad():
        tokenizer.codebook[10:] = tokenizer.codebook[:10].clone()
    assert int(tokenizer.encode(rectangles(4)).max()) < 10 <= int(tokens.max())


def test_mini_batches_change_nothing():
    one, all_at_once = small_tokenizer(), small_tokenizer()
    one.batch_size = 2
    frames = rectangles(5)
    tokens = one.encode(frames)
    assert tokens.equal(all_at_once.encode(frames))
    difference = one.decode(tokens).int() - all_at_once.decode(tokens).int()
    assert int(difference.abs().max()) <= 1  # convolutions round differently by batch size


@pytest.mark.parametrize(
    ("rounding", "levels"),
    [("nearest", (255, 0, 128, 128, 125)), ("down", (255, 0, 127, 128, 124))],
)
def test_decoding_rounds_and_clamps(rounding, levels):
    tokenizer = VQTokenizer(small_tokenizer().model, pixel_rounding=rounding)
    with torch.no_grad():
        tokenizer.model.decoder.conv_out.weight.zero_()
        bias = tokenizer.model.decoder.conv_out.bias
        for value, expected in zip((9.0, -9.0, 0.002, 0.005, -0.02), levels, strict=True):
            bias.fill_(value)
            painted = tokenizer.decode(torch.zeros(1, 3, 5, dtype=torch.int32))
            assert painted.unique().tolist() == [expected]


def test_patches_but_not_pixels_may_be_painted_in_bfloat16():
    patches, pixels = small_tokenizer(), VQTokenizer(convolutional_model())
    for tokenizer, levels in ((patches, (1, 2, 3)), (pixels, (0,))):
        tokens = tokenizer.encode(rectangles(3))
        exact = tokenizer.decode(tokens).int()
        tokenizer.painting = torch.bfloat16
        assert (tokenizer.decode(tokens).int() - exact).abs().max() in levels
        assert torch.equal(tokenizer.encode(rectangles(3)), tokens)


def test_how_pixels_are_rounded_is_kept(tmp_path):
    for rounding in ("nearest", "down"):
        VQTokenizer(small_tokenizer().model, pixel_rounding=rounding).save_pretrained(tmp_path)
        assert VQTokenizer.from_pretrained(tmp_path).pixel_rounding == rounding


def test_an_unknown_rounding_is_refused(saved):
    config = json.loads((saved / CONFIG_NAME).read_text())
    (saved / CONFIG_NAME).write_text(json.dumps(config | {"pixel_rounding": "up"}))
    with pytest.raises(
        ValueError, match=r"config\.json: pixel_rounding must be nearest or down, got 'up'$"
    ):
        VQTokenizer.from_pretrained(saved)


def test_weights_may_be_stored_to_the_last_bit(tmp_path):
    first = small_tokenizer()
    first.save_pretrained(tmp_path, torch.float32)
    assert VQTokenizer.from_pretrained(tmp_path).codebook.equal(first.codebook)


def test_decoding_follows_diffusers():
    """Whose `decode` wants ids instead of codes from a model that looks codes up itself."""
    for lookup in (False, True):
        tokenizer = VQTokenizer(convolutional_model(lookup_from_codebook=lookup))
        tokens = torch.arange(15).view(1, 3, 5) % 12
        with torch.no_grad():
            codes = tokenizer.codebook[tokens].movedim(-1, 1).contiguous()
            given = tokens if lookup else codes
            expected = tokenizer.model.decode(given, force_not_quantize=True, shape=(1, 3, 5, 4))
            assert tokenizer.pixels(codes).equal(expected.sample)


def test_a_saved_tokenizer_loads_again(tmp_path):
    first = small_tokenizer()
    first.save_pretrained(tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG_NAME, WEIGHTS_NAME]
    stored = load_file(folder / WEIGHTS_NAME)
    assert {value.dtype for value in stored.values()} == {torch.float16}
    second = VQTokenizer.from_pretrained(folder)
    assert second.codebook.dtype == torch.float32
    assert second.codebook.equal(first.codebook.half().float())
    tokens = torch.arange(15).view(1, 3, 5)
    difference = first.decode(tokens).int() - second.decode(tokens).int()
    assert int(difference.abs().max()) <= 2  # float16 keeps 11 bits


def test_diffusers_reads_what_we_write(saved):
    pytest.importorskip("accelerate")  # else diffusers warns that loading is slower without
    model = vq_model_class().from_pretrained(saved, use_safetensors=True)
    assert model.quantize.embedding.weight.equal(VQTokenizer.from_pretrained(saved).codebook)


def test_a_package_runs_when_it_is_asked_for_more_than_one_of_its_modules(tmp_path, monkeypatch):
    files = {"": "", "heavy/": "from around.heavy import light, other\nname = 'late'"}
    for folder, text in files.items():
        (tmp_path / "around" / folder).mkdir()
        (tmp_path / "around" / folder / "__init__.py").write_text(text)
    for name in ("light", "other"):
        (tmp_path / "around" / "heavy" / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    import_module("around")
    load_lazily("around", "heavy")
    light = import_module("around.heavy.light")
    assert "around.heavy.other" not in sys.modules
    package = import_module("around.heavy")
    assert (package.name, package.light) == ("late", light)
    assert package.other is sys.modules["around.heavy.other"]
    with pytest.raises(AttributeError):
        _ = package.nothing
    assert vq_model_class() is import_module("diffusers").VQModel


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"^file not found: .*{name}$"):
        VQTokenizer.from_pretrained(saved)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", rf"{CONFIG_NAME}: not valid JSON: "),
        ("[]", "expected a JSON object, got list"),
        ("{}", "_class_name must be VQModel, got None"),
        ('{"_class_name": "UNet2DModel"}', "_class_name must be VQModel, got 'UNet2DModel'"),
        ('{"_class_name": "VQModel", "norm_num_groups": 0}', "not the config of a VQModel: "),
        ('{"_class_name": "VQModel", "down_block_types": ["No"]}', "not the config of a VQModel: "),
    ],
)
def test_a_bad_config_is_refused(saved, text, message):
    (saved / CONFIG_NAME).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        VQTokenizer.from_pretrained(saved)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_per_block": 10**7}, r"must be at most the \d+ tensors of .*, got 10000000$"),
        ({"num_vq_embeddings": 2**40}, r"\(expected \(\d+, 6\), got \(20, 6\)\)"),
        ({"block_out_channels": [2**20] * 2}, "(missing|expected) "),
    ],
)
def test_sizes_that_the_weights_do_not_have_are_never_allocated(saved, changes, message):
    config = json.loads((saved / CONFIG_NAME).read_text())
    (saved / CONFIG_NAME).write_text(json.dumps(config | changes))
    before = process_peak_bytes()
    with pytest.raises(ValueError, match=message):
        VQTokenizer.from_pretrained(saved)
    assert process_peak_bytes() - before < 2**27


def test_truncated_weights_are_refused(saved):
    content = (saved / WEIGHTS_NAME).read_bytes()
    (saved / WEIGHTS_NAME).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"{WEIGHTS_NAME}: not a valid safetensors file: "):
        VQTokenizer.from_pretrained(saved)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda weights: [weights.pop(k) for k in list(weights) if "mid" in k],
            r"does not match the config: \d+ missing tensors: encoder\.mid.*, \.\.\.$",
        ),
        (
            lambda weights: weights.update(extra=torch.zeros(1)),
            r"1 unknown tensor: extra$",
        ),
        (
            lambda weights: weights["quantize.embedding.weight"][7].fill_(torch.nan),
            rf"{WEIGHTS_NAME}: quantize\.embedding\.weight holds NaN or infinity",
        ),
        (
            lambda weights: weights["quantize.embedding.weight"][7].fill_(-torch.inf),
            "holds NaN or infinity",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(saved, edit, message):
    weights = load_file(saved / WEIGHTS_NAME)
    edit(weights)
    save_file(weights, saved / WEIGHTS_NAME)
    with pytest.raises(ValueError, match=message):
        VQTokenizer.from_pretrained(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"in_channels": 5},
            r"in_channels and out_channels must be the same 3 \* p \* p .*, got 5 and",
        ),
        ({"out_channels": 4}, r"in_channels and out_channels must be the same .*, got 3 and 4$"),
    ],
)
def test_models_of_other_channels_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        VQTokenizer(convolutional_model(**changes))
