"""Train a world model on token shards: next-token prediction over interleaved frames and actions.

A sequence is frame, action, frame, action, frame ...; the loss counts visual tokens only, since
actions are always given. The batch of a step is a function of seed and step alone, so a run that
was killed goes on with the loss curve it would have had. Optimisation defaults are the paper's
(arXiv:2503.14070, appendix, table "Optimization hyperparameters"). Runs on one process or under
`accelerate launch`.

    diagd train --tokens tokens/train --validation tokens/heldout --out models/doom
"""

import dataclasses
import json
import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional

from diagd.data.actions import ActionVocabulary
from diagd.data.token_shards import TokenClips, read_shards
from diagd.models.checkpoints import save_model
from diagd.models.config import PRESETS, ModelConfig
from diagd.models.transformer import Transformer

NUM_VALIDATION_BATCHES = 4


@dataclass(frozen=True)
class TrainOptions:
    """Train MC-AR, a LLaMA decoder over frame and action tokens, from token shards."""

    tokens: Path  # folder of token shards, from diagd tokenize
    out: Path  # checkpoint folder to write; a run that was killed goes on from here
    model: str = "mc-ar-doom"  # preset: mc-ar-doom, mc-ar-42m, mc-ar-300m, mc-ar-700m, mc-ar-1.2b
    validation: Path | None = None  # folder of held-out token shards
    frames: int = 8  # frames of a training sequence, and of the model's context
    steps: int = 100_000  # optimiser steps
    batch_size: int = 4  # sequences a step and process
    learning_rate: float = 3e-4  # peak; decays along a cosine to a tenth
    warmup_steps: int = 10_000  # steps of linear warm-up
    weight_decay: float = 0.1  # of AdamW with betas (0.9, 0.95); matrices only
    clip_norm: float = 1.0  # gradients are scaled down to this norm
    precision: str = "bf16"  # bf16 autocast, or no (float32)
    compile: bool = True  # torch.compile the loss
    seed: int = 0  # of weights and batches
    log_every: int = 20  # steps between lines of log.jsonl
    save_minutes: float = 5.0  # minutes between checkpoints

    def __post_init__(self) -> None:
        choices = [name for name in PRESETS if name.startswith("mc-ar")]
        if self.model not in choices:
            raise ValueError(f"model must be one of {', '.join(choices)}, got {self.model!r}")
        for name in ("steps", "batch_size", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.frames < 2:
            raise ValueError(f"frames must be at least 2, got {self.frames}")
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(
                f"warmup_steps must be in [0, steps={self.steps}), got {self.warmup_steps}"
            )
        if self.precision not in ("bf16", "no"):
            raise ValueError(f"precision must be bf16 or no, got {self.precision!r}")


def main(options: TrainOptions) -> dict[str, float]:
    """Train to the last step, from the newest checkpoint if there is one."""
    clips = read_shards(options.tokens)
    held_out = read_shards(options.validation) if options.validation else None
    for name, data in (("tokens", clips), ("validation", held_out)):
        if data is not None and data.tokens.shape[1] < options.frames:
            raise ValueError(
                f"{name}: clips must have at least frames={options.frames} frames, "
                f"got {data.tokens.shape[1]}"
            )
    config = model_config(options, clips)
    accelerator = Accelerator(mixed_precision=options.precision, cpu=not torch.cuda.is_available())
    model = Transformer.random(config, seed=options.seed)
    optimizer = torch.optim.AdamW(_parameter_groups(model, options), betas=(0.9, 0.95))
    model, optimizer = accelerator.prepare(model, optimizer)
    run = TrainingRun(options, config, accelerator, model, optimizer, clips, held_out)
    run.resume()
    run.train()
    return {"steps": options.steps, "validation_loss": run.validation_loss()}


def model_config(options: TrainOptions, clips: TokenClips) -> ModelConfig:
    """Fit the preset to the data: its grid, its vocabulary, its context."""
    grid_height, grid_width = clips.tokens.shape[2:]
    return dataclasses.replace(
        PRESETS[options.model],
        vocab_size=clips.codebook_size + len(clips.action_names),
        image_vocab_size=clips.codebook_size,
        grid_height=grid_height,
        grid_width=grid_width,
        num_action_tokens=1,
        max_positions=options.frames * (grid_height * grid_width + 1) - 1,
    )


def sequences(clips: TokenClips, indices: Tensor, starts: Tensor, frames: int) -> Tensor:
    """Cut windows out of clips and interleave: frame, action, frame, ..., frame.

    Args:
        indices, starts: (B,) int64, which clip and its first frame.

    Returns:
        (B, frames * (height * width + 1) - 1) int64.
    """
    times = starts[:, None] + torch.arange(frames)
    visual = clips.tokens[indices[:, None], times].flatten(2).long()
    actions = clips.actions[indices[:, None], times].long() + clips.codebook_size
    return torch.cat([actions[..., None], visual], dim=2).flatten(1)[:, 1:]


def draw_batch(clips: TokenClips, options: TrainOptions, seed: int, size: int) -> Tensor:
    """Return the sequences that a seed names, whatever was drawn before."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(len(clips.tokens), (size,), generator=generator)
    last_start = clips.tokens.shape[1] - options.frames
    starts = torch.randint(last_start + 1, (size,), generator=generator)
    return sequences(clips, indices, starts, options.frames)


def next_token_loss(model: torch.nn.Module, tokens: Tensor, image_vocab_size: int) -> Tensor:
    """Mean negative log-likelihood of the visual tokens, in nats."""
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    targets = tokens[:, 1:].flatten()
    targets = torch.where(targets < image_vocab_size, targets, -100)
    return functional.cross_entropy(logits, targets, ignore_index=-100)


class TrainingRun:
    """The loop and its state: what `main` put together, and the step it has reached."""

    def __init__(
        self,
        options: TrainOptions,
        config: ModelConfig,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        clips: TokenClips,
        held_out: TokenClips | None,
    ) -> None:
        self.options, self.config, self.accelerator = options, config, accelerator
        self.model, self.optimizer = model, optimizer
        self.clips, self.held_out = clips, held_out
        self.step = 0
        self.loss = torch.compile(next_token_loss) if options.compile else next_token_loss

    @property
    def checkpoint(self) -> Path:
        """Folder with all that a run needs to go on."""
        return self.options.out / "training"

    def resume(self) -> None:
        """Go on from the checkpoint, refusing one of another model."""
        state_file = self.checkpoint / "run.json"
        if not state_file.is_file():
            return
        state = json.loads(state_file.read_text())
        if state["config"] != self.config.to_dict():
            raise ValueError(
                f"{self.options.out} holds a run of another model; choose another --out"
            )
        self.accelerator.load_state(str(self.checkpoint))
        self.step = state["step"]

    def train(self) -> None:
        """Run all steps that are left, logging and saving on the way."""
        options, accelerator = self.options, self.accelerator
        saved = logged = time.monotonic()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        with Progress(
            *columns, TimeRemainingColumn(), disable=not accelerator.is_main_process
        ) as bar:
            task = bar.add_task("training", total=options.steps, completed=self.step)
            losses: list[Tensor] = []
            while self.step < options.steps:
                losses.append(self._train_step())
                self.step += 1
                bar.update(task, completed=self.step)
                if self.step % options.log_every == 0 or self.step == options.steps:
                    seconds, logged = time.monotonic() - logged, time.monotonic()
                    loss = torch.stack(losses).mean().item()
                    bar.update(task, description=f"loss {loss:.3f}")
                    self._log(loss, len(losses), seconds)
                    losses = []
                if time.monotonic() - saved > options.save_minutes * 60:
                    self.save()
                    saved = time.monotonic()
        self.save()

    def _train_step(self) -> Tensor:
        options, accelerator = self.options, self.accelerator
        rank, world = accelerator.process_index, accelerator.num_processes
        seed = (options.seed << 40) + self.step * world + rank
        tokens = draw_batch(self.clips, options, seed, options.batch_size)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(options, self.step)
        with accelerator.autocast():
            loss = self.loss(self.model, tokens.to(accelerator.device), self.clips.codebook_size)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(self.model.parameters(), options.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss over fixed held-out windows; NaN without held-out shards."""
        if self.held_out is None:
            return math.nan
        losses = []
        for batch in range(NUM_VALIDATION_BATCHES):
            tokens = draw_batch(self.held_out, self.options, batch, self.options.batch_size)
            with self.accelerator.autocast():
                losses.append(
                    self.loss(
                        self.model, tokens.to(self.accelerator.device), self.clips.codebook_size
                    )
                )
        return torch.stack(losses).mean().item()

    def _log(self, loss: float, num_steps: int, seconds: float) -> None:
        options = self.options
        tokens = options.batch_size * self.accelerator.num_processes * self.config.max_positions
        line = {
            "step": self.step,
            "loss": loss,
            "learning_rate": learning_rate(options, self.step - 1),
            "tokens_per_second": tokens * num_steps / seconds,
        }
        if self.accelerator.is_main_process:
            options.out.mkdir(parents=True, exist_ok=True)
            with (options.out / "log.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def save(self) -> None:
        """Write the model folder and, beside it, what a resumed run needs."""
        partial = self.checkpoint.with_name("training.partial")
        shutil.rmtree(partial, ignore_errors=True)
        self.accelerator.save_state(str(partial))
        if not self.accelerator.is_main_process:
            return
        state = {"step": self.step, "config": self.config.to_dict()}
        (partial / "run.json").write_text(json.dumps(state))
        old = self.checkpoint.with_name("training.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.checkpoint.exists():
            os.replace(self.checkpoint, old)
        os.replace(partial, self.checkpoint)
        shutil.rmtree(old, ignore_errors=True)
        save_model(self.accelerator.unwrap_model(self.model), self.options.out)
        ActionVocabulary(self.clips.action_names).save(self.options.out / "actions.json")


def learning_rate(options: TrainOptions, step: int) -> float:
    """Linear warm-up, then a cosine from the peak to a tenth of it."""
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    done = (step - options.warmup_steps) / (options.steps - options.warmup_steps)
    return options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def _parameter_groups(model: torch.nn.Module, options: TrainOptions) -> list[dict]:
    """Decay matrices, not norms."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": options.weight_decay, "lr": options.learning_rate},
        {"params": vectors, "weight_decay": 0.0, "lr": options.learning_rate},
    ]
