import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import diagd
from diagd.data.actions import ActionVocabulary
from diagd.tokenizers.shards import read_shards
from diagd.training import loop, setup, train
from diagd.training.charts import plot_loss
from diagd.training.loop import decide_precision
from diagd.training.sequences import draw_batch
from diagd.training.setup import fit_config
from diagd.training.train import FinetuneOptions, finetune, pretrain
from tests.training.runs import assert_same_run, log_of, run_killed, weights_of
from tests.worlds import SHARD_CODES as NUM_CODES
from tests.worlds import SHARD_NAMES as NAMES
from tests.worlds import clips_of, write_shard, write_shard_model


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def whole(options, kept) -> Path:
    """Return the folder of a run that nobody killed, made once; to be read only."""
    run = options(kept / "whole")
    if not run.out.exists():
        pretrain(run)
    return run.out


def test_the_learning_rate_warms_up_and_follows_a_cosine_to_a_tenth(options):
    run = options(steps=10, warmup_steps=4, learning_rate=8.0)
    rates = [run.learning_rate_at(step) for step in range(11)]
    assert rates[:4] == [2, 4, 6, 8]
    assert rates[4:] == pytest.approx(
        [8 * (0.1 + 0.9 * (1 + math.cos(math.pi * done / 6)) / 2) for done in range(7)]
    )
    assert rates[10] == pytest.approx(0.8)


def test_the_warm_up_of_a_short_time_is_a_twentieth_of_it(options):
    run = options(steps=None, minutes=3, warmup_steps=None, learning_rate=8.0)
    rates = [run.learning_rate_at(step, 6.0 * step) for step in range(31)]  # 30 steps in 3 minutes
    assert rates[:2] == pytest.approx([8 / 50, 8 * 20 / 30])
    assert max(rates) == rates[2] > 7.9
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[30] == pytest.approx(0.8)
    slow = [run.learning_rate_at(step, 0.03 * step) for step in range(300)]  # of 6,000 steps
    assert slow[:50] == pytest.approx([8 * (step + 1) / 50 for step in range(50)], rel=1e-3)
    named = options(steps=None, minutes=3, warmup_steps=50, learning_rate=8.0)
    assert named.learning_rate_at(9, 90.0) == pytest.approx(8 * 10 / 50)


def test_every_step_has_its_own_batch_and_its_own_learning_rate(options, monkeypatch):
    seeds, rates = [], []
    original = loop.TrainingRun.take_step

    def draw(clips, frames, size, seed, hold):
        seeds.append(seed)
        return draw_batch(clips, frames, size, seed, hold)

    def step(self):
        number, value = self.step, original(self)
        rates.append([group["lr"] for group in self.optimizers[0].param_groups])
        assert rates[-1] == [self.options.learning_rate_at(number)] * 2
        return value

    monkeypatch.setattr(loop, "draw_batch", draw)
    monkeypatch.setattr(loop.TrainingRun, "take_step", step)
    pretrain(options("one", seed=1))
    pretrain(options("two", seed=2))
    assert len(rates) == 24
    assert len(set(seeds)) == 26  # the weights that are saved are seen to have a loss on the next


def test_the_loss_falls(options):
    run = options(steps=60, batch_size=8, log_every=10)
    report = pretrain(run)
    losses = [line["loss"] for line in log_of(run.out)]
    assert losses[0] > 1.8  # of 2.4 = log 11 at the start
    assert losses[-1] < 0.7 * losses[0]
    assert [line["step"] for line in log_of(run.out)] == [10, 20, 30, 40, 50, 60]
    assert report["steps"] == 60


def test_a_run_leaves_a_model_that_loads_and_a_picture_of_its_loss(options, monkeypatch):
    monkeypatch.setattr(loop, "plot_loss", plot_loss)
    run = options()
    pretrain(run)
    model = diagd.load_model(run.out)
    assert model.config == fit_config(run.model, clips_of(), run.frames)
    assert ActionVocabulary.load(run.out / "actions.json").names == NAMES
    (picture,) = run.out.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_validation_loss_is_that_of_fixed_held_out_windows(options, tmp_path):
    held_out = write_shard(tmp_path / "heldout", clips_of(seed=5))
    run = options(validation=held_out, strategy=("raster",))
    model_loss = pretrain(run)["validation_loss"]
    model = diagd.load_model(run.out)
    losses = []
    for seed in range(8):
        batch = draw_batch(read_shards(held_out), 3, 2, seed)
        with torch.no_grad():
            logits = model.logits(batch[:, :-1])
        visual = batch[:, 1:] < NUM_CODES
        losses.append(cross_entropy(logits[visual], batch[:, 1:][visual]).item())
    assert model_loss == pytest.approx(sum(losses) / 8, rel=1e-5)


def test_held_frames_need_an_action_for_standing_still(options, tmp_path):
    other = dataclasses.replace(clips_of(), action_names=("stay", "left", "right"))
    tokens = write_shard(tmp_path / "other", other)
    with pytest.raises(ValueError, match="hold needs an action named none, got stay, left, right"):
        pretrain(options(tokens=tokens, hold=0.5))
    assert not options().out.exists()


@pytest.mark.parametrize(
    ("save_minutes", "killed_after"),
    [*((0.0, steps) for steps in (0, 1, 8, 11)), (1e9, 1), (1e9, 8)],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    save_minutes, killed_after, options, whole
):
    killed = options("killed", save_minutes=save_minutes)
    run_killed(pretrain, killed, killed_after)
    pretrain(killed)
    assert_same_run(killed.out, whole)


@pytest.mark.parametrize(
    "setup",
    [{"optimizer": "muon", "hold": 0.3}, {"strategy": ("raster k=1:2 k=1,d=2",)}],
    ids=["muon", "mixture"],
)
def test_so_does_one_of_muon_and_held_frames_and_one_under_a_mixture(setup, options):
    whole, killed = options("whole", **setup), options("killed", save_minutes=0.0, **setup)
    pretrain(whole)
    run_killed(pretrain, killed, 7)
    pretrain(killed)
    assert_same_run(killed.out, whole.out)


@pytest.mark.parametrize("saved_at", [5, 6])
def test_lines_logged_after_the_last_checkpoint_are_not_doubled(
    saved_at, options, whole, monkeypatch
):
    """A run that saved a while before it was killed has logged steps it will do again."""
    killed = options("killed", save_minutes=1e9)
    original = loop.TrainingRun.take_step

    def step(self):
        if self.step == saved_at and not self.checkpoint.exists():
            self.save()
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainingRun, "take_step", step)
        run_killed(pretrain, killed, 9)
    pretrain(killed)
    steps = [line["step"] for line in log_of(killed.out)]
    assert steps == [line["step"] for line in log_of(whole)]
    ours, theirs = weights_of(killed.out), weights_of(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("point", ["in save_state", "before run.json", "before the old one goes"])
def test_a_run_killed_while_it_saves_goes_on(point, options, whole, monkeypatch):
    killed = options("killed", save_minutes=0.0, log_every=2)
    where, name = {
        "in save_state": (loop.Accelerator, "save_state"),
        "before run.json": (loop, "write_json"),
        "before the old one goes": (loop.shutil, "rmtree"),
    }[point]
    original = getattr(where, name)

    def die(*given, **named):
        if (killed.out / "training" / "step_4").is_dir():
            raise KeyboardInterrupt
        return original(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, die)
        with pytest.raises(KeyboardInterrupt):
            pretrain(killed)
    pretrain(killed)
    ours, theirs = weights_of(killed.out), weights_of(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    names = [path.name for path in (killed.out / "training").iterdir()]
    assert sorted(names) == ["run.json", f"step_{log_of(killed.out)[-1]['step']}"]


def test_a_checkpoint_that_does_not_fit_leaves_the_old_one(options, monkeypatch):
    run = options(save_minutes=0.0)
    run_killed(pretrain, run, 6)
    before = sorted((run.out / "training").rglob("*"))

    def fill(self, folder):
        (Path(folder) / "model.safetensors").write_bytes(bytes(9))
        raise RuntimeError("no room")

    monkeypatch.setattr(loop.Accelerator, "save_state", fill)
    with pytest.raises(OSError, match="training cannot be written: no room"):
        pretrain(run)
    assert sorted((run.out / "training").rglob("*")) == before


def test_a_log_whose_last_line_was_cut_short_does_not_stop_a_run(options, whole):
    killed = options("killed", save_minutes=0.0)
    run_killed(pretrain, killed, 6)
    with (killed.out / "log.jsonl").open("a") as log:
        log.write('{"step": 7, "lo')
    pretrain(killed)
    assert_same_run(killed.out, whole)


def test_a_run_keeps_the_precision_that_auto_was_when_it_began(options, monkeypatch):
    pretrain(options(steps=1, warmup_steps=0))  # in float32
    monkeypatch.setattr(setup, "_trains_in_bfloat16", lambda: True)
    assert decide_precision(options("other", precision="auto")).precision == "bf16"
    assert decide_precision(options(precision="auto")).precision == "no"
    pretrain(options(precision="auto"))
    state = options().out / "training" / "run.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"precision": "bf16"}))
    with pytest.raises(ValueError, match="run holds a run of precision=bf16, now no; choose"):
        pretrain(options(precision="no"))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_step_follows_the_free_cores_unless_it_is_compiled_for_a_number(
    is_compiled, options, monkeypatch
):
    calls = []
    monkeypatch.setattr(loop, "follow_free_cores", lambda: calls.append(1))
    init = loop.MixtureLoss.__init__

    def compiled(self, *arguments):
        init(self, *arguments)
        self.is_compiled = is_compiled

    monkeypatch.setattr(loop.MixtureLoss, "__init__", compiled)
    pretrain(options(steps=2, warmup_steps=0))
    assert len(calls) == (0 if is_compiled else 2)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("training/run.json", b'{"step": 1', r"run\.json: not valid JSON"),
        ("training/run.json", b"[]", r"run\.json: expected a JSON object, got list"),
        ("training/run.json", b"{}", r"run holds a run damaged .*: missing key 'step'"),
        ("training/run.json", b'{"step": 1, "seconds": 1}', r"damaged .*: missing key 'seed'"),
        ("training/step_1/model.safetensors", b"torn", r"holds a run damaged .* header"),
        ("training/step_1/optimizer.bin", b"PK\3\4torn", r"holds a run damaged .*zip"),
        ("training/step_1/optimizer.bin", b"", r"holds a run damaged .*EOFError"),
        ("log.jsonl", b'{"loss": 1.0}\n', r"log\.jsonl: missing key 'step'"),
    ],
)
def test_damage_of_what_a_run_goes_on_from_is_one_line(file, content, message, options):
    run = options(steps=1, warmup_steps=0)
    pretrain(run)
    (run.out / file).write_bytes(content)
    weights = (run.out / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=message) as caught:
        pretrain(options())
    assert "\n" not in str(caught.value)
    assert (run.out / "model.safetensors").read_bytes() == weights


def test_a_model_that_no_run_can_go_on_with_is_not_overwritten(options, tmp_path):
    out = write_shard_model(options().out)
    before = {path: path.read_bytes() for path in out.iterdir()}
    for timed in ({}, {"steps": None, "minutes": 0.1, "warmup_steps": None}):
        with pytest.raises(ValueError, match=r"run holds a model without .*: choose another --out"):
            pretrain(options(**timed))
    same = FinetuneOptions(tokens=tmp_path / "tokens", out=out, init=str(out), frames=3)
    with pytest.raises(ValueError, match=r"run holds a model without .*: choose another --out"):
        finetune(same)
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_a_finished_run_is_left_as_it_is(options):
    run = options()
    pretrain(run)
    log, weights = log_of(run.out), weights_of(run.out)
    pretrain(run)
    assert log_of(run.out) == log
    assert all(torch.equal(weights_of(run.out)[name], weights[name]) for name in weights)


@pytest.fixture
def timed(options, monkeypatch):
    """Return a function that makes options for 3.5 seconds of training, one a step."""
    monkeypatch.setattr(loop.TrainingRun, "_clock", lambda run, seconds: float(run.step))
    monkeypatch.setattr(train, "_probe", lambda *rest: (1000, 1e-9))
    monkeypatch.setattr(train, "monotonic", lambda: 0.0)  # planning takes no time
    length = {"steps": None, "minutes": 3.5 / 60, "warmup_steps": None, "log_every": 1}
    return lambda *out, **changes: options(*out, **{**length, **changes})


def test_a_finished_run_is_trained_for_longer_where_more_minutes_are_given(timed, capsys):
    whole, killed = timed("whole"), timed("killed")
    more = {"minutes": None, "more_minutes": 2.5 / 60, "model": None}
    for run in (whole, killed):
        pretrain(run)
        capsys.readouterr()
        pretrain(run)
        told = capsys.readouterr().out
        assert f"{run.out.name} is finished, after 4 steps in 4 s; to train longer, run " in told
        assert "the same diagd train with --more-minutes 10 instead of --minutes" in told
    longer = timed("killed", **more, save_minutes=0.0)
    run_killed(pretrain, longer, 5)
    assert pretrain(longer)["steps"] == pretrain(timed("whole", **more))["steps"] == 7
    assert "resuming after step 5, 2 s left" in capsys.readouterr().out  # 6.5 seconds in all
    assert_same_run(killed.out, whole.out)
    assert pretrain(longer)["steps"] == 10  # once more


def test_more_minutes_are_for_a_run_that_is_finished(timed):
    more = {"minutes": None, "more_minutes": 1.0}
    with pytest.raises(FileNotFoundError, match=r"run to train for longer not found: .*run\.json"):
        pretrain(timed(**more))
    run_killed(pretrain, timed(save_minutes=0.0), 2)
    with pytest.raises(ValueError, match=r"a run that is not finished: leave --more-minutes out"):
        pretrain(timed(**more))
    with pytest.raises(ValueError, match="minutes must be left out with more_minutes"):
        timed(more_minutes=1.0)
    with pytest.raises(ValueError, match="more_minutes must be above 0, got 0"):
        timed(minutes=None, more_minutes=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "seed=0, now 1"),
        ({"batch_size": 3}, "batch_size=2, now 3"),
        ({"optimizer": "muon"}, "optimizer=adamw, now muon"),
        ({"frames": 4}, "another model, tokenizer or schedule"),
    ],
)
def test_what_a_run_began_with_is_not_changed_on_the_way(changes, message, options):
    pretrain(options(steps=1, warmup_steps=0))
    with pytest.raises(ValueError, match=rf"run holds a run of {message}; choose another --out"):
        pretrain(options(**changes))
    assert len(log_of(options().out)) == 1
    pretrain(options(steps=2, warmup_steps=0, learning_rate=1e-3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "cosmos-4b"},
            r"model must be one of mc-ar-doom, mc-ar-doom-small, .*got 'cosmos-4b'",
        ),
        ({"steps": 0}, r"steps must be at least 1, got 0"),
        ({"batch_size": 0}, r"batch_size must be at least 1, got 0"),
        ({"log_every": 0}, r"log_every must be at least 1, got 0"),
        ({"frames": 1}, r"frames must be at least 2, got 1"),
        ({"warmup_steps": 12}, r"warmup_steps must be in \[0, steps=12\), got 12"),
        ({"hold": 1.0}, r"hold must be in \[0, 1\), got 1.0"),
        ({"minutes": 0}, r"minutes must be above 0, got 0"),
        ({"hours": math.inf}, r"hours must be above 0, got inf"),
        ({"seed": -1}, r"seed must be at least 0, got -1"),
        ({"seed": 2**64}, r"seed must fit in 64 bits, got 18446744073709551616"),
        ({"batch_size": 10**20}, r"batch_size must fit in 64 bits, got 1"),
        ({"weight_decay": -0.1}, r"weight_decay must be at least 0, got -0.1"),
        ({"weight_decay": math.inf}, r"weight_decay must be finite, got inf"),
        ({"save_minutes": math.nan}, r"save_minutes must be at least 0, got nan"),
        ({"learning_rate": math.nan}, r"learning_rate must be 0 or more, got nan"),
        ({"learning_rate": -1.0}, r"learning_rate must be 0 or more, got -1.0"),
        ({"clip_norm": 0.0}, r"clip_norm must be above 0, got 0.0"),
        ({"precision": "fp16"}, r"precision must be auto, bf16 or no, got 'fp16'"),
    ],
)
def test_options_that_cannot_be_are_refused(changes, message, options):
    with pytest.raises(ValueError, match=message):
        options(**changes)


def test_clips_shorter_than_a_sequence_are_refused(options, tmp_path):
    with pytest.raises(ValueError, match=r"tokens: clips must have at least frames=7 .*got 6"):
        pretrain(options(frames=7))
    held_out = write_shard(tmp_path / "heldout", clips_of(num_frames=2))
    with pytest.raises(ValueError, match=r"validation: clips must have at least frames=3 .*got 2"):
        pretrain(options(validation=held_out))
    assert not options().out.exists()


@pytest.mark.parametrize(
    "broken",
    [lambda loss: loss * torch.nan, lambda loss: loss + (loss - loss.detach()).sqrt()],
    ids=["loss", "gradient alone"],
)
def test_a_run_that_diverges_says_so_and_keeps_its_last_good_checkpoint(
    options, monkeypatch, broken
):
    good = options("good", steps=6, log_every=3, save_minutes=0)
    original = loop.TrainingRun.take_step
    kept = {}

    def step(self):
        loss = self.loss
        if self.step == 4:
            kept.update(weights_of(self.options.out))
            self.loss = lambda *given: broken(loss(*given))
        value, self.loss = original(self), loss
        return value

    monkeypatch.setattr(loop.TrainingRun, "take_step", step)
    message = r"training diverged between steps 4 and 6: loss nan; .*good keeps the last checkpoint"
    with pytest.raises(ValueError, match=message):
        pretrain(good)
    assert [line["step"] for line in log_of(good.out)] == [3]
    weights = weights_of(good.out)
    assert all(weights[name].isfinite().all() for name in weights)
    assert all(torch.equal(weights[name], kept[name]) for name in kept)


def test_a_step_that_spoils_the_weights_is_never_saved(options):
    """Its own loss is that of the weights before it; with a lower rate the run goes on."""
    with pytest.raises(ValueError, match=r"training diverged between steps \d and \d: loss nan"):
        pretrain(options(steps=9, log_every=1, save_minutes=0, learning_rate=1e20))
    assert [line["step"] for line in log_of(options().out)] == [1]
    pretrain(options(steps=9, log_every=1, save_minutes=0))
    assert [line["step"] for line in log_of(options().out)][-1] == 9


@pytest.fixture
def second_a_step(monkeypatch):
    """Fake a clock by which a step takes one second, and what comes before it no time."""
    monkeypatch.setattr(train, "monotonic", lambda: 0.0)
    monkeypatch.setattr(loop.TrainingRun, "_clock", lambda self, seconds: float(self.step))


def test_a_run_ends_on_time_and_so_does_its_schedule(options, second_a_step):
    run = options(steps=None, minutes=0.1, hours=0.002, model="mc-ar-tiny", log_every=1)
    assert run.seconds == pytest.approx(13.2)
    pretrain(run)
    log = log_of(run.out)
    assert [line["step"] for line in log] == list(range(1, 15))
    rates = [line["learning_rate"] for line in log]
    assert rates[:2] == [0.005, 0.01]
    assert rates[2:] == pytest.approx(
        [0.01 * (0.55 + 0.45 * math.cos(math.pi * done / 13.2)) for done in range(2, 14)]
    )


def test_what_ends_first_ends_a_run(options, second_a_step):
    pretrain(options("time", steps=100, minutes=0.1))
    assert log_of(options("time").out)[-1]["step"] == 6
    pretrain(options("steps", steps=4, minutes=0.1))
    assert log_of(options("steps").out)[-1]["step"] == 4


@pytest.mark.parametrize(("pace", "agreements"), [(0.01, 2), (0.1, 6), (2.0, 50)])
def test_processes_agree_on_the_time_about_once_a_second(pace, agreements):
    """A step of two processes waits for the other one only where they agree."""
    asked = []
    accelerator: Any = SimpleNamespace(num_processes=2, is_main_process=True, device="cpu")
    accelerator.reduce = lambda value, how: asked.append(how) or value
    run = loop.TrainingRun.__new__(loop.TrainingRun)
    run.accelerator, run.step, run.seconds, run.agreed_at, run.agree_at = accelerator, 0, 0.0, 0, 0
    for step in range(1, 51):
        run.step = step
        run.seconds = run._clock(10 + pace * step)  # the first step compiles
        assert 0 <= 10 + pace * step - run.seconds <= loop.AGREE_S + pace
    assert len(asked) == pytest.approx(agreements, abs=1)


def test_time_spent_is_part_of_the_checkpoint(options, second_a_step):
    timed = {"steps": None, "minutes": 0.2}
    whole, killed = options("whole", **timed), options("killed", save_minutes=0.0, **timed)
    pretrain(whole)
    run_killed(pretrain, killed, 7)
    pretrain(killed)
    assert_same_run(killed.out, whole.out)
    assert json.loads((killed.out / "training" / "run.json").read_text())["seconds"] == 12


def test_the_clock_goes_on_from_the_checkpoint(options):
    run = options(steps=1, warmup_steps=0)
    pretrain(run)
    file = run.out / "training" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"seconds": 1000.0}))
    pretrain(options(steps=2, warmup_steps=0))
    assert 1000 < json.loads(file.read_text())["seconds"] < 1060


def test_held_out_clips_are_looked_at_ten_times_a_run(options, tmp_path):
    held_out = write_shard(tmp_path / "heldout", clips_of(seed=5))
    whole = options("whole", steps=20, log_every=1, validation=held_out)
    report = pretrain(whole)
    looks = [line for line in log_of(whole.out) if "validation_loss" in line]
    assert [line["step"] for line in looks] == list(range(2, 21, 2))
    assert looks[-1]["validation_loss"] == report["validation_loss"]
    killed = dataclasses.replace(whole, out=tmp_path / "killed", save_minutes=0.0)
    run_killed(pretrain, killed, 9)
    pretrain(killed)
    assert_same_run(killed.out, whole.out)


def test_a_batch_holds_about_5000_tokens_where_no_size_is_given(options):
    clips = clips_of()
    assert options(batch_size=None).batch_of(clips) == 250  # of 3 * 7 - 1 = 20 tokens each
    assert options(batch_size=3).batch_of(clips) == 3
    assert options(warmup_steps=None, steps=40).warm_up == 2
    assert options(warmup_steps=None, steps=40_000).warm_up == 50
    finetuning = {"tokens": Path("tokens"), "out": Path("out"), "init": "doom"}
    assert FinetuneOptions(**finetuning).warm_up == 100
    assert FinetuneOptions(**finetuning, steps=60).warm_up == 3


def test_tokens_of_another_tokenizer_are_another_run(options, tmp_path):
    pretrain(options(steps=1, warmup_steps=0))
    other = write_shard(tmp_path / "other", clips_of(), codebook="f" * 16)
    with pytest.raises(ValueError, match=r"run holds a run of another model, tokenizer or schedul"):
        pretrain(options(tokens=other))
    with pytest.raises(ValueError, match="validation: clips have another grid, tokenizer or"):
        pretrain(options("fresh", validation=other))
