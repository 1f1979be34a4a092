"""Clips by name: which ones of a folder to evaluate on, and each fitted to a model.

What lies in the folder is the business of `diagd.families.clip_files`.
"""

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from diagd.backends.devices import dtype_of
from diagd.console import print_table, track
from diagd.data.actions import ActionCodec, idle_action, split_actions
from diagd.decoding.model import CAPTURING
from diagd.decoding.strategies.strategy import Strategy, parse_strategy
from diagd.decoding.teacher_forcing import gap_to_raster, spell_error, strategy_nll
from diagd.evaluation.options import Settings
from diagd.evaluation.results import (
    RASTER,
    Record,
    ResultsWriter,
    check_same,
    key_of,
    pack,
    read_results,
)
from diagd.evaluation.revisit import CHANCE, walk
from diagd.families.clip_files import Clip, find_clips, sample_clips
from diagd.metrics.perceptual import Lpips, VideoFeatures
from diagd.metrics.quality import (
    distinct_tokens,
    frame_features,
    psnr,
    repeated_tokens,
    sharpness,
    ssim,
)
from diagd.pipeline.generator import GeneratedVideo, VideoGenerator
from diagd.pipeline.prompts import seed_of
from diagd.system import clip_fingerprint
from diagd.tokenizers.vq import VQTokenizer


def choose_clips(folder: Path, num_clips: int, seed: int) -> list[str]:
    """Draw clips of a folder at random; more clips of one seed contain the fewer ones.

    Raises:
        FileNotFoundError: no such folder, or no clips in it.
        ValueError: fewer clips in it.
    """
    return [clip.name for clip in sample_clips(find_clips(folder), num_clips, seed)]


def fingerprint_clips(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Return hex digits that stand for what is in each of these clips of a folder."""
    return {
        clip.name: clip_fingerprint(clip.path) for clip in find_clips(folder) if clip.name in names
    }


def check_clips(
    folder: Path,
    names: Collection[str],
    codec: ActionCodec | None,
    start: int,
    num_frames: int,
    fps: float | None,
) -> None:
    """See that `read_clip` can read these clips, from their heads and their action files.

    Raises:
        FileNotFoundError, ValueError: a clip that cannot be read so (named).
    """
    for clip in find_clips(folder, codec=codec):
        if clip.name in names:
            clip.check(num_frames, start, fps)
            clip.actions()


def read_clip(
    folder: Path,
    name: str,
    codec: ActionCodec | None,
    start: int,
    num_frames: int,
    fps: float | None,
    size_px: tuple[int, int] | None = None,
    least: int | None = None,
) -> Clip:
    """Read `num_frames` frames from frame `start` on, with the actions that led to them.

    Args:
        codec: of the model's actions; None leaves actions unread.
        fps: frame rate to read at (see `ClipFile.read`).
        size_px: (height_px, width_px) to crop and scale to; None leaves frames as they are.
        least: frames that are enough where the clip has no more; None: `num_frames`.

    Raises:
        FileNotFoundError, ValueError: a clip that cannot be read so (named).
    """
    files = {clip.name: clip for clip in find_clips(folder, codec=codec)}
    if least is not None:
        num_frames = min(num_frames, files[name].check(least, start, fps))
    return files[name].read(num_frames, start, fps, size_px)


def clip_after(folder: Path, name: str) -> str:
    """Return the clip of a folder that comes after this one by name, the first after the last.

    Raises:
        FileNotFoundError: no such folder, or no clips in it.
        ValueError: there is no other clip.
    """
    names = [clip.name for clip in find_clips(folder)]
    if len(names) < 2:
        raise ValueError(f"{folder} holds one clip only: another one is needed to compare with")
    return names[(names.index(name) + 1) % len(names)]


class Task(NamedTuple):
    """One line to measure: a model by its label, a strategy or baseline, a clip."""

    model: str
    method: str
    clip: str


class Outcome(NamedTuple):
    """A clip line, and the frames (T, H_px, W_px, 3) uint8 it is about."""

    record: Record
    frames: Tensor


class ClipMeter:
    """Measures tasks one after the other; keeps the last model and the last clip."""

    def __init__(self, settings: Settings, with_frames: bool = True) -> None:
        """Load the metrics' networks.

        Args:
            with_frames: whether outcomes have their frames; none where nobody wants them.

        Raises:
            FileNotFoundError, ValueError: a weight file is missing or not what it should be.
        """
        self.settings, self._with_frames = settings, with_frames
        device = torch.device(settings.device)
        self._lpips = self._fvd = None
        if settings.lpips_backbone is not None:
            self._lpips = Lpips(settings.lpips_backbone, settings.lpips_heads, device)
        if settings.fvd_detector is not None:
            self._fvd = VideoFeatures(settings.fvd_detector, settings.fvd_resize, device)
        self._world: tuple[str, VideoGenerator] | None = None
        self._clip: tuple[tuple[str, str], Clip] | None = None
        self._warm: set[tuple[str, str]] = set()

    @property
    def provenance(self) -> dict[str, Any]:
        """Return which weight files the metrics come from; None where there are none."""
        return {
            "lpips": self._lpips.provenance if self._lpips else None,
            "fvd": self._fvd.provenance if self._fvd else None,
        }

    def world(self, model: str) -> VideoGenerator:
        """Return the world model of a label, loaded once in a row of tasks."""
        if self._world is None or self._world[0] != model:
            self._world = None  # before the next one is loaded: two may not fit
            settings = self.settings
            world = VideoGenerator.from_pretrained(
                settings.models[model],
                settings.device,
                dtype_of(settings.dtype),
                settings.backend,
                settings.dtype == "int8",
                tokenizer=settings.tokenizer,
            )
            _check_world(world, settings, model)
            self._world = model, world
        return self._world[1]

    def clip(self, model: str, name: str) -> Clip:
        """Return a clip at the size of the model's frames."""
        if self._clip is None or self._clip[0] != (model, name):
            self._clip = (model, name), self._read(model, name)
        return self._clip[1]

    def check(self, model: str, strategies: Sequence[Strategy], clips: Collection[str]) -> None:
        """Raise FileNotFoundError or ValueError for what does not fit a model, before any work."""
        world, settings = self.world(model), self.settings
        for strategy in strategies:
            world.check(strategy, settings.sampling)
        where = settings.start, settings.frames_read[1], settings.fps
        check_clips(settings.clips, clips, world.vocabulary, *where)

    def _read(self, model: str, name: str) -> Clip:
        world, settings = self.world(model), self.settings
        most, least = settings.frames_read
        clip = read_clip(
            settings.clips,
            name,
            world.vocabulary,
            settings.start,
            most,
            settings.fps,
            least=least,
        )
        return replace(clip, frames=world.tokenizer.fit_frames(clip.frames, *world.frame_size_px))

    def __call__(self, task: Task) -> Outcome:
        """Measure."""
        clip = self.clip(task.model, task.clip)
        given = self.settings.context_frames
        truth, length = clip.frames[given:], self.settings.num_frames - given
        if self.settings.revisit:
            truth = clip.frames[-1:].expand(length, -1, -1, -1)
        started = time.perf_counter()
        decoding: Record = {"stats": None}
        tokens: Tensor | None = None
        seed = seed_of(clip.name, self.settings.seed)
        if task.method == "truth":
            frames = truth
        elif task.method == "copy":
            frames = clip.frames[given - 1 : given].expand_as(truth).contiguous()
        elif task.method == "reconstruction":
            tokenizer = self.world(task.model).tokenizer
            shown = tokenizer.decode(tokenizer.encode(clip.frames)).cpu()
            frames = shown[-1:].expand_as(truth) if self.settings.revisit else shown[given:]
        elif task.method == CHANCE:
            other = clip_after(self.settings.clips, clip.name)
            frames = self._read(task.model, other).frames[-1:].expand_as(truth)
        else:
            strategy = parse_strategy(task.method)
            if (task.model, task.method) not in self._warm:
                world = self.world(task.model)
                shortest = world.tokenizer.temporal_compression
                # it compiles and allocates; a graph is captured for each number of slots in use
                warm_up = length if world.runner in CAPTURING else shortest
                self._generate(task.model, clip, strategy, warm_up, seed)
                self._warm.add((task.model, task.method))
                started = time.perf_counter()
            video = self._generate(task.model, clip, strategy, length, seed)
            frames, tokens = video.frames, video.tokens.cpu()
            decoding = {
                "stats": asdict(video.stats),
                "tokens": pack(tokens.numpy()),
                "lossless": strategy.promise,
            }
        wall_seconds = time.perf_counter() - started
        before = clip.frames[given - 1 : given]
        if self.settings.drift:
            decoding["drift"] = self._drift(task.model, before, frames, tokens)
        record = {
            "kind": "clip",
            **task._asdict(),
            "seed": seed,
            "quality": self._quality(frames[: len(truth)], truth) if task.method != "truth" else {},
            "features": self._features(task.model, before, frames),
            **decoding,
            "frame_size_px": list(truth.shape[1:3]),
            "fps": float(clip.fps),
            "wall_seconds": wall_seconds,  # with tokenizing and painting
            "worker": os.getpid(),
        }
        return Outcome(record, frames if self._with_frames else frames[:0])

    def _generate(
        self, model: str, clip: Clip, strategy: Strategy, num_frames: int, seed: int
    ) -> GeneratedVideo:
        given = self.settings.context_frames
        between, coming = split_actions(clip.actions, given)
        codec = self.world(model).vocabulary
        if self.settings.revisit and codec is not None:
            coming = walk(*self.settings.revisit_actions, idle_action(codec), self.settings.revisit)
        return self.world(model).generate(
            clip.frames[:given],
            coming and list(islice(cycle(coming), num_frames)),
            num_frames,
            strategy=strategy,
            context_actions=between,
            sampling=self.settings.sampling,
            seed=seed,
        )

    def _quality(self, frames: Tensor, truth: Tensor) -> dict[str, list[float]]:
        """Return each metric, frame by frame."""
        quality = {"psnr": psnr(frames, truth).tolist(), "ssim": ssim(frames, truth).tolist()}
        if self._lpips is not None:
            quality["lpips"] = self._lpips(frames, truth).tolist()
        return quality

    def _drift(
        self, model: str, before: Tensor, frames: Tensor, tokens: Tensor | None
    ) -> dict[str, list[float]]:
        """Return what can be said of each frame without the truth, the last given one before."""
        tokenizer = self.world(model).tokenizer
        grids = tokenizer.encode(frames) if tokens is None else tokens
        return {
            "sharpness": sharpness(frames).tolist(),
            "repeated": repeated_tokens(torch.cat([tokenizer.encode(before), grids])).tolist(),
            "distinct": distinct_tokens(grids).tolist(),
        }

    def _features(self, model: str, before: Tensor, frames: Tensor) -> dict[str, Record]:
        """Describe the clip for the Frechet distances."""
        features = {}
        if self._fvd is not None:
            features["fvd"] = pack(self._fvd(frames).numpy())
        tokenizer = self.world(model).tokenizer
        if isinstance(tokenizer, VQTokenizer):
            with torch.inference_mode():
                pixels = torch.cat([before, frames]).to(tokenizer.codebook.device)
                parts = [tokenizer.latents(chunk) for chunk in pixels.split(tokenizer.batch_size)]
                features["tfd"] = pack(frame_features(torch.cat(parts)).cpu().numpy())
        return features


def _check_world(world: VideoGenerator, settings: Settings, model: str) -> None:
    """Raise ValueError for a world in which drift or a way back cannot be measured."""
    joined = world.tokenizer.temporal_compression
    if (settings.drift or settings.revisit) and joined > 1:
        raise ValueError(
            f"drift and revisit go frame by frame, and the tokenizer of {model} joins {joined}"
        )
    if settings.revisit:
        if world.vocabulary is None:
            raise ValueError(f"revisit needs a model that takes actions, and {model} takes none")
        for action in settings.revisit_actions:
            world.vocabulary.tokens_of(action)


LIKELIHOOD_FILE = "teacher_forced.jsonl"


def measure_likelihood(
    meter: ClipMeter, tasks: Sequence[Task], folder: Path, run: Record
) -> list[Record]:
    """Return one line a task, measuring those that the file does not hold yet.

    Args:
        run: what the file says, before its lines, of how they came about.

    Raises:
        ValueError: a clip longer than a model's context, or a file of other settings.
    """
    path = folder / LIKELIHOOD_FILE
    with ResultsWriter(path) as writer:
        before = read_results(path)
        check_same(path, before, run)
        done = {key_of(line): line for line in before.clips}
        missing = [task for task in tasks if tuple(task) not in done]
        number = len(before.runs)
        if missing:
            writer.append({**run, "run": number})
        for task in track(missing, "teacher-forced"):
            line = {"kind": "clip", "run": number, **task._asdict(), **_likelihood(meter, task)}
            writer.append(line)
            done[task] = line
    return [done[task] for task in tasks]


def _likelihood(meter: ClipMeter, task: Task) -> dict[str, Any]:
    """Return the nats a token of a clip: all in all, by frame, by row and by column."""
    world, clip = meter.world(task.model), meter.clip(task.model, task.clip)
    tokens = world.tokenizer.encode(clip.frames.to(world.model.device))[None]
    actions = world.action_ids(clip.actions, len(clip.frames), "frame")
    given = 1 + (meter.settings.context_frames - 1) // world.tokenizer.temporal_compression
    strategy = parse_strategy(task.method)
    assert strategy.has_schedule
    nll = strategy_nll(world.model, tokens, actions, strategy, given)
    return {
        "nll": nll.mean().item(),
        "nll_by_frame": nll.mean((0, 2, 3)).tolist(),
        "nll_by_row": nll.mean((0, 1, 3)).tolist(),
        "nll_by_column": nll.mean((0, 1, 2)).tolist(),
    }


def summarize_likelihood(lines: Sequence[Record]) -> list[dict[str, Any]]:
    """Return likelihood and gap of each model and strategy (see `gap_to_raster`)."""
    by_key: dict[tuple[str, str], dict[str, float]] = {}
    for line in lines:
        by_key.setdefault((line["model"], line["method"]), {})[line["clip"]] = line["nll"]
    rows = []
    for (model, method), of_clips in by_key.items():
        raster = [by_key[model, RASTER][clip] for clip in of_clips]
        nll = torch.tensor(list(of_clips.values()), dtype=torch.float64)
        gap = gap_to_raster(nll, torch.tensor(raster, dtype=torch.float64))
        rows.append({"model": model, "method": method, "clips": len(nll), **gap})
    return rows


def print_likelihood(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the table."""
    lines = [
        [
            row["model"],
            row["method"],
            str(row["clips"]),
            f"{row['nll']:.4f}",
            f"{row['gap']:+.4f} ± {spell_error(row['gap_error'])}",
        ]
        for row in rows
    ]
    header = "model", "strategy", "clips", "likelihood", "gap to raster"
    print_table(console, "teacher-forced, nats a token", header, lines, num_labels=2)
