"""On the pretended GPU, whatever decodes writes the tokens that it writes on the CPU.

Strategies, samplings, families, streams and batches, with captured graphs where a strategy allows
them; nothing waits for the device within a step.
"""

import dataclasses
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import diagd
from diagd.backends.prepare import prepare
from diagd.backends.replay import Captured
from diagd.models.huggingface import HuggingFaceModel, llama_of
from tests.decoding.cases import Case
from tests.decoding.strategies.test_conformance import CASES
from tests.models.tiny import KINDS, tiny_model

NUM_VISUAL = 18  # of the ids that `Case` draws
SAMPLINGS = {
    "greedy": diagd.SamplingOptions(valid_range=(0, NUM_VISUAL)),
    "sampled": diagd.SamplingOptions(1.0, valid_range=(0, NUM_VISUAL)),
    "top-k": diagd.SamplingOptions(0.8, top_k=5, valid_range=(0, NUM_VISUAL)),
    "top-p": diagd.SamplingOptions(1.3, top_p=0.8, valid_range=(2, NUM_VISUAL)),
    "exclusive": diagd.SamplingOptions(
        1.3, top_p=0.7, exclusive_top_p=True, valid_range=(0, NUM_VISUAL)
    ),
}
EXACT = "exact,lanes=9"  # every iteration counts
MEASURED = ("exact",)  # as many lanes as pay on the machine
CASE = Case(num_frames=2, num_action_tokens=2)
ALONE = dataclasses.replace(CASE, batch_size=1)


def by_place(case: Case) -> torch.Tensor:
    """Ranges that differ from place to place, as WHAM's do."""
    ranges = torch.tensor([0, NUM_VISUAL]).expand(case.height, case.width, 2).clone()
    ranges[0, 0, 0], ranges[1, 2, 1] = 1, 9
    return ranges


def decode(model, case, strategy, sampling, device="cpu", text=None):
    actions = case.actions()
    return diagd.generate_tokens(
        model,
        case.prompt.to(device),
        strategy,
        None if actions is None else actions.to(device),
        case.context_frames,
        sampling=sampling,
        seed=3,
        grid=case.grid,
        context=text if text is None else text.to(device),
    )


def on_both(gpus, make, case, strategies, sampling, device="cuda", text=None):
    """Decode on the CPU, eagerly, and on the GPU; return how many graphs were replayed."""
    plain, model = make(), prepare_for(make(), device)
    for strategy in strategies:
        with _disable_current_modes():  # the machine need not look at what the CPU does
            expected = decode(plain, case, strategy, sampling, text=text)
        found = decode(model, case, strategy, sampling, device, text)
        assert found.tokens.device.type == "cuda"
        assert torch.equal(found.tokens.cpu(), expected.tokens), strategy
        if strategy not in MEASURED:
            assert found.stats.num_steps == expected.stats.num_steps
            assert found.stats.num_fed == expected.stats.num_fed
    return gpus.num_replays


def prepare_for(model, device) -> Any:
    if isinstance(model, HuggingFaceModel):
        return Captured(HuggingFaceModel(model.model.to(device)))
    return prepare(model.to(device))[0]


def tiny(kind="llama", **changes):
    """A tiny model with room for the whole case."""
    return tiny_model(**{**KINDS[kind], "max_positions": 320, **changes})


@pytest.mark.parametrize("strategy", CASES)
def test_every_strategy_writes_the_tokens_of_the_cpu(strategy, gpus):
    for name in ("greedy", "sampled"):
        on_both(gpus, tiny, CASE, [strategy], SAMPLINGS[name])
    assert gpus.num_replays > 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_sampling_draws_the_tokens_of_the_cpu(sampling, gpus):
    options = SAMPLINGS[sampling]
    on_both(gpus, tiny, CASE, ["k=2,d=4", "exact,lanes=8"], options)
    places = dataclasses.replace(options, valid_range=by_place(CASE))
    on_both(gpus, tiny, CASE, ["k=1"], places)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_runs(kind, gpus):
    strategies = ["k=1", "exact,lanes=8"]
    assert on_both(gpus, lambda: tiny(kind), CASE, strategies, SAMPLINGS["sampled"])


def test_hugging_face_runs(gpus):
    def make():
        return HuggingFaceModel(llama_of(tiny()))

    assert on_both(gpus, make, CASE, ["k=1", "exact,lanes=8"], SAMPLINGS["top-p"])


def test_the_second_gpu_is_as_good_as_the_first(gpus):
    on_both(gpus, tiny, CASE, ["k=1", "exact,lanes=8"], SAMPLINGS["sampled"], device="cuda:1")
    assert torch.cuda.current_device() == 0


class Streamed(NamedTuple):
    """Tokens (B, T, H, W) on the CPU, and how many frames were forgotten on the way."""

    tokens: torch.Tensor
    num_dropped_frames: int


def stream(case, words, model, device, **settings) -> Streamed:
    """Decode a frame with each strategy, one after the other."""
    engine = diagd.DecodingEngine(
        model,
        diagd.FrameFormat(case.height, case.width, case.num_action_tokens),
        batch_size=case.batch_size,
        sampling=SAMPLINGS["sampled"],
        **settings,
    )
    engine.prefill(case.prompt.to(device))
    actions = case.actions()
    assert actions is not None
    frames = []
    for t, word in enumerate(words):
        frames += list(engine.decode(word, actions[:, t : t + 1].to(device)))
    return Streamed(torch.stack(frames, 1).cpu(), engine.stream.num_dropped_frames)


@pytest.mark.parametrize("keep_frames", [None, 1])
def test_a_stream_goes_on_after_a_full_context(keep_frames, gpus):
    case, decoded = Case(num_frames=6, num_action_tokens=2), []
    for device in ("cpu", "cuda"):
        model, _ = prepare(tiny_model().to(device), "auto" if device == "cuda" else "eager")
        words = ("k=1", "raster", "exact,lanes=8", "k=2", "k=1", "k=1")
        found = stream(case, words, model, device, keep_frames=keep_frames)
        assert found.num_dropped_frames >= 4
        decoded.append(found.tokens)
    assert torch.equal(*decoded)


@pytest.mark.parametrize("strategy", ["raster", "k=1", "k=2,d=4"])
def test_no_step_waits_and_a_frame_is_one_launch(strategy, gpus):
    """What is replayed is lanes copied and a launch; steps wait for each other until a frame."""
    model, replays = prepare_for(tiny(), "cuda"), []
    make_step = model.make_step

    def watched(step):
        run = make_step(step)

        def taken(steps, num_slots, first=0):
            before = gpus.waits.total(), gpus.num_kernels, gpus.num_replays, gpus.num_captures
            run(steps, num_slots, first)
            if gpus.num_captures == before[3]:
                replays.append(gpus.num_replays - before[2])
                assert (gpus.waits.total(), gpus.num_kernels - replays[-1]) == before[:2]

        return taken

    model.make_step = watched
    engine = diagd.DecodingEngine(model, diagd.FrameFormat(3, 5, 2), batch_size=2)
    actions = CASE.actions()
    assert actions is not None

    def decode_again():
        engine.prefill(CASE.prompt.to("cuda"))
        waits = gpus.waits.total()
        replays.clear()
        frames = list(engine.decode(strategy, actions.to("cuda")))
        return len(frames), gpus.waits.total() - waits

    for _ in range(2):
        decode_again()
    num_frames, waits = decode_again()
    assert replays == [1] * num_frames
    assert waits <= 12


def test_a_prompt_is_read_in_few_pieces(gpus):
    """Pieces of a CPU's size would be thousands of launches, for some families in every frame."""
    case = dataclasses.replace(ALONE, num_frames=4, prefix_length=300)
    pieces = Counter()
    for device in ("cpu", "cuda"):
        model = prepare_for(tiny(max_positions=350), device)
        forward = model.forward

        def watched(*arguments, forward=forward, device=device, **settings):
            _, _, _, _, _, logits_to_keep, _ = arguments
            pieces[device] += logits_to_keep == 1
            return forward(*arguments, **settings)

        model.forward = watched
        engine = diagd.DecodingEngine(
            model, diagd.FrameFormat(3, 5, 2), max_slots=350, keep_frames=1
        )
        engine.prefill(case.prompt.to(device))
        actions = case.actions()
        assert actions is not None
        assert len(list(engine.decode("k=1", actions.to(device)))) == 4
        assert engine.stream.num_dropped_frames == 2
    assert pieces == {"cpu": 2 * 2, "cuda": 1 * 2}  # the prompt, and once more when it is full
