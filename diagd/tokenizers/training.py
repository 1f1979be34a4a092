"""Train a frame tokenizer on video clips, and measure it.

Training starts from a linear code of patches (`diagd.tokenizers.linear_init`), so its first
checkpoint is already usable, and it can be killed at any time. Progress is in `log.jsonl`.
"""

import json
import time
from pathlib import Path

import torch
from torch import Tensor

from diagd.console import progress, track
from diagd.data.threads import one_thread_workers
from diagd.data.video import read_video
from diagd.files import append_line, rewind_log
from diagd.tokenizers.frames import check_frames
from diagd.tokenizers.linear_init import choose_patch, linear_tokenizer_model
from diagd.tokenizers.optimisation import TokenizerTrainer, progress_of
from diagd.tokenizers.options import TokenizerOptions
from diagd.tokenizers.vq import VQTokenizer

LOG_NAME = "log.jsonl"
STATE_NAME = "training/state.safetensors"
OF_TRAINING = (LOG_NAME, Path(STATE_NAME).parts[0])  # what those who use a tokenizer do not need
LOG_EVERY = 50


def find_clips(folder: Path) -> list[Path]:
    """List the videos of a folder by name; FileNotFoundError without any."""
    paths = sorted(folder.glob("[!.]*.mp4"))
    if not paths:
        raise FileNotFoundError(f"no .mp4 clips in {folder}")
    return paths


def load_frames(paths: list[Path], options: TokenizerOptions) -> Tensor:
    """Read every n-th frame of clips of one size: (F, H_px, W_px, 3) uint8.

    Raises:
        ValueError: a corrupt clip, or clips of different sizes.
    """
    stride = options.frame_stride

    def read(number: int) -> Tensor:
        frames = read_video(paths[number], size_px=options.size_px).frames
        return frames[number % min(stride, len(frames)) :: stride].clone()

    with one_thread_workers(options.threads) as pool:
        chunks = list(track(pool.map(read, range(len(paths))), "reading clips", len(paths)))
    for path, chunk in zip(paths, chunks, strict=True):
        if chunk.shape[1:] != chunks[0].shape[1:]:
            raise ValueError(
                f"{path}: expected frames of {_size(chunks[0])} as in {paths[0].name}, "
                f"got {_size(chunk)}: give --size to make them one"
            )
    return torch.cat(chunks)


def finished_tokenizer(options: TokenizerOptions, folder: Path) -> VQTokenizer | None:
    """Return the tokenizer of a run in a folder that has reached its end, if there is one.

    Raises:
        ValueError: the folder holds a run with other options, or a corrupt one.
    """
    state = folder / STATE_NAME
    if not state.is_file() or options.share_done(*progress_of(state, options)) < 1:
        return None
    return VQTokenizer.from_pretrained(folder)


def train_tokenizer(
    options: TokenizerOptions, frames: Tensor, folder: Path, width: int = 128
) -> VQTokenizer:
    """Train on frames; continues where a killed run of the same options stopped.

    Args:
        options: the run.
        frames: (F, H_px, W_px, 3) uint8.
        folder: where the tokenizer is written, and what a killed run needs to go on.
        width: channels of a model trained from scratch.

    Raises:
        ValueError: frames that do not fit, or the folder holds a run with other options.
    """
    if options.init is not None:
        tokenizer = VQTokenizer.from_pretrained(options.init)
        check_frames(frames, tokenizer.compression)
    else:
        patch = options.patch or choose_patch(*frames.shape[1:3])
        model = linear_tokenizer_model(frames, options.codes, options.seed, width, patch)
        tokenizer = VQTokenizer(model)
    trainer = TokenizerTrainer(options, tokenizer)
    state = folder / STATE_NAME
    if state.is_file():
        trainer.load(state)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / LOG_NAME
    rewind_log(log, trainer.step)
    first, started = trainer.step, time.monotonic()
    saved = started
    with (
        progress("training tokenizer", 1.0, trainer.share_done) as job,
        one_thread_workers(options.threads) as pool,
    ):
        while trainer.share_done < 1:
            row = trainer.advance(frames, pool)
            if trainer.step % LOG_EVERY == 0 or trainer.share_done >= 1:
                speed = (trainer.step - first) * options.batch / (time.monotonic() - started)
                append_line(log, json.dumps(row | {"frames_per_second": round(speed, 1)}))
            job.reach(trainer.share_done)
            if trainer.share_done < 1 and time.monotonic() - saved > options.checkpoint_s:
                trainer.save(state)
                saved = time.monotonic()
    tokenizer.save_pretrained(folder)
    trainer.save(state)  # last: a state at its end means that the tokenizer is whole
    return VQTokenizer.from_pretrained(folder)  # with the weights as they are stored


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
