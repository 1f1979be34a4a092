import dataclasses
import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn import functional

from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.schedule import FrameFormat
from diagd.decoding.teacher_forcing import strategy_nll
from diagd.families.checkpoints import load_model, save_model
from diagd.models.transformer import Transformer
from diagd.pipeline.generator import VideoGenerator
from diagd.tokenizers.shards import TokenClips, codebook_fingerprint, read_shards
from diagd.tokenizers.vq import VQTokenizer
from diagd.training.loop import TrainingRun
from diagd.training.mixture import draw_strategy
from diagd.training.options import parse_mixture
from diagd.training.sequences import draw_batch
from diagd.training.train import FinetuneOptions, finetune
from tests.decoding.cases import Resampled
from tests.training.runs import assert_same_run, log_of, options_maker, run_killed
from tests.worlds import (
    HEIGHT,
    NAMES,
    NUM_CODES,
    SHARD_CODES,
    WIDTH,
    clips_of,
    write_shard,
    write_shard_model,
)


@pytest.fixture
def options(tmp_path):
    """Return a function that makes options for a run of eight steps of a tiny model."""
    init = str(write_shard_model(tmp_path / "init"))
    return options_maker(FinetuneOptions, tmp_path, init=init, frames=4, steps=8, log_every=1)


def losses_of(out):
    return [line["loss"] for line in log_of(out)]


def nll_of(options, tokens, strategy):
    """Price a batch of sequences with the engine's protocol and cache."""
    frames = torch.cat([tokens.new_zeros(len(tokens), 1), tokens], 1).unflatten(1, (-1, 7))
    clips, actions = frames[..., 1:].unflatten(2, (2, 3)), frames[..., :1]
    (scheduled,) = parse_mixture([strategy])
    model = load_model(options.init)
    return strategy_nll(model, clips, actions, scheduled, options.context_frames).mean().item()


@pytest.mark.parametrize(
    ("strategy", "context_frames"),
    [("k=1", 1), ("k=2,d=1/spatial", 1), ("k=1,d=2/predecessor", 2), ("k=3", 1), ("raster", 1)],
)
def test_the_first_loss_is_what_decoding_by_the_strategy_costs(strategy, context_frames, options):
    chosen = {"strategy": (strategy,), "context_frames": context_frames}
    run = options(steps=1, warmup_steps=0, **chosen)
    finetune(run)
    tokens = draw_batch(clips_of(), run.frames, run.batch_size, 0)
    assert losses_of(run.out) == [pytest.approx(nll_of(run, tokens, strategy), abs=1e-5)]


@pytest.mark.parametrize("window", [6, 4])
@pytest.mark.parametrize("strategy", ["raster", "k=1", "k=2,d=1"])
def test_under_a_window_the_first_loss_is_what_a_stream_pays(strategy, window, options):
    """The stream of a model that holds 6 frames, and sees as many or 4, writes the true 9."""
    clips = clips_of(num_frames=9)
    changes = {"frames": 9, "window": window, "strategy": (strategy,), "context_frames": 2}
    run = options(steps=1, warmup_steps=0, **changes)
    shutil.rmtree(run.tokens)
    write_shard(run.tokens, clips)
    finetune(run)
    tokens = draw_batch(clips, 9, run.batch_size, 0)
    assert losses_of(run.out) == [pytest.approx(stream_nll(run, tokens, strategy), abs=1e-5)]


def test_layers_that_shall_slide_learn_as_those_of_a_model_that_slides(options):
    run = options(steps=1, warmup_steps=0, sliding_frames=2)
    finetune(run)
    config = load_model(run.out).config
    assert (config.sliding_window, config.sliding_layers) == (2 * 7, (1,))
    again = options("again", steps=1, warmup_steps=0)
    save_model(Transformer(config), again.init, load_model(run.init).state_dict())
    finetune(again)
    assert losses_of(run.out) == losses_of(again.out)


@torch.inference_mode()
def stream_nll(options, tokens, strategy):
    """Price sequences of 2 x 3 tokens a frame by the logits from which a stream draws."""
    frames = torch.cat([tokens.new_zeros(len(tokens), 1), tokens], 1).unflatten(1, (-1, 7))
    truth, costs = frames[:, 2:, 1:].unflatten(2, (2, 3)), {}

    def forced(logits, draw):
        known, videos = set(costs), torch.arange(len(truth))[:, None]
        places = torch.stack([videos.expand_as(draw.rows), draw.frames, draw.rows, draw.columns])
        written = truth[tuple(places)]
        for lane, place in enumerate(zip(*places.flatten(1).tolist(), strict=True)):
            if place not in known:  # lanes that write nothing claim (t, 0, 0) later on, too
                given = logits.flatten(0, 1)[lane], written.flatten()[lane]
                costs[place] = functional.cross_entropy(*given)
        return written

    model: Any = Resampled(load_model(options.init), forced)
    sizes = {"batch_size": len(tokens), "max_slots": 7 * options.window - 1}
    engine = DecodingEngine(model, FrameFormat(2, 3, 1), **sizes)
    engine.prefill(tokens[:, :13], context_frames=2)
    written = list(engine.decode(strategy, frames[:, 2:, :1], 7))
    assert torch.equal(torch.stack(written, 1), truth)
    assert engine.stream.window == options.window == 9 - engine.stream.num_dropped_frames
    assert len(costs) == truth.numel()
    return torch.stack(list(costs.values())).mean().item()


def test_the_loss_falls_and_the_validation_loss_is_reported(options, tmp_path):
    held_out = write_shard(tmp_path / "heldout", clips_of(seed=5))
    mixture = ("k=1:3 k=2",)
    run = options(steps=40, batch_size=8, validation=held_out, strategy=mixture)
    report = finetune(run)
    losses = losses_of(run.out)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    tokens = [draw_batch(read_shards(held_out), 4, 8, seed) for seed in range(8)]
    tuned = dataclasses.replace(run, init=str(run.out))
    found = report["validation_loss_by_strategy"]
    assert list(found) == ["k=1", "k=2", "raster"]
    for strategy, loss in found.items():
        expected = sum(nll_of(tuned, batch, strategy) for batch in tokens) / 8
        assert loss == pytest.approx(expected, abs=1e-4)
    assert report["validation_loss"] == pytest.approx((3 * found["k=1"] + found["k=2"]) / 4)


def test_the_loss_of_a_step_is_that_of_the_strategy_drawn_for_it(options):
    """With a rate of almost zero, the model stays what it was."""
    run = options(strategy=("raster k=1", "k=1,d=2"), learning_rate=1e-12, steps=12)
    finetune(run)
    drawn = [str(draw_strategy(run.mixture, run.seed, step)) for step in range(12)]
    assert set(drawn) == {"raster", "k=1", "k=1,d=2"}
    for step, loss in enumerate(losses_of(run.out)):
        tokens = draw_batch(clips_of(), run.frames, run.batch_size, step)
        assert loss == pytest.approx(nll_of(run, tokens, drawn[step]), abs=1e-5)


def test_a_killed_run_goes_on_with_the_curve_it_would_have_had(options):
    whole = options("whole", strategy=("raster", "k=1:2"))
    killed = options("killed", strategy=("raster", "k=1:2"), save_minutes=0.0)
    finetune(whole)
    run_killed(finetune, killed, 5)
    finetune(killed)
    assert_same_run(killed.out, whole.out)


def test_a_run_for_another_schedule_is_refused_and_left_as_it_is(options):
    finetune(options(steps=1, warmup_steps=0))
    written = (options().out / "finetune.json").read_text()
    message = "run holds a run of another model, tokenizer or schedule; choose another --out"
    with pytest.raises(ValueError, match=message):
        finetune(options(strategy=("k=2",)))
    assert (options().out / "finetune.json").read_text() == written


def test_the_folder_is_a_world_and_says_what_it_was_tuned_for(options, world, command, tmp_path):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(NUM_CODES, (3, 5, HEIGHT, WIDTH), generator=generator)
    actions = torch.randint(len(NAMES), (3, 5), generator=generator)
    clips = TokenClips(tokens.to(torch.int16), actions.to(torch.int16), NUM_CODES, NAMES)
    codebook = codebook_fingerprint(VQTokenizer.from_pretrained(world / "tokenizer"))
    shards = write_shard(tmp_path / "world_tokens", clips, codebook)
    shutil.copytree(world, tmp_path / "init_world")
    world, out = tmp_path / "init_world", tmp_path / "tuned"
    (world / "generation.json").write_text('{"fps": 12, "row_lag": 2}')
    (world / "scenes").mkdir()
    (world / "scenes" / "hall.png").write_bytes(b"a picture")
    flags = ("--init", world, "--tokens", shards, "--out", out, "--frames", 3, "--steps", 2)
    more = ("--warmup-steps", 0, "--precision", "no", "--no-compile", "--json")
    outcome = command("finetune", *flags, *more, "--strategy", "raster", "k=2/spatial")
    assert (outcome.code, outcome.document) == (0, {"steps": 2}), outcome.err
    told = json.loads((out / "finetune.json").read_text())
    assert told["strategies"] == "raster k=2/spatial"
    assert (told["init"], told["options"]["steps"]) == (str(world), 2)
    dreamt = command("generate", "--model", out, "--frames", 2, "--output", tmp_path / "dream.mp4")
    assert dreamt.code == 0, dreamt.err
    defaults = VideoGenerator.from_pretrained(out).defaults
    assert (defaults.fps, defaults.row_lag) == (12, 2)
    assert (out / "scenes" / "hall.png").read_bytes() == b"a picture"


def test_a_finished_finetuning_goes_on_for_more_minutes_than_its_steps(options, monkeypatch):
    monkeypatch.setattr(TrainingRun, "_clock", lambda run, seconds: float(run.step))
    assert finetune(options())["steps"] == 8
    more = options(steps=FinetuneOptions.steps, more_minutes=2.5 / 60)
    assert finetune(more)["steps"] == 11


def launch(processes, options):
    """Train in subprocesses, as `torchrun` or `accelerate launch` starts them."""
    flags = {
        name: getattr(options, name)
        for name in ("init", "tokens", "out", "frames", "steps", "batch_size", "warmup_steps")
    }
    flags["strategy"] = " ".join(options.strategy)
    flags |= {"learning_rate": options.learning_rate, "precision": "no", "log_every": 1}
    arguments = [str(x) for k, v in flags.items() for x in (f"--{k.replace('_', '-')}", v)]
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    subprocess.run(
        [sys.executable, *run, "-m", "diagd", "finetune", *arguments, "--no-compile"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )


@pytest.mark.slow
def test_two_processes_follow_the_curve_of_one_with_the_double_batch(options):
    mixture = ("raster k=1",)
    one = options("one", batch_size=4, strategy=mixture)
    two = options("two", batch_size=2, strategy=mixture)
    finetune(one)
    launch(2, two)
    assert losses_of(two.out) == pytest.approx(losses_of(one.out), abs=1e-3)
    drawn = {draw_strategy(one.mixture, one.seed, step) for step in range(one.steps)}
    assert len(drawn) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": ("k=1/left",)}, r"row_start must be one of .*, got 'left'"),
        ({"strategy": ()}, r"strategies must not be empty, expected one such as k=1"),
        ({"context_frames": -1}, r"context_frames must be in \[0, frames=4\), got -1"),
        ({"context_frames": 4}, r"context_frames must be in \[0, frames=4\), got 4"),
    ],
)
def test_options_that_cannot_be_are_refused(changes, message, options):
    with pytest.raises(ValueError, match=message):
        options(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": ("raster k=4",)}, r"row_lag must be in \[1, width=3\], got 4"),
        ({"strategy": ("k=1,d=5",)}, r"frame_lag must be in \[1, .*=4\], got 5"),
        ({"init": "nowhere"}, r"no model at 'nowhere'"),
        ({"frames": 7}, r"tokens: clips must have at least frames=7 frames, got 6"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(changes, message, options):
    with pytest.raises((ValueError, OSError), match=message):
        finetune(options(**changes))
    assert not options().out.exists()


def test_more_frames_than_the_model_holds_are_refused(options, tmp_path):
    short = str(write_shard_model(tmp_path / "short", frames=3))
    with pytest.raises(
        ValueError, match=r"frames must be at most 3, the context of .*short, got 4"
    ):
        finetune(options(init=short))
    clips = dataclasses.replace(clips_of(), codebook_size=SHARD_CODES + 1)
    tokens = write_shard(tmp_path / "other", clips)
    with pytest.raises(ValueError, match="number of visual ids is 12, the model's 11"):
        finetune(options(tokens=tokens))


def test_a_window_that_the_model_cannot_hold_is_refused(options, tmp_path):
    clips = write_shard(tmp_path / "long", clips_of(num_frames=8))
    with pytest.raises(ValueError, match=r"window must be at most 6, the context of .*init, got 7"):
        finetune(options(frames=8, window=7, tokens=clips))
    clips = write_shard(tmp_path / "longer", clips_of(num_frames=7))
    with pytest.raises(ValueError, match=r"at most 6, .*got 7; with --window 6 there may be more"):
        finetune(options(frames=7, tokens=clips))
    assert not (tmp_path / "run").exists()
