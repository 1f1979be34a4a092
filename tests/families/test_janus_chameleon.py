"""Janus and Chameleon in miniature in our own decoder, against their classes in transformers."""

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    JanusVQVAEConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.janus.modeling_janus import JanusVQVAEDecoder

import diagd
from diagd.backends.native.model import NativeModel
from diagd.families.checkpoints import find_model, load_text, load_tokenizer
from diagd.families.janus import JanusPrompts
from diagd.families.presets import PRESETS
from diagd.models.guidance import GuidedModel
from diagd.models.transformer import Transformer
from diagd.pipeline.world_folder import load_parts
from tests import oracles
from tests.families.images import check_int8, check_prices
from tests.models.architectures import (
    BOS,
    FIRST_VISUAL,
    IMAGE_END,
    IMAGE_START,
    NUM_VISUAL,
    PAD,
    SIDE,
    architecture,
)
from tests.models.test_image_models import (
    RANGES,
    chameleon_words,
    janus_processor,
    own_images,
    own_logits,
    prompts,
)
from tests.models.tiny import random_tokens
from tests.worlds import smooth_frames

NAMES = ("janus", "chameleon")
SCALE = 2.5
GRIDS = {"janus": diagd.TokenGrid(1, SIDE, SIDE), "chameleon": diagd.TokenGrid(2, 3, 5)}
VISUAL = diagd.SamplingOptions(valid_range=(0, NUM_VISUAL))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Write both as transformers does, Chameleon's weights in several files."""
    written = {}
    for name in NAMES:
        written[name] = tmp_path_factory.mktemp(name)
        sharded = {"max_shard_size": "60KB"} if name == "chameleon" else {}
        architecture(name).save_pretrained(written[name], **sharded)
    janus_processor().save_pretrained(written["janus"])
    chameleon_words().save_pretrained(written["chameleon"])
    return written


def prepared(folders, name, backend):
    model = diagd.load_model(folders[name])
    return NativeModel(model) if backend == "native" else model


def to_ours(name, ids):
    """Images first, then the whole vocabulary."""
    low, high = RANGES[name]
    return torch.where((low <= ids) & (ids < high), ids - low, ids + NUM_VISUAL)


def to_theirs(name, ids):
    return torch.where(ids < NUM_VISUAL, ids + RANGES[name][0], ids - NUM_VISUAL)


def image_logits(name):
    """The class's logits of images, of our ids."""
    low, high = RANGES[name]

    def logits_fn(tokens, positions, visible):
        return own_logits(name)(to_theirs(name, tokens), positions, visible)[..., low:high]

    return logits_fn


@pytest.mark.proves("Janus, Chameleon", "logits")
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_are_those_of_the_class(name, folders):
    model = diagd.load_model(folders[name])
    text_ids = len(architecture(name).get_input_embeddings().weight)
    assert (model.vocab_size, model.num_embeddings) == (NUM_VISUAL, NUM_VISUAL + text_ids)
    tokens, positions = random_tokens(2, 41, vocab_size=model.num_embeddings), torch.arange(41)
    expected = image_logits(name)(tokens, positions, torch.ones(41, 41).tril().bool())
    torch.testing.assert_close(model.logits(tokens), expected, atol=1e-4, rtol=0)
    assert expected.std() > 1


def images(name, model, schedule, guided, grid=None):
    given, unconditional = (to_ours(name, prompt) for prompt in prompts())
    if guided:
        model = GuidedModel(model, unconditional, given.shape[1], SCALE)
    out = diagd.generate_tokens(
        model, given, schedule, context_frames=0, grid=grid or GRIDS[name], sampling=VISUAL
    )
    return out.tokens


@pytest.mark.proves("Janus, Chameleon", "native", "guidance", "raster")
@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize(
    ("name", "guided"), [("janus", True), ("chameleon", False), ("chameleon", True)]
)
def test_raster_tokens_are_those_of_its_own_loop(name, guided, backend, folders):
    ours = images(name, prepared(folders, name, backend), "raster", guided)
    given, unconditional = prompts()
    expected = to_ours(name, own_images(name, given, unconditional if guided else None))
    assert torch.equal(ours.flatten(1), expected)
    assert len(expected.unique()) > 3


@pytest.mark.proves("Janus, Chameleon", "native", "guidance", "diagonals")
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_diagonals_are_those_of_the_oracle(name, guided, folders):
    given, unconditional = (to_ours(name, prompt) for prompt in prompts())
    full, length = image_logits(name), given.shape[1]

    def logits_fn(tokens, positions, visible):
        logits = full(tokens, positions, visible)
        if guided:
            theirs = torch.where(
                positions < length, unconditional[:, positions.clamp(max=length - 1)], tokens
            )
            other = full(theirs, positions, visible)
            logits = other + SCALE * (logits - other)
        return logits

    expected = oracles.diagonal_reference(logits_fn, given, 2, 3, 5, row_lag=2, frame_lag=4)
    grid = diagd.TokenGrid(2, 3, 5)
    for backend in ("eager", "native"):
        model = prepared(folders, name, backend)
        ours = images(name, model, diagd.DiagonalSchedule(grid, 2, 4), guided, grid)
        assert torch.equal(ours, expected)


@pytest.mark.proves("Janus, Chameleon", "evaluate")
@pytest.mark.parametrize("name", NAMES)
def test_prices_are_those_of_a_decoder_without_a_cache(name, folders, command, tmp_path):
    if name == "chameleon":
        write_vqgan(folders[name])
    check_prices(command, folders[name], tmp_path / "out", image_logits(name), "a red house")


@pytest.mark.proves("Janus, Chameleon", "int8")
@pytest.mark.parametrize("name", NAMES)
def test_int8_keeps_close_to_float32(name, folders):
    check_int8(folders[name], to_ours(name, prompts()[0]))


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_folder_is_the_same_model(name, folders, command, tmp_path):
    if name == "chameleon":
        write_vqgan(folders[name])
    outcome = command("convert", folders[name], tmp_path / "ours", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["family"].lower() == name
    ours, tokens = load_parts(tmp_path / "ours"), random_tokens(1, 9, vocab_size=60)
    released = load_parts(folders[name])
    assert torch.equal(ours.model.logits(tokens), released.model.logits(tokens))
    assert ours.defaults == released.defaults
    assert ours.defaults.guidance > 1
    pictures = torch.arange(15).view(1, 3, 5)
    painted = load_tokenizer(tmp_path / "ours" / "tokenizer").decode(pictures)
    assert torch.equal(painted, released.tokenizer.decode(pictures))


def test_files_under_deepseeks_names_are_read(folders, tmp_path):
    renamed = {
        "model.language_model.": "language_model.model.",
        "model.vqmodel.": "gen_vision_model.",
        "model.generation_embeddings.": "gen_embed.",
        "model.generation_aligner.fc1.": "gen_aligner.layers.0.",
        "model.generation_aligner.hidden_layers.0.": "gen_aligner.layers.2.",
        "model.generation_head.proj_out.": "gen_head.output_mlp_projector.",
        "model.generation_head.": "gen_head.",
        "model.": "",
        "lm_head.": "language_model.lm_head.",
    }
    tensors = {}
    for name, tensor in architecture("janus").state_dict().items():
        theirs = next(theirs for theirs in renamed if name.startswith(theirs))
        tensors[renamed[theirs] + name.removeprefix(theirs)] = tensor
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    side = json.loads((folders["janus"] / "config.json").read_text())
    config = {"model_type": "multi_modality", "language_config": side["text_config"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected, found = find_model(folders["janus"]), find_model(tmp_path)
    assert found.config.grid_height == 384 // 16
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in found.weights.items():
        assert torch.equal(weight, expected.weights[name]), name


@pytest.mark.proves("Janus", "pixels")
@torch.no_grad()
def test_pictures_of_janus_are_those_of_its_class(folders):
    theirs, ours = deepcopy(architecture("janus").model.vqmodel), load_parts(folders["janus"])
    codes = theirs.quantize.embedding.weight
    codes.copy_(torch.nn.functional.normalize(codes))  # as DeepSeek's code compares them
    frames = smooth_frames(2, 12, 20)
    pixels = frames.movedim(-1, 1) / 127.5 - 1
    expected = theirs.encode(pixels, return_dict=True).image_tokens.view(2, 3, 5)
    assert torch.equal(ours.tokenizer.encode(frames), expected)
    assert len(expected.unique()) > 1
    tokens = random_tokens(2, SIDE, SIDE, vocab_size=NUM_VISUAL)
    expected = architecture("janus").decode_image_tokens(tokens.flatten(1)) * 127.5 + 127.5
    painted = ours.tokenizer.decode(tokens)
    assert ours.tokenizer.frame_size_px(3, 5) == (12, 20)
    assert (painted - expected.clamp(0, 255)).abs().max() < 0.51  # rounded


def _decoder_of_taming() -> JanusVQVAEDecoder:
    """Chameleon's, which its class lacks, is Janus's without attention in the blocks."""
    sizes = {"base_channels": 32, "latent_channels": 4, "channel_multiplier": [1, 1]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        decoder = JanusVQVAEDecoder(JanusVQVAEConfig(**sizes, num_res_blocks=1))
    for block in decoder.up:
        block.attn = torch.nn.ModuleList()
    return decoder.eval()


def write_vqgan(folder: Path) -> Path:
    """Write Meta's file: the decoder's blocks begin with the largest, and a part of training."""
    tensors = dict(architecture("chameleon").model.vqmodel.state_dict())
    for name, tensor in _decoder_of_taming().state_dict().items():
        for theirs, other in (("up.0.", "up.1."), ("up.1.", "up.0.")):
            if name.startswith(theirs):
                name = other + name.removeprefix(theirs)
                break
        tensors[f"decoder.{name}"] = tensor
    path = folder / "tokenizer" / "vqgan.ckpt"
    path.parent.mkdir(exist_ok=True)
    torch.save({"state_dict": tensors | {"loss.discriminator.main.0.weight": codes()}}, path)
    return path


def write_released(
    folder: Path, model: Any, ids: dict[str, int], words: PreTrainedTokenizerFast, **changes: Any
) -> Path:
    """Write a model of Chameleon's class with its tokenizers, as makers of others do."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["vocabulary_map"] |= ids
    (folder / "config.json").write_text(json.dumps(config | changes))
    words.save_pretrained(folder)
    write_vqgan(folder)
    return folder


def codes():
    return architecture("chameleon").model.vqmodel.quantize.embedding.weight.detach()


@pytest.mark.proves("Chameleon", "pixels")
@torch.no_grad()
def test_pictures_of_chameleon_are_those_of_its_parts(folders):
    write_vqgan(folders["chameleon"])
    tokenizer, theirs = load_parts(folders["chameleon"]).tokenizer, architecture("chameleon")
    frames = smooth_frames(2, 6, 10)
    pixels = frames.movedim(-1, 1) / 127.5 - 1
    encoded = theirs.model.vqmodel.encode(pixels, return_dict=True).image_tokens
    assert torch.equal(tokenizer.encode(frames), encoded.view(2, 3, 5))
    tokens = random_tokens(2, 3, 5, vocab_size=NUM_VISUAL)
    latents = theirs.model.vqmodel.post_quant_conv(codes()[tokens].movedim(-1, 1).contiguous())
    expected = _decoder_of_taming()(latents).movedim(1, -1) * 127.5 + 127.5
    assert (tokenizer.decode(tokens) - expected.clamp(0, 255)).abs().max() < 0.51


@pytest.mark.proves("Janus", "text")
def test_a_text_makes_the_image_of_the_class(folders, command, tmp_path):
    """Janus's processor and its own loop, guided; then the same at the command line."""
    world = diagd.VideoGenerator.from_pretrained(folders["janus"])
    chat = [{"role": "user", "content": [{"type": "text", "text": "a red house"}]}]
    processor: Any = janus_processor()
    said = processor.apply_chat_template(chat, add_generation_prompt=True)
    prompt = processor(text=said, generation_mode="image", return_tensors="pt").input_ids
    assert world.text is not None
    ids = world.text("a red house")
    assert torch.equal(to_theirs("janus", ids.prompt), prompt)
    expected = to_ours("janus", own_images("janus", prompt, scale=5.0))
    image = world.generate(text="a red house", strategy="raster", sampling=diagd.SamplingOptions())
    assert torch.equal(image.tokens.flatten(1), expected)
    assert len(expected.unique()) > 3
    base = "--model", folders["janus"], "--text", "a red house", "--dtype", "float32"
    flags = "--temperature", 0, "--strategy", "raster", "--output", tmp_path / "0.png"
    outcome = command("generate", *base, *flags)
    assert outcome.code == 0, outcome.err
    with Image.open(tmp_path / "0.png") as written:
        assert torch.equal(torch.tensor(list(written.tobytes())), image.frames.flatten())


def test_prompts_of_folders_under_deepseeks_names_need_no_template(folders, tmp_path):
    words: Any = janus_processor().tokenizer
    words.chat_template = None
    words.save_pretrained(tmp_path)
    ids = JanusPrompts(tmp_path, find_model(folders["janus"]))("a red house")
    spoken = words("<|User|>: a red house\n\n<|Assistant|>:<boi>").input_ids
    assert to_theirs("janus", ids.prompt).tolist() == [spoken]
    assert spoken[-1] == IMAGE_START
    without = [BOS, *[PAD] * (len(spoken) - 2), IMAGE_START]
    assert to_theirs("janus", ids.unconditional).tolist() == [without]


@pytest.mark.proves("Chameleon", "text")
def test_a_text_makes_the_image_of_chameleon(folders):
    """Without its text the prompt is shorter; Meta's code has BOS and image start there."""
    write_vqgan(folders["chameleon"])
    world = diagd.VideoGenerator.from_pretrained(folders["chameleon"])
    assert world.text is not None
    ids = world.text("a red house")
    prompt, without = (ids.prompt - NUM_VISUAL, ids.unconditional - NUM_VISUAL)
    assert prompt.tolist() == [[BOS, 34, 35, 36, IMAGE_START]]
    assert without.tolist() == [[BOS, IMAGE_START]]
    image = world.generate(text="a red house", strategy="raster", sampling=diagd.SamplingOptions())
    expected = own_images("chameleon", prompt, without, 3.0, image.tokens.numel())
    assert torch.equal(to_ours("chameleon", expected), image.tokens.flatten(1))


@pytest.mark.proves("Chameleon", "picture")
@torch.no_grad()
def test_a_picture_and_a_text_make_an_image_of_chameleon(folders, command, tmp_path):
    """As Meta's code does: guided by what it would write without the text, and without both."""
    write_vqgan(folders["chameleon"])
    world = diagd.VideoGenerator.from_pretrained(folders["chameleon"])
    photos = smooth_frames(2, *world.frame_size_px)
    codes = world.tokenizer.encode(photos)
    freed: Any = deepcopy(architecture("chameleon"))
    freed.model.vocabulary_mapping.image_tokens = []
    low, high = RANGES["chameleon"]
    shown = [[BOS, IMAGE_START, *ids, IMAGE_END] for ids in (codes.flatten(1) + low).tolist()]
    prompts = [
        torch.tensor([[*seen, 34, 35, 36, IMAGE_START] for seen in shown]),
        torch.tensor([[*seen, IMAGE_START] for seen in shown]),
        torch.tensor([[BOS, IMAGE_START] for _ in shown]),
    ]
    written = prompts[0][:, :0]
    for _ in range(codes[0].numel()):
        both, alone, none = (
            freed(torch.cat([prompt, written], 1)).logits[:, -1, low:high] for prompt in prompts
        )
        steered = none + 1.2 * (alone - none) + 3.0 * (both - alone)
        written = torch.cat([written, low + steered.argmax(-1, keepdim=True)], 1)
    expected = written - low
    greedy = {"strategy": "raster", "sampling": diagd.SamplingOptions()}
    images = world.generate([*photos[:, None]], text="a red house", **greedy)
    assert [image.tokens.flatten().tolist() for image in images] == expected.tolist()
    assert not torch.equal(*expected)
    with pytest.raises(ValueError, match="frames must be one picture for this model, got 2"):
        world.generate(photos, text="a red house", **greedy)

    Image.fromarray(photos[0].numpy()).save(tmp_path / "photo.png")
    base = "--model", folders["chameleon"], "--text", "a red house", "--dtype", "float32"
    flags = "--image", tmp_path / "photo.png", "--temperature", 0, "--strategy", "raster"
    outcome = command("generate", *base, *flags, "--output", tmp_path / "out.png")
    assert outcome.code == 0, outcome.err
    with Image.open(tmp_path / "out.png") as written:
        assert torch.equal(torch.tensor(list(written.tobytes())), images[0].frames.flatten())
    base = "--model", folders["janus"], "--text", "a red house"
    command("generate", *base, *flags).assert_refused(
        "prompt must be left out: this model takes texts alone"
    )


def test_image_ids_may_stand_anywhere(folders, tmp_path):
    """Rows are put in the order of the codes that the names of the ids tell."""
    theirs = deepcopy(architecture("chameleon"))
    names = theirs.config.vocabulary_map
    order = torch.randperm(NUM_VISUAL, generator=torch.Generator().manual_seed(4))
    moved = {
        name: FIRST_VISUAL + int(order[id - FIRST_VISUAL]) if name.startswith("IMGIMG") else id
        for name, id in names.items()
    }
    theirs.config.vocabulary_map = moved
    theirs.save_pretrained(tmp_path)
    model, plain = diagd.load_model(tmp_path), diagd.load_model(folders["chameleon"])
    table, rows = (each.get_parameter("model.embed_tokens.weight") for each in (model, plain))
    head, rows_of_head = (each.get_parameter("lm_head.weight") for each in (model, plain))
    assert torch.equal(head, rows_of_head[order])
    assert torch.equal(table[:NUM_VISUAL], rows[order])
    assert torch.equal(table[NUM_VISUAL:], rows[NUM_VISUAL:])


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (
            "janus",
            {"text_config": None},
            "Janus checkpoint: expected a config.json with text_config",
        ),
        ("janus", {"vq_config": {"hidden_act": "relu"}}, "of vq_config must be gelu, got 'relu'"),
        ("chameleon", {"swin_norm": True}, "swin_norm must be false: a block of the 30B"),
        ("chameleon", {"rms_norm_eps": 1e-6}, "rms_norm_eps must be 1e-05, got 1e-06"),
        ("chameleon", {"rope_scaling": {"type": "linear"}}, "type must be default, got 'linear'"),
        ("chameleon", {"vocabulary_map": {"IMGIMGBZ": 4}}, "must name image ids 0, 1, ..., got 1"),
    ],
)
def test_configs_that_do_not_fit_are_refused_in_one_line(name, edit, message, folders, tmp_path):
    side = json.loads((folders[name] / "config.json").read_text())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(side | edit))
    with pytest.raises(ValueError, match=message) as caught:
        find_model(folders[name], config)
    assert "\n" not in str(caught.value)


def test_chameleon_says_where_its_decoder_belongs(folders, tmp_path):
    architecture("chameleon").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds no decoder of images: put vqgan\.ckpt of Meta's"):
        load_parts(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--guidance", "nan"), "guidance must be at least 0, got nan"),
        (("--guidance", -2), "guidance must be at least 0, got -2.0"),
        (("--guidance", "inf"), "scale must be a finite number of at least 0, got inf"),
        (("--context-frames", 2), "context_frames must be left out: this model takes no prompt"),
        (("-k", 99), f"row_lag must be in \\[1, width={SIDE}\\], got 99"),
        (
            ("--prompts", "texts.txt", "--out", "a"),
            "prompts must be a folder of clips, got the file",
        ),
    ],
)
def test_flags_that_do_not_fit_an_image_are_refused(
    flags, message, folders, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("a house\n")
    start = "generate", "--model", folders["janus"], "--text", "a house"
    command(*start, *flags).assert_refused(message)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("janus", {"tokenizer_config.json": "{}"}, "the tokenizer has no BOS token"),
        ("chameleon", {"tokenizer_config.json": "{}"}, "the tokenizer has no BOS token"),
        ("janus", "chameleon", r"tokenizer has no <begin_of_image> token \(of another model\?\)"),
        ("chameleon", ("<s>", 7), "'<s>' is 7 in the model's config.json but 1 in its text tok"),
    ],
)
def test_a_tokenizer_of_another_model_is_refused(name, edit, message, folders, tmp_path):
    folder = shutil.copytree(folders[name], tmp_path / "copy")
    if isinstance(edit, str):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((folders[edit] / file).read_bytes())
    elif isinstance(edit, dict):
        for file, text in edit.items():
            (folder / file).write_text(text)
    else:
        config = json.loads((folder / "config.json").read_text())
        config["vocabulary_map"] |= dict([edit])
        (folder / "config.json").write_text(json.dumps(config))

    def read_a_text() -> None:
        prompts = load_text(find_model(folder))
        assert prompts is not None
        prompts("a red house")

    with pytest.raises(ValueError, match=message) as caught:
        read_a_text()
    assert "\n" not in str(caught.value)


def test_presets_are_as_large_as_the_released_models():
    """Their LLaMAs are DeepSeek-LLM 7B, and what transformers makes a Chameleon by default."""
    with torch.device("meta"):
        theirs = ChameleonForConditionalGeneration(ChameleonConfig(vocabulary_map={}))
        chameleon = [weight for name, weight in theirs.named_parameters() if "vqmodel" not in name]
        for name, expected in (
            ("janus-pro-7b", 6_910_365_696),
            ("chameleon-7b", sum(weight.numel() for weight in chameleon)),
        ):
            config = PRESETS[name]
            stack = sum(weight.numel() for weight in Transformer(config).model.parameters())
            whole_head = config.hidden_size * config.extra_embeddings
            images = config.hidden_size * config.image_vocab_size  # rows before those of text
            assert stack + whole_head - images == expected
    assert PRESETS["janus-pro-1b"].head_size == 2048
