"""What only our C++ kernels have to keep; the rest is in `tests/backends/conformance.py`."""

import copy
import ctypes
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diagd.backends.native import boundary
from diagd.backends.native.compiler import SOURCES
from diagd.backends.native.library import load_library
from diagd.backends.native.model import NativeModel
from diagd.backends.prepare import prepare
from diagd.decoding.generate_tokens import generate_tokens
from diagd.decoding.model import Buffers, Drawing, ModelWrapper, Step
from diagd.decoding.sampling import Draw, SamplingOptions, ValidRanges
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.decoding.step import Lanes
from diagd.decoding.visibility import Seen
from tests.models.feeding import causal, feed
from tests.models.tiny import random_tokens, tiny_model, with_int8_weights, with_outliers


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 40, "num_heads": 5, "num_kv_heads": 5, "head_dim": 34},
        {"intermediate_size": 33, "num_heads": 3, "num_kv_heads": 1, "head_dim": 70},
        {"num_layers": 1, "head_dim": 32, "hidden_size": 96, "vocab_size": 65},
    ],
)
@torch.no_grad()
def test_sizes_that_fill_no_block_are_padded(changes):
    model, tokens = tiny_model(**changes), random_tokens(1, 50)
    fed = feed(NativeModel(model), tokens, torch.arange(50) // 3)
    torch.testing.assert_close(fed, model.logits(tokens), atol=5e-6, rtol=0)


def test_int8_refuses_heads_wider_than_its_sums_are_safe_for():
    given = {"num_heads": 1, "num_kv_heads": 1, "num_layers": 1}
    widest = NativeModel(tiny_model(head_dim=512, **given), "int8")
    assert feed(widest, random_tokens(1, 9), torch.arange(9)).isfinite().all()
    with pytest.raises(ValueError, match="head_dim <= 512, got 514"):
        NativeModel(tiny_model(head_dim=514, **given), "int8")
    model, backend = prepare(tiny_model(head_dim=514, **given))  # times what can run it
    assert backend in ("native", "eager")
    assert feed(model, random_tokens(1, 9), torch.arange(9)).isfinite().all()


@pytest.mark.parametrize("outliers", [0, 9, -40])
@torch.no_grad()
def test_int8_activations_have_a_second_digit_where_a_norm_has_outliers(outliers, monkeypatch):
    model, tokens = tiny_model(hidden_size=96, intermediate_size=160), random_tokens(2, 50)
    if outliers:
        with_outliers(model, outliers)
    exact = with_int8_weights(model).logits(tokens)

    def error():
        fed = feed(NativeModel(model, "int8"), tokens, torch.arange(50) // 7)
        return ((fed - exact).square().mean().sqrt() / exact.std()).item()

    found = error()
    monkeypatch.setattr("diagd.backends.native.weights.HIGHEST_GAIN", float("inf"))
    assert found < error() / 10 if outliers else found == error()


@torch.no_grad()
def test_float32_stays_exact_where_the_largest_activation_matters_least():
    model, tokens = tiny_model(num_layers=3), random_tokens(1, 50)
    block: Any
    for block in model.model.blocks:
        heads, mlp = block.self_attn, block.mlp
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.weight[3] = 3000.0
        for linear in (heads.q_proj, heads.k_proj, heads.v_proj, mlp.gate_proj, mlp.up_proj):
            linear.weight[:, 3] = 0
    fed = feed(NativeModel(model), tokens, torch.arange(50) // 3)
    exact = model.double().logits(tokens)
    assert (fed - exact).abs().max() < 3e-6 * exact.abs().max()


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int8, outliers"])
@torch.no_grad()
def test_the_bits_of_a_lane_are_its_own_past_every_tile(weights):
    """Keys in two parts, weights in two panels, rows in many groups."""
    weights, _, outliers = weights.partition(", ")
    changes = {"hidden_size": 288, "intermediate_size": 544, "max_positions": 700, "num_layers": 1}
    model, tokens = tiny_model(**changes), random_tokens(1, 640)
    native = NativeModel(with_outliers(model) if outliers else model, weights)

    def logits(*chunks: int) -> torch.Tensor:
        cache, fed, at = native.make_cache(1, 700), [], 0
        for size in chunks:
            slots = torch.arange(at, at + size)
            seen = causal(slots, torch.arange(at + size))
            fed.append(native.forward(tokens[:, slots], slots, slots, seen, cache))
            at += size
        return torch.cat(fed, dim=1)

    one_by_one = logits(*[1] * 640)
    if weights == "float32":
        torch.testing.assert_close(one_by_one, model.logits(tokens), atol=2e-5, rtol=0)
    for chunks in ([16] * 40, [33, 65, 17, 48, 130, 33, 64, 250], [640]):
        assert torch.equal(logits(*chunks), one_by_one), chunks


def test_a_lane_that_sees_nothing_poisons_nobody():
    native, tokens = NativeModel(tiny_model()), random_tokens(1, 2)
    cache, slots, no_slots = native.make_cache(1, 4), torch.arange(2), torch.arange(0)
    visible = torch.tensor([[True, False], [False, False]])
    for seen in (
        Seen.of_mask(visible, slots, slots),
        Seen.of_mask(visible[:, :0], slots, no_slots),  # no slot to see at all
        Seen.of_mask(torch.ones(2, 0, dtype=torch.bool), slots, no_slots),
        causal(slots, no_slots),
        Seen(slots, slots, slots + 9, slots),
    ):
        assert native.forward(tokens, slots, slots, seen, cache).isfinite().all()


PAIR = torch.arange(2)


def masked(visible: Tensor) -> Seen:
    lanes, slots = visible.shape
    return Seen.of_mask(visible, torch.arange(lanes), torch.arange(slots))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.tensor([[0, 50]])}, "a token, position or slot is out of range"),
        ({"positions": torch.tensor([0, -1])}, "a token, position or slot is out of range"),
        ({"slots": torch.tensor([-1, 0])}, "a token, position or slot is out of range"),
        ({"slots": torch.tensor([0, 5])}, "a token, position or slot is out of range"),
        ({"slots": torch.tensor([0.0, 1.0])}, "slots must be int64 on the cpu, got torch.float32"),
        ({"seen": masked(torch.ones(2, 2))}, "visible must be bool on the cpu, got torch.float32"),
        ({"positions": torch.arange(2, device="meta")}, "must be int64 on the cpu, .* on meta"),
        (
            {"seen": masked(torch.ones(3, 2, dtype=torch.bool))},
            r"got \(1, 2\), \(2,\), \(2,\), \(3,\)",
        ),
        ({"seen": masked(torch.ones(2, 6, dtype=torch.bool))}, "at most 5 slots, got 6"),
        (
            {"seen": Seen.of_mask(torch.ones(2, 3, dtype=torch.bool), PAIR, PAIR)},
            r"mask must be \(S, L, M\)",
        ),
        (
            {"seen": Seen.of_mask(torch.ones(2, 2, dtype=torch.bool), PAIR, PAIR.float())},
            "held must be int64 on the cpu, got torch.float32",
        ),
        ({"seen": Seen(PAIR.expand(3, 2), PAIR, PAIR, PAIR)}, r"with as many lanes as seen"),
        ({"seen": Seen(PAIR, PAIR.expand(3, 2), PAIR, PAIR)}, r"steps must be \(S, L\)"),
        ({"seen": Seen(PAIR, torch.arange(3), PAIR, PAIR)}, r"steps must be \(S, L\)"),
        ({"seen": Seen(PAIR, PAIR, PAIR, torch.arange(3))}, r"held and fed_at \(S, M\)"),
        ({"seen": Seen(PAIR, PAIR, PAIR.expand(2, 2), PAIR)}, r"held and fed_at \(S, M\)"),
        ({"seen": Seen(PAIR, PAIR, PAIR, PAIR.int())}, "fed_at must be int64 on the cpu"),
        ({"seen": causal(torch.arange(3), PAIR)}, r"with as many lanes as seen"),
        ({"positions": torch.arange(0)}, r"positions and slots \(S, L\) or \(L,\)"),
        ({"slots": torch.arange(1)}, r"positions and slots \(S, L\) or \(L,\)"),
        ({"tokens": torch.zeros(2, dtype=torch.int64)}, r"tokens must be \(S, L\)"),
        ({"tokens": torch.zeros(3, 2, dtype=torch.int64)}, "has 2 sequences, got 3 from 0 on"),
        ({"first": 2}, "has 2 sequences, got 1 from 2 on"),
        ({"first": -1}, "has 2 sequences, got 1 from -1 on"),
        ({"logits_to_keep": -1}, "logits_to_keep must be 0 or more, got -1"),
        (
            {
                "tokens": torch.zeros(1, 1, dtype=torch.int64).expand(1, 2**20),
                "positions": torch.zeros(1, dtype=torch.int64).expand(2**20),
                "slots": torch.zeros(1, dtype=torch.int64).expand(2**20),
                "seen": causal(torch.zeros(1, dtype=torch.int64).expand(2**20), torch.arange(1)),
            },
            r"S \* L from 1 to 131072",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_memory_is_touched(changes, message):
    native = NativeModel(tiny_model())
    step = {
        "tokens": torch.zeros(1, 2, dtype=torch.int64),
        "positions": PAIR,
        "slots": PAIR,
        "seen": masked(torch.ones(2, 2, dtype=torch.bool)),
    }
    with pytest.raises(ValueError, match=message):
        native.forward(**{**step, **changes}, cache=native.make_cache(2, 5))


def fused(native: NativeModel, step: Step) -> Callable[..., None]:
    run = native.make_step(step)
    assert run is not None
    return lambda lanes, *rest: run([lanes], *rest)


def step_of(
    native: NativeModel,
    ranges: ValidRanges | None = None,
    drawn: tuple[int, ...] = (2,),
    **changes: Any,
) -> Step:
    """A step over two sequences of five slots, so many of them drawn in one way."""
    memory = {
        "tokens": torch.zeros(2, 5, dtype=torch.int64),
        "held": torch.arange(5).repeat(2, 1),
        "fed_at": torch.arange(5).repeat(2, 1),
        "seeds": torch.arange(2),
        "cache": native.make_cache(2, 5),
    }
    ranges = ranges or ValidRanges(3, 50, torch.tensor([3, 50]).repeat(2, 3, 1))
    drawings = tuple(Drawing(count, SamplingOptions(), ranges) for count in drawn)
    return Step(Buffers(**{**memory, **changes}), drawings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.zeros(2, 5)}, "tokens must be int64 on the cpu, got torch.float32"),
        ({"tokens": torch.arange(10).view(5, 2).T}, "all contiguous"),
        ({"held": torch.arange(5)}, r"got \(2, 5\), \(5,\), \(2, 5\), \(2,\)"),
        ({"fed_at": torch.arange(4).repeat(2, 1)}, r"got \(2, 5\), \(2, 5\), \(2, 4\), \(2,\)"),
        ({"seeds": torch.arange(3)}, r"seeds \(S,\)"),
        ({"cache": None}, "cache must be made by this model"),
        ({"ranges": ValidRanges(3, 51, None)}, r"valid ids must be in \[0, 50\), got \[3, 51\)"),
        ({"drawn": (1,)}, "expected drawings of 2 sequences, got 1"),
    ],
)
def test_memory_that_does_not_fit_a_fused_step_is_refused(changes, message):
    native = NativeModel(tiny_model())
    with pytest.raises(ValueError, match=message):
        native.make_step(step_of(native, **changes))


def test_a_cache_of_fewer_sequences_or_slots_is_no_memory_of_a_fused_step():
    native = NativeModel(tiny_model())
    for sizes, message in (
        ((1, 5), "has 1 sequences, got 2 from 0 on"),
        ((2, 6), "must have 5 slots"),
    ):
        with pytest.raises(ValueError, match=message):
            native.make_step(step_of(native, cache=native.make_cache(*sizes)))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("positions", -1), *product(("slots", "inputs", "outputs", "rows", "columns"), (-1, 99))],
)
def test_a_fused_step_out_of_range_writes_no_token(field, wrong):
    native = NativeModel(tiny_model())
    step = step_of(native)
    run, lanes, tokens = fused(native, step), torch.zeros(8, 2, 2).long(), step.buffers.tokens
    run(lanes, 5)
    assert tokens.count_nonzero() == 2  # one a sequence
    tokens.zero_()
    getattr(Lanes.of(lanes), field)[1, 1] = wrong
    with pytest.raises(ValueError, match="out of range"):
        run(lanes, 5)
    assert not tokens.any()


def test_each_sequence_of_a_fused_step_has_bounds_and_lanes_of_its_own():
    native, tokens = NativeModel(tiny_model()), torch.zeros(2, 5, dtype=torch.int64)
    step = step_of(native, tokens=tokens)
    ranges = ValidRanges(7, 8, None), ValidRanges(3, 50, torch.tensor([9, 10]).repeat(2, 3, 1))
    drawings = [Drawing(1, SamplingOptions(), one) for one in ranges]
    run = fused(native, Step(step.buffers, tuple(drawings)))
    lanes = torch.zeros(8, 2, 3, dtype=torch.int64)
    of = Lanes.of(lanes)
    of.slots[:], of.outputs[:] = torch.tensor([[0, 1, 2], [3, 4, 4]]), torch.tensor([1, 2, 3])
    run(lanes, 5)
    assert tokens.tolist() == [[0, 7, 7, 7, 0], [0, 9, 0, 0, 0]]  # padding draws nothing
    tokens.zero_()
    run(lanes[:, 1:], 5, 1)
    assert tokens.tolist() == [[0] * 5, [0, 9, 0, 0, 0]]


def test_a_step_of_one_lane_is_fused_whatever_its_stride():
    """As of a stream of a single token, whose table of lanes is (8, 1, 1)."""
    native, schedule = NativeModel(tiny_model()), DiagonalSchedule.raster(TokenGrid(1, 1, 1))
    out = generate_tokens(native, random_tokens(2, 1), schedule)
    assert out.tokens.shape == (2, 1, 1, 1)


@pytest.mark.parametrize(
    "lanes",
    [
        torch.zeros(8, 2, 0, dtype=torch.int64),
        torch.zeros(8, 0, 2, dtype=torch.int64),
        torch.zeros(8, 2, dtype=torch.int64),
        torch.zeros(7, 2, 2, dtype=torch.int64),
        torch.zeros(8, 3, 2, dtype=torch.int64),
        torch.zeros(2, 2, 8, dtype=torch.int64).permute(2, 0, 1),
        torch.zeros(8, 2, 1, dtype=torch.int64).expand(8, 2, 2**16 + 1),
        torch.zeros(8, 2, 2, dtype=torch.int32),
    ],
)
def test_lanes_that_do_not_fit_are_refused(lanes):
    native = NativeModel(tiny_model())
    with pytest.raises(ValueError, match="lanes must be"):
        fused(native, step_of(native))(lanes, 5)


def test_a_fused_step_of_a_model_on_a_grid_is_told_coordinates():
    native = NativeModel(tiny_model(position="rope3d"))
    step = step_of(native)  # whose memory it is
    run = fused(native, step)
    run(torch.zeros(11, 2, 2, dtype=torch.int64), 5)
    with pytest.raises(ValueError, match=r"lanes must be \(11, S, L\)"):
        run(torch.zeros(8, 2, 2, dtype=torch.int64), 5)


def test_coordinates_that_do_not_fit_are_refused():
    native, at = NativeModel(tiny_model(position="rope2d")), torch.arange(4)
    given = random_tokens(2, 4), at, at, Seen(at, at, at, at), native.make_cache(2, 5), 0, 0
    for wrong in (torch.zeros(3, 4).long(), torch.zeros(2, 2, 4).long()):
        with pytest.raises(ValueError, match=r"coordinates must be \(3, 2, 4\), got \("):
            native.forward(*given, wrong)
    with pytest.raises(ValueError, match="coordinates must be int64 on the cpu"):
        native.forward(*given, torch.zeros(3, 2, 4))


@pytest.mark.parametrize("first", [-1, 1, 2])
def test_lanes_of_sequences_that_are_none_are_refused(first):
    native = NativeModel(tiny_model())
    with pytest.raises(ValueError, match=f"of 2 sequences from {first} on"):
        fused(native, step_of(native))(torch.zeros(8, 2, 2, dtype=torch.int64), 5, first)


@contextmanager
def limited_memory(room: int) -> Iterator[None]:
    """Let the process take no more than so many bytes."""
    import resource  # there is none on Windows

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


only_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux limits a process's memory so"
)


@only_linux
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_step_without_memory_for_it_is_an_error(weights):
    lanes, slots = torch.arange(4096), torch.arange(60000)
    native = NativeModel(tiny_model(), weights)
    cache, rule = native.make_cache(1, 60000), causal(lanes, slots)
    tokens = torch.zeros(1, 4096, dtype=torch.int64)
    message = r"^out of memory for 1 x 4096 lanes over 60000 slots$"
    with limited_memory(2**28), pytest.raises(MemoryError, match=message):  # the mask takes 2**30
        native.forward(tokens, lanes, lanes, rule, cache, 1)


def whole_frame(native):
    lanes = torch.arange(15)
    return native.forward(lanes[None], lanes, lanes, causal(lanes, lanes), native.make_cache(1, 16))


@only_linux
def test_a_step_without_memory_for_threads_is_an_error_and_the_next_one_works(monkeypatch):
    native = NativeModel(tiny_model())
    expected = whole_frame(native)
    monkeypatch.setattr(NativeModel, "num_threads", 64)
    message = r"^out of memory for 1 x 15 lanes over 15 slots$"
    with limited_memory(2**26), pytest.raises(MemoryError, match=message):  # a stack takes 2**23
        whole_frame(native)
    assert whole_frame(native).equal(expected)


def test_more_lanes_than_int32_counts_in_chunks_are_a_step():
    lanes = torch.arange(15)
    native = NativeModel(tiny_model())
    tokens, seen = torch.ones(8200, 15, dtype=torch.int64), masked(torch.eye(15, dtype=torch.bool))
    logits = native.forward(tokens, lanes, lanes, seen, native.make_cache(8200, 16), 1)
    assert logits[0].equal(logits[-1])


def test_heads_and_steps_beyond_the_machine_are_refused_in_a_line(monkeypatch):
    with pytest.raises(ValueError, match=r"or head_dim above 8192, got 8194$"):
        NativeModel(tiny_model(head_dim=8194, num_heads=1, num_kv_heads=1))
    native, lanes = NativeModel(tiny_model()), torch.arange(2**17)
    monkeypatch.setattr(NativeModel, "num_threads", 2**20)
    rule, cache = causal(lanes, lanes[:1]), native.make_cache(1, 1)
    with pytest.raises(ValueError, match=r"^a step of 1 x 131072 lanes would need [\d,.]+ GB"):
        native.forward(lanes[None], lanes, lanes, rule, cache)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused_in_words(copied):
    with pytest.raises(TypeError, match="models of backend native cannot be copied or pickled"):
        copied(NativeModel(tiny_model()))


def test_a_cache_of_another_model_is_refused():
    native, slots = NativeModel(tiny_model()), torch.arange(2)
    step = torch.zeros(1, 2, dtype=torch.int64), slots, slots, causal(slots, slots)
    native.forward(*step, NativeModel(tiny_model(seed=3)).make_cache(1, 5))  # of the same kind
    others: tuple[Any, ...] = (
        NativeModel(tiny_model(), "bfloat16"),
        NativeModel(tiny_model(num_layers=3)),
        NativeModel(tiny_model(num_kv_heads=1)),
        NativeModel(tiny_model(head_dim=6)),
        tiny_model(),
    )
    for other in others:
        with pytest.raises(ValueError, match="cache must be made by this model"):
            native.forward(*step, other.make_cache(1, 5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(3, 50)}, r"logits must be \(S, L, V\)"),
        ({"seeds": torch.arange(3)}, r"seeds \(S,\)"),
        ({"rows": torch.arange(3)}, r"frames, rows and columns \(S, L\) or \(L,\)"),
        ({"frames": torch.arange(4).repeat(3, 1)}, r"frames, rows and columns \(S, L\) or"),
        ({"columns": torch.zeros(4)}, "columns must be int64 on the cpu, got torch.float32"),
        ({"logits": torch.zeros(2, 4, 50, device="meta")}, "floats on the cpu, got .* on meta"),
        ({"logits": torch.zeros(2, 4, 40)}, r"valid ids must be in \[0, 40\), got \[3, 50\)"),
        (
            {"ranges": ValidRanges(0, 50, torch.tensor([[[0, 2**40]]]).expand(4, 4, 2))},
            r"valid ids must be a non-empty range in \[0, 50\)",
        ),
        (
            {"ranges": ValidRanges(0, 50, torch.tensor([[[-9, 3]]]).expand(4, 4, 2))},
            r"valid ids must be a non-empty range in \[0, 50\)",
        ),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draws_that_do_not_fit_are_refused_before_memory_is_touched(changes, message, temperature):
    given = {
        "logits": torch.zeros(2, 4, 50),
        "options": SamplingOptions(temperature),
        "ranges": ValidRanges(3, 50, None),
        "seeds": torch.arange(2),
        **dict.fromkeys(("frames", "rows", "columns"), torch.arange(4)),
    }
    logits = (given := {**given, **changes}).pop("logits")
    with pytest.raises(ValueError, match=message):
        NativeModel(tiny_model()).sample(logits, Draw(**given))


def test_a_top_k_beyond_32_bits_keeps_all():
    native, lane = NativeModel(tiny_model()), torch.arange(5)
    logits = torch.randn(3, 5, 50, generator=torch.Generator().manual_seed(0))
    given = ValidRanges(0, 50, None), torch.arange(3), lane, lane, lane
    whole, beyond = (
        native.sample(logits, Draw(SamplingOptions(2.0, top_k=top_k), *given))
        for top_k in (None, 2**32 + 1)
    )
    assert torch.equal(whole, beyond)


@pytest.fixture
def read(monkeypatch, tmp_path):
    """Return what reads the kernels' records after a text in them was replaced."""

    def reading(old, new):
        text = (SOURCES / "records.h").read_text()
        assert old in text
        (tmp_path / "records.h").write_text(text.replace(old, new))
        monkeypatch.setattr(boundary, "SOURCES", tmp_path)
        return boundary.read_records(boundary.Record, boundary.POINTER, "records.h")

    return reading


@pytest.mark.parametrize(
    ("old", "new", "record"),
    [
        ("first, cached;", "cached, first;", "Step"),  # of one kind: no offset is another
        ("float *logits;  ", "int32_t logits;  ", "Step"),
        ("  float norm_eps;\n", "", "Model"),
        ("low, high;  ", "low;", "Drawing"),
    ],
)
def test_a_record_with_a_field_moved_or_changed_or_lost_is_refused(
    monkeypatch, read, old, new, record
):
    monkeypatch.setattr("diagd.backends.native.model.RECORDS", read(old, new))
    with pytest.raises(OSError, match=f"kernels have another record {record} than csrc"):
        NativeModel(tiny_model())


def test_a_record_of_which_a_field_stands_elsewhere_is_refused():
    """As where a compiler aligns otherwise: the text is the same."""
    library = load_library()
    library.records.restype = ctypes.c_char_p
    boundary.check_records(said := library.records(), boundary.RECORDS)
    with pytest.raises(OSError, match="another record Space"):
        boundary.check_records(said.replace(b"\n48,0,8,16", b"\n48,0,4,16"), boundary.RECORDS)


@pytest.mark.parametrize(
    "line", ["double seconds;", "float *low, high;", "int32_t parts[2];", "int32_t count", "}"]
)
def test_a_line_that_is_no_field_of_a_record_is_named(read, line):
    with pytest.raises(ValueError, match=f"records.h: no field of a record: {re.escape(line)}"):
        read("int32_t count, vocab;", line)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name",
    ["embed_tokens.weight", "layers.1.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"],
)
def test_broken_numbers_reach_the_logits(name, number):
    """Attention swallowed them: a weight of 0 for every slot, and plausible logits."""
    model, tokens = tiny_model(), random_tokens(1, 9)
    model.model.get_parameter(name).data[:, 3] = number
    for weights in ("float32", "bfloat16"):
        fed = feed(NativeModel(model, weights), tokens, torch.arange(9) // 2)
        assert not fed.isfinite().any(), weights


def test_a_wrapper_hands_on_the_fused_step_unless_it_feeds_or_draws_otherwise():
    class Own(ModelWrapper[NativeModel]):
        def sample(self, logits, draw):
            return self.model.sample(logits, draw)

    native = NativeModel(tiny_model())
    step = step_of(native)
    assert ModelWrapper(native).make_step(step) is not None
    assert Own(native).make_step(step) is None
