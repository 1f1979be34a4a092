"""Train a frame tokenizer on video clips, measure it, and turn clips into token shards.

Training starts from a linear code of 8x8 patches (`diagd.tokenizers.linear_init`), so its first
checkpoint is already usable, and it can be killed at any time. Progress is in `OUT/log.jsonl`.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diagd.console import progress, track
from diagd.data.actions import ActionVocabulary
from diagd.data.threads import one_thread_workers
from diagd.data.video import read_video
from diagd.files import rewind_log
from diagd.flags import OutputFolder
from diagd.tokenizers.frames import check_frames
from diagd.tokenizers.linear_init import linear_tokenizer_model
from diagd.tokenizers.optimisation import OptimisationOptions, TokenizerTrainer
from diagd.tokenizers.shards import actions_of, write_shards
from diagd.tokenizers.vq import VQTokenizer

LOG_NAME = "log.jsonl"
STATE_NAME = "training/state.safetensors"
LOG_EVERY = 50


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(OptimisationOptions):
    """Train a tokenizer on clips (or take a trained one) and store the clips as tokens."""

    clips: Path  # folder of clips: NAME.mp4, with NAME.jsonl where there are actions
    # folder for the trained tokenizer; a killed run goes on from here
    out: OutputFolder | None = None
    tokenizer: Path | None = None  # trained tokenizer to apply as it is, instead of training
    init: Path | None = None  # tokenizer to start training from, instead of from scratch
    shards: OutputFolder | None = None  # folder for token shards of the clips
    actions: Path | None = None  # actions.json with the order of actions; else as in the clips
    heldout: Path | None = None  # folder of clips to measure the tokenizer on
    codes: int = 1024  # codebook size, from scratch
    frame_stride: int = 4  # train and measure on every n-th frame; all of them lie in memory
    checkpoint_s: float = 60.0  # seconds between checkpoints

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("codes", "frame_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.tokenizer is None and self.out is None:
            raise ValueError("nothing to do: give --out to train, or --tokenizer to apply one")
        if self.tokenizer is not None and (self.out is not None or self.init is not None):
            raise ValueError(
                "--tokenizer is applied as it is, without --out; to train it further use --init"
            )
        if self.tokenizer is not None and self.shards is None and self.heldout is None:
            raise ValueError("--tokenizer needs --shards to write or --heldout to measure")


def tokenize(options: TokenizeOptions) -> dict[str, Any]:
    """Train, measure and store tokens, each if asked; return what was measured.

    Raises:
        FileNotFoundError, ValueError: clips, actions or a tokenizer that are missing or do not fit.
    """
    paths = find_clips(options.clips)
    held_out = find_clips(options.heldout) if options.heldout else []
    vocabulary = ActionVocabulary.load(options.actions) if options.actions else None
    if options.shards is not None:
        vocabulary = actions_of(paths, vocabulary)
    if options.tokenizer is not None:
        tokenizer = VQTokenizer.from_pretrained(options.tokenizer)
    else:
        tokenizer = train_tokenizer(options, load_frames(paths, options))
    tokenizer.to(options.device)
    report: dict[str, Any] = {}
    if held_out:
        report |= measure_tokenizer(tokenizer, load_frames(held_out, options))
    if options.shards is not None:
        assert vocabulary is not None
        report["shards_written"] = write_shards(
            tokenizer, paths, options.shards, vocabulary, threads=options.threads
        )
    return report


def find_clips(folder: Path) -> list[Path]:
    """List the videos of a folder by name; FileNotFoundError without any."""
    paths = sorted(folder.glob("[!.]*.mp4"))
    if not paths:
        raise FileNotFoundError(f"no .mp4 clips in {folder}")
    return paths


def load_frames(paths: list[Path], options: TokenizeOptions) -> Tensor:
    """Read every n-th frame of clips of one size: (F, H_px, W_px, 3) uint8.

    Raises:
        ValueError: a corrupt clip, or clips of different sizes.
    """
    stride = options.frame_stride

    def read(number: int) -> Tensor:
        frames = read_video(paths[number]).frames
        return frames[number % min(stride, len(frames)) :: stride].clone()

    with one_thread_workers(options.threads) as pool:
        chunks = list(track(pool.map(read, range(len(paths))), "reading clips", len(paths)))
    for path, chunk in zip(paths, chunks, strict=True):
        if chunk.shape[1:] != chunks[0].shape[1:]:
            raise ValueError(
                f"{path}: expected frames of {_size(chunks[0])} as in {paths[0].name}, "
                f"got {_size(chunk)}"
            )
    return torch.cat(chunks)


def train_tokenizer(options: TokenizeOptions, frames: Tensor, width: int = 128) -> VQTokenizer:
    """Train on frames; continues where a killed run of the same options stopped.

    Args:
        options: the run; `out` is set.
        frames: (F, H_px, W_px, 3) uint8.
        width: channels of a model trained from scratch.

    Raises:
        ValueError: frames that do not fit, or `out` holds a run with other options.
    """
    assert options.out is not None
    if options.init is not None:
        tokenizer = VQTokenizer.from_pretrained(options.init)
        check_frames(frames, tokenizer.compression)
    else:
        model = linear_tokenizer_model(frames, options.codes, options.seed, width)
        tokenizer = VQTokenizer(model)
    trainer = TokenizerTrainer(options, tokenizer)
    state = options.out / STATE_NAME
    if state.is_file():
        trainer.load(state)
    options.out.mkdir(parents=True, exist_ok=True)
    log_path = options.out / LOG_NAME
    rewind_log(log_path, trainer.step)
    first, started = trainer.step, time.monotonic()
    saved = started
    with (
        progress("training tokenizer", options.steps, first) as job,
        log_path.open("a", buffering=1) as log,
        one_thread_workers(options.threads) as pool,
    ):
        while trainer.step < options.steps:
            row = trainer.advance(frames, pool)
            if trainer.step % LOG_EVERY == 0 or trainer.step == options.steps:
                speed = (trainer.step - first) * options.batch / (time.monotonic() - started)
                log.write(json.dumps(row | {"frames_per_second": round(speed, 1)}) + "\n")
            job.advance()
            if time.monotonic() - saved > options.checkpoint_s:
                trainer.save(state)
                saved = time.monotonic()
    trainer.save(state)
    tokenizer.save_pretrained(options.out)
    return VQTokenizer.from_pretrained(options.out)  # with the weights as they are stored


@torch.inference_mode()
def measure_tokenizer(tokenizer: VQTokenizer, frames: Tensor) -> dict[str, float]:
    """Reconstruct frames.

    Args:
        frames: (F, H_px, W_px, 3) uint8.

    Returns:
        Mean and lowest PSNR of the frames in dB, codes used and the perplexity of their use,
        milliseconds a frame for encoding and decoding.
    """
    used = torch.zeros(tokenizer.codebook_size)
    seconds = torch.zeros(2)
    errors: list[Tensor] = []
    for original in frames.split(64):
        times = [time.monotonic()]
        tokens = tokenizer.encode(original)
        times.append(time.monotonic())
        painted = tokenizer.decode(tokens)
        times.append(time.monotonic())
        seconds += torch.tensor(times).diff()
        used += torch.bincount(tokens.flatten(), minlength=len(used))
        errors.append((painted.float() - original.float()).square().mean(dim=(1, 2, 3)))
    psnr = 10 * torch.log10(255**2 / torch.cat(errors).clamp(min=1e-4))
    return {
        "psnr": round(psnr.mean().item(), 3),
        "psnr_min": round(psnr.min().item(), 3),
        "codes_used": int((used > 0).sum()),
        "perplexity": round(torch.special.entr(used / used.sum()).sum().exp().item(), 1),
        "encode_ms": round(1000 * seconds[0].item() / len(frames), 2),
        "decode_ms": round(1000 * seconds[1].item() / len(frames), 2),
    }


def _size(frames: Tensor) -> str:
    return f"{frames.shape[1]}x{frames.shape[2]} px"
