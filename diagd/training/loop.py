"""The loop of training: draw a batch, take a step, log, save; a killed run goes on as it was.

Pretraining and diagonal finetuning are this loop with two losses. The batch of a step is a function
of seed and step alone, and every process takes its share of it, so neither a kill nor the number of
processes changes the loss curve. `accelerate launch` spreads it.
"""

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from diagd.console import progress
from diagd.data.actions import ActionVocabulary
from diagd.families.own_format import save_model
from diagd.files import recover_folder, rewind_log, swap_folder, write_json
from diagd.flags import OutputFolder
from diagd.models.transformer import Transformer
from diagd.tokenizers.shards import TokenClips, read_shards
from diagd.training.curves import plot_loss
from diagd.training.sequences import draw_batch
from diagd.training.setup import OptimizerName, make_optimizers, same_kind

NUM_VALIDATION_BATCHES = 8
Loss = Callable[[nn.Module, Tensor, int], Tensor]  # model, sequences (B, N), step -> nats a token


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """What every training run is told."""

    tokens: Path  # folder of token shards, from diagd tokenize
    out: OutputFolder  # checkpoint folder to write; a run that was killed goes on from here
    validation: Path | None = None  # folder of held-out token shards
    frames: int = 8  # frames of a training sequence
    hold: float = 0.0  # share of frames that repeat the one before, under the action "none"
    steps: int  # optimiser steps
    batch_size: int = 4  # sequences a step and process
    learning_rate: float = 3e-4  # peak; decays along a cosine to a tenth
    warmup_steps: int  # steps of linear warm-up
    optimizer: OptimizerName = "adamw"  # muon learns faster per token: for the blocks' matrices
    weight_decay: float = 0.1  # of matrices; betas of AdamW are (0.9, 0.95)
    clip_norm: float = 1.0  # gradients are scaled down to this norm
    precision: str = "bf16"  # bf16 autocast, or no (float32)
    compile: bool = True  # torch.compile the loss
    seed: int = 0  # of weights and batches
    log_every: int = 20  # steps between lines of log.jsonl
    save_minutes: float = 5.0  # minutes between checkpoints

    def __post_init__(self) -> None:
        for name, lowest in (("steps", 1), ("batch_size", 1), ("log_every", 1), ("frames", 2)):
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {getattr(self, name)}")
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(
                f"warmup_steps must be in [0, steps={self.steps}), got {self.warmup_steps}"
            )
        if not 0 <= self.hold < 1:
            raise ValueError(f"hold must be in [0, 1), got {self.hold}")
        if self.precision not in ("bf16", "no"):
            raise ValueError(f"precision must be bf16 or no, got {self.precision!r}")

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine from the peak to a tenth of it."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / (self.steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def read_clips(options: LoopOptions) -> tuple[TokenClips, TokenClips | None]:
    """Read what to train on and what to validate on.

    Raises:
        FileNotFoundError, ValueError: no or damaged shards, clips too short, or of two kinds.
    """
    clips = read_shards(options.tokens)
    held_out = read_shards(options.validation) if options.validation else None
    for name, data in (("tokens", clips), ("validation", held_out)):
        if data is not None and data.tokens.shape[1] < options.frames:
            raise ValueError(
                f"{name}: clips must have at least frames={options.frames} frames, "
                f"got {data.tokens.shape[1]}"
            )
    if options.hold and "none" not in clips.action_names:
        raise ValueError(f"hold needs an action named none, got {', '.join(clips.action_names)}")
    if held_out is not None and not same_kind(held_out, clips):
        raise ValueError("validation: clips have another grid, tokenizer or actions than tokens")
    return clips, held_out


class TrainingRun:
    """The loop and its state.

    Args:
        clips: what to train on.
        model: where to start; trained in place.
        purpose: what makes two runs the same one beside the model's config; JSON types.
    """

    def __init__(
        self,
        options: LoopOptions,
        clips: TokenClips,
        model: Transformer,
        purpose: dict[str, object] | None = None,
    ) -> None:
        self.options, self.clips = options, clips
        self.identity = {"config": model.config.to_dict(), **(purpose or {})}
        self.accelerator = Accelerator(
            mixed_precision=options.precision, cpu=not torch.cuda.is_available()
        )
        optimizers = make_optimizers(
            model, options.optimizer, options.learning_rate, options.weight_decay
        )
        self.model, *self.optimizers = self.accelerator.prepare(model, *optimizers)
        self.checkpoint = options.out / "training"  # all that a run needs to go on
        self.log_file = options.out / "log.jsonl"
        options.out.mkdir(parents=True, exist_ok=True)
        self.step = 0

    def resume(self) -> None:
        """Go on from the checkpoint, refusing one of another run; cut the log back to it."""
        is_main = self.accelerator.is_main_process
        if is_main:
            recover_folder(self.checkpoint)
        self.accelerator.wait_for_everyone()
        state_file = self.checkpoint / "run.json"
        if state_file.is_file():
            state = json.loads(state_file.read_text())
            step = state.pop("step")
            if state != self.identity:
                raise ValueError(
                    f"{self.options.out} holds a run of another model or schedule; "
                    "choose another --out"
                )
            self.accelerator.load_state(str(self.checkpoint))
            self.step = step
        if is_main:
            rewind_log(self.log_file, self.step)

    def train(self, loss: Loss) -> None:
        """Lower the loss, on to the last step, logging and saving on the way."""
        options, is_main = self.options, self.accelerator.is_main_process
        with progress("training", options.steps, self.step, shown=is_main) as job:
            losses: list[Tensor] = []
            saved = logged = time.monotonic()
            while self.step < options.steps:
                losses.append(self.take_step(loss))
                job.advance()
                if self.step % options.log_every == 0 or self.step == options.steps:
                    seconds, logged = time.monotonic() - logged, time.monotonic()
                    mean = self._mean_over_processes(torch.stack(losses).mean())
                    job.describe(f"training, loss {mean:.3f}")
                    self._log(mean, seconds / len(losses))
                    losses = []
                    if self._is_time_to_save(logged - saved):
                        self.save()  # with the log, so that a resumed run logs the same means
                        saved = time.monotonic()
        self.save()

    def take_step(self, loss: Loss) -> Tensor:
        """Lower the loss by one optimiser step, and return what it was on the step's batch."""
        options, accelerator = self.options, self.accelerator
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate_at(self.step)
        with accelerator.autocast():
            value = loss(self.model, self._batch().to(accelerator.device), self.step)
        accelerator.backward(value)
        accelerator.clip_grad_norm_(self.model.parameters(), options.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return value.detach()

    def _batch(self) -> Tensor:
        """Return this process's share of the step's sequences."""
        options, size = self.options, self.options.batch_size
        seed, first = (options.seed << 40) + self.step, self.accelerator.process_index * size
        everyones = size * self.accelerator.num_processes
        tokens = draw_batch(self.clips, options.frames, everyones, seed, options.hold)
        return tokens[first : first + size]

    @torch.no_grad()
    def validation_loss(self, held_out: TokenClips, loss: Loss) -> float:
        """Mean loss over fixed windows of held-out clips."""
        losses, options, device = [], self.options, self.accelerator.device
        for batch in range(NUM_VALIDATION_BATCHES):
            tokens = draw_batch(held_out, options.frames, options.batch_size, batch).to(device)
            with self.accelerator.autocast():
                losses.append(loss(self.model, tokens, self.step))
        return torch.stack(losses).mean().item()

    def _mean_over_processes(self, value: Tensor) -> float:
        return self.accelerator.reduce(value, "mean").item()  # pyright: ignore[reportAttributeAccessIssue]

    def _is_time_to_save(self, seconds: float) -> bool:
        """Ask the main process's clock, since all processes save together."""
        late = torch.tensor(float(seconds > self.options.save_minutes * 60))
        late = late * self.accelerator.is_main_process
        return self._mean_over_processes(late.to(self.accelerator.device)) > 0

    def _log(self, loss: float, seconds_per_step: float) -> None:
        options, sequences = self.options, self.options.batch_size * self.accelerator.num_processes
        length = options.frames * (self.clips.tokens[0, 0].numel() + 1) - 1
        line = {
            "step": self.step,
            "loss": loss,
            "learning_rate": options.learning_rate_at(self.step - 1),
            "tokens_per_second": sequences * length / seconds_per_step,
        }
        if self.accelerator.is_main_process:
            with self.log_file.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def save(self) -> None:
        """Write the model folder and, beside it, what a resumed run needs."""
        partial = self.checkpoint.with_name("training.partial")
        if self.accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(partial))
        weights: Any = self.accelerator.get_state_dict(self.model)  # gathered where it is sharded
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return
        write_json(partial / "run.json", {"step": self.step, **self.identity})
        swap_folder(partial, self.checkpoint)
        save_model(self.accelerator.unwrap_model(self.model), self.options.out, weights)
        ActionVocabulary(self.clips.action_names).save(self.options.out / "actions.json")
        plot_loss(self.options.out)
