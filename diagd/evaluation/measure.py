"""One clip under one method: generate or imitate, compare with the truth, return a clip line."""

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diagd.backends.devices import dtype_of
from diagd.data.actions import idle_action, split_actions
from diagd.decoding.runner import CAPTURING
from diagd.decoding.strategies.strategy import Strategy
from diagd.decoding.strategies.table import parse_strategy
from diagd.evaluation.named_clips import Clip, check_clips, clip_after, read_clip
from diagd.evaluation.options import Settings
from diagd.evaluation.results import Record, pack
from diagd.evaluation.revisit import CHANCE, walk
from diagd.metrics.drift import distinct_tokens, repeated_tokens, sharpness
from diagd.metrics.fvd import VideoFeatures
from diagd.metrics.latents import frame_features
from diagd.metrics.lpips import Lpips
from diagd.metrics.quality import psnr, ssim
from diagd.pipeline.generated_video import GeneratedVideo
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.prompts import seed_of
from diagd.tokenizers.vq import VQTokenizer


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
