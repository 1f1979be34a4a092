"""The training loop: batches of token clips, optimizer steps, the log, checkpoints."""

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from diagd.console import progress
from diagd.families.checkpoints import CONFIG_FILE, save_model
from diagd.files import (
    append_line,
    naming,
    read_json_object,
    require_file,
    rewind_log,
    write_json,
)
from diagd.models.transformer import Transformer
from diagd.system import keep_freed_memory, refuse_other_run
from diagd.threads import follow_free_cores
from diagd.tokenizers.shards import TokenClips, part_of, read_shards
from diagd.training.charts import plot_loss
from diagd.training.mixture import MixtureLoss
from diagd.training.options import RunOptions
from diagd.training.sequences import Data, TokenImages, draw_batch
from diagd.training.setup import choose_precision, make_optimizers

NUM_VALIDATION_BATCHES = 8
NUM_STAGES = 10  # of a run; each ends with a look at the model
RUN_FILE = Path("training", "run.json")  # in a run's folder: what it trains, and its last step
AGREE_S = 1.0  # seconds of training between agreements of several processes on the time
Look = Callable[[], dict[str, Any]]  # measurements for the log
Options = TypeVar("Options", bound=RunOptions)


def check_out(options: RunOptions) -> None:
    """Raise ValueError or FileNotFoundError unless --out holds a run or nothing, as asked."""
    if (options.out / CONFIG_FILE).is_file() and not (options.out / RUN_FILE).is_file():
        given = f"{options.out} holds a model without the state of its training"
        raise ValueError(f"{given}: choose another --out")
    if options.more_minutes is not None:
        require_file(options.out / RUN_FILE, "run to train for longer")


def read_clips(options: RunOptions) -> tuple[TokenClips, TokenClips | None]:
    """Read the clips to train on, and those to validate on if there are any."""
    check_out(options)
    clips = read_shards(part_of(options.token_folder, "train"))
    beside = options.token_folder / "heldout"
    validation = options.validation or (beside if beside.is_dir() else None)
    held_out = read_shards(validation) if validation else None
    for name, data in (("tokens", clips), ("validation", held_out)):
        if data is not None and data.tokens.shape[1] < options.frames:
            raise ValueError(
                f"{name}: clips must have at least frames={options.frames} frames, "
                f"got {data.tokens.shape[1]}: lower --frames"
            )
    if options.hold and "none" not in clips.action_names:
        raise ValueError(f"hold needs an action named none, got {', '.join(clips.action_names)}")
    if held_out is not None and held_out.kind != clips.kind:
        raise ValueError("validation: clips have another grid, tokenizer or actions than tokens")
    return clips, held_out


def decide_precision(options: Options) -> Options:
    """Return options with `auto` precision resolved: that of the run in --out, if any."""
    state_file = options.out / RUN_FILE
    before = read_json_object(state_file) if state_file.is_file() else {}
    asked = before.get("precision", "auto") if options.precision == "auto" else options.precision
    return replace(options, precision=choose_precision(asked))


class TrainingRun:
    """The loop and its state: the model, trained in place, its optimizers, steps and seconds.

    Two runs are the same if `purpose` (JSON types) and the model's config are equal. What is frozen
    is not part of the state. `write`, if given, writes a result other than a world's folder.
    """

    def __init__(
        self,
        options: RunOptions,
        clips: Data,
        model: Transformer,
        purpose: dict[str, object],
        write: Callable[[dict[str, Tensor]], None] | None = None,
    ) -> None:
        keep_freed_memory()
        self.options, self.clips = options, clips
        config = json.loads(json.dumps(asdict(model.config)))  # as it will be read again
        self.identity = {"config": config, "codebook": clips.codebook, **purpose}
        self.batch_size = options.batch_of(clips)
        self.settings = {name: getattr(options, name) for name in ("seed", "hold", "optimizer")}
        self.settings["batch_size"] = self.batch_size
        self.settings["precision"] = precision = choose_precision(options.precision)
        accelerator = Accelerator(mixed_precision=precision, cpu=not torch.cuda.is_available())
        self.accelerator, where = accelerator, (accelerator.device, accelerator.process_index)
        self.row_ends = isinstance(clips, TokenImages) and clips.row_ends
        self.loss = MixtureLoss(options, model.config, *where, self.row_ends)
        self.is_compiled = self.loss.is_compiled
        optimizers = make_optimizers(model, options)
        if accelerator.is_fsdp2 and len(optimizers) > 1:  # accelerate would save only one of them
            raise ValueError(
                f"optimizer must be adamw for a sharded model, got {options.optimizer}"
            )
        frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
        if accelerator.is_fsdp2 and frozen:
            raise ValueError("lora and stand_in must be left out for a sharded model")

        def leave_out(models: object, states: list[dict[str, Tensor]], folder: object) -> None:
            states[:] = [
                {name: weight for name, weight in state.items() if name not in frozen}
                for state in states
            ]

        accelerator.register_save_state_pre_hook(leave_out)
        self.is_partial, self.write = bool(frozen), write or self._write_world
        self.model, *self.optimizers = accelerator.prepare(model, *optimizers)
        # a run's state after a step; run.json names it once it is complete
        self.checkpoint = options.out / RUN_FILE.parent
        self.log_file = options.out / "log.jsonl"
        self.step, self.saved, self.seconds = 0, -1, 0.0
        self.extended_to: float | None = None  # total seconds of a run with more_minutes
        self.agreed_at, self.agree_at = 0, 0  # steps: of the last agreement, of the next one

    @property
    def share_done(self) -> float:
        return self.options.share_done(self.step, self.seconds)

    def resume(self) -> None:
        """Continue from the checkpoint, rejecting another run's; truncate the log to it."""
        self.options.out.mkdir(parents=True, exist_ok=True)
        if (state_file := self.options.out / RUN_FILE).is_file():
            state = read_json_object(state_file)
            damage = KeyError, SafetensorError, RuntimeError, EOFError
            held = f"{self.options.out} holds a run"
            with naming(f"{held} damaged or of another version; choose another --out", damage):
                step, seconds = state.pop("step"), state.pop("seconds")
                finished, end = state.pop("finished", True), state.pop("extended_to", None)
                state.setdefault("precision", self.settings["precision"])
                before = {name: state.pop(name) for name in self.settings}
                refuse_other_run(f"{held} of", before, self.settings)
                if state != self.identity:
                    raise ValueError(
                        f"{held} of another model, tokenizer or schedule; choose another --out"
                    )
                folder = self.checkpoint / f"step_{step}"
                self.accelerator.load_state(str(folder), strict=not self.is_partial)
            self.step, self.saved, self.seconds, self.agreed_at = step, step, seconds, step
            if self.options.more_minutes is not None:
                if not finished and end is None:
                    raise ValueError(f"{held} that is not finished: leave --more-minutes out first")
                self._extend(60 * self.options.more_minutes + seconds if finished else end)
        if self.accelerator.is_main_process:
            rewind_log(self.log_file, self.step)

    def _extend(self, end: float) -> None:
        """Let the run end after `end` seconds in all, even if it is killed and resumed."""
        self.extended_to = end
        self.options = replace(
            self.options, more_minutes=None, steps=None, hours=None, minutes=end / 60
        )
        self.accelerator.wait_for_everyone()  # until all have read the file to be replaced
        self._write_state()

    def train(self, look: Look | None = None) -> None:
        """Train to the end; log, save and, after each stage, look (in all processes)."""
        options, is_main = self.options, self.accelerator.is_main_process
        with progress("training", 1.0, self.share_done, shown=is_main) as job:
            losses: list[Tensor] = []
            began = time.monotonic() - self.seconds
            logged, saved = time.monotonic(), self.seconds
            stage = int(NUM_STAGES * self.share_done)
            while self.share_done < 1:
                losses.append(self.take_step())
                self.seconds = self._clock(time.monotonic() - began)
                job.reach(self.share_done)
                if self.step % options.log_every == 0 or self.share_done == 1:
                    mean = self._finite_mean(losses)
                    job.describe(f"training, loss {mean:.3f}")
                    speed = len(losses) / max(time.monotonic() - logged, 1e-6)  # clocks are coarse
                    seen: dict[str, Any] = {}
                    if look and int(NUM_STAGES * self.share_done) > stage:
                        seen, stage = look(), int(NUM_STAGES * self.share_done)
                    if is_main:
                        size = self.accelerator.num_processes * self.batch_size
                        line = {
                            "step": self.step,
                            "loss": mean,
                            "learning_rate": self.optimizers[0].param_groups[0]["lr"],
                            "tokens_per_second": size * options.length_of(self.clips) * speed,
                        }
                        append_line(self.log_file, json.dumps(line | seen))
                        if seen:
                            plot_loss(options.out)
                    losses, logged = [], time.monotonic()
                    if self.seconds - saved > options.save_minutes * 60:
                        self.save()  # with the log, so that a resumed run logs the same means
                        saved = self.seconds
        self.save()

    def take_step(self) -> Tensor:
        """Run one optimizer step; return the loss, NaN unless gradients were finite."""
        if not self.is_compiled:  # compiled for a number of threads
            follow_free_cores()
        value = self._backward()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.options.learning_rate_at(self.step, self.seconds)
            optimizer.step()
        self.step += 1
        return value

    def _backward(self) -> Tensor:
        """Compute gradients of the next batch's loss; return it, NaN unless they are finite."""
        accelerator, options, size = self.accelerator, self.options, self.batch_size
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        seed, total = (options.seed << 40) + self.step, size * accelerator.num_processes
        batches = draw_batch(self.clips, options.frames, total, seed, options.hold)
        batch = batches.split(size)[accelerator.process_index]
        with accelerator.autocast():
            value = self.loss(self.model, batch.to(accelerator.device), self.step)
        accelerator.backward(value)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), options.clip_norm)
        if isinstance(norm, DTensor):  # of a sharded model
            norm = norm.full_tensor()
        finite = torch.as_tensor(0.0 if norm is None else norm).isfinite()
        return torch.where(finite.to(value.device), value.detach(), torch.nan)

    @torch.no_grad()
    def validate(self, held_out: Data, options: RunOptions | None = None) -> dict[str, Any]:
        """Return the mean held-out loss of the mixture, of each strategy and of raster.

        The mixture is that of `options`, if given.
        """
        frames, size, device = self.options.frames, self.batch_size, self.accelerator.device
        seeds = range(NUM_VALIDATION_BATCHES)  # of fixed windows
        batches = [draw_batch(held_out, frames, size, seed).to(device) for seed in seeds]
        found: dict[str, float] = {}
        options, of = options or self.options, self.loss
        if options is not self.options:
            of = MixtureLoss(
                options, self.accelerator.unwrap_model(self.model).config, device, 0, self.row_ends
            )
        for strategy, loss in of.losses.items():
            with self.accelerator.autocast():
                losses = [loss(self.model, tokens) for tokens in batches]
            found[str(strategy)] = torch.stack(losses).mean().item()
        weights = options.mixture
        total = sum(found[str(strategy)] * weight for strategy, weight in weights.items())
        mean = total / sum(weights.values())
        return {"validation_loss": mean, "validation_loss_by_strategy": found}

    def _finite_mean(self, losses: list[Tensor]) -> float:
        """Return the mean loss of the latest steps; ValueError before a good checkpoint is lost."""
        if not math.isfinite(mean := self._reduce(torch.stack(losses).mean(), "mean")):
            raise ValueError(
                f"training diverged between steps {self.step - len(losses) + 1} and {self.step}: "
                f"loss {mean}; {self.options.out} keeps the last checkpoint: continue from it with "
                "a lower --learning-rate"
            )
        return mean

    def _clock(self, seconds: float) -> float:
        """Return the main process's seconds, as all processes save and end together.

        A step that asks for them waits for all processes, so it asks about once a second; in
        between, the time and the learning rate stay the same.
        """
        if self.accelerator.num_processes == 1:
            return seconds
        if self.step < self.agree_at:
            return self.seconds
        mine = seconds if self.accelerator.is_main_process else 0.0
        device = self.accelerator.device
        agreed = self._reduce(torch.tensor(mine, dtype=torch.float64, device=device), "sum")
        pace = (agreed - self.seconds) / max(self.step - self.agreed_at, 1)
        self.agreed_at = self.step
        self.agree_at = self.step + max(1, int(AGREE_S / max(pace, 1e-3)))
        return agreed

    def _reduce(self, value: Tensor, how: str) -> float:
        return self.accelerator.reduce(value, how).item()  # pyright: ignore[reportAttributeAccessIssue]

    def save(self) -> None:
        """Write the model folder and, beside it, the state that a resumed run needs.

        ValueError, with nothing written, if the latest step broke the weights, which its own loss
        cannot show yet.
        """
        self._finite_mean([self._backward()])
        if self.step != self.saved:
            self._save_state()
        weights: Any = self.accelerator.get_state_dict(self.model)  # gathered if it is sharded
        if self.accelerator.is_main_process:
            self.write(weights)
            plot_loss(self.options.out)

    def _write_world(self, weights: dict[str, Tensor]) -> None:
        save_model(self.accelerator.unwrap_model(self.model), self.options.out, weights)
        if isinstance(self.clips, TokenClips):
            self.clips.codec.save(self.options.out / "actions.json")

    def _save_state(self) -> None:
        fresh, is_main = self.checkpoint / f"step_{self.step}", self.accelerator.is_main_process
        if is_main:
            shutil.rmtree(fresh, ignore_errors=True)  # left by a killed run
            fresh.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        try:
            self.accelerator.save_state(str(fresh))
        except (SafetensorError, RuntimeError, OSError) as error:  # how they and torch report it
            shutil.rmtree(fresh, ignore_errors=True)
            raise OSError(f"{self.checkpoint} cannot be written: {error}") from error
        self.accelerator.wait_for_everyone()
        self._write_state()
        if is_main:
            for old in set(self.checkpoint.glob("step_*")) - {fresh}:
                shutil.rmtree(old, ignore_errors=True)
        self.saved = self.step

    def _write_state(self) -> None:
        if self.accelerator.is_main_process:
            state = {"step": self.step, "seconds": self.seconds, **self.settings}
            state |= {"finished": self.share_done >= 1, "extended_to": self.extended_to}
            write_json(self.options.out / RUN_FILE, state | self.identity)
