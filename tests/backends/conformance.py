"""What every backend keeps: write one, then run these checks over it.

    MINE = UnderTest(MyModel)

    @pytest.mark.parametrize("check", checks_of(MINE))
    def test_mine(check):
        check(MINE)

Each compares with the full forward, or with `Recomputing`, which remembers what it was fed and runs
it all again. Lanes stand in no order, slots are no positions, the grid is 3 x 5.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import diagd
from diagd.decoding.model import CausalModel, ModelWrapper
from diagd.decoding.sampling import UNDRAWN, Draw, SamplingOptions, ValidRanges, sample
from diagd.decoding.visibility import Seen
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
        buffers: what its cache writes to.
    """

    make: Callable[[Transformer], CausalModel]
    kinds: tuple[str, ...] = tuple(KINDS)
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    tolerance: float = 2e-5  # float32 logits of size 10, summed in another order
    rounds: bool = False
    steadfast: bool = False
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


def random_steps(model: CausalModel) -> Iterator[dict[str, Any]]:
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
        tokens = numbers(model.num_embeddings, 2, width + 2)
        positions, reach = numbers(model.max_positions, width + 2), NUM_SLOTS if index % 2 else reach
        held[own] = positions[:width]
        seen = visible[:, :reach], positions, held[:reach].clone()
        yield {
            "tokens": tokens.to(model.device),
            "positions": positions.to(model.device),
            "slots": F.pad(own, (0, 2), value=scratch).to(model.device),
            "seen": Seen.of_mask(*(one.to(model.device) for one in seen)),
        }


def run_random_steps(model: CausalModel, cache: Any) -> Tensor:
    """Return the logits (B, all lanes but padded ones, V) of random steps, one after another."""
    logits = []
    for step in random_steps(model):
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
            backend.assert_close(feed(model, TOKENS, steps), expected, kind)


@cache
def recomputed_steps(kind: str) -> Tensor:
    plain = Recomputing(tiny_model(**KINDS[kind]))
    return run_random_steps(plain, plain.make_cache(2, NUM_SLOTS))


@torch.no_grad()
def a_step_writes_its_slots_and_sees_what_the_mask_says(backend: UnderTest) -> None:
    for kind in backend.kinds:
        model = backend.model(kind)
        logits = run_random_steps(model, model.make_cache(2, NUM_SLOTS))
        backend.assert_close(logits, recomputed_steps(kind), kind)


@torch.no_grad()
def what_hidden_slots_hold_changes_nothing(backend: UnderTest) -> None:
    model = backend.model()
    cache = model.make_cache(2, NUM_SLOTS)
    for _ in range(2):
        model.forward(**next(random_steps(model)), cache=cache)  # some allocate at the first step
        for buffer in backend.buffers(cache):
            buffer.fill_(1e4)  # no NaN: caches begin with zeros, for 0 * NaN is NaN
    expected = run_random_steps(model, model.make_cache(2, NUM_SLOTS))
    backend.assert_same(run_random_steps(model, cache), expected)


@torch.no_grad()
def a_lane_does_not_care_who_shares_its_step(backend: UnderTest) -> None:
    for kind in ("llama", "multi-head", "multi-query"):  # widths around those of the kernels' tiles
        if kind in backend.kinds:
            model, tokens = backend.model(kind), random_tokens(1, 40)
            alone = feed(model, tokens, torch.arange(40))
            for width in (2, 3, 13, 14, 15, 40):
                backend.assert_same(feed(model, tokens, torch.arange(40) // width), alone)


@torch.no_grad()
def only_the_distance_between_positions_counts(backend: UnderTest) -> None:
    """Where it says so: a stream may have run for a year."""
    for kind in backend.kinds:
        model = backend.model(kind)
        if not model.relative_positions:
            continue
        logits = []
        for start in (0, 17 * 10**9):  # whole frames
            step = causal_step(model)
            step["positions"] = step["positions"] + 17 + start  # behind any prefix
            logits.append(model.forward(**step, cache=model.make_cache(2, 9)).float())
        torch.testing.assert_close(*logits, atol=max(5e-5, backend.tolerance), rtol=0)


def a_batch_is_its_rows_one_by_one(backend: UnderTest) -> None:
    model, tokens, steps = backend.model(), random_tokens(3, 41), scrambled_steps(41, 6)
    together = feed(model, tokens, steps)
    for row in range(3):
        backend.assert_same(together[row : row + 1], feed(model, tokens[row : row + 1], steps))


@torch.no_grad()
def only_the_last_logits_are_kept_when_asked(backend: UnderTest) -> None:
    model = backend.model()
    step = causal_step(model)
    every = model.forward(**step, cache=model.make_cache(2, 9))
    for keep, lanes in ((0, 7), (1, 1), (2, 2), (100, 7)):
        kept = model.forward(**step, cache=model.make_cache(2, 9), logits_to_keep=keep)
        assert kept.shape == (2, lanes, model.vocab_size)
        backend.assert_same(kept, every[:, -lanes:])


def causal_step(model: CausalModel) -> dict[str, Any]:
    """Feed seven tokens of two rows from slot 0 on."""
    tokens, slots = random_tokens(2, 7).to(model.device), torch.arange(7, device=model.device)
    seen = Seen(slots, slots, slots, slots)
    return {"tokens": tokens, "positions": slots, "slots": slots, "seen": seen}


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
        step = causal_step(model)
        step[name] = step[name].clone()
        step[name][..., 3] = limit
        if backend.device == "cpu":  # on CUDA it would end the process
            with pytest.raises((ValueError, IndexError), match=r"out of (range|bounds)"):
                model.forward(**step, cache=model.make_cache(2, 9))


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
    """Decode as many frames as there are actions by each strategy, (2, T, 3, 5)."""
    engine = diagd.DecodingEngine(
        model, 3, 5, num_action_tokens=2, batch_size=2, sampling=sampling, seed=5
    )
    decoded = []
    for strategy in strategies:
        engine.prefill(prompt.to(model.device))
        frames = list(engine.decode(strategy, actions.to(model.device)))
        decoded.append(torch.stack(frames, 1).cpu())
        assert engine.stream.num_dropped_frames == max(
            0, len(frames) - 2
        )  # the context holds three
    return decoded


NAMES = ("raster", "k=1", "k=2,d=4")


@cache
def plain_tokens(sampling: SamplingOptions) -> list[Tensor]:
    return decode(tiny_model(), NAMES, ACTIONS[:, :2], sampling=sampling)


def its_tokens_are_those_of_the_plain_model(
    backend: UnderTest, sampling: SamplingOptions = SAMPLED
) -> None:
    decoded = decode(backend.model(), NAMES, ACTIONS[:, :2], sampling=sampling)
    for name, own, other in zip(NAMES, decoded, plain_tokens(sampling), strict=True):
        assert torch.equal(own, other), name


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
            given = ("raster", "k=1", "k=2,d=4", "exact"), ACTIONS, PROMPT, sampling
            whole, parts = (decode(one, *given) for one in (model, Apart(model)))
            for own, other in zip(whole, parts, strict=True):
                assert torch.equal(own, other), (kind, sampling)


def greedy_raster_writes_what_the_full_forward_finds_likeliest(backend: UnderTest) -> None:
    (frames,) = decode(backend.model(), ["raster"], ACTIONS[:, :2])
    generated = torch.cat([ACTIONS[:, :2], frames.flatten(2)], 2)  # (2, 2, 17)
    sequence = torch.cat([PROMPT, generated.flatten(1)], 1)
    with torch.no_grad():
        logits = tiny_model().logits(sequence)[:, 15:-1, :NUM_VISUAL].unflatten(1, (2, 17))
    chances = logits[:, :, 2:]  # (2, 2, 15, ids)
    written = chances.gather(-1, frames.flatten(2)[..., None])[..., 0]
    assert (chances.amax(-1) - written).max() <= 2 * backend.tolerance


PROMPTS = {"llama": PROMPT, "sliding": PROMPT[:, 1:]}  # 3-D positions begin with a frame


@cache
def recomputed_stream(kind: str) -> Tensor:
    plain = Recomputing(tiny_model(**KINDS[kind]))
    return decode(plain, ["k=1"], ACTIONS, PROMPTS[kind])[0]


def a_stream_goes_on_after_a_full_context(backend: UnderTest) -> None:
    """Nothing is read again, or the prefix and the newest frame are, as at a start."""
    for kind, prompt in PROMPTS.items():
        if kind == "sliding" and kind not in backend.kinds:
            continue
        model = backend.model(kind)
        (whole,) = decode(model, ["k=1"], ACTIONS, prompt)
        if not model.relative_positions:
            newest = torch.cat([prompt[:, :-15], whole[:, 1].flatten(1)], 1)
            (rest,) = decode(model, ["k=1"], ACTIONS[:, 2:], newest)
            assert torch.equal(whole[:, 2:], rest)
        elif not backend.rounds:
            assert torch.equal(whole, recomputed_stream(kind))


CHECKS = (
    it_tells_what_the_protocol_asks,
    what_cannot_be_is_refused,
    fed_in_any_order_and_pieces_it_equals_the_full_forward,
    a_step_writes_its_slots_and_sees_what_the_mask_says,
    what_hidden_slots_hold_changes_nothing,
    a_lane_does_not_care_who_shares_its_step,
    only_the_distance_between_positions_counts,
    a_batch_is_its_rows_one_by_one,
    only_the_last_logits_are_kept_when_asked,
    it_draws_what_the_sampler_draws,
    where_logits_are_broken_nothing_is_drawn,
    a_fused_step_is_its_parts,
    a_stream_goes_on_after_a_full_context,
)


def checks_of(backend: UnderTest) -> tuple[Callable[[UnderTest], None], ...]:
    """Return the checks that a backend has to pass."""
    if backend.rounds:
        return *CHECKS, greedy_raster_writes_what_the_full_forward_finds_likeliest
    exact = its_tokens_are_those_of_the_plain_model
    return *CHECKS, exact, its_likeliest_tokens_are_those_of_the_plain_model
