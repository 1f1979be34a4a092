"""Train a frame tokenizer on video clips, and turn clips into token shards.

The model is a small `VQModel`; its codebook follows a moving average of the encoder outputs it
stands for (van den Oord et al., arXiv:1711.00937, appendix A.1) and codes nobody uses start again
at an encoder output.

    diagd tokenize --clips gameplay --out tokenizer --shards tokens
    diagd tokenize --clips heldout --tokenizer tokenizer --shards tokens_heldout
"""

import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import VQModel
from rich.progress import Progress, track
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from diagd.data.token_shards import write_shards
from diagd.data.tokenizer_init import linear_tokenizer_model
from diagd.data.tokenizers import VQTokenizer, normalise
from diagd.data.video import read_video

ModelBuilder = Callable[[Tensor, int, int], VQModel]
STATE_NAME = "training_state.safetensors"
LOG_NAME = "log.jsonl"


@dataclass(frozen=True)
class TokenizeOptions:
    """Train a tokenizer on clips (or take a trained one) and store the clips as tokens."""

    clips: Path  # folder of clips: NAME.mp4, with NAME.jsonl where there are actions
    out: Path | None = None  # folder for the trained tokenizer; leave out to only apply --tokenizer
    tokenizer: Path | None = None  # trained tokenizer to apply as it is
    init: Path | None = None  # tokenizer to start training from, instead of from scratch
    shards: Path | None = None  # folder for token shards of the clips
    heldout: Path | None = None  # folder of clips to measure the trained tokenizer on
    steps: int = 2000  # optimizer steps
    batch: int = 16  # frames a step
    learning_rate: float = 1e-3  # peak; linear warm-up, then a cosine to zero
    frame_stride: int = 4  # train on every n-th frame of a clip (all frames lie in memory)
    codes: int = 1024  # codebook size, from scratch
    seed: int = 0  # of the weights and of the order of frames
    threads: int = 2  # workers, each with its share of the batch
    device: str = "cpu"  # cpu or cuda
    decoder_only: bool = False  # with --init: leave encoder and codes, so that tokens stay the same
    checkpoint_s: float = 60.0  # seconds between checkpoints; a killed run resumes from the last

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "frame_stride", "codes", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.batch % self.threads:
            raise ValueError(
                f"batch must be a multiple of threads={self.threads}, got {self.batch}"
            )
        if self.tokenizer is not None and (self.out is not None or self.init is not None):
            raise ValueError(
                "--tokenizer applies a tokenizer as it is; train with --init and --out"
            )
        if self.tokenizer is None and self.out is None:
            raise ValueError("nothing to do: give --out to train, or --tokenizer and --shards")
        if self.tokenizer is not None and self.shards is None:
            raise ValueError("--tokenizer needs --shards, the folder for the tokens")


def main(options: TokenizeOptions) -> dict[str, Any]:
    """Train if asked, measure if asked, store tokens if asked; returns what was measured."""
    report: dict[str, Any] = {}
    if options.tokenizer is not None:
        tokenizer = VQTokenizer.from_pretrained(options.tokenizer)
    else:
        clips = find_clips(options.clips)
        tokenizer = train_tokenizer(options, load_frames(clips, options.frame_stride))
    tokenizer.to(options.device)
    if options.heldout is not None:
        frames = load_frames(find_clips(options.heldout), options.frame_stride)
        report |= measure_tokenizer(tokenizer, frames)
    if options.shards is not None:
        report["shards_written"] = write_shards(
            tokenizer, find_clips(options.clips), options.shards
        )
    return report


def find_clips(folder: Path) -> list[Path]:
    """List the videos of a folder by name; FileNotFoundError without any."""
    paths = sorted(folder.glob("[!.]*.mp4"))
    if not paths:
        raise FileNotFoundError(f"no .mp4 clips in {folder}")
    return paths


def load_frames(paths: list[Path], stride: int = 1, threads: int = 2) -> Tensor:
    """Read every `stride`-th frame of clips of one size: (F, H_px, W_px, 3) uint8."""
    with ThreadPoolExecutor(threads) as pool:
        clips = pool.map(
            lambda path, k: read_video(path).frames[k % stride :: stride].clone(),
            paths,
            range(len(paths)),
        )
        chunks = list(track(clips, total=len(paths), description="reading clips"))
    for path, chunk in zip(paths, chunks, strict=True):
        if chunk.shape[1:] != chunks[0].shape[1:]:
            raise ValueError(
                f"{path}: expected frames of {_size(chunks[0])} as before it, got {_size(chunk)}"
            )
    return torch.cat(chunks)


def train_tokenizer(
    options: TokenizeOptions, frames: Tensor, build: ModelBuilder = linear_tokenizer_model
) -> VQTokenizer:
    """Train on frames; continues where a killed run of the same options stopped.

    Args:
        options: the run; `out` is set.
        frames: (F, H_px, W_px, 3) uint8.
        build: makes the model to start from out of frames, codebook size and seed.

    Raises:
        ValueError: frames that do not fit, or `out` holds a run with other options.
    """
    assert options.out is not None
    if options.init is not None:
        tokenizer = VQTokenizer.from_pretrained(options.init)
    else:
        tokenizer = VQTokenizer(build(frames, options.codes, options.seed))
    tokenizer.check_frames(frames[:1])
    options.out.mkdir(parents=True, exist_ok=True)
    trainer = _Trainer(options, tokenizer)
    trainer.resume()
    saved = started = time.monotonic()
    first = trainer.step
    with (
        Progress() as progress,
        (options.out / LOG_NAME).open("a", buffering=1) as log,
        ThreadPoolExecutor(
            options.threads, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool,
    ):
        task = progress.add_task("training tokenizer", total=options.steps, completed=first)
        while trainer.step < options.steps:
            row = trainer.advance(frames, pool)
            if trainer.step % 10 == 0 or trainer.step == options.steps:
                speed = (trainer.step - first) * options.batch / (time.monotonic() - started)
                log.write(json.dumps(row | {"frames_per_s": round(speed, 1)}) + "\n")
            progress.update(task, completed=trainer.step)
            if time.monotonic() - saved > options.checkpoint_s:
                trainer.save()
                saved = time.monotonic()
    tokenizer.save_pretrained(options.out)
    (options.out / STATE_NAME).unlink(missing_ok=True)
    return tokenizer


class _Trainer:
    """Model, optimizer and codebook statistics: everything a checkpoint holds.

    The batch of a step is a function of (seed, step), so nothing else needs to be stored.
    Each worker thread runs forward and backward on its share of the batch with one-thread
    operations: several times faster than many-thread operations when cores are shared.
    """

    commitment = 0.25
    decay = 0.98  # of the codebook's moving average
    dead_share = 0.1  # a code used less than this share of the mean is reseeded

    def __init__(self, options: TokenizeOptions, tokenizer: VQTokenizer) -> None:
        self.options = options
        self.tokenizer = tokenizer.to(options.device)
        tokenizer.model.to(memory_format=torch.channels_last).train()
        model = tokenizer.model
        tokenizer.codebook.requires_grad_(False)
        if options.decoder_only:
            model.encoder.requires_grad_(False)
            model.quant_conv.requires_grad_(False)
        self.weights = [p for p in tokenizer.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.weights, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=1e-4, fused=True
        )
        self.counts = torch.full((tokenizer.codebook_size,), 1.0, device=options.device)
        self.sums = tokenizer.codebook.detach().clone()
        self.step = 0

    def advance(self, frames: Tensor, pool: ThreadPoolExecutor) -> dict[str, float]:
        """Take one optimizer step; returns a row for the log."""
        options = self.options
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + self.step)
        rows = torch.randint(len(frames), (options.batch,), generator=generator)
        batch = frames[rows].to(options.device)
        shares = list(pool.map(self._gradients, batch.chunk(options.threads)))
        for weight, *parts in zip(self.weights, *(s.gradients for s in shares), strict=True):
            weight.grad = torch.stack(parts).mean(dim=0)
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        rate = options.learning_rate * _schedule(self.step, options.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        loss = sum(share.loss.item() for share in shares) / len(shares)
        error = sum(share.error.item() for share in shares) / len(shares)
        row = {"step": self.step + 1, "loss": loss, "psnr": 10 * math.log10(4 / error)}
        row |= self._update_codebook(shares, generator)
        self.step += 1
        return {name: round(value, 4) for name, value in row.items()} | {"lr": rate}

    def _gradients(self, frames: Tensor) -> "_Share":
        latents = self._latents(frames)
        ids = self.tokenizer.nearest(latents.detach())
        codes = self.tokenizer.codebook[ids].movedim(-1, 1)
        with torch.autocast(self.options.device, torch.bfloat16):
            values = self.tokenizer.pixels(latents + (codes - latents).detach()).float()
        target = normalise(frames)
        loss = _reconstruction_loss(values, target)
        loss = loss + self.commitment * functional.mse_loss(latents, codes.detach())
        error = functional.mse_loss(values.detach().clamp(-1, 1), target)
        gradients = torch.autograd.grad(loss, self.weights)
        return _Share(gradients, loss.detach(), error, latents.detach(), ids)

    def _latents(self, frames: Tensor) -> Tensor:
        with torch.autocast(self.options.device, torch.bfloat16):
            return self.tokenizer.latents(frames).float()

    def _update_codebook(
        self, shares: list["_Share"], generator: torch.Generator
    ) -> dict[str, float]:
        latents = torch.cat([share.latents for share in shares])
        ids = torch.cat([share.ids for share in shares]).flatten()
        vectors = latents.movedim(1, -1).flatten(0, -2)
        used = torch.bincount(ids, minlength=len(self.counts)).float()
        self.counts.lerp_(used, 1 - self.decay)
        self.sums.lerp_(torch.zeros_like(self.sums).index_add_(0, ids, vectors), 1 - self.decay)
        share = self.counts / self.counts.sum()
        dead = share < self.dead_share / len(share)
        if (
            not self.options.decoder_only
            and self.step % 10 == 0
            and self.step < 0.8 * self.options.steps
        ):
            self._reseed(dead, latents, generator)
        if not self.options.decoder_only:
            self.tokenizer.codebook.copy_(self.sums / self.counts.clamp(min=1e-6)[:, None])
        perplexity = torch.special.entr(share).sum().exp().item()
        return {"codes_used": len(share) - int(dead.sum()), "perplexity": perplexity}

    def _reseed(self, chosen: Tensor, latents: Tensor, generator: torch.Generator) -> None:
        vectors = latents.movedim(1, -1).flatten(0, -2)
        picks = torch.randint(len(vectors), (len(chosen),), generator=generator)[chosen.cpu()]
        count = len(vectors) / len(chosen)
        self.counts[chosen] = count
        self.sums[chosen] = vectors[picks.to(vectors.device)] * count
        self.tokenizer.codebook[chosen] = self.sums[chosen] / count

    def save(self) -> None:
        """Write the state; the file is replaced only by a whole one."""
        assert self.options.out is not None
        tensors = {
            f"model.{k}": v.contiguous() for k, v in self.tokenizer.model.state_dict().items()
        }
        for index, weight in enumerate(self.weights):
            for name, value in self.optimizer.state[weight].items():
                tensors[f"optimizer.{index}.{name}"] = value.contiguous()
        tensors |= {"counts": self.counts, "sums": self.sums}
        path = self.options.out / STATE_NAME
        partial = path.with_name(f".{path.name}.partial")
        save_file(tensors, partial, {"step": str(self.step), "options": _fingerprint(self.options)})
        os.replace(partial, path)

    def resume(self) -> None:
        """Load the state a killed run left, if any, and cut the log back to it."""
        assert self.options.out is not None
        path, log = self.options.out / STATE_NAME, self.options.out / LOG_NAME
        if not path.is_file():
            log.unlink(missing_ok=True)
            return
        try:
            with safe_open(path, "pt", device=self.options.device) as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is corrupt, delete it to start again: {error}") from None
        if metadata.get("options") != _fingerprint(self.options):
            raise ValueError(
                f"{path} is of a run with other options: expected {_fingerprint(self.options)}, "
                f"got {metadata.get('options')}; use another --out"
            )
        self.step = int(metadata["step"])
        model = {k[6:]: v for k, v in tensors.items() if k.startswith("model.")}
        self.tokenizer.model.load_state_dict(model)
        for index, weight in enumerate(self.weights):
            prefix = f"optimizer.{index}."
            state = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
            self.optimizer.state[weight] = {  # moments in the layout of their weight
                name: torch.empty_like(weight).copy_(value) if value.dim() else value.cpu()
                for name, value in state.items()
            }
        self.counts, self.sums = tensors["counts"], tensors["sums"]
        if log.is_file():
            rows = [line for line in log.read_text().splitlines() if line.endswith("}")]
            kept = [row for row in rows if json.loads(row)["step"] <= self.step]
            log.write_text("".join(f"{row}\n" for row in kept))


@dataclass(frozen=True)
class _Share:
    """What a worker computed on its share of a batch."""

    gradients: tuple[Tensor, ...]
    loss: Tensor
    error: Tensor  # mean squared, of values in [-1, 1]
    latents: Tensor  # (b, C, h, w)
    ids: Tensor  # (b, h, w)


@torch.inference_mode()
def measure_tokenizer(tokenizer: VQTokenizer, frames: Tensor) -> dict[str, float]:
    """Return mean PSNR over frames, codes used, and perplexity of code use."""
    tokens = tokenizer.encode(frames)
    used = torch.bincount(tokens.flatten(), minlength=tokenizer.codebook_size).float()
    errors = []
    for chunk, original in zip(tokens.split(64), frames.split(64), strict=True):
        difference = tokenizer.decode(chunk).float() - original.float()
        errors.append(difference.square().mean(dim=(1, 2, 3)))
    psnr = 10 * torch.log10(255**2 / torch.cat(errors).clamp(min=1e-6))
    return {
        "psnr": round(psnr.mean().item(), 3),
        "psnr_min": round(psnr.min().item(), 3),
        "codes_used": int((used > 0).sum()),
        "perplexity": round(torch.special.entr(used / used.sum()).sum().exp().item(), 1),
    }


def _reconstruction_loss(values: Tensor, target: Tensor) -> Tensor:
    """L1 + squared error, and L1 between the gradients at three scales, which keeps edges."""
    loss = functional.l1_loss(values, target) + 10 * functional.mse_loss(values, target)
    for _ in range(3):
        for axis in (-1, -2):
            loss = loss + 0.25 * functional.l1_loss(values.diff(dim=axis), target.diff(dim=axis))
        values, target = functional.avg_pool2d(values, 2), functional.avg_pool2d(target, 2)
    return loss


def _schedule(step: int, steps: int) -> float:
    """Warm up over a fiftieth of training, then follow a cosine to zero."""
    warm_up = max(1, steps // 50)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def _fingerprint(options: TokenizeOptions) -> str:
    """Name the options a resumed run must share."""
    shared = ("clips", "init", "steps", "batch", "learning_rate", "frame_stride", "codes", "seed")
    return json.dumps({k: str(v) for k, v in asdict(options).items() if k in shared})


def _size(frames: Tensor) -> str:
    return f"{frames.shape[1]}x{frames.shape[2]} px"
