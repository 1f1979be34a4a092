"""Janus and Chameleon in miniature: the images that their own classes generate, and diagonals."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    JanusForConditionalGeneration,
    JanusImageProcessor,
    JanusProcessor,
    PreTrainedTokenizerFast,
)

import diagd
from diagd.models.guidance import GuidedModel
from tests import oracles
from tests.models.architectures import (
    BOS,
    FIRST_VISUAL,
    IMAGE_END,
    IMAGE_START,
    NUM_VISUAL,
    PAD,
    SIDE,
    VOCAB_SIZE,
    architecture,
    janus_of,
)
from tests.models.feeding import feed, scrambled_steps, visible_under
from tests.models.tiny import random_tokens

NAMES = ("janus", "chameleon")
SCALE = 2.5
PROMPT = torch.tensor([[BOS, 21, 9, 34, 17, IMAGE_START]])
RANGES = {
    "janus": (VOCAB_SIZE, VOCAB_SIZE + NUM_VISUAL),
    "chameleon": (FIRST_VISUAL, FIRST_VISUAL + NUM_VISUAL),
}
JANUS_GRID = diagd.TokenGrid(1, SIDE, SIDE)  # the class has square images alone
GRIDS = {"janus": JANUS_GRID, "chameleon": diagd.TokenGrid(2, 3, 5)}


def prompts():
    """Two prompts, and each with all but its ends padded: Janus's unconditional prompt."""
    other = torch.tensor([[BOS, 30, 22, 8, 12, IMAGE_START]])
    given = torch.cat([PROMPT, other])
    return given, given.masked_fill((given != BOS) & (given != IMAGE_START), PAD)


def own_logits(name):
    """The class's own modules on whole sequences, at any positions and under any mask."""
    theirs = architecture(name)
    if name == "chameleon":
        return oracles.chameleon_logits(theirs)

    @torch.no_grad()
    def logits_fn(tokens, positions, visible):
        embedded = [
            theirs.prepare_embeddings_for_image_generation(id - VOCAB_SIZE)
            if id >= VOCAB_SIZE
            else theirs.model.language_model.embed_tokens(id)
            for id in tokens.flatten()
        ]
        rows = torch.stack(embedded).view(*tokens.shape, -1)
        hidden = theirs.model.language_model(
            inputs_embeds=rows, **oracles.placed(len(rows), positions, visible)
        ).last_hidden_state
        image = theirs.model.generation_head(hidden)
        return torch.cat([image.new_full((*tokens.shape, VOCAB_SIZE), float("-inf")), image], -1)

    return logits_fn


def restricted(name, logits_fn):
    low, high = RANGES[name]

    def image_logits(*arguments):
        logits = logits_fn(*arguments)
        ids = torch.arange(logits.shape[-1])
        return logits.masked_fill((ids < low) | (ids >= high), float("-inf"))

    return image_logits


def generated(name, model, schedule, prompt=PROMPT):
    sampling = diagd.SamplingOptions(valid_range=RANGES[name])
    return diagd.generate_tokens(
        model, prompt, schedule, context_frames=0, grid=GRIDS[name], sampling=sampling
    ).tokens


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_sizes_are_those_of_text_and_images(name):
    model = diagd.HuggingFaceModel(architecture(name))
    size = VOCAB_SIZE + NUM_VISUAL * (name == "janus")
    assert model.image_range == RANGES[name]
    assert (model.vocab_size, model.num_embeddings, model.max_positions) == (size, size, 160)
    assert diagd.HuggingFaceModel(architecture("llama")).image_range is None


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_are_those_of_the_class_in_any_order(name):
    """Float32 logits of these models reach 10; the issue asks for 1e-4."""
    model = diagd.HuggingFaceModel(architecture(name))
    tokens, positions = random_tokens(2, 41, vocab_size=model.vocab_size), torch.arange(41)
    low, high = RANGES[name]
    for steps in (positions, scrambled_steps(41, num_steps=6)):
        expected = own_logits(name)(tokens, positions, visible_under(steps))[..., low:high]
        ours = feed(model, tokens, steps)[..., low:high]
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    hidden = model.logits(tokens)[..., :low]
    assert name == "chameleon" or (hidden == torch.finfo(torch.float32).min).all()


def own_images(name, given, unconditional=None, scale=SCALE, size=30):
    """What the class's own loop generates, (B, tokens); Janus has a prompt of nothing itself."""
    how = {"attention_mask": torch.ones_like(given), "do_sample": False}
    if name == "janus":
        how |= {"generation_mode": "image", "guidance_scale": scale}
        return VOCAB_SIZE + architecture(name).generate(given, **how)
    freed = deepcopy(architecture(name))
    freed.model.vocabulary_mapping.image_tokens = []  # a copy: its forward bans no id
    if unconditional is not None:
        how |= {"guidance_scale": scale, "negative_prompt_ids": unconditional}
    images = list(range(*RANGES[name]))
    how |= {"max_new_tokens": size, "prefix_allowed_tokens_fn": lambda *_: images}
    return freed.generate(given, **how)[:, given.shape[1] :]


@pytest.mark.parametrize(
    ("name", "guided"), [("janus", True), ("chameleon", False), ("chameleon", True)]
)
def test_raster_order_generates_what_the_class_does(name, guided):
    model, (given, unconditional) = diagd.HuggingFaceModel(architecture(name)), prompts()
    expected = own_images(name, given, unconditional if guided else None)
    if guided:
        model = GuidedModel(model, unconditional, given.shape[1], SCALE)
    assert torch.equal(generated(name, model, "raster", given).flatten(1), expected)
    assert len(expected.unique()) > 3


def test_an_empty_prompt_makes_janus_greedy_without_guidance():
    """Both its rows are the same then, so their difference is 0."""
    empty = torch.tensor([[BOS, IMAGE_START]])
    ours = generated("janus", diagd.HuggingFaceModel(architecture("janus")), "raster", empty)
    assert torch.equal(ours.flatten(1), own_images("janus", empty))


@pytest.mark.parametrize("row_lag", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_diagonals_are_those_of_a_decoder_without_a_cache(name, row_lag):
    grid, (given, _) = GRIDS[name], prompts()
    frame_lag = grid.height * row_lag
    schedule = diagd.DiagonalSchedule(grid, row_lag, frame_lag)
    expected = oracles.diagonal_reference(
        restricted(name, own_logits(name)),
        given,
        *(grid.num_frames, grid.height, grid.width),
        row_lag=row_lag,
        frame_lag=frame_lag,
    )
    model = diagd.HuggingFaceModel(architecture(name))
    assert torch.equal(generated(name, model, schedule, given), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_text_is_never_drawn_by_janus(dtype):
    model, given = diagd.HuggingFaceModel(deepcopy(architecture("janus")).to(dtype)), PROMPT
    for sampling in (
        diagd.SamplingOptions(),
        diagd.SamplingOptions(temperature=5.0),
        diagd.SamplingOptions(temperature=0.5, top_p=0.9),
    ):
        for decoder in (model, GuidedModel(model, given[:, -1:], given.shape[1], SCALE)):
            out = diagd.generate_tokens(
                decoder, given, "k=1", context_frames=0, grid=JANUS_GRID, sampling=sampling
            )
            assert out.tokens.min() >= VOCAB_SIZE


@pytest.mark.parametrize("name", NAMES)
def test_what_users_get_wrong_is_said_in_one_line(name):
    model = diagd.HuggingFaceModel(architecture(name))
    given, unconditional = prompts()
    pair = torch.cat([given[:1], unconditional[:1]])
    with pytest.raises(ValueError, match=r"got id 0: .* are a list; .* one row, .*GuidedModel"):
        generated(name, model, "k=1", pair)
    behind = torch.cat([given, torch.full((2, 3), 9)], dim=1)
    with pytest.raises(ValueError, match=r"end with the image start, id 6, got \[9, 9\]: the text"):
        generated(name, model, "k=1", behind)
    foreign = given.clone()
    foreign[0, 1] = model.num_embeddings
    with pytest.raises(ValueError, match=rf"ids must be in \[0, {model.num_embeddings}\)"):
        generated(name, model, "k=1", foreign)
    guided = GuidedModel(model, unconditional, given.shape[1], SCALE)
    with pytest.raises(ValueError, match="must end with the image start"):
        generated(name, guided, "k=1", behind)


def test_sizes_may_stand_behind_the_image_start_of_lumina():
    model = diagd.HuggingFaceModel(architecture("chameleon"))
    sized = torch.cat([PROMPT, torch.tensor([[36, 37]])], dim=1)
    assert generated("chameleon", model, "k=1", sized).shape == (1, 2, 3, 5)


def test_context_frames_are_images():
    model = diagd.HuggingFaceModel(architecture("chameleon"))
    images = generated("chameleon", model, "k=1").flatten(1)
    out = diagd.generate_tokens(
        model, torch.cat([PROMPT, images], 1), "k=1", context_frames=1, grid=GRIDS["chameleon"]
    )
    assert out.tokens.shape == (1, 2, 3, 5)


def janus_processor():
    """Words to ids; BOS before the text, the image start behind it."""
    words = {"<pad>": PAD, "<bos>": BOS, "<image>": 3, "<eoi>": 4, "<boi>": IMAGE_START}
    words |= {"a": 20, "red": 21, "house": 22, "<unk>": 23}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    special = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        unk_token="<unk>",
        extra_special_tokens=special,
    )
    template = "{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}"
    return JanusProcessor(JanusImageProcessor(), fast, chat_template=template)


WORDS = {
    **{"<pad>": PAD, "<s>": BOS, "</s>": 2, "<image>": 3, "<racm3:break>": IMAGE_START},
    **{"a": 34, "red": 35, "house": 36, "<unk>": 37, "<eoss>": IMAGE_END},
}


def chameleon_words(words: dict[str, int] = WORDS, by: Any = None) -> PreTrainedTokenizerFast:
    """Words to ids, without BOS: where that stands is the reader's to say."""
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = by or pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="<unk>"
    )


def test_the_tutorial_turns_text_into_a_picture(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "models_huggingface.md"
    code = page.read_text().split("## Text to image (Janus)")[1]
    code = code.split("```python\n")[1].split("```")[0]
    janus, processor = janus_of(side=24).eval(), janus_processor()
    for kind, made in ((JanusForConditionalGeneration, janus), (JanusProcessor, processor)):
        monkeypatch.setattr(kind, "from_pretrained", lambda _, made=made: made)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["prompt"].tolist() == [[BOS, 20, 21, 22, IMAGE_START]]
    assert names["unconditional"].tolist() == [[BOS, PAD, PAD, PAD, IMAGE_START]]
    assert names["out"].stats.num_steps == 47
    with Image.open("house.png") as picture:
        assert picture.size == (24 * 4, 24 * 4)
        assert len(picture.getcolors(picture.width * picture.height) or ()) > 10
