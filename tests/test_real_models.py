"""Released models end to end: pixels, actions or text in, mp4 out; conversion; what is refused.

The checkpoints are the fixtures (random weights in the released wrappings) and small random models
of the families' shapes; frames come from files written here.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import T5Config, T5EncoderModel

import diagd
from diagd.data.video import read_video, resize, write_image, write_video
from diagd.decoding.sampling import SamplingOptions
from diagd.families.checkpoints import find_model, load_model, save_model
from diagd.families.clip_files import ClipFile
from diagd.families.cosmos import CosmosTokenizer
from diagd.families.defaults import GenerationDefaults, visual_ranges
from diagd.families.wham.actions import WHAMActions
from diagd.families.wham.tokenizer import ViTVQGAN, ViTVQGANConfig, WHAMTokenizer
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.world_folder import load_parts
from diagd.tokenizers.text import encode_text, read_embedding
from tests.families.cosmos.scripts import write_scripts
from tests.golden import FIXTURES, golden
from tests.models.tiny import tiny_fields
from tests.tokenizers.rectangles import rectangles
from tests.worlds import smooth_frames

RELEASED = ["wham_tiny", "wham_tiny_v2", "mineworld_tiny_v256"]


def wham_recording(name, clip, path):
    """Write the golden clip as an npz whose newest frames are still to be dreamt."""
    data = golden(f"{name}/golden.safetensors")
    images = golden(f"{name}/golden_tokenizer.safetensors")["images_u8"][clip, 1:]
    actions = torch.cat([data["actions"][clip, 1:], data["dream_future_actions"][clip]])
    images = torch.cat([images, torch.zeros(3, *images.shape[1:], dtype=torch.uint8)])
    np.savez(path, images=images.numpy(), actions=actions.numpy())
    return data["dream_images_u8"][clip].movedim(1, -1)


@pytest.mark.parametrize("clip", [0, 1])
@pytest.mark.parametrize("name", ["wham_tiny", "wham_tiny_v2"])
def test_wham_dreams_the_pixels_that_its_own_code_dreams(name, clip, tmp_path):
    expected = wham_recording(name, clip, tmp_path / "clip.npz")
    world = VideoGenerator.from_pretrained(FIXTURES / name, backend="eager")
    held = world.defaults.context_frames
    recording = ClipFile("clip", tmp_path / "clip.npz", WHAMActions()).read()
    assert recording.actions is not None
    video = world.generate(
        recording.frames[:held],
        recording.actions[held:],
        3,
        strategy="raster",
        context_actions=recording.actions[1:held],
        sampling=SamplingOptions(),
    )
    assert (video.frames.int() - expected.int()).abs().max() <= 1
    assert video.stats.num_dropped_frames == 2


@pytest.fixture
def minecraft_clip(tmp_path):
    """An ordinary recording: 30 fps, H.264, not the model's size, VPT's action file beside it."""
    write_video(tmp_path / "clip.mp4", smooth_frames(3, 250, 418), fps=30)
    keys = [["key.keyboard.w"], [], ["key.keyboard.space"]]
    lines = [
        {"keyboard": {"keys": pressed}, "mouse": {"dx": 40.0, "dy": 0.0, "buttons": [0]}}
        for pressed in keys
    ]
    (tmp_path / "clip.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "clip.mp4"


def test_mineworld_goes_on_from_an_ordinary_video(minecraft_clip, command, tmp_path):
    outcome = command(
        *("generate", "--model", FIXTURES / "mineworld_tiny_v256", "--prompt", minecraft_clip),
        *("--context-frames", 2, "--frames", 1, "--actions", "forward+camera(0,10)"),
        *("--raster-frames", 0, "--output", tmp_path / "dream.mp4", "--json"),
    )
    assert outcome.code == 0, outcome.err
    assert outcome.document["runs"][0]["num_steps"] == 37
    assert "centre-cropped and scaled to 224x384" in outcome.said
    assert read_video(tmp_path / "dream.mp4").frames.shape == (3, 224, 384, 3)


def cosmos_config(**changes):
    """A small model of Cosmos' kind: 3-D RoPE, qk-norm, 64000 codes, five grids of 2 x 3."""
    fields = tiny_fields(num_action_tokens=0) | {
        "vocab_size": CosmosTokenizer.codebook_size,
        "image_vocab_size": CosmosTokenizer.codebook_size,
        "max_positions": 5 * 2 * 3,
        "grid_height": 2,
        "grid_width": 3,
        "qk_norm": True,
        "position": "rope3d",
        "rope_theta": 500000.0,
    }
    return ModelConfig(**{**fields, **changes})


TEXT = {
    "prefix_length": 1,
    "extra_embeddings": 64,
    "context_size": 16,
    "position_table": True,
    "max_positions": 31,
}


@cache
def tokenizer_files():
    """Return TorchScript files by name, which take most of a second to write."""
    with TemporaryDirectory() as folder:
        write_scripts(Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def write_cosmos(folder, **changes):
    """Write a random Cosmos-shaped folder, and TorchScript tokenizer files beside it."""
    save_model(Transformer.random(cosmos_config(**changes)), folder / "model")
    defaults = {"fps": 25, "context_frames": 9, "num_frames": 24, "overlap": True}
    (folder / "model" / "generation.json").write_text(json.dumps(defaults))
    (folder / "tokenizer").mkdir(exist_ok=True)
    for name, content in tokenizer_files().items():
        (folder / "tokenizer" / name).write_bytes(content)
    return "--model", folder / "model", "--tokenizer", folder / "tokenizer"


@pytest.mark.parametrize(("context", "dreamt"), [(9, 24), (1, 8)])
def test_cosmos_goes_on_from_real_footage(context, dreamt, command, tmp_path):
    """Nine frames are two grids; grids overlap, since no action has to be waited for."""
    write_video(tmp_path / "clip.mp4", smooth_frames(11, 66, 98), fps=30)
    outcome = command(
        *("generate", *write_cosmos(tmp_path), "--prompt", tmp_path / "clip.mp4"),
        *("--context-frames", context, "--frames", dreamt, "--row-lag", 1),
        *("--output", tmp_path / "dream.mp4", "--json"),
    )
    assert outcome.code == 0, outcome.err
    (run,) = outcome.document["runs"]
    grids = dreamt // 8
    assert run["num_steps"] == (grids - 1) * 2 + (2 - 1) + 3
    assert run["num_frames"] == dreamt
    video = read_video(tmp_path / "dream.mp4")
    assert video.frames.shape == (context + dreamt, 32, 48, 3)
    assert video.fps == 25  # Cosmos makes as many: a faster clip is read at its pace


@pytest.mark.parametrize("flags", [("--compare",), ("--raster-frames", 30)])
def test_raster_is_sampled_in_whole_grids(flags, command, tmp_path):
    """Before 16 frames of two grids stands a sample of one grid."""
    write_video(tmp_path / "clip.mp4", smooth_frames(9, 32, 48), fps=25)
    outcome = command(
        *("generate", *write_cosmos(tmp_path), "--prompt", tmp_path / "clip.mp4", *flags),
        *("--frames", 16, "--output", tmp_path / "dream.mp4", "--json"),
    )
    assert outcome.code == 0, outcome.err
    counts = [(run["strategy"], run["num_frames"]) for run in outcome.document["runs"]]
    assert counts == [("raster", 16), ("k=1,d=2", 16)]


def test_a_clip_costs_what_the_logits_of_its_tokens_say(command, tmp_path):
    """Two grids are given, three are priced, behind a token that stands before the clip."""
    changes = {name: TEXT[name] for name in ("prefix_length", "extra_embeddings", "max_positions")}
    _, model, *tokenizer = write_cosmos(tmp_path, **changes)
    (tmp_path / "clips").mkdir()
    write_video(tmp_path / "clips" / "a.mp4", smooth_frames(33, 32, 48), fps=25)
    outcome = command(
        *("evaluate", "--models", f"tiny={model}", *tokenizer, "--clips", tmp_path / "clips"),
        *("--protocol", "cosmos", "--num-clips", 1, "--strategy", "k=1", "--teacher-forced"),
        *("--out", tmp_path / "out", "--json"),
    )
    assert outcome.code == 0, outcome.err
    rows = {row["strategy"]: row for row in outcome.document["rows"]}
    world = diagd.VideoGenerator.from_pretrained(model, tokenizer=tokenizer[-1])
    frames = read_video(tmp_path / "clips" / "a.mp4").frames
    tokens = world.tokenizer.encode(frames).flatten()
    begin = torch.tensor(list(world.config.prefix_ids))
    with torch.no_grad():
        logits = diagd.load_model(model).logits(torch.cat([begin, tokens])[None])[0]
    costs = -logits[:-1].log_softmax(-1).gather(1, tokens[:, None])
    priced = costs[2 * world.config.tokens_per_frame :].mean().item()
    assert len(costs) == len(tokens) == 5 * world.config.tokens_per_frame
    assert rows["raster"]["nll"] == pytest.approx(priced, abs=1e-4)
    assert rows["k=1"]["gap"] != 0
    _, model, *_ = write_cosmos(tmp_path, **TEXT)
    outcome = command(
        *("evaluate", "--models", model, *tokenizer, "--clips", tmp_path / "clips"),
        *("--protocol", "cosmos", "--num-clips", 1, "--out", tmp_path / "b"),
        *("--strategy", "k=1"),
    )
    outcome.assert_refused("needs a text with each clip, and clips come without texts")


def test_cosmos_is_evaluated_under_its_protocol(command, tmp_path):
    """33 frames of a video of another shape, 9 of them given."""
    (tmp_path / "clips").mkdir()
    write_video(tmp_path / "clips" / "a.mp4", smooth_frames(33, 66, 120), fps=30)
    _, model, *tokenizer = write_cosmos(tmp_path)
    outcome = command(
        *("evaluate", "--models", f"tiny={model}", *tokenizer, "--clips", tmp_path / "clips"),
        *("--protocol", "cosmos", "--num-clips", 1, "--strategy", "k=1", "--backend", "eager"),
        *("--out", tmp_path / "out", "--json"),
    )
    assert outcome.code == 0, outcome.err
    rows = {row["strategy"]: row for row in outcome.document["rows"]}
    assert (rows["raster"]["num_steps"], rows["k=1"]["num_steps"]) == (18, 3 * 4)
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["frame_size_px"] == [32, 48]


def test_cosmos_sees_a_picture_fitted_as_its_makers_fit_it(tmp_path):
    """Scaled until it covers the frame, then cropped; others are cropped, then scaled."""
    _, model, _, tokenizer = write_cosmos(tmp_path)
    world = VideoGenerator.from_pretrained(model, backend="eager", tokenizer=tokenizer)
    picture = rectangles(1, size=(45, 81))
    write_image(tmp_path / "photo.png", picture[0])
    start = world.read_prompt(tmp_path / "photo.png", context_frames=1)
    assert start.frames.equal(CosmosTokenizer(None, None).fit_frames(picture, 32, 48))
    assert not start.frames.equal(resize(picture, 32, 48))


def test_attention_to_frames_that_a_tokenizer_joins(command, tmp_path):
    """The third grid of a clip is the seventeenth frame, with those that it is joined to."""
    write_video(tmp_path / "clip.mp4", smooth_frames(18, 32, 48), fps=25)
    flags = "--clips", tmp_path / "clip.mp4", "--frame", 2, "--output", tmp_path / "a.png"
    done = command("attention", *write_cosmos(tmp_path), *flags, "--json")
    assert done.code == 0, done.err
    assert (done.document["grid"], done.document["frame"]) == ("2x3", 2)


def write_t5(folder, size=16):
    """Write a tiny random T5 encoder with a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "red": 4, "door": 5}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = T5Config(vocab_size=8, d_model=size, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5EncoderModel(config).save_pretrained(folder)
    return folder


def test_a_text_leads_the_dream(command, tmp_path):
    write_video(tmp_path / "clip.mp4", smooth_frames(9, 32, 48), fps=25)
    world = write_cosmos(tmp_path, **TEXT)
    encoder = write_t5(tmp_path / "t5")
    states = encode_text("a red door", encoder)
    assert states.shape == (1, 512, 16)
    assert (states[0, :4].abs().sum(-1) > 0).all()  # three words and the end
    assert states[0, 4:].abs().sum() == 0
    save_file({"t5": states[0]}, tmp_path / "said.safetensors")
    assert torch.equal(read_embedding(tmp_path / "said.safetensors"), states)
    dreams = {}
    for name, flags in {
        "said": ("--text", "a red door", "--text-encoder", encoder),
        "read": ("--text-embedding", tmp_path / "said.safetensors"),
        "other": ("--text", "a", "--text-encoder", encoder),
    }.items():
        outcome = command(
            *("generate", *world, "--prompt", tmp_path / "clip.mp4", "--frames", 8, *flags),
            *("--output", tmp_path / f"{name}.mp4"),
        )
        assert outcome.code == 0, outcome.err
        dreams[name] = read_video(tmp_path / f"{name}.mp4").frames
    assert torch.equal(dreams["said"], dreams["read"])


def test_wham_shaped_models_dream_from_footage_of_an_odd_size(command, tmp_path):
    config = ViTVQGANConfig(18, 28, 5, 16, 1, 8, 6, 40)
    WHAMTokenizer(ViTVQGAN(config)).save_pretrained(tmp_path / "model" / "tokenizer")
    model = Transformer.random(find_model(FIXTURES / "wham_tiny_v2").config)
    save_model(model, tmp_path / "model")
    (tmp_path / "model" / "actions.json").write_text('{"kind": "WHAM"}')
    (tmp_path / "model" / "generation.json").write_text('{"context_frames": 1, "first_id": 1}')
    write_video(tmp_path / "clip.mp4", smooth_frames(5, 34, 50), fps=30)
    outcome = command(
        *("generate", "--model", tmp_path / "model", "--prompt", tmp_path / "clip.mp4"),
        *("--frames", 3, "--actions", "button1*2,none", "--output", tmp_path / "dream.mp4"),
    )
    assert outcome.code == 0, outcome.err
    assert read_video(tmp_path / "dream.mp4").frames.shape == (4, 18, 28, 3)


def test_only_the_first_token_of_a_frame_cannot_be_0():
    config = cosmos_config(grid_height=3, grid_width=5, image_vocab_size=64)
    ranges = visual_ranges(GenerationDefaults(first_id=1), config)
    assert isinstance(ranges, torch.Tensor)
    assert (ranges.shape, ranges.dtype) == ((3, 5, 2), torch.int64)
    assert ranges[0, 0].tolist() == [1, 64]
    assert (ranges.flatten(0, 1)[1:] == torch.tensor([0, 64])).all()
    assert visual_ranges(GenerationDefaults(), config) == (0, 64)


@pytest.mark.parametrize("name", RELEASED)
def test_a_converted_world_is_the_same_world(name, command, tmp_path):
    outcome = command("convert", FIXTURES / name, tmp_path / "ours", "--json")
    assert outcome.code == 0, outcome.err
    before, after = load_parts(FIXTURES / name), load_parts(tmp_path / "ours")
    assert after.model.config == before.model.config
    assert after.defaults == before.defaults
    assert after.vocabulary == before.vocabulary
    for key, weight in before.model.state_dict().items():
        assert torch.equal(after.model.state_dict()[key], weight)
    config = before.model.config
    frames = smooth_frames(
        2, *before.tokenizer.frame_size_px(config.grid_height, config.grid_width)
    )
    tokens = before.tokenizer.encode(frames)
    assert torch.equal(after.tokenizer.encode(frames), tokens)
    assert torch.equal(after.tokenizer.decode(tokens), before.tokenizer.decode(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conversion_keeps_the_type_of_the_weights(dtype, command, tmp_path):
    weights = torch.load(FIXTURES / "cosmos_tiny_b" / "model.pt", weights_only=True)
    torch.save({key: value.to(dtype) for key, value in weights.items()}, tmp_path / "model.pt")
    shutil.copy(FIXTURES / "cosmos_tiny_b" / "config.json", tmp_path)
    outcome = command("convert", tmp_path, tmp_path / "ours", "--json")
    assert (outcome.code, outcome.document["family"]) == (0, "Cosmos")
    found = find_model(tmp_path / "ours")
    assert found.family.name == "diagd"
    assert {weight.dtype for weight in found.weights.values()} == {dtype}
    expected = load_model(tmp_path / "model.pt", dtype=dtype).state_dict()
    assert all(torch.equal(found.weights[key], value) for key, value in expected.items())


def test_a_converted_folder_is_not_overwritten_unasked(command, tmp_path):
    arguments = "convert", FIXTURES / "cosmos_tiny_a", tmp_path / "ours"
    assert command(*arguments).code == 0
    command(*arguments).assert_refused("holds a checkpoint already: give --force to replace it")
    assert command(*arguments, "--force").code == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--text", "a door"), "this model takes no text"),
        (("--context-frames", 4), "context_frames must be 1 or 1 more than a multiple of 8"),
        (("--frames", 12), "num_frames must be a multiple of 8"),
        (("--frames", 32), "9 frames and 32 new ones are 6 grids, the model holds 5"),
        (("--actions", "forward"), "this model takes no actions"),
    ],
)
def test_what_cosmos_cannot_do_is_refused(flags, message, command, tmp_path):
    write_video(tmp_path / "clip.mp4", smooth_frames(9, 32, 48), fps=25)
    prompt = "--prompt", tmp_path / "clip.mp4"
    output = "--output", tmp_path / "dream.mp4"
    outcome = command("generate", *write_cosmos(tmp_path), *prompt, *output, *flags)
    outcome.assert_refused(message)
    assert not (tmp_path / "dream.mp4").exists()


def test_a_text_model_wants_its_text(command, tmp_path):
    write_video(tmp_path / "clip.mp4", smooth_frames(9, 32, 48), fps=25)
    start = "generate", *write_cosmos(tmp_path, **TEXT), "--prompt", tmp_path / "clip.mp4"
    output = "--output", tmp_path / "dream.mp4"
    command(*start, *output).assert_refused("this model needs a text: give --text with --text-enc")
    save_file({"t5": torch.zeros(4, 9)}, tmp_path / "narrow.safetensors")
    flags = "--text-embedding", tmp_path / "narrow.safetensors"
    command(*start, *output, *flags).assert_refused("text embeddings must have width 16, got 9")
    flags = "--text", "a door", "--text-encoder", tmp_path / "nowhere"
    command(*start, *output, *flags).assert_refused("text encoder folder not found: .*nowhere")
    flags = "--text", "a door", "--text-encoder", tmp_path
    command(*start, *output, *flags).assert_refused(": not a T5 encoder: ")


def test_tokenizers_that_are_not_there_are_asked_for(command, tmp_path):
    save_model(Transformer.random(cosmos_config()), tmp_path / "model")
    output = "--output", tmp_path / "dream.mp4"
    message = "tokenizer not found, give its folder as --tokenizer"
    command("generate", "--model", tmp_path / "model", *output).assert_refused(message)
    for name in ("model.ckpt", "config.yaml"):
        shutil.copy(FIXTURES / "mineworld_tiny" / name, tmp_path)
    message = "tokenizer not found: give its folder as --tokenizer"
    command("generate", "--model", tmp_path / "model.ckpt", *output).assert_refused(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_frames": 2}, r"clip\.npz: expected at least 3 frames"),
        ({"bins": 11}, r"clip\.npz.*(bin|stick|0 to 10)"),
        ({"keys": ("pictures", "actions")}, r"clip\.npz.*images"),
    ],
)
def test_recordings_that_do_not_fit_are_refused(changes, message, command, tmp_path):
    num_frames = changes.get("num_frames", 6)
    actions = np.zeros((num_frames, 16), np.float32)
    actions[:, 12:] = changes.get("bins", 5)
    images = np.zeros((num_frames, 3, 30, 40), np.uint8)
    names = changes.get("keys", ("images", "actions"))
    arrays: dict[str, Any] = dict(zip(names, (images, actions), strict=True))
    np.savez(tmp_path / "clip.npz", **arrays)
    outcome = command(
        *("generate", "--model", FIXTURES / "wham_tiny", "--prompt", tmp_path / "clip.npz"),
        *("--frames", 2, "--output", tmp_path / "dream.mp4"),
    )
    outcome.assert_refused(message)


def test_an_unknown_word_of_an_action_is_named(minecraft_clip, command, tmp_path):
    outcome = command(
        *("generate", "--model", FIXTURES / "mineworld_tiny_v256", "--prompt", minecraft_clip),
        *("--frames", 1, "--actions", "forward+fly", "--output", tmp_path / "dream.mp4"),
    )
    outcome.assert_refused("unknown action 'fly'")


def test_defaults_of_another_version_are_refused(tmp_path):
    write_cosmos(tmp_path)
    (tmp_path / "model" / "generation.json").write_text('{"mood": "calm"}')
    with pytest.raises(ValueError, match=r"generation\.json: not generation defaults: .*mood"):
        load_parts(tmp_path / "model", tokenizer=tmp_path / "tokenizer")
