"""Measure clips and prompts: a class for each mode, which loads worlds, clips and networks once."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diagd.backends.names import Backend, DTypeName
from diagd.checks import shorten
from diagd.data.actions import idle_action, split_actions
from diagd.decoding.model import CausalModel
from diagd.decoding.strategies.table import Strategy, parse_strategy
from diagd.decoding.teacher_forcing import strategy_nll
from diagd.evaluation.comparison import walk
from diagd.evaluation.options import (
    CONTINUATION,
    DRIFT,
    IMAGES,
    LIKELIHOOD,
    REVISIT,
    EvaluateOptions,
)
from diagd.evaluation.results import CHANCE, RASTER, Record, pack
from diagd.families.clip_files import Clip, find_clips
from diagd.metrics import quality
from diagd.metrics.perceptual import (
    EfficientNetFeatures,
    ImageFeatures,
    Lpips,
    StLpips,
    VideoFeatures,
)
from diagd.pipeline.generator import GeneratedVideo, VideoGenerator
from diagd.pipeline.prompts import seed_of
from diagd.tokenizers.vq import VideoTokenizer, VQTokenizer


class Task(NamedTuple):
    model: str  # its label
    strategy: str  # or baseline
    clip: str  # or prompt of an image


class Meter:
    """Measures tasks one after the other; keeps the last world, and what it measured last."""

    def __init__(
        self, options: EvaluateOptions, dtype: DTypeName, backends: Mapping[str, Backend]
    ) -> None:
        self.options, self._backends = options, backends  # one for each label
        self._dtype: DTypeName = dtype
        device = torch.device(options.device)
        backbone, detector = options.lpips_backbone, options.fvd_detector
        self._likeness = {
            "lpips": Lpips(backbone, options.lpips_heads, device) if backbone else None,
            "stlpips": StLpips(options.perceptual, device) if options.perceptual else None,
        }
        self._fvd = VideoFeatures(detector, options.fvd_resize, device) if detector else None
        fid, efd = options.fid_detector, options.efd_detector
        self._of_images = {
            "fid": ImageFeatures(fid, device) if fid else None,
            "efd": EfficientNetFeatures(efd, device) if efd else None,
        }
        self._world: tuple[str, VideoGenerator] | None = None
        metrics = {**self._likeness, "fvd": self._fvd, **self._of_images}
        # the weight files of each metric; None where there are none
        self.provenance = {name: metric and metric.provenance for name, metric in metrics.items()}

    def world(self, model: str) -> VideoGenerator:
        """Return the world model of a label, loaded once in a row of tasks."""
        if self._world is None or self._world[0] != model:
            self._world = None  # before the next one is loaded: two may not fit
            options = self.options
            world = VideoGenerator.from_pretrained(
                options.labelled_models()[model],
                options.device,
                self._dtype,
                self._backends[model],
                tokenizer=options.tokenizer,
                adapter=options.adapter,
            )
            self.check_world(world, model)
            self._world = model, world
        return self._world[1]

    def check(self, model: str, names: Sequence[str]) -> dict[str, str]:
        """Check strategies; return the error of each clip (its head, its actions) or prompt."""
        world, options, bad = self.world(model), self.options, dict[str, str]()
        for strategy in options.strategies():
            world.check(strategy, options.drawing(world.defaults))
        for name in names:
            try:
                self.check_source(world, name)
            except (ValueError, OSError) as error:
                bad[name] = shorten(str(error))
        return bad

    def __call__(self, task: Task) -> tuple[Record, Tensor | None]:
        """Measure a line; with it come its frames (T, H_px, W_px, 3) uint8 if they are kept."""
        measured, frames = self.measure(*task)
        record: Record = {"kind": "clip", **task._asdict()}
        if frames is not None:
            record |= {"seed": seed_of(task.clip, self.options.seed)}
            measured |= {"frame_size_px": list(frames.shape[1:3]), "worker": os.getpid()}
        return record | measured, frames if self.options.save_videos else None

    def check_world(self, world: VideoGenerator, model: str) -> None:
        """Raise ValueError for a world that makes none of what is asked for."""
        raise NotImplementedError

    def check_source(self, world: VideoGenerator, name: str) -> None:
        """Raise ValueError or OSError for a clip or a prompt that cannot be measured."""
        raise NotImplementedError

    def measure(self, model: str, strategy: str, clip: str) -> tuple[Record, Tensor | None]:
        """Return the values of a line, and the frames that were generated, if any were."""
        raise NotImplementedError


class ClipMeter(Meter):
    """What all modes of clips have in common."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.clip = lru_cache(maxsize=1)(self._read)  # (model, name) -> the last clip

    def check_world(self, world: VideoGenerator, model: str) -> None:
        if not world.defaults.context_frames:
            given = "classes" if world.text is None else "texts"
            raise ValueError(f"{model} makes images of {given}: give a file of them with --prompts")
        if world.config.context_size:
            raise ValueError(f"{model} needs a text with each clip, and clips come without texts")

    def check_source(self, world: VideoGenerator, name: str) -> None:
        file, options = find_clips(self.options.clips, world.vocabulary)[name], self.options
        file.check(options.frames_read[0], options.start, options.lengths.fps)
        file.actions()

    def _read(self, model: str, name: str) -> Clip:
        world, options = self.world(model), self.options
        file = find_clips(options.clips, world.vocabulary)[name]
        part = options.start, options.lengths.fps
        min_frames, max_frames = options.frames_read
        clip = file.read(min(max_frames, file.check(min_frames, *part)), *part)
        return replace(clip, frames=world.tokenizer.fit_frames(clip.frames, *world.frame_size_px))


class ContinuationMeter(ClipMeter):
    """Continues a clip by a strategy, and compares with what was recorded."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._warm: set[tuple[str, str]] = set()

    def truth(self, clip: Clip) -> Tensor:
        """Return the frames to compare with."""
        return clip.frames[self.options.lengths.context_frames :]

    def coming(self, world: VideoGenerator, clip: Clip) -> list[str] | None:
        """Return the actions from the given frames on; over again where they are too few."""
        return split_actions(clip.actions, self.options.lengths.context_frames)[1]

    def baseline(self, name: str, model: str, clip: Clip) -> Tensor:
        """Return the frames that a baseline shows."""
        truth, given = self.truth(clip), self.options.lengths.context_frames
        if name == "copy":
            return clip.frames[given - 1 : given].expand_as(truth).contiguous()
        if name == "reconstruction":
            tokenizer = self.world(model).tokenizer
            return tokenizer.decode(tokenizer.encode(clip.frames)).cpu()[given:]
        assert name == "truth"
        return truth

    def more(
        self, tokenizer: VideoTokenizer, before: Tensor, frames: Tensor, tokens: Tensor | None
    ) -> Record:
        """Return what else is measured of frames, after the last given one."""
        return {}

    def measure(self, model: str, strategy: str, clip: str) -> tuple[Record, Tensor]:
        world, recorded, options = self.world(model), self.clip(model, clip), self.options
        given, tokenizer = options.lengths.context_frames, world.tokenizer
        before, truth = recorded.frames[given - 1 : given], self.truth(recorded)
        decoding: Record = {"stats": None}
        tokens: Tensor | None = None
        started = time.perf_counter()
        if strategy in options.mode.baselines:
            frames = self.baseline(strategy, model, recorded)
        else:
            chosen, length = parse_strategy(strategy), options.lengths.frames - given
            if (model, strategy) not in self._warm:
                # it compiles and allocates; a graph is captured for each number of slots in use
                warm_up = length if world.model.replays else tokenizer.temporal_compression
                self._generate(world, recorded, chosen, warm_up)
                self._warm.add((model, strategy))
                started = time.perf_counter()
            video = self._generate(world, recorded, chosen, length)
            frames, tokens = video.frames, video.tokens.cpu()
            decoding = {
                "stats": asdict(video.stats),
                "tokens": pack(tokens.numpy()),
                "promise": chosen.promise,
            }
        wall_seconds = time.perf_counter() - started
        measured = dict[str, list[float]]()
        if strategy != "truth":
            measured = quality.likeness(frames[: len(truth)], truth, self._likeness)
        return {
            "quality": measured,
            "features": self._features(tokenizer, before, frames),
            **decoding,
            **self.more(tokenizer, before, frames, tokens),
            "fps": float(recorded.fps),
            "wall_seconds": wall_seconds,  # with tokenizing and painting
        }, frames

    def _generate(
        self, world: VideoGenerator, clip: Clip, strategy: Strategy, num_frames: int
    ) -> GeneratedVideo:
        options, given = self.options, self.options.lengths.context_frames
        between, _ = split_actions(clip.actions, given)
        coming = self.coming(world, clip)
        return world.generate(
            world.read_prompt(clip.frames[:given], between),
            coming and list(islice(cycle(coming), num_frames)),
            num_frames,
            strategy=strategy,
            sampling=options.drawing(world.defaults),
            seed=seed_of(clip.name, options.seed),
        )

    def _features(
        self, tokenizer: VideoTokenizer, before: Tensor, frames: Tensor
    ) -> dict[str, Record]:
        features = {}
        if self._fvd is not None:
            features["fvd"] = pack(self._fvd(frames).numpy())
        if isinstance(tokenizer, VQTokenizer):
            with torch.inference_mode():
                pixels = torch.cat([before, frames]).to(tokenizer.codebook.device)
                parts = [tokenizer.latents(chunk) for chunk in pixels.split(tokenizer.batch_size)]
                features["tfd"] = pack(quality.frame_features(torch.cat(parts)).cpu().numpy())
        return features


def check_one_frame_a_grid(options: EvaluateOptions, world: VideoGenerator, model: str) -> None:
    if (joined := world.tokenizer.temporal_compression) > 1:
        raise ValueError(
            f"{options.mode.name} needs one frame a grid, the tokenizer of {model} joins {joined}"
        )


class DriftMeter(ContinuationMeter):
    """Continues a clip for longer than it was recorded, and shows how frames change."""

    def check_world(self, world: VideoGenerator, model: str) -> None:
        super().check_world(world, model)
        check_one_frame_a_grid(self.options, world, model)

    def more(
        self, tokenizer: VideoTokenizer, before: Tensor, frames: Tensor, tokens: Tensor | None
    ) -> Record:
        grids = tokenizer.encode(frames) if tokens is None else tokens
        whole = torch.cat([tokenizer.encode(before), grids])
        drift = {
            "sharpness": quality.sharpness(frames).tolist(),
            "repeated": quality.repeated_tokens(whole).tolist(),
            "distinct": quality.distinct_tokens(grids).tolist(),
        }
        return {"drift": drift}


class RevisitMeter(ContinuationMeter):
    """Turns away and back, and compares with the last given frame."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        clips_after(self.options.clips, next(iter(find_clips(self.options.clips))))  # for chance

    def check_world(self, world: VideoGenerator, model: str) -> None:
        super().check_world(world, model)
        check_one_frame_a_grid(self.options, world, model)
        if world.vocabulary is None:
            raise ValueError(f"revisit needs a model that takes actions, and {model} takes none")
        for action in self.options.revisit_actions:
            world.vocabulary.tokens_of(action)

    def truth(self, clip: Clip) -> Tensor:
        lengths = self.options.lengths
        return clip.frames[-1:].expand(lengths.frames - lengths.context_frames, -1, -1, -1)

    def coming(self, world: VideoGenerator, clip: Clip) -> list[str] | None:
        assert world.vocabulary is not None
        assert self.options.revisit is not None
        still = idle_action(world.vocabulary)
        return walk(*self.options.revisit_actions, still, self.options.revisit)

    def baseline(self, name: str, model: str, clip: Clip) -> Tensor:
        truth = self.truth(clip)
        if name == CHANCE:
            return self._another(model, clip.name).frames[-1:].expand_as(truth)
        assert name == "reconstruction"
        tokenizer = self.world(model).tokenizer
        return tokenizer.decode(tokenizer.encode(clip.frames)).cpu()[-1:].expand_as(truth)

    def _another(self, model: str, name: str) -> Clip:
        """Read the next clip of the folder; one that cannot be read is passed over."""
        for other in clips_after(self.options.clips, name):
            with suppress(ValueError, OSError):
                return self._read(model, other)
        raise ValueError(f"{name}: no other clip can be read to compare with")


def clips_after(folder: Path, name: str) -> list[str]:
    """Return the other clips of a folder by name, those after this one first."""
    if len(names := list(find_clips(folder))) < 2:
        raise ValueError(f"{folder} holds one clip only: another one is needed to compare with")
    place = names.index(name)
    return names[place + 1 :] + names[:place]


class LikelihoodMeter(ClipMeter):
    """Prices a strategy: the nats a token of the true frames."""

    def measure(self, model: str, strategy: str, clip: str) -> tuple[Record, None]:
        """Return the nats a token of a clip: all in all, by frame, by row and by column."""
        world, recorded = self.world(model), self.clip(model, clip)
        tokens = world.tokenizer.encode(recorded.frames.to(world.model.device))[None]
        actions = world.action_ids(recorded.actions, tokens.shape[1], "frame")
        step = world.tokenizer.temporal_compression
        given = 1 + (self.options.lengths.context_frames - 1) // step
        length = world.config.prefix_length + tokens.numel() - world.config.num_leading
        length += len(recorded.frames) * world.config.num_action_tokens
        held, keep_frames = world.window(given)
        if keep_frames is not None and length > held:
            raise ValueError(
                f"{model} sees {held} tokens at once, and the clip has {length}: lower --frames"
            )
        nll = strategy_nll(
            world.model,
            tokens,
            actions,
            parse_strategy(strategy),
            given,
            prefix=tokens.new_tensor(world.config.prefix_ids)[None],
            row_ends=world.defaults.row_ends,
            frame=world.config.frame,
        )
        return {
            "nll": nll.mean().item(),
            "nll_by_frame": nll.mean((0, 2, 3)).tolist(),
            "nll_by_row": nll.mean((0, 1, 3)).tolist(),
            "nll_by_column": nll.mean((0, 1, 2)).tolist(),
        }, None


class ImageMeter(Meter):
    """Makes an image of a text or a class by a strategy, and compares with raster's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._raster = lru_cache(maxsize=1)(self._raster_image)  # the last one

    def check_world(self, world: VideoGenerator, model: str) -> None:
        if world.defaults.context_frames:
            raise ValueError(f"{model} continues clips: give a folder of them with --clips")

    def check_source(self, world: VideoGenerator, name: str) -> None:
        self._guided(world, name)

    def measure(self, model: str, strategy: str, clip: str) -> tuple[Record, Tensor]:
        """Make an image (1, H_px, W_px, 3), compare it with raster's and price the strategy."""
        world, chosen = self.world(model), parse_strategy(strategy)
        image = raster = self._raster(model, clip)
        measured = dict[str, list[float]]()
        if strategy != RASTER:
            image = self._generate(model, clip, strategy)
            measured = quality.likeness(image.frames, raster.frames, self._likeness)
        row_ends = world.defaults.row_ends
        if chosen.has_schedule:
            guided, text, ids = self._guided(world, clip)
            nll = strategy_nll(
                guided,
                raster.tokens[None],
                ids,
                chosen,
                0,
                prefix=text,
                row_ends=row_ends,
                num_ids=world.config.image_vocab_size - row_ends,
            )
            measured["nll"] = [nll.mean().item()]
        return {
            "quality": measured,
            "features": {
                name: pack(describe(image.frames).numpy())
                for name, describe in self._of_images.items()
                if describe
            },
            "stats": asdict(image.stats),
            "tokens": pack(image.tokens[..., : world.width - row_ends].cpu().numpy()),
            "promise": chosen.promise,
        }, image.frames

    def _raster_image(self, model: str, prompt: str) -> GeneratedVideo:
        return self._generate(model, prompt, RASTER)

    def _generate(self, model: str, prompt: str, strategy: str) -> GeneratedVideo:
        world, options = self.world(model), self.options
        said: dict[str, Any] = {"actions" if world.text is None else "text": prompt}
        return world.generate(
            **said,
            num_frames=1,
            strategy=strategy,
            sampling=options.drawing(world.defaults),
            seed=seed_of(prompt, options.seed),
            guidance=options.guidance,
        )

    def _guided(
        self, world: VideoGenerator, prompt: str
    ) -> tuple[CausalModel, Tensor | None, Tensor | None]:
        """Return the guided model, and the text or the class before the image."""
        if world.text is None:
            return world.guided(self.options.guidance), None, world.action_ids(prompt, 1, "image")
        said = world.read_text(prompt)
        assert said is not None
        return world.guided(self.options.guidance, [said]), said.prompt, None


METERS = {
    CONTINUATION: ContinuationMeter,
    LIKELIHOOD: LikelihoodMeter,
    DRIFT: DriftMeter,
    REVISIT: RevisitMeter,
    IMAGES: ImageMeter,
}
