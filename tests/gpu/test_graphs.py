"""`diagd/backends/replay.py`: what is captured when, and how long it lives."""

import weakref

import pytest
import torch

import diagd
from diagd.backends import replay
from diagd.backends.prepare import prepare
from diagd.backends.replay import Captured
from diagd.decoding.step import Lanes
from diagd.families.checkpoints import load_model
from tests.decoding.cases import Case
from tests.golden import FIXTURES
from tests.gpu.test_tokens import (
    CASE,
    NUM_VISUAL,
    SAMPLINGS,
    by_place,
    decode,
    prepare_for,
    tiny,
)
from tests.models.tiny import tiny_model

SAMPLED = SAMPLINGS["sampled"]


def generate(model, strategy="k=1", sampling=SAMPLED, case=CASE, **settings):
    return decode(model, case, strategy, sampling, "cuda", **settings)


def test_a_step_is_captured_once_a_kind_and_shape_and_replayed_on_its_own_lanes(gpus):
    written = torch.zeros(8, 1024, dtype=torch.int64, device="cuda")
    runs = []

    def step(steps, num_slots, first=0):
        (lanes,) = steps
        runs.append((first, lanes.shape[2], num_slots))
        written.index_copy_(1, Lanes.of(lanes).outputs[0], lanes[:, 0])

    own = replay.Graphs(written.device, scratch=1023)
    first = torch.arange(16, device="cuda").view(8, 1, 2)
    second, wide = first + 100, torch.arange(32, device="cuda").view(8, 1, 4) + 200
    steps = [("a", first, 1), ("a", second, 512), ("a", wide, 512), ("a", first, 513)]
    steps += [("b", second, 2), ("a", second, 2)]
    for kind, lanes, num_slots, row in [*[(*step, 0) for step in steps], ("a", first, 2, 3)]:
        before = lanes.tolist()
        written.zero_()
        own.run(kind, step, [lanes], num_slots, row, False)
        assert lanes.tolist() == before
        outputs = Lanes.of(lanes).outputs[0].tolist()
        found = written.cpu()
        assert (
            found[:, None, outputs].tolist() == before
        )  # of the lanes given, not of those captured
        found[:, outputs] = 0
        assert not found[:, :-1].any()  # warming up has written to scratch alone
    # each graph: warmed up and captured
    shapes = [(0, 2, 512), (0, 4, 512), (0, 2, 1024), (0, 2, 512), (3, 2, 512)]
    assert runs == [run for run in shapes for _ in range(2)]
    assert len(own._captured) == gpus.num_captures == 5
    assert gpus.num_replays == 7


def test_steps_that_follow_each_other_again_are_one_launch(gpus):
    written = torch.zeros(8, 1024, dtype=torch.int64, device="cuda")

    def take(steps, num_slots, first=0):
        for lanes in steps:
            written.index_copy_(1, Lanes.of(lanes).outputs[0], lanes[:, 0])

    own = replay.Graphs(written.device, scratch=1023)
    frame = torch.arange(8 * 9, device="cuda").view(8, 1, 9)
    widths, replays = (2, 3, 2, 2), []
    for again in range(4):
        lanes = frame + 100 * again
        written.zero_()
        before = gpus.num_replays, gpus.num_captures
        own.run("a", take, lanes.split(widths, 2), 70, 0, False)
        replays.append((gpus.num_replays - before[0], gpus.num_captures - before[1]))
        found = written.cpu()
        assert torch.equal(found[:, Lanes.of(lanes.cpu()).outputs[0]], lanes[:, 0].cpu())
    assert replays == [(4, 2), (1, 1), (1, 0), (1, 0)]
    own.run("a", take, frame.split((3, 2, 4), 2), 70, 0, False)  # in another order, of other widths
    assert gpus.num_captures == 4


def test_all_captures_are_on_one_stream_of_the_device_and_in_one_pool(gpus):
    """A stream more is tens of megabytes more, which cuBLAS keeps."""
    for device in ("cuda", "cuda:1"):
        for max_positions in (320, 640):
            model, _ = prepare(tiny(max_positions=max_positions).to(device))
            for strategy in ("k=1", "exact,lanes=8"):
                decode(model, CASE, strategy, SAMPLED, device)
    assert gpus.num_captures >= 8
    assert len(gpus.used_streams) == 4  # where the host launches, and where steps are captured
    assert len(gpus.pools) == 4  # one for each model


def test_old_graphs_leave_where_there_are_too_many(monkeypatch, gpus):
    monkeypatch.setattr(replay, "MAX_GRAPHS", 2)
    model = prepare_for(tiny(), "cuda")
    for _ in range(2):
        expected = decode(tiny(), CASE, "exact,lanes=8", SAMPLED).tokens
        assert torch.equal(generate(model, "exact,lanes=8").tokens.cpu(), expected)


def test_the_next_stream_of_a_model_replays_what_the_last_one_captured(gpus):
    model, plain = prepare_for(tiny(), "cuda"), tiny()
    places = diagd.SamplingOptions(1.0, valid_range=by_place(CASE))
    for strategy, sampling in (("k=1", SAMPLED), ("k=1", places), ("exact,lanes=9", SAMPLED)):
        first = generate(model, strategy, sampling)
        captured = gpus.num_captures
        # ranges and rules that are equal, though not the same
        again = diagd.SamplingOptions(sampling.temperature, valid_range=sampling.valid_range)
        second = generate(model, strategy, again)
        assert gpus.num_captures == captured
        assert first.stats.capture_seconds > 0
        assert second.stats.capture_seconds == 0
        expected = decode(plain, CASE, strategy, sampling).tokens
        for found in (first, second):
            assert torch.equal(found.tokens.cpu(), expected)


def test_seconds_leave_captures_out(monkeypatch, gpus):
    replay_one = replay.Graphs._replay

    def slow(self, *arguments):
        seconds = replay_one(self, *arguments)
        return seconds and seconds + 1000

    monkeypatch.setattr(replay.Graphs, "_replay", slow)
    stats = generate(prepare_for(tiny(), "cuda")).stats
    assert 1000 * gpus.num_captures < stats.capture_seconds < 1000 * gpus.num_captures + 100
    assert stats.seconds < -1000 * gpus.num_captures + 100


@pytest.mark.slow
def test_a_shorter_stream_takes_over_and_a_longer_one_does_not(gpus):
    model = prepare_for(tiny(max_positions=1200), "cuda")
    captured = []
    for num_frames in (1, 3, 1, 2):
        case = Case(num_frames, height=9, width=20, num_action_tokens=2)
        expected = decode(tiny(max_positions=1200), case, "k=1", SAMPLED).tokens
        assert torch.equal(generate(model, case=case).tokens.cpu(), expected)
        captured.append(gpus.num_captures)
    assert captured[0] < captured[1] == captured[2] == captured[3]


def test_another_batch_or_another_text_is_no_matter(gpus):
    name, size = FIXTURES / "cosmos_tiny_b", 32
    model, plain = prepare_for(load_model(name), "cuda"), load_model(name)
    case = Case(1, 3, 5, 1, 7)
    for seed, length in ((0, 4), (1, 4), (2, 4), (3, 6)):
        generator = torch.Generator().manual_seed(seed)
        text = torch.randn(2, length, size, generator=generator) * 30
        captured = gpus.num_captures
        found = generate(model, case=case, text=text).tokens.cpu()
        assert torch.equal(found, decode(plain, case, "k=1", SAMPLED, text=text).tokens)
        # a text as long takes its place
        assert (gpus.num_captures == captured) == (seed == 2)


@pytest.mark.parametrize(
    ("strategy", "is_captured"),
    [
        *((name, False) for name in ("k=1", "exact,lanes=8")),
        *((name, True) for name in ("k=1", "exact,lanes=8")),
    ],
)
def test_a_dropped_engine_drops_its_cache_at_once(strategy, is_captured, no_collection, gpus):
    """With graphs, the memory waits for the next stream; no second one is ever made beside it."""
    model = tiny_model().to("cuda")
    model = Captured(model) if is_captured else model
    before = gpus.live_bytes
    held = []
    for taken in (2, 1, 2):  # to the end, and cut off in the middle of a frame
        engine = diagd.DecodingEngine(
            model, diagd.FrameFormat(3, 5, 2), batch_size=2, sampling=SAMPLED
        )
        engine.prefill(CASE.prompt.to("cuda"))
        actions = CASE.actions()
        assert actions is not None
        frames = engine.decode(strategy, actions.to("cuda"))
        for _ in range(taken):
            next(frames)
        gone, cache = weakref.ref(engine), weakref.ref(engine.batch.buffers.cache.keys[0])
        del engine, frames
        assert gone() is None
        assert (cache() is None) != is_captured
        held.append(gpus.live_bytes - before)
    assert held[0] == held[1] == held[2]
    assert (held[0] == 0) != is_captured
    del model
    assert gpus.live_bytes == 0


def test_broken_numbers_do_not_reach_the_next_stream(gpus):
    plain = tiny_model(max_positions=320).to("cuda")
    model = Captured(plain)
    expected = generate(model).tokens
    weight = plain.get_parameter("model.layers.0.mlp.down_proj.weight").requires_grad_(False)
    whole = weight.clone()
    weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"no token can be sampled at frame 0.*first in layer 1"):
        generate(model)
    weight.copy_(whole)
    assert torch.equal(generate(model).tokens, expected)


def test_a_session_may_change_its_sampling_and_come_back(gpus):
    engine = diagd.DecodingEngine(
        prepare_for(tiny(), "cuda"), diagd.FrameFormat(3, 5, 2), batch_size=2
    )
    engine.prefill(CASE.prompt.to("cuda"))
    actions = CASE.actions(12)
    assert actions is not None
    captures = []
    for t in range(12):
        temperature = (0.0, 1.0)[t % 2]
        engine.set_sampling(diagd.SamplingOptions(temperature, valid_range=(0, NUM_VISUAL)))
        strategy = ("k=1", "raster")[t // 2 % 2]
        list(engine.decode(strategy, actions[:, t : t + 1].to("cuda")))
        captures.append(gpus.num_captures)
    assert captures[8:] == captures[8:9] * 4  # each frame has come twice
