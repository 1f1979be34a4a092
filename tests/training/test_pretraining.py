import dataclasses
import re

import pytest
import torch

import diagd
from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.schedule import FrameFormat
from diagd.tokenizers.shards import codebook_fingerprint
from diagd.training.mixture import MixtureLoss
from diagd.training.sequences import draw_batch
from diagd.training.setup import fit_config, start_model
from diagd.training.train import pretrain
from tests.training.runs import log_of, weights_of
from tests.worlds import SHARD_CODES as NUM_CODES
from tests.worlds import clips_of, tokenizer, write_shard

HEIGHT, WIDTH = 2, 3  # of the clips


def test_actions_are_inputs_all_the_same(options):
    pretrain(options(steps=2, warmup_steps=0))
    model = diagd.load_model(options().out)
    tokens = draw_batch(clips_of(), 3, 2, 0)
    other = torch.where(tokens >= NUM_CODES, NUM_CODES, tokens)
    place = HEIGHT * WIDTH
    assert torch.equal(model.logits(tokens)[:, :place], model.logits(other)[:, :place])
    assert not torch.equal(model.logits(tokens)[:, place], model.logits(other)[:, place])


def test_weights_are_decayed_and_norms_are_not(options, monkeypatch):
    """With gradients of zero, AdamW does nothing but decay."""

    def flat(loss, model, tokens, step):
        return 0 * torch.stack([weight.square().sum() for weight in model.parameters()]).sum()

    monkeypatch.setattr(MixtureLoss, "__call__", flat)
    run = options(steps=1, warmup_steps=0, learning_rate=0.5, weight_decay=0.1)
    start = start_model(fit_config(run.model, clips_of(), run.frames), run.seed).state_dict()
    pretrain(run)
    for name, weight in weights_of(run.out).items():
        factor = 0.95 if weight.dim() > 1 else 1.0
        torch.testing.assert_close(weight, start[name] * factor, atol=1e-7, rtol=1e-6)


def test_training_goes_on_from_a_model_with_another_context(options):
    pretrain(options("short"))
    run = options("long", frames=4, init=str(options("short").out), steps=1, warmup_steps=0)
    pretrain(run)
    first = log_of(run.out)[0]["loss"]
    scratch = options("scratch", frames=4, steps=1, warmup_steps=0)
    pretrain(scratch)
    assert first < log_of(scratch.out)[0]["loss"] - 0.05


def test_a_start_decides_the_size_where_none_is_named(options):
    first = options("first", steps=1, warmup_steps=0)
    pretrain(first)
    run = options("second", init=str(first.out), model=None, steps=None, minutes=0.02)
    pretrain(run)
    assert diagd.load_model(run.out).config == diagd.load_model(first.out).config


def test_a_model_trained_under_a_window_holds_the_window(options):
    """It sees as much as its streams will, however long the sequences are that it learns from."""
    run = options(frames=5, window=3, strategy=("raster k=1",), steps=4, warmup_steps=0)
    pretrain(run)
    model = diagd.load_model(run.out)
    assert model.config.frames_held == 3
    engine = DecodingEngine(model, FrameFormat(HEIGHT, WIDTH, 1))
    engine.prefill(torch.zeros(1, HEIGHT * WIDTH, dtype=torch.int64))
    assert (engine.stream.window, engine.stream.is_endless) == (3, True)


@pytest.mark.parametrize("window", [1, 3, 4])
def test_a_window_that_nothing_outgrows_is_refused(window, options):
    message = rf"window must be in \[2, frames=3\).*got {window}"
    with pytest.raises(ValueError, match=message):
        options(window=window)


def test_a_model_of_another_shape_is_no_start(options, world):
    message = rf"init: {world} has another shape or vocabulary"
    with pytest.raises(ValueError, match=message):
        pretrain(options(init=str(world)))


def test_a_start_whose_tokenizer_is_another_is_refused(options):
    first = options(out="first", steps=1, warmup_steps=0)
    pretrain(first)
    tokenizer().save_pretrained(first.out / "tokenizer")
    with pytest.raises(ValueError, match="first: they were tokenized with another"):
        pretrain(options(out="second", init=str(first.out)))


def test_tokens_of_another_tokenizer_than_the_one_beside_them_are_refused(options):
    tokenizer().save_pretrained(options().tokens / "tokenizer")
    with pytest.raises(ValueError, match="tokens: they were tokenized with another"):
        pretrain(options())
    assert not options().out.exists()


def test_a_run_that_goes_on_leaves_the_defaults_that_tune_has_chosen(options):
    first, chosen = options(steps=1, warmup_steps=0), '{"decoding": "k=2"}'
    (first.tokens / "generation.json").write_text('{"fps": 5.0}')
    pretrain(first)
    defaults = first.out / "generation.json"
    assert defaults.read_text() == '{"fps": 5.0}'
    defaults.write_text(chosen)
    pretrain(options(steps=2, warmup_steps=0))
    assert defaults.read_text() == chosen


def test_a_run_names_the_pictures_that_there_will_be(options, tmp_path, capsys):
    tokens = tmp_path / "with its tokenizer"
    for part in (tokens / "train", tokens / "heldout"):
        part.parent.mkdir(exist_ok=True)
        write_shard(part, clips_of(num_frames=8), codebook_fingerprint(tokenizer()))
    for run in (options("one", tokens=tokens), options("two", tokens=tokens)):
        pretrain(dataclasses.replace(run, steps=1, warmup_steps=0))
        (told,) = re.findall(r"progress: .*", capsys.readouterr().out.replace("\n", " "))
        assert (f"{run.out}/dreams.png" in told) == (run.out / "dreams.png").is_file()
        assert f"{run.out}/loss.png" in told
        tokenizer().save_pretrained(tokens / "tokenizer")


def test_bf16_trains_float32_weights(options):
    run = options(precision="bf16", steps=2, warmup_steps=0)
    pretrain(run)
    assert {weight.dtype for weight in weights_of(run.out).values()} == {torch.float32}
    assert log_of(run.out)[0]["loss"] > 0
