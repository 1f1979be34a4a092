"""Train a frame tokenizer on clips, and measure it.

The codebook follows a moving average of the encoder outputs assigned to its codes (van den Oord et
al., arXiv:1711.00937, appendix A.1); unused codes restart at an encoder output. Squared errors
alone
decode the mean of everything that a code stands for: a discriminator (`sharpen`) asks for realistic
pictures (Esser et al., arXiv:2012.09841).
"""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from diagd.backends.devices import device_of, multiplies_bfloat16
from diagd.console import progress, track
from diagd.data.video import one_thread_workers, read_video
from diagd.families.checkpoints import TOKENIZER_FOLDER
from diagd.files import append_line, rewind_log
from diagd.metrics.quality import psnr, sharpness
from diagd.system import refuse_other_run
from diagd.tokenizers.linear_init import choose_patch, linear_tokenizer_model
from diagd.tokenizers.vq import VQTokenizer, normalise
from diagd.training.options import TokenizeOptions
from diagd.weight_files import UNPICKLING_ERRORS, write_torch_file

LOG_NAME = "log.jsonl"
STATE_NAME = "training/state.pt"
OF_TRAINING = (LOG_NAME, Path(STATE_NAME).parts[0])  # not needed to use a tokenizer
LOG_EVERY = 50
COMMITMENT = 0.25  # weight of the encoder's distance to its codes
DECAY = 0.98  # of the codebook's moving average
DEAD_SHARE = 0.1  # a code used less than this share of the mean count is dead
RESEED_EVERY = 10  # steps between checks for dead codes, during the first four fifths of training
WARM_UP = 0.05  # share of training with a rising learning rate
HEARD = 0.2  # share of training over which the weight of the discriminator rises
ALIKE = 2.0  # weight of the discriminator's feature matching, relative to its score
# options that do not affect the tokenizer, so that a run may continue with others
WITHOUT_EFFECT = ("threads", "device", "out", "tokenizer", "actions", "checkpoint_s")


def load_frames(paths: list[Path], options: TokenizeOptions) -> Tensor:
    """Read every n-th frame of clips of one size: (F, H_px, W_px, 3) uint8."""
    stride = options.frame_stride

    def read(number: int) -> Tensor:
        frames = read_video(paths[number], size_px=options.size_px).frames
        return frames[number % min(stride, len(frames)) :: stride].clone()

    with one_thread_workers(options.threads) as pool:
        chunks = list(track(pool.map(read, range(len(paths))), "reading clips", len(paths)))
    return torch.cat(chunks)


def prepare_tokenizer(options: TokenizeOptions, clips: list[Path]) -> VQTokenizer:
    """Load the tokenizer given, or train one in the folder --out unless already trained."""
    if options.tokenizer is not None:
        return VQTokenizer.from_pretrained(options.tokenizer)
    folder = options.out / TOKENIZER_FOLDER
    if (state := folder / STATE_NAME).is_file():
        if options.share_done(*read_state(state, options)["progress"]) >= 1:
            return VQTokenizer.from_pretrained(folder)
    elif any(options.out.glob("*/shard_*.safetensors")):
        raise ValueError(f"{options.out} holds tokens of another tokenizer: give it as --tokenizer")
    return train_tokenizer(options, load_frames(clips, options), folder)


def train_tokenizer(
    options: TokenizeOptions, frames: Tensor, folder: Path, width: int = 128
) -> VQTokenizer:
    """Train on (F, H_px, W_px, 3) uint8, or resume a killed run of the same options."""
    if options.init is not None:
        tokenizer = VQTokenizer.from_pretrained(options.init)
    else:
        patch = options.patch or choose_patch(*frames.shape[1:3])
        model = linear_tokenizer_model(frames, options.codes, options.seed, width, patch)
        tokenizer = VQTokenizer(model)
    trainer = TokenizerTrainer(options, tokenizer)
    state, log = folder / STATE_NAME, folder / LOG_NAME
    if state.is_file():
        trainer.load(state)
    folder.mkdir(parents=True, exist_ok=True)
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
                trainer.check_finite()
                speed = (trainer.step - first) * options.batch_size / (time.monotonic() - started)
                append_line(log, json.dumps(row | {"frames_per_second": round(speed, 1)}))
            job.reach(trainer.share_done)
            if trainer.share_done < 1 and time.monotonic() - saved > options.checkpoint_s:
                trainer.save(state)
                saved = time.monotonic()
    tokenizer.save_pretrained(folder)
    trainer.save(state)  # last: a final state means that the tokenizer is complete
    return VQTokenizer.from_pretrained(folder)  # with the weights as stored


class Discriminator(nn.Module):
    """Tell reconstructed pictures from true ones, patch by patch."""

    def __init__(self) -> None:
        super().__init__()
        shapes = (3, 32, 4, 2), (32, 64, 4, 2), (64, 128, 3, 1), (128, 1, 3, 1)
        self.layers = nn.ModuleList(
            spectral_norm(nn.Conv2d(before, after, size, stride, padding=1))
            for before, after, size, stride in shapes
        )

    def forward(self, pictures: Tensor) -> list[Tensor]:
        """Return the features of each layer for pictures (B, 3, H_px, W_px) in [-1, 1].

        The last is (B, 1, H_px / 4, W_px / 4), above 0 where pictures look true.
        """
        seen = [self.layers[0](pictures)]
        for layer in self.layers[1:]:
            seen.append(layer(functional.leaky_relu(seen[-1], 0.2)))
        return seen

    def losses(self, painted: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
        """Return the generator's loss, and this network's own (hinge)."""
        *ours, fake = self(painted)
        *theirs, real = self(true)
        alike = [
            functional.l1_loss(one, two.detach()) for one, two in zip(ours, theirs, strict=True)
        ]
        caught = self(painted.detach())[-1]
        own = functional.relu(1 - real).mean() + functional.relu(1 + caught).mean()
        return ALIKE * torch.stack(alike).sum() - fake.mean(), own


class TokenizerTrainer:
    """Model, optimizer and codebook statistics: the contents of a checkpoint.

    The batch of a step follows from (seed, step) alone; each worker trains on a share of it.
    """

    def __init__(self, options: TokenizeOptions, tokenizer: VQTokenizer) -> None:
        self.options, self.device = options, device_of(options.device)
        self.rounds = multiplies_bfloat16(self.device)  # elsewhere it is several times slower
        self.tokenizer = tokenizer.to(self.device)
        model = tokenizer.model.to(memory_format=torch.channels_last)
        tokenizer.codebook.requires_grad_(False)
        if options.decoder_only:
            model.encoder.requires_grad_(False)
            model.quant_conv.requires_grad_(False)
        self.discriminator = None
        if options.sharpen:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(options.seed)
                self.discriminator = Discriminator().to(self.device)
        networks = [model, *([] if self.discriminator is None else [self.discriminator])]
        self.weights = [[w for w in one.parameters() if w.requires_grad] for one in networks]
        betas = (0.5, 0.9) if options.sharpen else (0.9, 0.95)  # adversarial: a moving target
        groups, rate = [{"params": weights} for weights in self.weights], options.learning_rate
        self.optimizer = torch.optim.AdamW(groups, rate, betas, weight_decay=1e-4, fused=True)
        self.counts = torch.ones(tokenizer.codebook_size, device=self.device)
        self.sums = tokenizer.codebook.detach().clone()
        self.step, self.seconds = 0, 0.0

    @property
    def share_done(self) -> float:
        return self.options.share_done(self.step, self.seconds)

    def advance(self, frames: Tensor, pool: ThreadPoolExecutor) -> dict[str, float]:
        """Run one optimizer step on a batch of the training frames; return a row for the log."""
        options, started = self.options, time.monotonic()
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + self.step)
        rows = torch.randint(len(frames), (options.batch_size,), generator=generator)
        batch = frames[rows].to(self.device)
        if self.discriminator is not None:
            # a forward in training mode updates spectral norms, on which workers would race
            self.discriminator.train()(normalise(batch[:1]))
            self.discriminator.eval()
        shares = pool.map(self._gradients, batch.chunk(options.threads))
        gradients, losses, errors, latents, ids = zip(*shares, strict=True)
        for weight, *parts in zip(chain(*self.weights), *gradients, strict=True):
            # in the weight's memory layout: the fused AdamW on CPUs ignores strides
            weight.grad = torch.empty_like(weight).copy_(torch.stack(parts).mean(dim=0))
        for each in self.weights:
            torch.nn.utils.clip_grad_norm_(each, 1.0)
        rate = options.learning_rate * _warm_cosine(self.share_done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        error = torch.stack(errors).mean().item()
        used, perplexity = self._follow_latents(torch.cat(latents), torch.cat(ids), generator)
        self.step += 1
        self.seconds += time.monotonic() - started
        return {
            "step": self.step,
            "loss": round(torch.stack(losses).mean().item(), 5),
            "psnr": round(10 * math.log10(4 / max(error, 1e-9)), 3),
            "codes_used": used,
            "perplexity": round(perplexity, 1),
            "learning_rate": rate,
        }

    def _gradients(
        self, frames: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor, Tensor]:
        """Return a share's gradients, loss, squared error, latents (b, C, h, w), ids (b, h, w)."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.rounds):
            latents = self.tokenizer.latents(frames).float()
        ids = self.tokenizer.nearest(latents.detach())
        codes = self.tokenizer.codebook[ids].movedim(-1, 1)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.rounds):
            values = self.tokenizer.pixels(latents + (codes - latents).detach()).float()
        target = normalise(frames)
        loss = _reconstruction_loss(values, target)
        loss = loss + COMMITMENT * functional.mse_loss(latents, codes)
        error = functional.mse_loss(values.detach().clamp(-1, 1), target)
        own: tuple[Tensor, ...] = ()
        if self.discriminator is not None:
            doubt, mistakes = self.discriminator.losses(values, target)
            loss = loss + self.options.sharpen * min(1, self.share_done / HEARD) * doubt
            own = torch.autograd.grad(mistakes, self.weights[1])
        gradients = torch.autograd.grad(loss, self.weights[0]) + own
        return gradients, loss.detach(), error, latents.detach(), ids

    def _follow_latents(
        self, latents: Tensor, ids: Tensor, generator: torch.Generator
    ) -> tuple[int, float]:
        """Update the codebook; return the number of codes in use and their perplexity."""
        ids, vectors = ids.flatten(), latents.movedim(1, -1).flatten(0, -2)
        used = torch.bincount(ids, minlength=len(self.counts)).float()
        self.counts.lerp_(used, 1 - DECAY)
        share = self.counts / self.counts.sum()
        dead = share < DEAD_SHARE / len(share)
        if not self.options.decoder_only:
            sums = torch.zeros_like(self.sums).index_add_(0, ids, vectors)
            self.sums.lerp_(sums, 1 - DECAY)
            if self.step % RESEED_EVERY == 0 and self.share_done < 0.8:
                picks = torch.randint(len(vectors), (len(dead),), generator=generator)
                fresh = vectors[picks.to(vectors.device)]
                mean_count = len(vectors) / len(dead)
                self.sums[dead] = fresh[dead] * mean_count
                self.counts[dead] = mean_count
            self.tokenizer.codebook.copy_(self.sums / self.counts.clamp(min=1e-6)[:, None])
        return len(dead) - int(dead.sum()), torch.special.entr(share).sum().exp().item()

    def check_finite(self) -> None:
        """Raise ValueError if training diverged, before a good checkpoint is overwritten."""
        if not all(weight.isfinite().all() for weight in self.tokenizer.model.parameters()):
            raise ValueError(
                f"training diverged by step {self.step}: use a lower --learning-rate and "
                "another --out"
            )

    def save(self, path: Path) -> None:
        self.check_finite()
        state = {
            "model": self.tokenizer.model.state_dict(),
            "discriminator": self.discriminator and self.discriminator.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counts": self.counts,
            "sums": self.sums,
            "progress": (self.step, self.seconds),
            "rounds": self.rounds,
            "options": _settings(self.options),
        }
        write_torch_file(path, state)

    def load(self, path: Path) -> None:
        state = read_state(path, self.options)
        self.tokenizer.model.load_state_dict(state["model"])
        if self.discriminator is not None:
            self.discriminator.load_state_dict(state["discriminator"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.counts, self.sums = state["counts"].to(self.device), state["sums"].to(self.device)
        self.step, self.seconds = state["progress"]
        self.rounds = state.get("rounds", self.rounds)  # kept wherever the run resumes


def read_state(path: Path, options: TokenizeOptions) -> dict[str, Any]:
    """Read the state of a run; ValueError if it has other options."""
    try:
        state = torch.load(path, "cpu", weights_only=True)
    except UNPICKLING_ERRORS:
        raise ValueError(f"{path}: corrupt, delete it to start again") from None
    refuse_other_run(f"{path} is of a run with", state["options"], _settings(options))
    return state


def _settings(options: TokenizeOptions) -> dict[str, str]:
    """Format the options on which the result depends; files by their absolute path."""
    fields = {n: value for n, value in asdict(options).items() if n not in WITHOUT_EFFECT}
    paths = {n: value.resolve() for n, value in fields.items() if isinstance(value, Path)}
    return {name: str(value) for name, value in (fields | paths).items()}


def _reconstruction_loss(values: Tensor, target: Tensor) -> Tensor:
    """L1 + squared error, and L1 between the gradients at three scales, which keeps edges."""
    loss = functional.l1_loss(values, target) + 10 * functional.mse_loss(values, target)
    for _ in range(3):
        for axis in (-1, -2):
            loss = loss + 0.25 * functional.l1_loss(values.diff(dim=axis), target.diff(dim=axis))
        values, target = functional.avg_pool2d(values, 2), functional.avg_pool2d(target, 2)
    return loss


def _warm_cosine(done: float) -> float:
    if done < WARM_UP:
        return max(done / WARM_UP, WARM_UP)
    return 0.5 * (1 + math.cos(math.pi * min((done - WARM_UP) / (1 - WARM_UP), 1)))


@torch.inference_mode()
def measure_tokenizer(tokenizer: VQTokenizer, frames: Tensor) -> dict[str, float]:
    """Reconstruct (F, H_px, W_px, 3) uint8 frames; measure quality, code use, time per frame."""
    used = torch.zeros(tokenizer.codebook_size)
    seconds = torch.zeros(2)
    qualities: list[Tensor] = []
    sharp: list[Tensor] = []
    for original in frames.split(64):
        times = [time.monotonic()]
        tokens = tokenizer.encode(original)
        times.append(time.monotonic())
        painted = tokenizer.decode(tokens)
        times.append(time.monotonic())
        seconds += torch.tensor(times).diff()
        used += torch.bincount(tokens.flatten(), minlength=len(used))
        qualities.append(psnr(painted, original))
        sharp.append(sharpness(painted) / sharpness(original).clamp(min=1e-3))
    quality = torch.cat(qualities)
    return {
        "psnr": round(quality.mean().item(), 3),
        "psnr_min": round(quality.min().item(), 3),
        "sharpness": round(torch.cat(sharp).median().item(), 3),  # relative to the true frames
        "codes_used": int((used > 0).sum()),
        "perplexity": round(torch.special.entr(used / used.sum()).sum().exp().item(), 1),
        "encode_ms": round(1000 * seconds[0].item() / len(frames), 2),
        "decode_ms": round(1000 * seconds[1].item() / len(frames), 2),
    }
