import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from diagd.backends.devices import multiplies_bfloat16
from diagd.tokenizers.vq import VQTokenizer
from diagd.training import tokenizer as tokenizer_training
from diagd.training.corpus import TokenizeOptions, tokenize
from diagd.training.tokenizer import (
    LOG_NAME,
    STATE_NAME,
    TokenizerTrainer,
    load_frames,
    measure_tokenizer,
    train_tokenizer,
)
from tests.tokenizers.rectangles import rectangles, small_tokenizer, write_clips

FRAMES = rectangles(24)


@pytest.fixture
def options(tmp_path):
    return TokenizeOptions(
        clips=tmp_path / "clips",
        out=tmp_path / "out",
        steps=2,
        batch_size=4,
        codes=20,
        learning_rate=1e-3,
    )


def train(options) -> VQTokenizer:
    return train_tokenizer(options, FRAMES, options.out, width=16)


def weights(tokenizer) -> torch.Tensor:
    return torch.cat([value.flatten() for value in tokenizer.model.state_dict().values()])


def rows(options) -> list[dict]:
    return [json.loads(line) for line in (options.out / LOG_NAME).read_text().splitlines()]


def test_training_paints_frames_better(options):
    options = dataclasses.replace(options, steps=100, batch_size=2, learning_rate=2e-3)
    start = measure_tokenizer(small_tokenizer(), FRAMES)["psnr"]
    trained = train(options)
    assert measure_tokenizer(trained, FRAMES)["psnr"] > start + 0.5
    assert [row["step"] for row in rows(options)] == [50, 100]
    assert rows(options)[-1]["loss"] < rows(options)[0]["loss"]
    assert rows(options)[-1]["learning_rate"] < 1e-3 * rows(options)[0]["learning_rate"]


@pytest.mark.parametrize("sharpen", [0.0, 0.05])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(sharpen, options, tmp_path, monkeypatch):
    options = dataclasses.replace(options, steps=4, sharpen=sharpen)
    whole = train(options)
    killed = dataclasses.replace(options, out=tmp_path / "killed", checkpoint_s=0.0)
    advance = TokenizerTrainer.advance

    def die_in_step_three(trainer, frames, pool):
        if trainer.step == 2:
            raise KeyboardInterrupt
        return advance(trainer, frames, pool)

    monkeypatch.setattr(TokenizerTrainer, "advance", die_in_step_three)
    with pytest.raises(KeyboardInterrupt):
        train(killed)
    rounds = not multiplies_bfloat16(torch.device("cpu"))  # it goes on elsewhere, in its own type
    monkeypatch.setattr(tokenizer_training, "multiplies_bfloat16", lambda _: rounds)
    (killed.out / LOG_NAME).write_text('{"step": 2}\n{"step": 3}\n{"st')  # written after the save
    steps = []
    monkeypatch.setattr(
        TokenizerTrainer,
        "advance",
        lambda trainer, *rest: steps.append(trainer.step) or advance(trainer, *rest),
    )
    assert weights(train(killed)).equal(weights(whole))
    assert steps == [2, 3]
    assert [row["step"] for row in rows(killed)] == [2, 4]


@pytest.mark.parametrize(("rate", "saves_s"), [(1e30, 60.0), (math.inf, 0.0)])
def test_a_run_that_diverges_says_so_and_saves_nothing(rate, saves_s, options):
    options = dataclasses.replace(options, learning_rate=rate, checkpoint_s=saves_s, steps=4)
    with pytest.raises(ValueError, match=r"training diverged by step \d: use a lower --lear"):
        train(options)
    assert not [path for path in options.out.rglob("*") if path.is_file()]


def test_a_finished_run_is_not_repeated(options, monkeypatch):
    first = train(options)
    monkeypatch.delattr(TokenizerTrainer, "advance")
    assert weights(train(options)).equal(weights(first))


def test_workers_share_a_batch(options, tmp_path):
    one = train(dataclasses.replace(options, threads=1))
    two = train(dataclasses.replace(options, threads=2, out=tmp_path / "two"))
    # bfloat16 sums in another order, through two steps of Adam at 1e-3
    assert (weights(one) - weights(two)).abs().max() < 5e-3


def test_a_tokenizer_is_trained_further(options, tmp_path):
    first = train(options)
    again = dataclasses.replace(options, init=options.out, out=tmp_path / "again")
    assert not weights(train(again)).equal(weights(first))


def test_decoder_only_training_keeps_the_tokens(options, tmp_path):
    first = train(options)
    again = {"init": options.out, "out": tmp_path / "again", "decoder_only": True}
    second = train(dataclasses.replace(options, **again))
    assert second.encode(FRAMES).equal(first.encode(FRAMES))
    assert not second.decode(second.encode(FRAMES)).equal(first.decode(first.encode(FRAMES)))


def test_a_discriminator_brings_textures_back(options, tmp_path):
    """Noise cannot be coded, and squared errors paint its mean."""
    small = torch.rand(24, 24, 32, 1, generator=torch.Generator().manual_seed(0))
    noise = (255 * small.repeat_interleave(2, 1).repeat_interleave(2, 2)).byte().repeat(1, 1, 1, 3)
    given = dataclasses.replace(options, steps=25, learning_rate=2e-3)

    def edges(sharpen: float) -> float:
        out = tmp_path / str(sharpen)
        run = dataclasses.replace(given, sharpen=sharpen, out=out)
        tokenizer = train_tokenizer(run, noise, out, width=16)
        return tokenizer.decode(tokenizer.encode(noise)).float().diff(dim=2).abs().mean().item()

    assert edges(1.0) > 1.5 * edges(0.0)


def test_codes_out_of_use_start_again(options):
    tokenizer = small_tokenizer()
    with torch.no_grad():
        tokenizer.codebook[5:] = 100.0  # far from every frame
    tokenizer.save_pretrained(options.out / "far")
    options = dataclasses.replace(options, init=options.out / "far", steps=40, batch_size=24)
    assert measure_tokenizer(tokenizer, FRAMES)["codes_used"] <= 5
    assert measure_tokenizer(train(options), FRAMES)["codes_used"] > 10


def test_a_run_with_other_options_is_refused(options):
    train(options)
    with pytest.raises(ValueError, match=r"state.pt is of a run with steps=2, now 3; choose anot"):
        train(dataclasses.replace(options, steps=3))


def test_a_corrupt_state_is_refused(options):
    train(options)
    (options.out / STATE_NAME).write_bytes(b"no state")
    with pytest.raises(ValueError, match=r"state\.pt: corrupt, delete it to start aga"):
        train(options)


def test_frames_are_strided_from_a_different_start_in_each_clip(options):
    paths = write_clips(options.clips, num_clips=3, num_frames=5)
    options = dataclasses.replace(options, frame_stride=2)
    frames = load_frames(paths, options)
    every = [load_frames([path], dataclasses.replace(options, frame_stride=1)) for path in paths]
    expected = torch.cat([every[0][0::2], every[1][1::2], every[2][0::2]])
    assert frames.equal(expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"codes": 0}, "codes must be at least 1, got 0"),
        ({"frame_stride": 0}, "frame_stride must be at least 1, got 0"),
        ({"batch_size": 5}, "batch_size must be a multiple of threads=2, got 5"),
        ({"learning_rate": 0.0}, r"learning_rate must be above 0, got 0\.0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 2**64}, "seed must fit in 64 bits, got 18446744073709551616"),
        ({"minutes": 0}, "minutes must be above 0, got 0"),
        ({"patch": 8, "init": Path("x")}, "patch must be left out: --init or --tokenizer"),
        ({"patch": 8, "tokenizer": Path("x")}, "patch must be left out: --init or --tokenizer"),
        (
            {"size": "64"},
            r"size must be .* pixels .64x96., multiples of 2 and at least 10, got '64'",
        ),
        ({"checkpoint_s": float("nan")}, "checkpoint_s must be at least 0, got nan"),
        ({"size": "64x97"}, r"size must be .*, multiples of 2 and at least 10, got '64x97'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(options, **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "device 'cuda' is not available"),
        ("tpu", "device must look like cpu, .* got 'tpu'"),
    ],
)
def test_a_missing_device_is_no_reason_to_train_on_the_cpu(options, device, message):
    with pytest.raises(ValueError, match=message):
        tokenize(dataclasses.replace(options, device=device))
