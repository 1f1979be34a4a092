from functools import partial

import pytest
import torch

import diagd
from diagd.backends.native.model import NativeModel
from diagd.models.guidance import GuidedModel
from tests import oracles
from tests.models.architectures import architecture
from tests.models.tiny import KINDS, random_tokens, tiny_model

GRID = diagd.TokenGrid(num_frames=2, height=3, width=5)
SCALE = 2.5
PROMPT_LENGTH = 4


def prompt_of(batch_size=1, context_frames=0, seed=1):
    return random_tokens(batch_size, PROMPT_LENGTH + 15 * context_frames, seed=seed, vocab_size=40)


def unconditional_of(length, batch_size=1):
    return random_tokens(batch_size, length, seed=2, vocab_size=40)


def guided(name, unconditional, scale=SCALE):
    return GuidedModel(
        diagd.HuggingFaceModel(architecture(name)), unconditional, PROMPT_LENGTH, scale
    )


def guided_logits(full, *unconditional, scales=(SCALE,)):
    """All prompts whole, each in a forward of its own, without a cache."""
    if isinstance(full, str):
        full = oracles.llama_logits(architecture(full))

    def logits_fn(tokens, positions, visible):
        rest = positions >= PROMPT_LENGTH
        start = int((~rest).sum()) - 1  # the last token of the prompts
        rows = [full(tokens, positions, visible)]
        for prompt in unconditional:
            length = prompt.shape[1]
            theirs = torch.ones(2 * [length + int(rest.sum())], dtype=torch.bool).tril()
            theirs[length:, :length] = True
            theirs[length:, length:] = visible[rest][:, rest]
            other = full(
                torch.cat([prompt.expand(len(tokens), -1), tokens[:, rest]], 1),
                torch.cat([torch.arange(length), positions[rest] + length - PROMPT_LENGTH]),
                theirs,
            )
            rows.append(rows[0].clone())
            rows[-1][:, start:] = other[:, length - 1 :]
        steered = rows[-1]
        for scale, more, less in zip(scales[::-1], rows[-2::-1], rows[:0:-1], strict=True):
            steered = steered + scale * (more - less)
        return steered

    return logits_fn


@pytest.mark.parametrize(
    ("name", "length"),
    [("llama", 1), ("llama", 4), ("llama", 7), ("gpt2", 3), ("gpt2", 7), ("emu3", 3)],
)
def test_guided_diagonals_are_those_of_two_models_without_a_cache(name, length):
    unconditional, prompt = unconditional_of(length), prompt_of(2)
    schedule = diagd.DiagonalSchedule(GRID, 2, 4)
    out = diagd.generate_tokens(guided(name, unconditional), prompt, schedule, context_frames=0)
    expected = oracles.diagonal_reference(
        guided_logits(name, unconditional), prompt, 2, 3, 5, row_lag=2, frame_lag=4
    )
    assert torch.equal(out.tokens, expected)


def test_context_frames_are_seen_after_both_prompts():
    unconditional, prompt = unconditional_of(6), prompt_of(1, context_frames=1)
    schedule = diagd.DiagonalSchedule(GRID, 1, 3)
    out = diagd.generate_tokens(guided("llama", unconditional), prompt, schedule)
    expected = oracles.diagonal_reference(
        guided_logits("llama", unconditional), prompt, 2, 3, 5, 1, 3, context_frames=1
    )
    assert torch.equal(out.tokens, expected)


def test_every_row_may_have_its_own_unconditional_prompt():
    unconditional, prompt = unconditional_of(3, batch_size=2), prompt_of(2)
    schedule = diagd.DiagonalSchedule.spatial(GRID)
    both = diagd.generate_tokens(
        guided("llama", unconditional), prompt, schedule, context_frames=0
    ).tokens
    for row in range(2):
        model = guided("llama", unconditional[row : row + 1])
        alone = diagd.generate_tokens(model, prompt[row : row + 1], schedule, context_frames=0)
        assert torch.equal(both[row : row + 1], alone.tokens)
    assert not torch.equal(both[0], both[1])


def test_a_scale_of_one_is_the_model_as_it_is():
    prompt, schedule = prompt_of(), diagd.DiagonalSchedule.spatial(GRID)
    plain = diagd.generate_tokens(
        diagd.HuggingFaceModel(architecture("llama")), prompt, schedule, context_frames=0
    )
    for scale, same in ((1.0, True), (3.0, False)):
        model = guided("llama", unconditional_of(2), scale)
        out = diagd.generate_tokens(model, prompt, schedule, context_frames=0)
        assert torch.equal(out.tokens, plain.tokens) is same


def test_a_full_context_forgets_frames_and_no_prompt():
    """After the prefix and the newest frame are prefilled again, nothing tells it from a start."""
    schedule = diagd.DiagonalSchedule.spatial(diagd.TokenGrid(1, 3, 5))
    model, prompt = guided("llama", unconditional_of(6)), prompt_of(1, context_frames=1)
    engine = diagd.DecodingEngine(model, diagd.FrameFormat(3, 5), max_slots=6 + 30, keep_frames=1)
    engine.prefill(prompt)
    first, second = (next(engine.decode(schedule)) for _ in range(2))
    assert engine.stream.num_dropped_frames == 1
    again = torch.cat([prompt[:, :PROMPT_LENGTH], first.flatten(1)], dim=1)
    assert torch.equal(second, diagd.generate_tokens(model, again, schedule).tokens[:, 0])


def test_both_prompts_count_for_the_context():
    model = guided("llama", unconditional_of(9))
    assert (model.vocab_size, model.num_embeddings, model.device.type) == (40, 40, "cpu")
    assert (model.max_positions, model.scales) == (160, (SCALE,))
    for length, taken in ((9, 24), (2, 19)):
        engine = diagd.DecodingEngine(
            guided("llama", unconditional_of(length)), diagd.FrameFormat(3, 5), max_slots=18
        )
        message = f"prompt and one frame need {taken} slots, the context holds 18"
        with pytest.raises(ValueError, match=message):
            engine.prefill(prompt_of(), 0)
    engine = diagd.DecodingEngine(model, diagd.FrameFormat(3, 5), max_slots=24)
    engine.prefill(prompt_of(), 0)
    assert engine.stream.window == 1
    assert engine.batch.num_sequences == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, dtype=torch.int64), 2, 1.0), r"must be of shape .*, got \(3,\)"),
        ((torch.zeros(1, 0, dtype=torch.int64), 2, 1.0), r"at least 1\), got \(1, 0\)"),
        ((torch.zeros(1, 2), 2, 1.0), r"must be int64, got torch.float32"),
        ((torch.tensor([[3, 40]]), 2, 1.0), r"ids must be in \[0, 40\), got 3..40"),
        ((torch.tensor([[3]]), 0, 1.0), "prompt_length must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    model = diagd.HuggingFaceModel(architecture("llama"))
    with pytest.raises(ValueError, match=message):
        GuidedModel(model, *arguments)


def own_logits(model, tokens, positions, visible):
    return model.logits(tokens, positions=positions, visible=visible)


@pytest.mark.parametrize(
    ("backend", "length"),
    [
        ("eager", 1),
        ("eager", 7),
        ("native", 4),
        ("native", 7),
        ("learned positions", 1),
        ("learned positions", 7),
    ],
)
def test_our_own_models_are_guided_by_prompts_of_any_length(backend, length):
    kind = "wham" if backend == "learned positions" else "chameleon"
    plain = tiny_model(num_action_tokens=0, **KINDS[kind])
    model = NativeModel(plain) if backend == "native" else plain
    unconditional, prompt = unconditional_of(length), prompt_of(2)
    schedule = diagd.DiagonalSchedule(GRID, 2, 4)
    out = diagd.generate_tokens(
        GuidedModel(model, unconditional, PROMPT_LENGTH, SCALE), prompt, schedule, context_frames=0
    )
    logits_fn = guided_logits(partial(own_logits, plain), unconditional)
    expected = oracles.diagonal_reference(logits_fn, prompt, 2, 3, 5, row_lag=2, frame_lag=4)
    assert torch.equal(out.tokens, expected)


@pytest.mark.parametrize("lengths", [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("kind", ["huggingface", "native"])
def test_of_several_prompts_each_is_steered_away_from_by_the_one_before(kind, lengths):
    if kind == "native":
        plain = tiny_model(num_action_tokens=0, **KINDS["chameleon"])
        model, full = NativeModel(plain), partial(own_logits, plain)
    else:
        model, full = diagd.HuggingFaceModel(architecture("llama")), "llama"
    others = [random_tokens(1, one, seed=one, vocab_size=40) for one in lengths]
    schedule, scales, prompt = diagd.DiagonalSchedule(GRID, 2, 4), (SCALE, 1.5), prompt_of(2)
    steered = GuidedModel(model, others, PROMPT_LENGTH, scales)
    out = diagd.generate_tokens(steered, prompt, schedule, context_frames=0)
    logits_fn = guided_logits(full, *others, scales=scales)
    expected = oracles.diagonal_reference(logits_fn, prompt, 2, 3, 5, row_lag=2, frame_lag=4)
    assert torch.equal(out.tokens, expected)
    assert (steered.max_positions, steered.scales) == (model.max_positions, scales)
    with pytest.raises(ValueError, match="scale must be one for each of 2 prompts, got 1"):
        GuidedModel(model, others, PROMPT_LENGTH, SCALE)


def test_positions_on_a_grid_are_not_shifted():
    model = tiny_model(position="rope2d")
    with pytest.raises(ValueError, match=r"prompts must be of one length .* of 4 and 1$"):
        GuidedModel(model, torch.tensor([[3]]), PROMPT_LENGTH, SCALE)
    assert GuidedModel(model, torch.tensor([[3]]), 1, SCALE).max_positions == 64


def test_a_batch_without_its_unconditional_prompts_is_refused():
    model = guided("llama", unconditional_of(2, batch_size=2))
    engine = diagd.DecodingEngine(model, diagd.FrameFormat(3, 5), batch_size=3)
    with pytest.raises(ValueError, match="expected 1 or 3 unconditional prompts, got 2"):
        engine.prefill(prompt_of(3), 0)
    with pytest.raises(ValueError, match="context must be None: this model has no cross-attention"):
        model.make_cache(2, 8, torch.zeros(1, 3, 8))
