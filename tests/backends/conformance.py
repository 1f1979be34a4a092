"""What every backend keeps: write one, then run these checks over it.

    MINE = UnderTest(MyModel)

    @pytest.mark.parametrize("check", checks_of(MINE))
    def test_mine(check):
        check(MINE)

Each compares with the full forward, or with `Recomputing`, which remembers what it was fed and runs
it all again. Lanes stand in no order, slots are no positions, the grid is 3 x 5.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import diagd
from diagd.decoding.engine import Batch, Stream
from diagd.decoding.generate_tokens import write_frames
from diagd.decoding.model import CausalModel, ModelWrapper
from diagd.decoding.sampling import UNDRAWN, Draw, SamplingOptions, ValidRanges, sample
from diagd.decoding.visibility import NEVER, Seen
from diagd.models.transformer import Transformer
from tests.backends.recomputing import Recomputing
from tests.models.feeding import feed, scrambled_steps, visible_under
from tests.models.tiny import KINDS, random_tokens, tiny_model

NUM_SLOTS = 71  # the last is scratch
WIDTHS = (1, 9, 2, 33, 1, 5, 14, 3, 40, 1, 70)  # lanes of a step
NUM_VISUAL = 44  # of the 50 ids; the others are action ids


@dataclass(frozen=True)
class UnderTest:
    """A backend, and what it promises besides the protocol.

    Attributes:
        make: turns a tiny Transformer into what runs its steps; may use it up.
        kinds: the tiny models that it runs.
        dtype, device: of the Transformer that it is given.
        tolerance: how far its logits may be from those of the float32 model.
        rounds: whether it rounds weights or cache, so that tokens need not be the float32 model's.
        steadfast: whether a lane's logits are the same bits whoever shares its step or batch.
        sequences: how many the checks feed at once; 1 where it takes no more.
        buffers: what its cache writes to.
    """

    make: Callable[[Transformer], CausalModel]
    kinds: tuple[str, ...] = tuple(KINDS)
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    tolerance: float = 2e-5  # float32 logits of size 10, summed in another order
    rounds: bool = False
    steadfast: bool = False
    sequences: int = 2
    buffers: Callable[[Any], Iterable[Tensor]] = lambda cache: [*cache.keys, *cache.values]

    def model(self, kind: str = "llama") -> CausalModel:
        """Make what runs the tiny model of a kind."""
        return self.make(tiny_model(**KINDS[kind]).to(self.device, self.dtype))

    def assert_close(self, actual: Tensor, expected: Tensor, kind: str = "llama") -> None:
        """Compare logits with those of the float32 model."""
        torch.testing.assert_close(
            actual.float().cpu(),
            expected,
            atol=self.tolerance,
            rtol=0,
            msg=lambda message: f"{kind}: {message}",
        )

    def assert_same(self, actual: Tensor, expected: Tensor) -> None:
        """Compare logits of its own."""
        atol = 0 if self.steadfast else self.tolerance
        torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def random_steps(model: CausalModel, sequences: int = 2) -> Iterator[dict[str, Any]]:
    """Draw steps: any token anywhere in any slot, seeing any slots written by then.

    Slots are written several times. Every step ends with two padded lanes, one that sees what the
    first lane sees and one that sees nothing. They write to the scratch slot, which nobody sees,
    whether the mask reaches so far or not.
    """
    generator = torch.Generator().manual_seed(0)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    scratch = NUM_SLOTS - 1
    written, held = torch.zeros(NUM_SLOTS, dtype=torch.bool), torch.full((NUM_SLOTS,), -1)
    for index, width in enumerate(WIDTHS):
        reach = width + int(numbers(NUM_SLOTS - width, 1))
        own = torch.randperm(reach, generator=generator)[:width]
        written[own] = True
        visible = (numbers(2, width + 2, NUM_SLOTS) == 1) & written
        visible[torch.arange(width), own] = True
        visible[width], visible[width + 1] = visible[0], False
        tokens = numbers(model.num_embeddings, 2, width + 2)[:sequences]
        positions, reach = (
            numbers(model.max_positions, width + 2),
            NUM_SLOTS if index % 2 else reach,
        )
        held[own] = positions[:width]
        seen = visible[:, :reach], positions, held[:reach].clone()
        yield {
            "tokens": tokens.to(model.device),
            "positions": positions.to(model.device),
            "slots": F.pad(own, (0, 2), value=scratch).to(model.device),
            "seen": Seen.of_mask(*(one.to(model.device) for one in seen)),
        }


def run_random_steps(model: CausalModel, cache: Any, sequences: int = 2) -> Tensor:
    """Return the logits (S, all lanes but padded ones, V) of random steps, one after another."""
    logits = []
    for step in random_steps(model, sequences):
        out = model.forward(**step, cache=cache)
        assert out.isfinite().all()  # of padded lanes, too: 0 * NaN would reach those who hide them
        logits.append(out[:, :-2])
    return torch.cat(logits, 1)


@torch.no_grad()
def it_tells_what_the_protocol_asks(backend: UnderTest) -> None:
    for kind in backend.kinds:
        model, config = backend.model(kind), tiny_model(**KINDS[kind]).config
        assert model.vocab_size == config.vocab_size
        assert model.num_embeddings == config.vocab_size + config.extra_embeddings
        assert model.max_positions == config.max_positions
        assert model.device.type == backend.device


TOKENS = random_tokens(2, 61)
FED_AT = scrambled_steps(61, num_steps=6), torch.arange(61) // 7


@cache
def full_forwards(kind: str) -> list[Tensor]:
    """Return the logits of tokens that are fed in each of the two orders; once for all backends."""
    plain = tiny_model(**KINDS[kind])
    return [plain.logits(TOKENS, visible=visible_under(steps)) for steps in FED_AT]


@torch.no_grad()
def fed_in_any_order_and_pieces_it_equals_the_full_forward(backend: UnderTest) -> None:
    for kind in backend.kinds:
        model = backend.model(kind)
        for steps, expected in zip(FED_AT, full_forwards(kind), strict=True):
            own = slice(backend.sequences)
            backend.assert_close(feed(model, TOKENS[own], steps), expected[own], kind)


@cache
def recomputed_steps(kind: str) -> Tensor:
    plain = Recomputing(tiny_model(**KINDS[kind]))
    return run_random_steps(plain, plain.make_cache(2, NUM_SLOTS))


@torch.no_grad()
def a_step_writes_its_slots_and_sees_what_the_mask_says(backend: UnderTest) -> None:
    for kind in backend.kinds:
        model = backend.model(kind)
        count = backend.sequences
        logits = run_random_steps(model, model.make_cache(count, NUM_SLOTS), count)
        backend.assert_close(logits, recomputed_steps(kind)[:count], kind)


@torch.no_grad()
def what_hidden_slots_hold_changes_nothing(backend: UnderTest) -> None:
    model, count = backend.model(), backend.sequences
    cache = model.make_cache(count, NUM_SLOTS)
    for _ in range(2):  # some allocate at the first step
        model.forward(**next(random_steps(model, count)), cache=cache)
        for buffer in backend.buffers(cache):
            buffer.fill_(1e4)  # no NaN: caches begin with zeros, for 0 * NaN is NaN
    expected = run_random_steps(model, model.make_cache(count, NUM_SLOTS), count)
    backend.assert_same(run_random_steps(model, cache, count), expected)


@torch.no_grad()
def a_lane_does_not_care_who_shares_its_step(backend: UnderTest) -> None:
    for kind in ("llama", "multi-head", "multi-query"):  # widths around those of the kernels' tiles
        if kind in backend.kinds:
            model, tokens = backend.model(kind), random_tokens(1, 40)
            alone = feed(model, tokens, torch.arange(40))
            for width in (2, 3, 13, 14, 15, 40):
                backend.assert_same(feed(model, tokens, torch.arange(40) // width), alone)


@torch.no_grad()
def lanes_turn_by_the_coordinates_that_they_are_told(backend: UnderTest) -> None:
    """As of a second grid in an image, or of the text of M-RoPE: they say nothing of order."""
    count, places = backend.sequences, torch.arange(12)
    told = torch.randint(-1, 9, (3, 2, 12), generator=torch.Generator().manual_seed(0))[:, :count]
    for kind in backend.kinds:
        plain, model = tiny_model(**KINDS[kind]), backend.model(kind)
        if (own := model.coordinates(places)) is None:
            continue

        def fed(model: CausalModel, coordinates: Tensor | None) -> Tensor:
            at = places.to(model.device)
            given = TOKENS[:count, :12].to(model.device), at, at, Seen(at, at, at, at)
            cache = model.make_cache(count, NUM_SLOTS)
            told = None if coordinates is None else coordinates.to(model.device)
            return model.forward(*given, cache, 0, 0, told)

        expected = fed(plain, told)
        assert (expected - fed(plain, None)).abs().max() > 0.01, kind
        backend.assert_close(fed(model, told), expected, kind)
        each = own.cpu()[:, None].expand(-1, count, -1)
        backend.assert_same(fed(model, each), fed(model, None))


@torch.no_grad()
def only_the_distance_between_positions_counts(backend: UnderTest) -> None:
    """Where it says so: a stream may have run for a year."""
    for kind in backend.kinds:
        model = backend.model(kind)
        if not model.relative_positions:
            continue
        logits = []
        for start in (0, 17 * 10**9):  # whole frames
            step = causal_step(model, backend.sequences, 17 + start)  # behind any prefix
            cache = model.make_cache(backend.sequences, 9)
            logits.append(model.forward(**step, cache=cache).float())
        torch.testing.assert_close(*logits, atol=max(5e-5, backend.tolerance), rtol=0)


def a_batch_is_its_rows_one_by_one(backend: UnderTest) -> None:
    model, tokens, steps = backend.model(), random_tokens(3, 41), scrambled_steps(41, 6)
    together = feed(model, tokens, steps)
    for row in range(3):
        backend.assert_same(together[row : row + 1], feed(model, tokens[row : row + 1], steps))


def steps_of_its_own(model: CausalModel, sequence: int) -> Iterator[dict[str, Tensor]]:
    """Draw the steps of one sequence, as the rule shows them: lanes (L,), held and fed_at (slots,).

    Some of its tokens are to be fed again later, so until then only their own lanes see them.
    """
    generator = torch.Generator().manual_seed(sequence)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    held, fed_at = torch.full((NUM_SLOTS,), -1), torch.full((NUM_SLOTS,), NEVER)
    for step in itertools.count(3 * sequence):
        width = int(numbers(1, 20, 1))
        slots = torch.randperm(NUM_SLOTS - 1, generator=generator)[:width]
        positions = torch.randperm(model.max_positions, generator=generator)[:width]
        held[slots], fed_at[slots] = positions, step + numbers(0, 3, width)
        own = {
            "tokens": numbers(0, model.num_embeddings, width),
            "positions": positions,
            "slots": slots,
            "steps": torch.full((width,), step),
            "held": held.clone(),
            "fed_at": fed_at.clone(),
        }
        yield {name: one.to(model.device) for name, one in own.items()}


def run_side_by_side(
    model: CausalModel, cache: Any, first: int, steps: list[dict[str, Tensor]], by_mask: bool
) -> list[Tensor]:
    """Feed a step of each of neighbouring sequences, padded at the end; return their (L, V)."""
    widths = [len(step["tokens"]) for step in steps]

    def side_by_side(name: str, padding: int = 0) -> Tensor:
        pairs = zip(steps, widths, strict=True)
        padded = [
            F.pad(step[name], (0, max(widths) - width), value=padding) for step, width in pairs
        ]
        return torch.stack(padded)

    positions, held = side_by_side("positions"), torch.stack([step["held"] for step in steps])
    fed_at = torch.stack([step["fed_at"] for step in steps])
    seen = Seen(positions, side_by_side("steps"), held, fed_at)
    seen = Seen.of_mask(seen.mask(), positions, held) if by_mask else seen
    lanes = side_by_side("tokens"), positions, side_by_side("slots", NUM_SLOTS - 1)
    logits = model.forward(*lanes, seen, cache, 0, first)
    assert logits.isfinite().all()  # of padding, too
    return [of[:width] for of, width in zip(logits, widths, strict=True)]


TAKE_PART = (0, 3), (1, 3), (2, 3), (0, 2), (1, 2), (0, 1), (0, 3)  # first and end of a step


@torch.no_grad()
def sequences_of_a_step_stand_where_they_like(backend: UnderTest) -> None:
    """Each at positions, slots and steps of its own, so many as it likes, as if it were alone."""
    for kind, by_mask in itertools.product(backend.kinds, (False, True)):
        model = backend.model(kind)
        cache, steps = (
            model.make_cache(3, NUM_SLOTS),
            [steps_of_its_own(model, s) for s in range(3)],
        )
        alone = [model.make_cache(1, NUM_SLOTS) for _ in range(3)]
        for first, end in TAKE_PART:
            taken = [next(steps[sequence]) for sequence in range(first, end)]
            together = run_side_by_side(model, cache, first, taken, by_mask)
            for sequence, own, logits in zip(range(first, end), taken, together, strict=True):
                (expected,) = run_side_by_side(model, alone[sequence], 0, [own], by_mask)
                backend.assert_same(logits, expected)


@torch.no_grad()
def only_the_last_logits_are_kept_when_asked(backend: UnderTest) -> None:
    model, count = backend.model(), backend.sequences
    step = causal_step(model, count)
    every = model.forward(**step, cache=model.make_cache(count, 9))
    for keep, lanes in ((0, 7), (1, 1), (2, 2), (100, 7)):
        kept = model.forward(**step, cache=model.make_cache(count, 9), logits_to_keep=keep)
        assert kept.shape == (count, lanes, model.vocab_size)
        backend.assert_same(kept, every[:, -lanes:])


def causal_step(model: CausalModel, sequences: int, start: int = 0) -> dict[str, Any]:
    """Feed seven tokens of each sequence at positions from `start` on, into slots from 0 on."""
    slots = torch.arange(7, device=model.device)
    tokens, at = random_tokens(sequences, 7).to(model.device), slots + start
    seen = Seen(at, at, at, at)
    return {"tokens": tokens, "positions": at, "slots": slots, "seen": seen}


def what_cannot_be_is_refused(backend: UnderTest) -> None:
    model = backend.model()
    for sizes in ((1, 0), (0, 4)):
        message = "batch_size and num_slots must be at least 1, got {} and {}".format(*sizes)
        with pytest.raises(ValueError, match=message):
            model.make_cache(*sizes)
    with pytest.raises(ValueError, match="context must be None: this model has no cross-attention"):
        model.make_cache(1, 4, torch.zeros(1, 3, 8))
    limits = {"tokens": model.num_embeddings, "slots": 9}
    for name, limit in limits.items():
        step = causal_step(model, backend.sequences)
        step[name] = step[name].clone()
        step[name][..., 3] = limit
        seen = step["seen"]  # kernels of a GPU do not look where they write
        step["seen"] = Seen.of_mask(seen.mask(), seen.positions, seen.held)
        if backend.device == "cpu":  # on CUDA it would end the process
            with pytest.raises((ValueError, IndexError), match=r"out of (range|bounds)"):
                model.forward(**step, cache=model.make_cache(backend.sequences, 9))


def it_draws_what_the_sampler_draws(backend: UnderTest) -> None:
    model, generator = backend.model(), torch.Generator().manual_seed(0)
    seeds = torch.tensor([1, 2**40 + 3, -5], device=model.device)
    lanes = torch.arange(14, device=model.device)
    frames, rows, columns = lanes + 3, lanes, lanes * 3 % 24
    low = torch.arange(14 * 24).view(14, 24) % 40
    by_place = torch.stack([low, low + 3], dim=-1)
    for options in (
        SamplingOptions(),
        SamplingOptions(1.0),
        SamplingOptions(0.7, top_k=20),
        SamplingOptions(1.0, top_p=0.9),
        SamplingOptions(1.0, top_p=0.9, exclusive_top_p=True),
        SamplingOptions(1.3, top_k=30, top_p=0.5, valid_range=(5, 40)),
        SamplingOptions(2.0, top_k=1),
        SamplingOptions(valid_range=by_place),
        SamplingOptions(1.0, valid_range=by_place),
    ):
        for vocab_size in (50, 1030):
            ranges = ValidRanges.resolve(options.valid_range, 14, 24, vocab_size, model.device)
            for spread in (0.1, 1, 3, 10):
                logits = torch.randn(3, 15, vocab_size, generator=generator) * spread
                logits = (logits.round() if spread == 3 else logits).to(model.device)  # ties
                logits = logits[:, 1:] if spread == 10 else logits[:, 1:].clone()  # of a larger one
                draw = Draw(options, ranges, seeds, frames, rows, columns)
                assert torch.equal(model.sample(logits, draw), sample(logits, draw)), options


def where_logits_are_broken_nothing_is_drawn(backend: UnderTest) -> None:
    """And what is broken outside of the valid ids, or in another lane, changes nothing."""
    model, lanes = backend.model(), torch.arange(7, device=backend.device)
    logits = torch.randn(2, 7, 50, generator=torch.Generator().manual_seed(0)).to(model.device)
    logits[0, 0] = torch.nan
    logits[0, 1, 40] = logits[1, 2, 5] = torch.nan  # behind whole blocks of the kernels; the first
    logits[0, 2, 20] = torch.inf
    logits[1, 4, 5:44] = -torch.inf
    logits[1, 5, 6:44] = -torch.inf  # one is left
    logits[1, 6, :5], logits[1, 6, 44:] = torch.nan, torch.inf
    by_place = torch.tensor([5, 44]).expand(7, 7, 2).clone()
    by_place[3, 3] = torch.tensor([9, 12])
    for options in (
        SamplingOptions(),
        SamplingOptions(0.9),
        SamplingOptions(0.7, top_k=20),
        SamplingOptions(1.0, top_p=0.8),
        SamplingOptions(1.3, top_k=30, top_p=0.5, exclusive_top_p=True),
    ):
        for valid in ((5, 44), by_place):
            ranges = ValidRanges.resolve(valid, 7, 7, 50, model.device)
            seeds = torch.tensor([3, 4], device=model.device)
            draw = Draw(options, ranges, seeds, lanes, lanes, lanes)
            drawn = model.sample(logits, draw)
            broken = [[0, 0], [0, 1], [0, 2], [1, 2], [1, 4]]
            assert (drawn == UNDRAWN).nonzero().tolist() == broken, options
            assert drawn[1, 5] == 5
            assert torch.equal(drawn, sample(logits, draw)), options


GREEDY = SamplingOptions(valid_range=(0, NUM_VISUAL))
SAMPLED = SamplingOptions(0.8, top_k=9, valid_range=(0, NUM_VISUAL))
PROMPT = random_tokens(2, 16, vocab_size=NUM_VISUAL)  # a token and a frame of 3 x 5
ACTIONS = NUM_VISUAL + random_tokens(2, 4, 2, vocab_size=50 - NUM_VISUAL)


def decode(
    model: CausalModel,
    strategies: Iterable[str],
    actions: Tensor,
    prompt: Tensor = PROMPT,
    sampling: SamplingOptions = GREEDY,
) -> list[Tensor]:
    """Decode as many frames as there are actions by each strategy, (B, T, 3, 5)."""
    engine = diagd.DecodingEngine(
        model, diagd.FrameFormat(3, 5, 2), batch_size=len(prompt), sampling=sampling, seed=5
    )
    decoded = []
    for strategy in strategies:
        engine.prefill(prompt.to(model.device))
        frames = list(engine.decode(strategy, actions.to(model.device)))
        decoded.append(torch.stack(frames, 1).cpu())
        dropped = [stream.num_dropped_frames for stream in engine.streams]
        assert dropped == [max(0, len(frames) - 2)] * len(prompt)  # the context holds three
    return decoded


NAMES = ("raster", "k=1", "k=2,d=4")


@cache
def plain_tokens(sampling: SamplingOptions) -> list[Tensor]:
    return decode(tiny_model(), NAMES, ACTIONS[:, :2], sampling=sampling)


def its_tokens_are_those_of_the_plain_model(
    backend: UnderTest, sampling: SamplingOptions = SAMPLED
) -> None:
    own = slice(backend.sequences)
    decoded = decode(backend.model(), NAMES, ACTIONS[own, :2], PROMPT[own], sampling)
    for name, found, expected in zip(NAMES, decoded, plain_tokens(sampling), strict=True):
        assert torch.equal(found, expected[own]), name


def its_likeliest_tokens_are_those_of_the_plain_model(backend: UnderTest) -> None:
    its_tokens_are_those_of_the_plain_model(backend, GREEDY)


def a_fused_step_is_its_parts(backend: UnderTest) -> None:
    """Where there is one: a wrapper that feeds in a way of its own has its steps in parts."""

    class Apart(ModelWrapper[CausalModel]):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return self.model.forward(*args, **kwargs)

    places = torch.tensor([3, 40]).repeat(3, 5, 1)
    places[:, 4] = torch.arange(41, 44)[:, None] + torch.arange(2)  # separators
    samplings = GREEDY, SAMPLED, SamplingOptions(1.0, top_p=0.9, valid_range=places)
    for number, kind in enumerate(backend.kinds):  # the first by every sampling, others by one
        model = backend.model(kind)
        plain = CausalModel.make_step, ModelWrapper.make_step
        if type(model).make_step in plain or model.replays:
            return
        for sampling in samplings[number % 3 :][:1] if number else samplings:
            own = slice(backend.sequences)
            given = ("raster", "k=1", "k=2,d=4", "exact"), ACTIONS[own], PROMPT[own], sampling
            whole, parts = (decode(one, *given) for one in (model, Apart(model)))
            for one, other in zip(whole, parts, strict=True):
                assert torch.equal(one, other), (kind, sampling)


@dataclass(frozen=True)
class Request:
    """A stream that somebody asks for."""

    strategy: str
    prompt_length: int
    seed: int
    sampling: SamplingOptions

    def start(self, batch: Batch) -> Stream:
        device = batch.model.device
        stream = batch.admit(diagd.FrameFormat(3, 5, 2), self.sampling, self.seed)
        prompt = random_tokens(self.prompt_length, seed=self.seed, vocab_size=NUM_VISUAL)
        stream.prefill([prompt.to(device)], 1)
        write_frames(stream, self.strategy, ACTIONS[0, :2].to(device))
        return stream


REQUESTS = (
    Request("exact,lanes=4", 16, 3, SAMPLED),
    Request("k=1", 19, 4, GREEDY),
    Request("exact,lanes=7", 17, 5, SamplingOptions(1.1, top_p=0.9, valid_range=(3, 41))),
    Request("k=2,d=4", 15, 2**40, SAMPLED),
)


def finish(batch: Batch, streams: list[Stream]) -> list[Tensor]:
    """Run all steps, and return the two frames of each stream, (2, 3, 5)."""
    while any(one.num_whole < 2 for one in streams):
        batch.step()
    return [torch.stack([one.take_frame() for _ in range(2)]).cpu() for one in streams]


def streams_come_and_go_and_write_what_they_write_alone(backend: UnderTest) -> None:
    """By strategies, from prompts, with seeds and temperatures of their own."""
    for kind in [kind for kind in ("llama", "wham") if kind in backend.kinds]:
        model = backend.model(kind)
        alone = list[Tensor]()
        for request in REQUESTS:
            batch = Batch(model, 1, 64)
            alone += finish(batch, [request.start(batch)])
        batch = Batch(model, 3, 64)
        gone, *stay = (request.start(batch) for request in REQUESTS[:3])
        for _ in range(4):
            batch.step()
        gone.close()
        for _ in range(4):
            batch.step()
        newcomer = REQUESTS[3].start(batch)
        assert (newcomer.first, [one.first for one in stay]) == (0, [1, 2])
        for number, frames in enumerate(finish(batch, [*stay, newcomer])):
            assert torch.equal(frames, alone[1 + number]), (kind, REQUESTS[1 + number])


def greedy_raster_writes_what_the_full_forward_finds_likeliest(backend: UnderTest) -> None:
    own = slice(backend.sequences)
    actions, prompt = ACTIONS[own, :2], PROMPT[own]
    (frames,) = decode(backend.model(), ["raster"], actions, prompt)
    generated = torch.cat([actions, frames.flatten(2)], 2)  # (B, 2, 17)
    sequence = torch.cat([prompt, generated.flatten(1)], 1)
    with torch.no_grad():
        logits = tiny_model().logits(sequence)[:, 15:-1, :NUM_VISUAL].unflatten(1, (2, 17))
    chances = logits[:, :, 2:]  # (B, 2, 15, ids)
    written = chances.gather(-1, frames.flatten(2)[..., None])[..., 0]
    assert (chances.amax(-1) - written).max() <= 2 * backend.tolerance


PROMPTS = {"llama": PROMPT, "sliding": PROMPT[:, 1:]}  # 3-D positions begin with a frame


@cache
def recomputed_stream(kind: str) -> Tensor:
    plain = Recomputing(tiny_model(**KINDS[kind]))
    return decode(plain, ["k=1"], ACTIONS, PROMPTS[kind])[0]


def a_stream_goes_on_after_a_full_context(backend: UnderTest) -> None:
    """Nothing is read again, or the prefix and the newest frame are, as at a start."""
    own = slice(backend.sequences)
    for kind, prompts in PROMPTS.items():
        if kind == "sliding" and kind not in backend.kinds:
            continue
        model, prompt = backend.model(kind), prompts[own]
        (whole,) = decode(model, ["k=1"], ACTIONS[own], prompt)
        if not model.relative_positions:
            newest = torch.cat([prompt[:, :-15], whole[:, 1].flatten(1)], 1)
            (rest,) = decode(model, ["k=1"], ACTIONS[own, 2:], newest)
            assert torch.equal(whole[:, 2:], rest)
        elif not backend.rounds:
            assert torch.equal(whole, recomputed_stream(kind)[own])


CHECKS = (
    it_tells_what_the_protocol_asks,
    what_cannot_be_is_refused,
    fed_in_any_order_and_pieces_it_equals_the_full_forward,
    a_step_writes_its_slots_and_sees_what_the_mask_says,
    what_hidden_slots_hold_changes_nothing,
    a_lane_does_not_care_who_shares_its_step,
    lanes_turn_by_the_coordinates_that_they_are_told,
    only_the_distance_between_positions_counts,
    only_the_last_logits_are_kept_when_asked,
    it_draws_what_the_sampler_draws,
    where_logits_are_broken_nothing_is_drawn,
    a_fused_step_is_its_parts,
    a_stream_goes_on_after_a_full_context,
)
OF_MANY = a_batch_is_its_rows_one_by_one, sequences_of_a_step_stand_where_they_like


def checks_of(backend: UnderTest) -> tuple[Callable[[UnderTest], None], ...]:
    """Return the checks that a backend has to pass."""
    checks = list[Callable[[UnderTest], None]](CHECKS)
    if backend.sequences > 1:
        checks += OF_MANY
        if backend.steadfast or not backend.rounds:
            checks.append(streams_come_and_go_and_write_what_they_write_alone)
    if backend.rounds:
        return *checks, greedy_raster_writes_what_the_full_forward_finds_likeliest
    exact = its_tokens_are_those_of_the_plain_model
    return *checks, exact, its_likeliest_tokens_are_those_of_the_plain_model
