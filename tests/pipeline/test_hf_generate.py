from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

import diagd
from diagd.models.huggingface import cache_argument
from tests import oracles
from tests.models.architectures import architecture

VOCAB_SIZE, NUM_VISUAL = 24, 18
GRID = diagd.TokenGrid(num_frames=2, height=3, width=5)


@pytest.fixture(scope="module")
def llama():
    return oracles.tiny_llama(VOCAB_SIZE, 160)


@pytest.fixture
def prompt():
    return torch.randint(NUM_VISUAL, (2, 4), generator=torch.Generator().manual_seed(0))


def generate(llama, prompt, custom, **flags):
    """Call the model's own `generate`, which warns of its own limit unless it is told one."""
    flags = {"do_sample": False, "max_new_tokens": GRID.num_tokens, **flags}
    return llama.generate(prompt, custom_generate=custom, **flags)


def actions_of(num_action_tokens):
    shape = (2, GRID.num_frames, num_action_tokens)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(NUM_VISUAL, VOCAB_SIZE, shape, generator=generator)


def test_raster_order_writes_what_generate_writes(llama, prompt):
    plain = llama.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None)
    schedule = diagd.DiagonalSchedule.raster(GRID)
    ours = generate(llama, prompt, diagd.custom_generate(schedule, context_frames=0))
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("row_start", ["temporal", "predecessor", "spatial"])
def test_diagonals_write_what_generate_tokens_writes(row_start, llama, prompt):
    schedule, actions = diagd.DiagonalSchedule(GRID, 2, 4, row_start), actions_of(2)
    valid = (0, NUM_VISUAL)
    out = diagd.generate_tokens(
        diagd.HuggingFaceModel(llama),
        prompt,
        diagd.Diagonal(2, 4, row_start),
        actions,
        context_frames=0,
        sampling=diagd.SamplingOptions(valid_range=valid),
        grid=GRID,
    )
    custom = diagd.custom_generate(schedule, actions, 0, valid)
    sequence = generate(llama, prompt, custom, max_new_tokens=2 * (2 + 15))
    assert sequence.shape == (2, 4 + 2 * (2 + 15))
    assert torch.equal(sequence[:, :4], prompt)
    frames = sequence[:, 4:].unflatten(1, (2, 17))
    assert torch.equal(frames[:, :, :2], actions)
    assert torch.equal(frames[:, :, 2:].unflatten(2, (3, 5)), out.tokens)


def test_context_frames_reach_the_decoder(llama):
    prompt = torch.randint(NUM_VISUAL, (2, 15), generator=torch.Generator().manual_seed(3))
    schedule = diagd.DiagonalSchedule.spatial(GRID)
    out = diagd.generate_tokens(diagd.HuggingFaceModel(llama), prompt, schedule)
    custom = diagd.custom_generate(schedule)
    sequence = generate(llama, prompt, custom)
    assert torch.equal(sequence[:, 15:], out.tokens.flatten(1))


@pytest.mark.parametrize(
    ("flags", "sampling"),
    [
        ({"top_k": 0}, diagd.SamplingOptions(1.0)),
        ({"temperature": 0.7, "top_k": 5}, diagd.SamplingOptions(0.7, top_k=5)),
        ({"top_k": 0, "top_p": 0.8}, diagd.SamplingOptions(1.0, top_p=0.8)),
    ],
)
def test_the_generation_config_says_how_to_sample(flags, sampling, llama, prompt):
    schedule = diagd.DiagonalSchedule.spatial(GRID)
    model = diagd.HuggingFaceModel(llama)
    out = diagd.generate_tokens(
        model, prompt, schedule, context_frames=0, sampling=sampling, seed=9
    )
    custom = diagd.custom_generate(schedule, context_frames=0, seed=9)
    sequence = generate(llama, prompt, custom, do_sample=True, **flags)
    assert torch.equal(sequence[:, 4:], out.tokens.flatten(1))


def test_a_processor_that_is_passed_wins_over_the_config(llama, prompt):
    custom = diagd.custom_generate(diagd.DiagonalSchedule.spatial(GRID), context_frames=0, seed=9)
    passed = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)])
    flags = {"do_sample": True, "top_k": 0}
    ours = generate(llama, prompt, custom, logits_processor=passed, **flags)
    told = generate(llama, prompt, custom, **flags | {"temperature": 0.7, "top_k": 5})
    assert torch.equal(ours, told)
    assert not torch.equal(ours, generate(llama, prompt, custom, **flags))


@pytest.mark.parametrize("guidance_scale", [None, 2.0])
def test_padded_prompts_write_what_they_write_alone(guidance_scale, llama, prompt):
    custom = diagd.custom_generate(diagd.DiagonalSchedule.spatial(GRID), context_frames=0)
    padded, mask = prompt.clone(), torch.ones_like(prompt)
    padded[1, :2], mask[1, :2] = 0, 0
    flags = {"guidance_scale": guidance_scale} if guidance_scale else {}
    both = generate(llama, padded, custom, attention_mask=mask, **flags)
    assert torch.equal(both[:, :4], padded)
    for row, start in enumerate((0, 2)):
        alone = generate(llama, prompt[row : row + 1, start:], custom, **flags)
        assert torch.equal(both[row, start:], alone[0])


@pytest.mark.parametrize("negative_length", [None, 1, 6])
def test_guidance_flags_write_what_generate_writes_with_them(negative_length, llama, prompt):
    flags = {"guidance_scale": 2.0, "max_new_tokens": 30, "do_sample": False}
    if negative_length is not None:
        shape = (2, negative_length)
        generator = torch.Generator().manual_seed(5)
        flags["negative_prompt_ids"] = torch.randint(NUM_VISUAL, shape, generator=generator)
        flags["negative_prompt_attention_mask"] = torch.ones(shape, dtype=torch.int64)
    plain = llama.generate(prompt, eos_token_id=None, **flags)
    schedule = diagd.DiagonalSchedule.raster(GRID)
    ours = llama.generate(
        prompt, custom_generate=diagd.custom_generate(schedule, context_frames=0), **flags
    )
    assert torch.equal(ours, plain)
    assert not torch.equal(
        ours, generate(llama, prompt, diagd.custom_generate(schedule, context_frames=0))
    )


def test_without_a_limit_transformers_warns_and_nothing_else_changes(llama, prompt):
    custom = diagd.custom_generate(diagd.DiagonalSchedule.spatial(GRID), context_frames=0)
    with pytest.warns(UserWarning, match="We recommend setting `max_new_tokens`"):
        unlimited = llama.generate(prompt, custom_generate=custom, do_sample=False)
    assert torch.equal(unlimited, generate(llama, prompt, custom))


NEGATIVE = {"guidance_scale": 2.0, "negative_prompt_ids": torch.zeros(2, 140, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_new_tokens": 29}, "max_new_tokens must be at least 30, got 29"),
        (
            {"max_new_tokens": None, "max_length": 4 + 20},  # what it would be if nobody said
            "max_new_tokens must be at least 30, got 20",
        ),
        (NEGATIVE, "guidance needs prompts and frames to fit a context of 160 tokens, got 170"),
        (
            {**NEGATIVE, "negative_prompt_attention_mask": torch.eye(2, 140)},
            "negative prompts must be padded on the left only \\(see their attention_mask\\)",
        ),
        (
            {"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])},
            "prompts must be padded on the left only \\(see their attention_mask\\)",
        ),
        (
            {"logits_processor": LogitsProcessorList([TypicalLogitsWarper(0.9)])},
            r"logits processors are not supported, got \['TypicalLogitsWarper'\]",
        ),
        ({"repetition_penalty": 1.5}, "diagonal decoding: repetition_penalty=1.5$"),
        ({"do_sample": True, "min_p": 0.1}, "diagonal decoding: min_p=0.1$"),
        ({"num_beams": 2}, "diagonal decoding: num_beams=2$"),
        ({"return_dict_in_generate": True}, "diagonal decoding: return_dict_in_generate=True$"),
        (
            {"output_scores": True, "max_time": 9.0},
            "diagonal decoding: output_scores=True, max_time=9.0$",
        ),
        (
            {"do_sample": True, "num_return_sequences": 2},
            "diagonal decoding: num_return_sequences=2$",
        ),
        ({"eos_token_id": 5}, "diagonal decoding: eos_token_id=5$"),
        ({"cache_implementation": "offloaded"}, "diagonal decoding: cache_implementation$"),
        (
            {"generation_config": GenerationConfig(low_memory=True)},
            "diagonal decoding: low_memory=True$",
        ),
        ({"position_ids": torch.arange(4)[None] + 3}, "diagonal decoding: position_ids$"),
        ({"inputs_embeds": torch.zeros(2, 4, 32)}, "diagonal decoding: inputs_embeds$"),
        (
            {"prefix_allowed_tokens_fn": lambda *_: [3]},
            "diagonal decoding: prefix_allowed_tokens_fn$",
        ),
        ({"synced_gpus": True}, "diagonal decoding: synced_gpus=True$"),
        (
            {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(9.0)])},
            "diagonal decoding: stopping_criteria$",
        ),
    ],
)
def test_what_diagonals_cannot_honour_is_refused(flags, message, llama, prompt):
    custom = diagd.custom_generate(diagd.DiagonalSchedule.spatial(GRID), context_frames=0)
    with pytest.raises(ValueError, match=message):
        generate(llama, prompt, custom, **flags)


def test_a_cache_and_an_assistant_are_refused(llama, prompt):
    custom = diagd.custom_generate(diagd.DiagonalSchedule.spatial(GRID), context_frames=0)
    name = cache_argument(llama)
    for flags, named in (
        ({name: DynamicCache(config=llama.config)}, name),
        ({"assistant_model": llama}, "assistant_model"),
    ):
        with pytest.raises(ValueError, match=f"diagonal decoding: {named}"):
            generate(llama, prompt[:1], custom, **flags)


def test_what_changes_no_token_is_taken(llama, prompt):
    custom = diagd.custom_generate(diagd.DiagonalSchedule.spatial(GRID), context_frames=0)
    flags = {"cache_implementation": "static", "use_cache": True, "length_penalty": 1.0}
    told = generate(
        llama, prompt, custom, attention_mask=torch.ones(2, 4), synced_gpus=False, **flags
    )
    assert torch.equal(told, generate(llama, prompt, custom))


def test_another_kind_of_input_is_refused():
    """A model of pictures: `generate` knows of their sizes, and diagonals do not."""
    custom = diagd.custom_generate(diagd.DiagonalSchedule.spatial(GRID), context_frames=0)
    with pytest.raises(ValueError, match=r"diagonal decoding: pixel_values, image_sizes$"):
        generate(
            architecture("emu3"),
            torch.tensor([[1, 20, 3]]),
            custom,
            pixel_values=torch.zeros(1, 3, 4, 6),
            image_sizes=torch.tensor([[4, 6]]),
        )


class Listener:
    def __init__(self):
        self.heard, self.ended = [], 0

    def put(self, value):
        self.heard.append(value)

    def end(self):
        self.ended += 1


def test_a_streamer_hears_prompt_and_tokens_and_the_end(llama, prompt):
    custom, listener = diagd.custom_generate(diagd.DiagonalSchedule(GRID, 2), None, 0), Listener()
    sequence = generate(llama, prompt, custom, streamer=listener)
    first, *rest = listener.heard
    assert torch.equal(torch.cat([first, torch.stack(rest, 1)], 1), sequence)
    assert listener.ended == 1


def test_a_streamer_is_ended_when_the_call_is_refused(llama, prompt):
    custom, listener = diagd.custom_generate(diagd.DiagonalSchedule(GRID, 2), None, 0), Listener()
    with pytest.raises(ValueError, match=r"diagonal decoding: num_beams=2$"):
        generate(llama, prompt, custom, streamer=listener, num_beams=2)
    assert listener.ended == 1


def test_a_strategy_in_place_of_a_schedule_is_refused():
    with pytest.raises(ValueError, match=r"^schedule must be a DiagonalSchedule, got 'k=1'$"):
        diagd.custom_generate("k=1")  # pyright: ignore[reportArgumentType]


def test_a_model_in_training_stays_in_training_but_for_what_was_frozen(prompt):
    model = oracles.tiny_llama(VOCAB_SIZE, 160).train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    custom = diagd.custom_generate(diagd.DiagonalSchedule.spatial(GRID), context_frames=0)
    generate(model, prompt, custom)
    assert [module.training for module in model.modules()] == before
    with pytest.raises(ValueError, match="prompt ids must be in"):
        generate(model, prompt + VOCAB_SIZE, custom)
    with pytest.raises(ValueError, match="guidance needs prompts and frames to fit a context"):
        generate(model, prompt, custom, **NEGATIVE)
    assert [module.training for module in model.modules()] == before


def test_the_weights_and_the_attention_of_the_model_stay_as_they_were(llama, prompt):
    before = llama(prompt).logits
    custom = diagd.custom_generate(diagd.DiagonalSchedule.spatial(GRID), context_frames=0)
    generate(llama, prompt, custom)
    assert torch.equal(llama(prompt).logits, before)


def test_the_examples_of_the_guide_write_the_same_tokens(tmp_path):
    """They run as they stand, but for the model and the size of the grid."""
    text = (Path(__file__).parents[2] / "docs" / "use.md").read_text()
    code = text.partition("## Tokens in, tokens out")[2].split("```python\n")[1].split("```")[0]
    oracles.tiny_llama(VOCAB_SIZE, 5 * 8 * 13).save_pretrained(tmp_path)
    for word, ours in (
        ('"..."', repr(str(tmp_path))),
        ("height=40, width=64", "height=8, width=13"),
        ("frame_lag=40", "frame_lag=8"),
    ):
        assert word in code
        code = code.replace(word, ours)
    prompt = torch.randint(NUM_VISUAL, (2, 2 * 8 * 13), generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {"prompt": prompt}
    exec(code, names)
    assert names["out"].tokens.shape == (2, 3, 8, 13)
    assert len(names["out"].tokens.unique()) > 5
    assert torch.equal(names["sequence"][:, : prompt.shape[1]], prompt)
    assert torch.equal(names["sequence"][:, prompt.shape[1] :], names["out"].tokens.flatten(1))
