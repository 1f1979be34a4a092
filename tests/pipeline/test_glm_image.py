"""GLM-Image from a folder of its release: a text becomes tokens, and these a picture."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import GlmImageForConditionalGeneration

import diagd
from diagd.backends.prepare import prepare
from diagd.data.video import read_video
from diagd.pipeline.glm_image import GlmImage, grids_of
from tests.pipeline.glm_image import (
    CODES,
    END,
    STAGE,
    START,
    write_painter,
    write_processor,
    write_release,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:diffusers")
SIZE_PX, SIZE = (192, 256), "192x256"
STEPS = (13 - 1) + 18 + (6 - 1) + 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_release(tmp_path_factory.mktemp("glm") / "GLM-Image")


@pytest.fixture(scope="module")
def glm(folder):
    return GlmImage.from_pretrained(folder)


@pytest.fixture
def stage(tmp_path):
    return write_release(tmp_path / "GLM-Image", painter=False)


def picture(height, width):
    pixels = np.random.default_rng(height).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize(
    ("size", "preview", "tokens", "steps"),
    [
        ((512, 512), (16, 16), 512, (62, 92)),
        ((1024, 1024), (16, 16), 1280, (94, 140)),
        ((1152, 768), (19, 13), 1111, (90, 143)),
        ((1024, 1152), (15, 16), 1392, (97, 142)),
        ((768, 1360 - 16), (12, 21), 1260, (97, 131)),
        ((2048, 2048), (16, 16), 4352, (158, 236)),
    ],
)
def test_sizes_have_the_grids_and_steps_of_the_table(size, preview, tokens, steps):
    grids = [one.grid for one in grids_of(*size)]
    assert (grids[0].height, grids[0].width) == preview
    assert sum(one.num_tokens for one in grids) == tokens
    for row_lag, expected in zip((1, 2), steps, strict=True):
        each = (diagd.DiagonalSchedule(one, row_lag).num_steps for one in grids)
        assert sum(each) == expected


def test_a_text_becomes_a_picture_of_its_tokens(glm):
    text, steps = 'a red house "24"', {"num_inference_steps": 2}
    (made,) = glm.generate(text, SIZE_PX, seed=3, **steps)
    assert made.tokens.shape == (6, 8)
    assert made.preview is not None
    assert made.preview.shape == (13, 18)
    assert max(int(made.tokens.max()), int(made.preview.max())) < CODES
    assert made.stats.num_steps == STEPS
    ids = made.prior_token_ids.view(12, 16)
    assert torch.equal(ids[1::2, ::2], made.tokens)
    noise = torch.Generator().manual_seed(3)
    theirs = glm.painter(
        text,
        height=192,
        width=256,
        prior_token_ids=made.prior_token_ids,
        generator=noise,
        output_type="np",
        **steps,
    )
    expected = torch.from_numpy((theirs.images[0] * 255).round().astype("uint8"))
    assert torch.equal(made.pixels, expected)


def test_the_prompt_is_that_of_the_pipeline(glm):
    """Text, both sizes, image start; behind source pictures their tokens and one size."""
    asked = glm._ask("a red house", SIZE_PX, [])
    words = glm.processor.tokenizer.convert_ids_to_tokens(asked.prompt)
    expected = ["a", "red", "house", "<sop>", "6", "8", "<eop>", "<sop>", "13", "18", "<eop>"]
    assert words == [*expected, f"<|dit_token_{START}|>"]
    asked = glm._ask("a house", SIZE_PX, [picture(96, 160), picture(64, 64)])
    (first, second), prompt = asked.sources, asked.prompt
    assert (first.frame.height, first.frame.width) == (3, 5)
    assert (second.frame.height, second.frame.width) == (2, 2)
    assert prompt[first.start - 1] == prompt[second.start - 1] == prompt[-1] == START
    assert prompt[first.end] == prompt[second.end] == END
    assert max(int(one.max()) for one in asked.source_tokens()) < CODES
    assert asked.grids == [diagd.FrameFormat(6, 8)]


def test_source_pictures_become_a_picture(glm):
    sources = [picture(96, 160), np.asarray(picture(64, 64))]
    (made,) = glm.generate("a house", SIZE_PX, sources, num_inference_steps=2)
    assert made.preview is None
    assert made.stats.num_steps == (6 - 1) + 8
    assert made.pixels.shape == (192, 256, 3)
    (other,) = glm.generate("a house", SIZE_PX, sources[:1], num_inference_steps=2)
    assert not torch.equal(made.tokens, other.tokens)


def test_texts_of_a_batch_are_each_as_alone(glm):
    texts = ["a red house", "a"]
    both = glm.generate(texts, SIZE_PX, seed=[7, 5], num_inference_steps=2)
    for made, text, seed in zip(both, texts, (7, 5), strict=True):
        (alone,) = glm.generate(text, SIZE_PX, seed=seed, num_inference_steps=2)
        assert torch.equal(made.tokens, alone.tokens)
        assert torch.equal(made.pixels, alone.pixels)


def test_tokens_are_those_of_its_class(folder):
    """Its own reading of source pictures, and its own logits."""
    theirs = GlmImageForConditionalGeneration.from_pretrained(folder / "vision_language_encoder")
    glm = GlmImage.from_pretrained(folder, dtype="float32")
    source, text = picture(96, 160), "a house"
    asked = glm._ask(text, SIZE_PX, [source])
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
    said = glm.processor.apply_chat_template(chat, tokenize=False)
    read = glm.processor([source], [said], target_h=192, target_w=256, return_tensors="pt")
    pixels, sizes = read["pixel_values"], read["image_grid_thw"][:1]
    with torch.inference_mode():
        (features,) = theirs.get_image_features(pixels, sizes).pooler_output
        as_rows = features[None] if features.ndim > 2 else features  # by transformers' version
        ids = theirs.get_image_tokens(as_rows, sizes)
    assert torch.equal(asked.source_tokens()[0].flatten(), ids)
    out = diagd.generate_grids(
        diagd.HuggingFaceModel(theirs),
        [asked.prompt],
        [asked.grids],
        "k=1",
        glm.defaults.sampling(None, (0, CODES)),
        4,
        sections=[asked.sources],
    )
    made = glm.generate(text, SIZE_PX, [source], seed=4, num_inference_steps=1)
    assert torch.equal(made[0].tokens, out.tokens[0][0])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_int8_is_rounded_from_the_type_of_the_files(stage, stored):
    path = stage / "vision_language_encoder" / "model.safetensors"
    weights = {name: tensor.to(stored) for name, tensor in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})
    made = GlmImage.from_pretrained(stage, dtype="int8")
    assert (made.dtype, made.backend) == ("int8", "native")
    assert next(made.encoder.parameters()).dtype == stored
    wide = diagd.load_model(path.parent)  # in float32
    same = replace(made, model=prepare(wide, "native", int8=True)[0])
    tokens = [one.generate("a", SIZE_PX)[0].tokens for one in (made, same)]
    assert torch.equal(*tokens)


def test_tokens_are_drawn_as_the_release_says_out_of_all_codes(glm):
    """transformers' own generate adds a top_k of 50."""
    defaults = glm.defaults
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.9, 0.75, None)
    raster = glm.generate("a", SIZE_PX, strategy="raster", num_inference_steps=1)
    exact = glm.generate("a", SIZE_PX, strategy="exact,lanes=8", num_inference_steps=1)
    assert torch.equal(raster[0].tokens, exact[0].tokens)


@pytest.fixture
def draw(command, folder, tmp_path, monkeypatch):
    """Run `diagd generate` on the release, where an empty folder is."""
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")

    def run(*flags, model=folder, text="a red house"):
        return command("generate", "--model", model, "--text", text, "--size", SIZE, *flags)

    return run


def test_the_command_writes_a_picture(draw, tmp_path):
    report = draw("-k", 1, "--images", 2, "--out", "house.png", "--json").document
    assert report["runs"][0]["num_steps"] == STEPS
    assert report["pictures"] == ["house-0.png", "house-1.png"]
    assert read_video("house-1.png").frames.shape == (1, 192, 256, 3)
    picture(96, 160).save(tmp_path / "source.png")
    narrow = "--dtype", "int8", "--backend", "native"
    assert draw("--image", tmp_path / "source.png", "--guidance", 1, *narrow).code == 0
    assert read_video("dream.png").frames.shape == (1, 192, 256, 3)


def test_without_the_second_stage_the_command_writes_tokens(draw, stage, tmp_path):
    report = draw("--out", "house.png", "--json", model=stage).document
    assert report["tokens"] == ["house.safetensors"]
    written = load_file("house.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in written.items()}
    assert shapes == {"tokens": (6, 8), "prior_token_ids": (1, 192), "preview": (13, 18)}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["house.safetensors"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--size", "190x256"], "height must be a multiple of 32 pixels, got 190"),
        (["--size", "256x0"], "width must be a multiple of 32 pixels, got 0"),
        (["--size", "16384x32"], "a picture of 16384x32 pixels is too narrow for a preview"),
        (["--size", "1024"], "size must look like HEIGHTxWIDTH .*, got '1024'"),
        (["-k", "20"], r"row_lag must be in \[1, width=18\], got 20"),
        (["--frames", "2"], "frames is for other models than GLM-Image"),
        (["--backend", "webgpu"], "backend webgpu does not support norms behind layers"),
        (["--backend", "eager", "--dtype", "int8"], "int8 needs backend native or webgpu on the"),
        (["--text", " "], "expected a text, got an empty one"),
        (
            ["--model", "doom"],
            "size is for GLM-Image and MammothModa2; others have one of their own",
        ),
        (["--temperature", "-1"], "temperature must be 0 or more"),
    ],
)
def test_flags_that_do_not_fit_are_refused(draw, tmp_path, flags, message):
    draw(*flags).assert_refused(message)
    assert not list((tmp_path / "out").iterdir())


def test_a_text_is_needed(command, folder):
    done = command("generate", "--model", folder)
    done.assert_refused("GLM-Image makes pictures of texts: give --text")


def test_other_commands_say_that_a_pipeline_is_none_of_theirs(folder):
    with pytest.raises(ValueError, match="a pipeline of diffusers, GlmImagePipeline; of these"):
        diagd.load_model(folder)


def test_what_is_missing_is_named(stage):
    shutil.move(stage / "processor", stage / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"text tokenizer and processor not found: .*GLM"):
        GlmImage.from_pretrained(stage)
    shutil.move(stage / "elsewhere", stage / "processor")
    (stage / "transformer").mkdir()
    with pytest.raises(FileNotFoundError, match=r"vae of GLM-Image not found: .*vae"):
        GlmImage.from_pretrained(stage)
    weights = stage / "vision_language_encoder" / "model.safetensors"
    index = {"weight_map": dict.fromkeys(load_file(weights), "model-00001-of-00001.safetensors")}
    weights.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    weights.rename(weights.with_name("elsewhere"))
    with pytest.raises(FileNotFoundError, match=r"not found: .*model-00001-of-00001.safetensors"):
        GlmImage.from_pretrained(stage)


def test_weights_of_another_revision_are_refused(stage):
    path = stage / "vision_language_encoder" / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.old"] = weights.pop("lm_head.weight")
    save_file(weights, path, {"format": "pt"})
    message = "1 missing tensor: lm_head.weight; 1 unknown tensor: lm_head.old"
    with pytest.raises(ValueError, match=message):
        GlmImage.from_pretrained(stage)
    weights["lm_head.weight"] = weights.pop("lm_head.old")[:70].clone()
    save_file(weights, path, {"format": "pt"})
    message = r"1 mis-shaped tensor: lm_head.weight \(expected \(72, 128\), got \(70, 128\)\)"
    with pytest.raises(ValueError, match=message):
        GlmImage.from_pretrained(stage)


def test_another_models_processor_is_refused(stage):
    write_processor(stage / "processor", start=START + 2)
    with pytest.raises(ValueError, match="its image start is id 66, the model's 64"):
        GlmImage.from_pretrained(stage)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 8}, "channels of vae are 8, expected 4: another model's"),
        ({"codes": 60}, "codes of transformer are 60, expected 64: another model's"),
        ({"blocks": 3}, "pixels of a patch are 16, expected 32: another model's"),
    ],
)
def test_another_models_second_stage_is_refused(tmp_path, change, message):
    folder = write_release(tmp_path / "GLM-Image", painter=False)
    write_painter(folder, **change)
    with pytest.raises(ValueError, match=message):
        GlmImage.from_pretrained(folder)


def test_another_pipeline_is_refused(tmp_path):
    shutil.copytree(STAGE, tmp_path / "other")
    (tmp_path / "other" / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(ValueError, match=r"model_index.json of GlmImagePipeline, got FluxPipeline"):
        GlmImage.from_pretrained(tmp_path / "other")
