"""`Batch`: streams that are unlike in all share steps and memory, each as it is alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import pytest
import torch
from torch import Tensor

import diagd
from diagd.backends.native.model import NativeModel
from diagd.decoding import engine
from diagd.decoding.engine import Batch, Stream
from diagd.decoding.generate_tokens import write_frames
from diagd.decoding.model import CausalModel, ModelWrapper, Step, StepFunction
from diagd.decoding.schedule import FrameFormat
from diagd.decoding.step import run_steps
from diagd.models.guidance import GuidedModel
from tests.decoding.cases import MODELS, NUM_VISUAL, VOCAB_SIZE, model_of
from tests.models.tiny import KINDS, tiny_model

GREEDY = diagd.SamplingOptions(valid_range=(0, NUM_VISUAL))
SLOTS = 120


@dataclass(frozen=True)
class Request:
    """What a stream is to write."""

    strategy: str = "k=1"
    height: int = 3
    width: int = 5
    num_frames: int = 2
    num_actions: int = 1
    prefix_length: int = 1
    context_frames: int = 1
    sampling: diagd.SamplingOptions = GREEDY
    seed: int = 0
    max_slots: int = SLOTS

    @property
    def grid(self) -> diagd.TokenGrid:
        return diagd.TokenGrid(self.num_frames, self.height, self.width)

    def ids(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(self.seed))

    @property
    def prompt(self) -> Tensor:
        between = max(0, self.context_frames - 1) * self.num_actions
        frames = self.context_frames * self.height * self.width
        return self.ids(0, NUM_VISUAL, self.prefix_length + between + frames)

    @property
    def actions(self) -> Tensor:
        return self.ids(NUM_VISUAL, VOCAB_SIZE, self.num_frames, self.num_actions)

    def alone(self, model) -> Tensor:
        """Return (T, height, width), decoded by itself."""
        out = diagd.generate_tokens(
            model,
            self.prompt[None],
            self.strategy,
            self.actions[None],
            self.context_frames,
            self.grid,
            self.sampling,
            self.seed,
            max_slots=self.max_slots,
        )
        return out.tokens[0]

    def begin(self, batch: Batch, model: CausalModel | None = None) -> Stream:
        """Have a stream of a batch write the same."""
        frame = FrameFormat(self.height, self.width, self.num_actions)
        given = {"model": model, "max_slots": self.max_slots}
        stream = batch.admit(frame, self.sampling, self.seed, **given)
        stream.read(self.prompt, self.context_frames)
        write_frames(stream, self.strategy, self.actions)
        return stream


def taken(stream: Stream) -> list[Tensor]:
    return [stream.take_frame() for _ in range(stream.num_whole - stream.num_taken)]


def together(
    batch: Batch, requests: list[Request], models: Sequence[CausalModel | None] = ()
) -> list[Tensor]:
    """Return the frames of all, written side by side."""
    each = zip_longest(requests, models)
    streams = [request.begin(batch, model) for request, model in each]
    written: list[list[Tensor]] = [[] for _ in streams]
    counts = [request.num_frames for request in requests]
    while [*map(len, written)] != counts:
        batch.step()
        for stream, frames in zip(streams, written, strict=True):
            frames += taken(stream)
    for stream in streams:
        stream.close()
    return [torch.stack(frames) for frames in written]


def drawn(temperature: float, *valid_range: int, **options) -> diagd.SamplingOptions:
    return diagd.SamplingOptions(temperature, valid_range=valid_range, **options)  # pyright: ignore[reportArgumentType]


class Collecting(ModelWrapper[CausalModel]):
    """A model that takes some steps at once, and notes how many they were."""

    steps_at_once = 4

    def __init__(self, model: CausalModel) -> None:
        super().__init__(model)
        self.taken: list[int] = []

    def make_step(self, step: Step) -> StepFunction:
        def run(steps: Sequence[Tensor], num_slots: int, first: int = 0) -> None:
            self.taken.append(len(steps))
            run_steps(self.model, step, steps, num_slots, first)

        return run


def test_steps_wait_for_each_other_until_their_tokens_are_read():
    request, model = Request(num_frames=3), Collecting(tiny_model())
    batch = Batch(model, 1, SLOTS + 1)
    assert torch.equal(together(batch, [request])[0], request.alone(tiny_model()))
    steps = request.height + request.width - 1
    assert model.taken == [4, steps - 4] * 3


def test_steps_that_wait_run_before_a_prompt_is_read_beside_them_or_memory_changes():
    requests = [replace(request, sampling=GREEDY) for request in UNLIKE]
    model = Collecting(tiny_model())
    found = together(Batch(model, len(requests), SLOTS + 9), requests)
    for request, frames in zip(requests, found, strict=True):
        assert torch.equal(frames, request.alone(tiny_model()))
    assert max(model.taken) > 1


UNLIKE = [
    Request("k=1", seed=4),
    Request("exact,lanes=9", 2, 4, 3, 2, 5, 2, drawn(0.8, 0, 12), 7),
    Request("raster", 1, 6, 2, 0, 3, 0, drawn(1.3, 2, 18, top_k=6), 2**40 + 1),
    Request("k=2,d=3/predecessor", 4, 3, 4, 1, 9, 1, drawn(1.0, 0, 18, top_p=0.9), -3),
    Request("jacobi,lanes=6", 3, 5, 2, 1, 2, 1, drawn(0.5, 0, 18), 4),
    Request("zipar=2", 3, 2, 9, 1, 1, 1, drawn(1.0, 0, 18), 5, max_slots=30),  # frames leave
]


@pytest.mark.parametrize("name", MODELS)
def test_streams_unlike_in_all_write_together_what_each_writes_alone(name):
    """Prompts, grids, strategies, seeds, temperatures, ids, and what a context holds."""
    model = model_of(name)
    alone = [request.alone(model) for request in UNLIKE]
    batch = Batch(model, len(UNLIKE), SLOTS + 3)
    for order in (UNLIKE, UNLIKE[::-1]):  # the second where others have been
        for own, request in zip(together(batch, order), order, strict=True):
            assert torch.equal(own, alone[UNLIKE.index(request)]), request
    assert batch.streams == []


def test_a_batch_takes_as_many_steps_as_its_longest_stream():
    batch = Batch(model_of("native"), 2, SLOTS)
    together(batch, [Request("raster"), Request("k=1")])
    assert batch.num_steps == 2 * 15


def random_request(chance: random.Random) -> Request:
    strategy = chance.choice(["k=1", "raster", "exact,lanes=9"])
    height, width = chance.choice([(3, 5), (2, 4), (1, 6), (4, 3)])
    actions = chance.randint(0, 2)
    request = Request(
        strategy,
        height,
        width,
        num_frames=chance.randint(1, 3),
        num_actions=actions,
        prefix_length=chance.randint(1, 30),
        context_frames=chance.randint(0, 2),
        sampling=drawn(chance.choice([0.0, 0.7, 1.0]), 0, chance.choice([12, NUM_VISUAL])),
        seed=chance.randint(0, 10**6),
    )
    room = 2 + chance.choice([2, 9]) * (height * width + actions)  # frames may leave
    return replace(request, max_slots=min(len(request.prompt) + room, SLOTS - 5))


def guided() -> GuidedModel:
    ids = {"vocab_size": VOCAB_SIZE, "image_vocab_size": NUM_VISUAL, "max_positions": SLOTS}
    plain = tiny_model(**ids, num_action_tokens=0, **KINDS["chameleon"])
    return GuidedModel(NativeModel(plain), torch.tensor([[3, 7, 1]]), 1, 2.5)


@pytest.mark.parametrize(("make", "events"), [(partial(model_of, "native"), 500), (guided, 150)])
def test_streams_come_and_go_and_each_writes_what_it_writes_alone(make, events, monkeypatch):
    """Arrivals and departures, finished or not, while newcomers read in pieces."""
    monkeypatch.setitem(engine.PREFILL_LANES, "cpu", 7)
    chance, model = random.Random(0), make()
    batch = Batch(model, 6 * (1 + len(model.scales)), SLOTS)
    here: list[tuple[Stream, Request, list[Tensor]]] = []
    counts = {"arrivals": 0, "frames": 0, "unfinished": 0, "full": 0}
    for _ in range(events):
        if here and (len(here) == 6 or chance.random() < 0.45):
            counts["full"] += len(here) == 6
            stream, request, frames = here.pop(chance.randrange(len(here)))
            stream.close()
            counts["frames"] += len(frames)
            counts["unfinished"] += len(frames) < request.num_frames
            if frames:
                alone = request.alone(model)[: len(frames)]
                assert torch.equal(torch.stack(frames), alone), request
        else:
            request = random_request(chance)
            here.append((request.begin(batch), request, []))
            counts["arrivals"] += 1
        for _ in range(chance.choice([0, 1, 4, 16])):
            batch.step()
            for stream, _, frames in here:
                frames += taken(stream)
    assert 2 * counts["arrivals"] >= events
    assert 25 * min(counts.values()) > events, counts
    assert 2 * counts["frames"] > events


def test_guided_streams_share_steps_and_take_a_sequence_for_each_prompt():
    model = guided()
    requests = [
        Request("k=1", num_actions=0, max_slots=60, seed=1),
        Request("exact,lanes=7", 2, 4, num_actions=0, prefix_length=6, max_slots=60, seed=2),
    ]
    batch = Batch(model, 5, 62)
    for own, request in zip(together(batch, requests), requests, strict=True):
        assert torch.equal(own, request.alone(model))
    kept = [request.begin(batch) for request in requests]
    assert [(stream.first, stream.end) for stream in kept] == [(0, 2), (2, 4)]
    message = r"batch is full: expected 2 free sequences in a row, 4 of 5 are in use$"
    with pytest.raises(ValueError, match=message):
        requests[0].begin(batch)


def test_streams_of_one_batch_are_guided_each_in_its_own_way():
    """By other scales and other prompts, or not at all."""
    plain = guided().model
    models = [GuidedModel(plain, torch.tensor([[3, 7]]), 1, 4.0), plain, guided()]
    requests = [Request(seed=seed, num_actions=0, max_slots=60) for seed in range(3)]
    batch = Batch(plain, 5, 62)
    written = together(batch, requests, models)
    for own, request, model in zip(written, requests, models, strict=True):
        assert torch.equal(own, request.alone(model))
    assert not torch.equal(written[0], requests[0].alone(plain))


def test_a_full_batch_takes_nobody_until_a_stream_has_gone():
    batch = Batch(model_of("native"), 2, SLOTS)
    first, second = Request(seed=1).begin(batch), Request(seed=2).begin(batch)
    message = "^batch is full: expected 1 free sequences in a row, 2 of 2 are in use$"
    with pytest.raises(ValueError, match=message):
        Request().begin(batch)
    first.close()
    assert Request(seed=3).begin(batch).first == 0 != second.first


def test_a_stream_that_nobody_holds_is_closed():
    batch = Batch(model_of("native"), 1, SLOTS)
    batch.admit(FrameFormat(3, 5))
    assert batch.streams == []
    batch.admit(FrameFormat(2, 4))


def test_a_stream_holds_no_more_than_its_model():
    batch = Batch(model_of("native"), 1, 400)
    assert batch.admit(FrameFormat(3, 5)).max_slots == 320


def test_a_stream_is_closed_once():
    batch = Batch(model_of("native"), 2, SLOTS)
    stream = Request().begin(batch)
    other = Request(seed=1).begin(batch)
    stream.close()
    with pytest.raises(ValueError, match=r"^stream is closed already$"):
        stream.close()
    assert batch.streams == [other]


def test_a_prompt_too_long_for_what_is_left_is_refused_and_the_others_go_on():
    model = model_of("native")
    batch, other = Batch(model, 2, 60), Request(max_slots=58)
    running = other.begin(batch)
    long = Request(prefix_length=40, max_slots=58)
    with pytest.raises(
        ValueError, match=r"^prompt and one frame need 71 slots, the context holds 58$"
    ):
        long.begin(batch)
    frames: list[Tensor] = []
    while len(frames) < 2:
        batch.step()
        frames += taken(running)
    assert torch.equal(torch.stack(frames), other.alone(model))


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("strategy", ["k=1", "exact,lanes=6"])
def test_a_stream_whose_logits_break_ends_alone_and_leaves_nothing_behind(kernels, strategy):
    ids = {"vocab_size": VOCAB_SIZE, "image_vocab_size": NUM_VISUAL}
    plain = tiny_model(**ids, num_action_tokens=1)
    with torch.no_grad():
        plain.embeddings[VOCAB_SIZE - 1] = torch.nan
    model = NativeModel(plain) if kernels else plain
    batch, fine = Batch(model, 3, 62), Request(strategy, max_slots=60, seed=6)
    assert (fine.actions < VOCAB_SIZE - 1).all()
    broken = Request(strategy, max_slots=60, seed=1)
    streams = [fine.begin(batch), broken.begin(batch), fine.begin(batch)]
    write_frames(streams[1], strategy, torch.tensor([[VOCAB_SIZE - 1], [NUM_VISUAL]]))
    frames: list[list[Tensor]] = [[], []]
    ended = []
    for _ in range(2):  # the second where the first has been
        while streams[1].num_whole == 0:
            batch.step()
            for stream, own in zip(streams[::2], frames, strict=True):
                own += taken(stream)
        with pytest.raises(
            ValueError, match=r"^no token can be sampled at frame 0, row 0"
        ) as error:
            streams[1].take_frame()
        ended.append(str(error.value))
        streams[1].close()
        streams[1] = broken.begin(batch)
        write_frames(streams[1], strategy, torch.tensor([[VOCAB_SIZE - 1], [NUM_VISUAL]]))
    assert not any("\n" in line for line in ended)
    streams[1].close()
    newcomer, written = fine.begin(batch), list[Tensor]()
    while min(map(len, [*frames, written])) < 2:
        batch.step()
        for stream, own in zip([*streams[::2], newcomer], [*frames, written], strict=True):
            own += taken(stream)
    assert newcomer.first == 1
    for own in (*frames, written):
        assert torch.equal(torch.stack(own), fine.alone(model))


@pytest.mark.parametrize("name", MODELS)
def test_a_stream_goes_on_with_frames_of_another_format(name):
    """As an image whose preview is written first: the picture sees it like a prompt."""
    model = model_of(name)
    batch, prompt = Batch(model, 1, 200), prompt_of(7, seed=3)
    stream = batch.admit(diagd.FrameFormat(2, 3))
    stream.read(prompt, 0)
    (preview,) = written(batch, stream, "k=1", torch.empty(1, 0, dtype=torch.int64))
    stream.go_on_with(diagd.FrameFormat(5, 4, 1), diagd.SamplingOptions(valid_range=(3, 9)))
    actions = torch.tensor([[20], [21], [22]])
    pictures = written(batch, stream, "k=1,d=3", actions)
    known = torch.cat([prompt, preview.flatten()])
    alone = diagd.generate_tokens(
        model,
        known[None],
        "k=1,d=3",
        actions[None],
        0,
        diagd.TokenGrid(3, 5, 4),
        diagd.SamplingOptions(valid_range=(3, 9)),
    )
    assert torch.equal(torch.stack(pictures), alone.tokens[0])


@pytest.mark.parametrize(
    ("strategy", "action", "message"),
    [
        ("k=4", NUM_VISUAL, r"row_lag must be in \[1, width=3\], got 4"),
        ("k", NUM_VISUAL, "strategy must look like raster, k=2"),
        ("k=1", VOCAB_SIZE, rf"actions ids must be in \[0, {VOCAB_SIZE}\), got {VOCAB_SIZE}"),
    ],
)
def test_what_does_not_fit_a_stream_is_refused_before_it_begins(strategy, action, message):
    batch = Batch(model_of("native"), 1, 60)
    stream = batch.admit(diagd.FrameFormat(2, 3, 1))
    stream.read(prompt_of(7, seed=3), 1)
    with pytest.raises(ValueError, match=message):
        write_frames(stream, strategy, torch.tensor([[action]]))
    assert not stream.is_writing


def test_another_format_has_no_place_in_a_full_context():
    batch = Batch(model_of("native"), 1, 60)
    stream = batch.admit(diagd.FrameFormat(2, 3), max_slots=20)
    stream.read(prompt_of(7, seed=3), 1)
    written(batch, stream, "raster", torch.empty(5, 0, dtype=torch.int64))
    with pytest.raises(ValueError, match="context is full: cannot continue with frames of another"):
        stream.go_on_with(diagd.FrameFormat(3, 5))


def prompt_of(length, seed):
    return torch.randint(18, (length,), generator=torch.Generator().manual_seed(seed))


def written(batch, stream, strategy, actions):
    """Have a stream write its frames, and return them."""
    diagd.write_frames(stream, strategy, actions)
    frames = []
    while len(frames) < len(actions):
        batch.step()
        while stream.num_taken < stream.num_whole:
            frames.append(stream.take_frame())
    return frames
