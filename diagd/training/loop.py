"""Training sequences cut out of token clips: frame, action, frame, action, frame ..."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from accelerate import Accelerator
from matplotlib.figure import Figure
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diagd.console import progress
from diagd.data.actions import ActionVocabulary
from diagd.families.checkpoints import save_model
from diagd.files import (
    append_line,
    read_json_lines,
    recover_folder,
    replacing,
    replacing_folder,
    rewind_log,
    write_json,
)
from diagd.models.transformer import Transformer
from diagd.system import keep_freed_memory
from diagd.tokenizers.shards import TokenClips, part_of, read_shards
from diagd.training.options import LoopOptions
from diagd.training.setup import faster_precision, make_optimizers, same_kind


def sequences(clips: TokenClips, indices: Tensor, times: Tensor) -> Tensor:
    """Interleave frames of clips with the actions between them.

    Args:
        indices: (B,) int64, which clip.
        times: (B, T) int64, which of its frames. A frame that repeats the one before it stands
            under the action "none".

    Returns:
        (B, T * (height * width + 1) - 1) int64; action ids follow the visual ids.
    """
    visual = clips.tokens[indices[:, None], times].flatten(2).long()
    actions = clips.actions[indices[:, None], times].long()
    held = times.diff(dim=1, prepend=times[:, :1] - 1) == 0
    if held.any():
        actions = actions.masked_fill(held, clips.action_names.index("none"))
    actions = actions[..., None] + clips.codebook_size
    return torch.cat([actions, visual], dim=2).flatten(1)[:, 1:]


def generator_of(*key: int) -> torch.Generator:
    """Return a generator whose numbers are a function of the key, all of it.

    A seed given to torch itself counts for its low 32 bits only.
    """
    (seed,) = np.random.SeedSequence(key).generate_state(1)
    return torch.Generator().manual_seed(int(seed))


def draw_batch(clips: TokenClips, frames: int, size: int, seed: int, hold: float = 0.0) -> Tensor:
    """Return `size` sequences that the seed names, whatever was drawn before.

    Args:
        hold: Probability with which a frame repeats the one before it.
    """
    generator = generator_of(seed)
    indices = torch.randint(len(clips.tokens), (size,), generator=generator)
    starts = torch.randint(clips.tokens.shape[1] - frames + 1, (size,), generator=generator)
    moves = torch.rand(size, frames - 1, generator=generator) >= hold
    times = torch.cat([starts[:, None], moves.long()], dim=1).cumsum(1)
    return sequences(clips, indices, times)


def windows(clips: TokenClips, size: int, frames: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Cut a window, whose place the seed names, out of each of the first `size` clips.

    Returns:
        Tokens (size, frames, height, width) and actions (size, frames, 1), int64 ids of a model.

    Raises:
        ValueError: more clips or frames than there are.
    """
    num_clips, length = clips.tokens.shape[:2]
    for name, asked, there in (("clips", size, num_clips), ("frames", frames, length)):
        if not 1 <= asked <= there:
            raise ValueError(f"{name} must be in [1, {there}], got {asked}")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(length - frames + 1, (size, 1), generator=generator)
    indices, times = torch.arange(size)[:, None], starts + torch.arange(frames)
    actions = clips.actions[indices, times].long() + clips.codebook_size
    return clips.tokens[indices, times].long(), actions[..., None]


def plot_loss(folder: Path) -> None:
    """Draw a training run's log.jsonl as loss.png, with the held-out loss where it was measured."""
    lines = read_json_lines(folder / "log.jsonl")
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for key, style, label in (("loss", "-", "training"), ("validation_loss", "o-", "held out")):
        shown = [(line["step"], line[key]) for line in lines if key in line]
        if shown:
            axis.plot(*zip(*shown, strict=True), style, linewidth=1, markersize=4, label=label)
    axis.set(xlabel="step", ylabel="loss, nats a token")
    axis.legend()
    axis.grid(alpha=0.3)
    _save(figure, folder / "loss.png")


def plot_dreams(path: Path, rows: Mapping[str, Path], num_given: int) -> None:
    """Draw strips of frames below each other.

    Args:
        rows: picture files under their labels.
        num_given: frames at the start of each strip that were given to the model.
    """
    pictures = {label: plt.imread(picture) for label, picture in rows.items()}
    height, width = next(iter(pictures.values())).shape[:2]
    figure, axes = plt.subplots(
        len(rows),
        figsize=(9, 0.4 + len(rows) * 8 * height / width),
        layout="constrained",
        squeeze=False,
    )
    for axis, (label, picture) in zip(axes[:, 0], pictures.items(), strict=True):
        axis.imshow(picture, interpolation="nearest")
        axis.set(xticks=[], yticks=[])
        axis.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    plural = "s" if num_given > 1 else ""
    axes[0, 0].set_title(f"{num_given} frame{plural} given, the others dreamt", fontsize=9)
    _save(figure, path)


def plot_frontier(path: Path, rows: Sequence[dict[str, Any]], tolerance: float) -> None:
    """Draw the gap of schedules over their steps, as `diagd tune` reports them."""
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for row_start in dict.fromkeys(row["row_start"] for row in rows):
        own = [row for row in rows if row["row_start"] == row_start]
        axis.errorbar(
            *zip(*[(row["num_steps"], row["gap"]) for row in own], strict=True),
            yerr=[row["gap_error"] or 0.0 for row in own],
            fmt="o",
            markersize=4,
            capsize=2,
            label=row_start or "raster",
        )
    frontier = sorted(
        (row["num_steps"], row["gap"], row["name"]) for row in rows if row["frontier"]
    )
    axis.plot(*zip(*[point[:2] for point in frontier], strict=True), color="gray", linewidth=1)
    for steps, gap, name in frontier:
        axis.annotate(name, (steps, gap), textcoords="offset points", xytext=(4, 5), fontsize=8)
    axis.axhline(tolerance, color="black", linewidth=0.8, linestyle="--")
    axis.set(xlabel="steps", ylabel="nats a token above raster", xscale="log")
    axis.grid(alpha=0.3)
    axis.legend(title="row start")
    _save(figure, path)


def plot_profiles(path: Path, axis_name: str, profiles: Mapping[str, Sequence[float]]) -> None:
    """Draw the gap of schedules over frames, rows or columns."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, values in profiles.items():
        axis.plot(range(len(values)), values, marker=".", linewidth=1, label=name)
    axis.set(xlabel=axis_name, ylabel="nats a token above raster")
    axis.grid(alpha=0.3)
    axis.legend()
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)


NUM_VALIDATION_BATCHES = 8
NUM_STAGES = 10  # of a run; at the end of each it is looked at what the model can do
Loss = Callable[[nn.Module, Tensor, int], Tensor]  # model, sequences (B, N), step -> nats a token
Look = Callable[[], dict[str, Any]]  # what was seen, for the log


def read_clips(options: LoopOptions) -> tuple[TokenClips, TokenClips | None]:
    """Read what to train on and what to validate on.

    Raises:
        FileNotFoundError, ValueError: no or damaged shards, clips too short, or of two kinds.
    """
    clips = read_shards(part_of(options.tokens, "train"))
    beside = options.tokens / "heldout"
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
    if held_out is not None and not same_kind(held_out, clips):
        raise ValueError("validation: clips have another grid, tokenizer or actions than tokens")
    return clips, held_out


class TrainingRun:
    """The loop and its state: the model, its optimisers, steps and seconds so far.

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
        keep_freed_memory()
        self.options, self.clips = options, clips
        self.identity = {
            "config": model.config.to_dict(),
            "codebook": clips.codebook,
            **(purpose or {}),
        }
        self.length, self.batch_size = options.length_of(clips), options.batch_of(clips)
        self.settings = {  # of the whole run
            "seed": options.seed,
            "hold": options.hold,
            "batch_size": self.batch_size,
            "optimizer": options.optimizer,
        }
        precision = faster_precision() if options.precision == "auto" else options.precision
        self.accelerator = Accelerator(mixed_precision=precision, cpu=not torch.cuda.is_available())
        optimizers = make_optimizers(
            model, options.optimizer, options.learning_rate, options.weight_decay
        )
        if self.accelerator.is_fsdp2 and len(optimizers) > 1:  # accelerate would save one of them
            raise ValueError(
                f"a sharded model is trained by --optimizer adamw, got {options.optimizer}"
            )
        self.model, *self.optimizers = self.accelerator.prepare(model, *optimizers)
        self.checkpoint = options.out / "training"  # all that a run needs to go on
        self.log_file = options.out / "log.jsonl"
        options.out.mkdir(parents=True, exist_ok=True)
        self.step, self.seconds = 0, 0.0

    @property
    def share_done(self) -> float:
        """How much of the run is over, 1 at its end."""
        return self.options.share_done(self.step, self.seconds)

    def resume(self) -> None:
        """Go on from the checkpoint, refusing one of another run; cut the log back to it."""
        is_main = self.accelerator.is_main_process
        if is_main:
            recover_folder(self.checkpoint)
        self.accelerator.wait_for_everyone()
        state_file = self.checkpoint / "run.json"
        if state_file.is_file():
            state = json.loads(state_file.read_text(encoding="utf-8"))
            step, seconds = state.pop("step"), state.pop("seconds", 0.0)
            for name, value in self.settings.items():
                before = state.pop(name, value)  # older runs do not say
                if before != value:
                    raise ValueError(
                        f"{self.options.out} holds a run of {name} {before}, now {value}; "
                        "choose another --out"
                    )
            if state != self.identity:
                raise ValueError(
                    f"{self.options.out} holds a run of another model, tokenizer or schedule; "
                    "choose another --out"
                )
            self.accelerator.load_state(str(self.checkpoint))
            self.step, self.seconds = step, seconds
        if is_main:
            rewind_log(self.log_file, self.step)

    def train(self, loss: Loss, look: Look | None = None) -> None:
        """Lower the loss, on to the end of the run, logging and saving on the way.

        Args:
            look: called at the end of each stage of the run, a tenth of it, in all processes.
        """
        options, is_main = self.options, self.accelerator.is_main_process
        with progress("training", 1.0, self.share_done, shown=is_main) as job:
            losses: list[Tensor] = []
            began = time.monotonic() - self.seconds
            saved = logged = self.seconds
            stage = int(NUM_STAGES * self.share_done)
            while self.share_done < 1:
                losses.append(self.take_step(loss))
                self.seconds = self._clock(time.monotonic() - began)
                job.reach(self.share_done)
                if self.step % options.log_every == 0 or self.share_done == 1:
                    mean = self._finite_mean(losses)
                    job.describe(f"training, loss {mean:.3f}")
                    speed = len(losses) / max(self.seconds - logged, 1e-6)  # clocks may be coarse
                    seen: dict[str, Any] = {}
                    if look and int(NUM_STAGES * self.share_done) > stage:
                        seen, stage = look(), int(NUM_STAGES * self.share_done)
                    self._log(mean, speed, seen)
                    if seen and is_main:
                        plot_loss(options.out)
                    losses, logged = [], self._clock(time.monotonic() - began)
                    if logged - saved > options.save_minutes * 60:
                        self.save(loss)  # with the log, so that a resumed run logs the same means
                        saved = logged
        self.save(loss)

    def take_step(self, loss: Loss) -> Tensor:
        """Lower the loss by one optimiser step, and return what it was on the step's batch.

        It is NaN where the gradients are not finite, for the weights are lost then.
        """
        value = self._backward(loss)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.options.learning_rate_at(self.step, self.seconds)
            optimizer.step()
        self.step += 1
        return value

    def _backward(self, loss: Loss) -> Tensor:
        """Return the loss on the next step's batch, NaN unless its gradients, made here, are good.

        It says of the weights as they are whether a step can be taken from them.
        """
        accelerator = self.accelerator
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        with accelerator.autocast():
            value = loss(self.model, self._batch().to(accelerator.device), self.step)
        accelerator.backward(value)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), self.options.clip_norm)
        if isinstance(norm, DTensor):  # of a model that is sharded
            norm = norm.full_tensor()
        finite = torch.as_tensor(0.0 if norm is None else norm).isfinite()
        return torch.where(finite.to(value.device), value.detach(), torch.nan)

    def _batch(self) -> Tensor:
        """Return this process's share of the step's sequences."""
        options, size = self.options, self.batch_size
        seed, first = (options.seed << 40) + self.step, self.accelerator.process_index * size
        everyones = size * self.accelerator.num_processes
        tokens = draw_batch(self.clips, options.frames, everyones, seed, options.hold)
        return tokens[first : first + size]

    @torch.no_grad()
    def validation_loss(self, held_out: TokenClips, loss: Loss) -> float:
        """Mean loss over fixed windows of held-out clips."""
        losses, options, device = [], self.options, self.accelerator.device
        for batch in range(NUM_VALIDATION_BATCHES):
            tokens = draw_batch(held_out, options.frames, self.batch_size, batch).to(device)
            with self.accelerator.autocast():
                losses.append(loss(self.model, tokens, self.step))
        return torch.stack(losses).mean().item()

    def _finite_mean(self, losses: list[Tensor]) -> float:
        """Return the mean loss of the newest steps, or stop before anything good is overwritten.

        Raises:
            ValueError: training diverged.
        """
        value = torch.stack(losses).mean()
        mean = self.accelerator.reduce(value, "mean").item()  # pyright: ignore[reportAttributeAccessIssue]
        if not math.isfinite(mean):
            raise ValueError(
                f"training diverged between steps {self.step - len(losses) + 1} and {self.step}: "
                f"loss {mean}; {self.options.out} keeps what was saved last, to go on from with a "
                "lower --learning-rate"
            )
        return mean

    def _clock(self, seconds: float) -> float:
        """Return the main process's seconds, since all processes save and end together."""
        if self.accelerator.num_processes == 1:
            return seconds
        mine = torch.tensor(seconds * self.accelerator.is_main_process, dtype=torch.float64)
        mine = mine.to(self.accelerator.device)
        return self.accelerator.reduce(mine, "sum").item()  # pyright: ignore[reportAttributeAccessIssue]

    def _log(self, loss: float, steps_per_second: float, seen: dict[str, Any]) -> None:
        sequences = self.batch_size * self.accelerator.num_processes
        line = {
            "step": self.step,
            "loss": loss,
            "learning_rate": self.optimizers[0].param_groups[0]["lr"],
            "tokens_per_second": sequences * self.length * steps_per_second,
            **seen,
        }
        if self.accelerator.is_main_process:
            append_line(self.log_file, json.dumps(line))

    def save(self, loss: Loss) -> None:
        """Write the model folder and, beside it, what a resumed run needs.

        Raises:
            OSError: it cannot be written; what was saved before is still there.
            ValueError: the newest step spoilt the weights, which its own loss could not show yet.
        """
        self._finite_mean([self._backward(loss)])
        is_main = self.accelerator.is_main_process
        others = nullcontext(self.checkpoint.with_name("training.partial"))  # where main makes it
        with replacing_folder(self.checkpoint) if is_main else others as fresh:
            self.accelerator.wait_for_everyone()
            try:
                self.accelerator.save_state(str(fresh))
            except (SafetensorError, RuntimeError) as error:  # how they and torch say it
                raise OSError(f"{self.checkpoint} cannot be written: {error}") from error
            # gathered where it is sharded
            weights: Any = self.accelerator.get_state_dict(self.model)
            self.accelerator.wait_for_everyone()
            if is_main:
                state = {"step": self.step, "seconds": self.seconds, **self.settings}
                write_json(fresh / "run.json", state | self.identity)
        if not is_main:
            return
        save_model(self.accelerator.unwrap_model(self.model), self.options.out, weights)
        ActionVocabulary(self.clips.action_names).save(self.options.out / "actions.json")
        plot_loss(self.options.out)
