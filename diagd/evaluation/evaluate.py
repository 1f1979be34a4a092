"""Compare strategies on recorded clips: quality, speed, steps, agreement with raster.

Every clip is continued from its first frames under its recorded actions, by each model with each
strategy and the same seed. Raster, the tokenizer's reconstruction and a copy of the last given
frame are always in. A killed run resumes; `diagd report` turns results.jsonl into a page.

Of a model of images every strategy makes an image of a text or a class under the same noise, and
raster's stands in for the truth. A strategy's price is what raster's own tokens cost under its
schedule, with the guidance under which they were drawn.

    diagd evaluate --clips work/doom/heldout --num-clips 64 --out work/study
    diagd evaluate --model deepseek-ai/Janus-Pro-1B --prompts p.txt --out out
"""

import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diagd.backends.devices import device_of
from diagd.backends.names import Backend, DTypeName
from diagd.backends.prepare import choose_backend, choose_dtype
from diagd.checks import shorten
from diagd.console import make_console, track
from diagd.data.actions import idle_action, split_actions
from diagd.data.video import write_image, write_video
from diagd.decoding.model import CausalModel
from diagd.decoding.strategies.table import Strategy, parse_strategy
from diagd.decoding.teacher_forcing import strategy_nll
from diagd.evaluation.comparison import compare, walk
from diagd.evaluation.options import EvaluateOptions
from diagd.evaluation.results import (
    CHANCE,
    IMAGES_FILE,
    LIKELIHOOD_FILE,
    RASTER,
    RESULTS_FILE,
    Record,
    appending,
    check_same,
    file_name,
    key_of,
    pack,
    read_results,
    video_path,
)
from diagd.families.checkpoints import find_model, model_path
from diagd.families.clip_files import Clip, find_clips
from diagd.files import read_lines
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
from diagd.pipeline.world_folder import check_strategy
from diagd.system import clip_fingerprint, fingerprint, provenance
from diagd.tokenizers.vq import VideoTokenizer, VQTokenizer
from diagd.workers import do_tasks


def choose_clips(
    clips: Path, num_clips: int | None, seed: int, limit: int | None = None
) -> list[str]:
    """Draw clips of a folder, or prompts of a file; a larger draw of one seed has the smaller.

    Without a number all that are there are drawn, up to the `limit`.
    """
    what = "clips"
    if clips.is_dir():
        names = list(find_clips(clips))
    else:
        what, lines = "prompts", read_lines(clips, "folder of clips, or file of prompts,")
        if not (names := [name for line in lines if (name := line.strip())]):
            raise ValueError(f"{clips}: expected a text or a class a line, got none")
        if twice := [name for place, name in enumerate(names) if name in names[:place]]:
            raise ValueError(f"{clips}: {twice[0]!r} is there twice")
    if num_clips is None:
        num_clips = min(len(names), limit or len(names))
    if not 1 <= num_clips <= len(names):
        raise ValueError(f"expected a number of {what} from 1 to {len(names)}, got {num_clips}")
    places = list(range(len(names)))
    random.Random(seed).shuffle(places)
    return [names[place] for place in sorted(places[:num_clips])]


def clips_after(folder: Path, name: str) -> list[str]:
    """Return the other clips of a folder by name, those after this one first."""
    if len(names := list(find_clips(folder))) < 2:
        raise ValueError(f"{folder} holds one clip only: another one is needed to compare with")
    place = names.index(name)
    return names[place + 1 :] + names[:place]


class Task(NamedTuple):
    model: str  # its label
    strategy: str  # or baseline
    clip: str  # or prompt of an image


class ClipMeter:
    """Measures tasks one after the other; keeps the last model, clip and image of raster."""

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
        self._warm: set[tuple[str, str]] = set()
        self.clip = lru_cache(maxsize=1)(self._read)  # (model, name) -> the last clip
        # (model, prompt) -> the last image
        self._raster = lru_cache(maxsize=1)(partial(self._generate_image, strategy=RASTER))
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
            )
            _check_world(world, options, model)
            self._world = model, world
        return self._world[1]

    def check(self, model: str, names: Sequence[str]) -> dict[str, str]:
        """Check strategies; return the error of each clip (its head, its actions) or prompt."""
        world, options, bad = self.world(model), self.options, dict[str, str]()
        for strategy in options.strategies():
            world.check(strategy, options.drawing(world.defaults))
        files = {} if options.of_images else find_clips(options.clips, world.vocabulary)
        for name in names:
            try:
                if options.of_images:
                    self._guided(world, name)
                else:
                    files[name].check(options.frames_read[0], options.start, options.lengths.fps)
                    files[name].actions()
            except (ValueError, OSError) as error:
                bad[name] = shorten(str(error))
        return bad

    def _read(self, model: str, name: str) -> Clip:
        world, options = self.world(model), self.options
        file = find_clips(options.clips, world.vocabulary)[name]
        part = options.start, options.lengths.fps
        min_frames, max_frames = options.frames_read
        clip = file.read(min(max_frames, file.check(min_frames, *part)), *part)
        return replace(clip, frames=world.tokenizer.fit_frames(clip.frames, *world.frame_size_px))

    def _another(self, model: str, name: str) -> Clip:
        """Read the next clip of the folder; one that cannot be read is passed over."""
        for other in clips_after(self.options.clips, name):
            with suppress(ValueError, OSError):
                return self._read(model, other)
        raise ValueError(f"{name}: no other clip can be read to compare with")

    def __call__(self, task: Task) -> tuple[Record, Tensor | None]:
        """Measure a line; with it come its frames (T, H_px, W_px, 3) uint8 if they are kept."""
        record: Record = {"kind": "clip", **task._asdict()}
        if self.options.teacher_forced:
            return record | self._likelihood(*task), None
        measure = self._image if self.options.of_images else self._continuation
        measured, frames = measure(*task)
        record |= {"seed": seed_of(task.clip, self.options.seed), **measured}
        record |= {"frame_size_px": list(frames.shape[1:3]), "worker": os.getpid()}
        return record, frames if self.options.save_videos else None

    def _continuation(self, model: str, name: str, clip_name: str) -> tuple[Record, Tensor]:
        """Continue a clip by a strategy, or make what a baseline shows, and compare."""
        world, clip, options = self.world(model), self.clip(model, clip_name), self.options
        given, tokenizer = options.lengths.context_frames, world.tokenizer
        truth, length = clip.frames[given:], options.lengths.frames - given
        if options.revisit:
            truth = clip.frames[-1:].expand(length, -1, -1, -1)
        before = clip.frames[given - 1 : given]
        decoding: Record = {"stats": None}
        tokens: Tensor | None = None
        started = time.perf_counter()
        if name == "truth":
            frames = truth
        elif name == "copy":
            frames = before.expand_as(truth).contiguous()
        elif name == "reconstruction":
            shown = tokenizer.decode(tokenizer.encode(clip.frames)).cpu()
            frames = shown[-1:].expand_as(truth) if options.revisit else shown[given:]
        elif name == CHANCE:
            frames = self._another(model, clip_name).frames[-1:].expand_as(truth)
        else:
            strategy = parse_strategy(name)
            if (model, name) not in self._warm:
                # it compiles and allocates; a graph is captured for each number of slots in use
                warm_up = length if world.model.replays else tokenizer.temporal_compression
                self._generate(world, clip, strategy, warm_up)
                self._warm.add((model, name))
                started = time.perf_counter()
            video = self._generate(world, clip, strategy, length)
            frames, tokens = video.frames, video.tokens.cpu()
            decoding = {
                "stats": asdict(video.stats),
                "tokens": pack(tokens.numpy()),
                "lossless": strategy.promise,
            }
        wall_seconds = time.perf_counter() - started
        if options.drift:
            grids = tokenizer.encode(frames) if tokens is None else tokens
            whole = torch.cat([tokenizer.encode(before), grids])
            decoding["drift"] = {
                "sharpness": quality.sharpness(frames).tolist(),
                "repeated": quality.repeated_tokens(whole).tolist(),
                "distinct": quality.distinct_tokens(grids).tolist(),
            }
        measured = dict[str, list[float]]()
        if name != "truth":
            measured = quality.likeness(frames[: len(truth)], truth, self._likeness)
        return {
            "quality": measured,
            "features": self._features(tokenizer, before, frames),
            **decoding,
            "fps": float(clip.fps),
            "wall_seconds": wall_seconds,  # with tokenizing and painting
        }, frames

    def _generate(
        self, world: VideoGenerator, clip: Clip, strategy: Strategy, num_frames: int
    ) -> GeneratedVideo:
        options, given = self.options, self.options.lengths.context_frames
        between, coming = split_actions(clip.actions, given)
        if options.revisit and world.vocabulary is not None:
            coming = walk(*options.revisit_actions, idle_action(world.vocabulary), options.revisit)
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

    def _likelihood(self, model: str, strategy: str, clip_name: str) -> Record:
        """Return the nats a token of a clip: all in all, by frame, by row and by column."""
        world, clip = self.world(model), self.clip(model, clip_name)
        tokens = world.tokenizer.encode(clip.frames.to(world.model.device))[None]
        actions = world.action_ids(clip.actions, tokens.shape[1], "frame")
        step = world.tokenizer.temporal_compression
        given = 1 + (self.options.lengths.context_frames - 1) // step
        length = world.config.prefix_length + tokens.numel() - world.config.num_leading
        length += len(clip.frames) * world.config.num_action_tokens
        held, keep_frames = world.window(given)
        if keep_frames is not None and length > held:
            raise ValueError(
                f"{model} sees {held} tokens at once and begins anew then, the clip takes "
                f"{length}: fewer --frames can be priced"
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
        }

    def _image(self, model: str, name: str, prompt: str) -> tuple[Record, Tensor]:
        """Make an image (1, H_px, W_px, 3), compare it with raster's and price the strategy."""
        world, strategy = self.world(model), parse_strategy(name)
        image = raster = self._raster(model, prompt)
        measured = dict[str, list[float]]()
        if name != RASTER:
            image = self._generate_image(model, prompt, name)
            measured = quality.likeness(image.frames, raster.frames, self._likeness)
        row_ends = world.defaults.row_ends
        if strategy.has_schedule:
            guided, text, ids = self._guided(world, prompt)
            nll = strategy_nll(
                guided,
                raster.tokens[None],
                ids,
                strategy,
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
            "lossless": strategy.promise,
        }, image.frames

    def _generate_image(self, model: str, prompt: str, strategy: str) -> GeneratedVideo:
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


def _check_world(world: VideoGenerator, options: EvaluateOptions, model: str) -> None:
    """Raise ValueError for a world that makes none of what is asked for."""
    makes_images = not world.defaults.context_frames
    if makes_images and not options.of_images:
        given = "classes" if world.text is None else "texts"
        raise ValueError(f"{model} makes images of {given}: give a file of them with --prompts")
    if options.of_images and not makes_images:
        raise ValueError(f"{model} continues clips: give a folder of them with --clips")
    if world.config.context_size:
        raise ValueError(f"{model} reads a text with each clip, and clips come without texts here")
    joined = world.tokenizer.temporal_compression
    if (options.drift or options.revisit) and joined > 1:
        raise ValueError(
            f"drift and revisit go frame by frame, and the tokenizer of {model} joins {joined}"
        )
    if options.revisit:
        if world.vocabulary is None:
            raise ValueError(f"revisit needs a model that takes actions, and {model} takes none")
        for action in options.revisit_actions:
            world.vocabulary.tokens_of(action)


def main(options: EvaluateOptions) -> dict[str, Any]:
    """Measure what is not there yet, clips that `failed` before as well, and print the tables."""
    device, models = device_of(options.device), options.labelled_models()
    fingerprints = {label: fingerprint(model_path(name)) for label, name in models.items()}
    of_images = options.of_images
    limit = None if of_images else options.lengths.num_clips
    clips = choose_clips(options.clips, options.num_clips, options.seed, limit)
    for name in models.values():
        found = find_model(name)
        options.drawing(found.family.defaults(found))
        for strategy in options.strategies():
            check_strategy(found, strategy)
    if options.revisit:
        clips_after(options.clips, clips[0])  # or there is no chance
    file = IMAGES_FILE if of_images else RESULTS_FILE
    path = options.out / (LIKELIHOOD_FILE if options.teacher_forced else file)
    dtype, backends = _decide(options, device, path)
    meter = ClipMeter(options, dtype, backends)
    failed: dict[str, str] = {}
    loads_here = options.is_this_process  # else others load the models
    if loads_here:
        for label in reversed(models):  # the first one stays loaded
            failed |= meter.check(label, clips)
    if len(failed) == len(clips):
        raise ValueError(failed[clips[0]])
    files = {} if of_images else find_clips(options.clips)
    run = {
        "kind": "run",
        "settings": options.settings(dtype),
        "backends": backends,
        "metrics": meter.provenance,
        "models": fingerprints,
        "clips": {name: clip_fingerprint(files[name].path) for name in clips if name in files},
        "tokenizer": options.tokenizer and fingerprint(options.tokenizer),
        "options": json.loads(json.dumps(asdict(options), default=str)),
        **provenance(device),
    }
    tasks = [
        Task(model, strategy, clip)
        for model in models
        for clip in clips
        if clip not in failed
        for strategy in options.names()
    ]
    num_measured = 0
    with appending(path) as append:
        before = read_results(path)
        check_same(path, before, run)
        done = {key_of(record) for record in before.clips}
        if missing := [task for task in tasks if tuple(task) not in done]:
            run["run"] = len(before.runs)
            append(run)
            make = (lambda: meter) if loads_here else partial(ClipMeter, options, dtype, backends)
            outcomes, num_done = do_tasks(missing, make, options), len(tasks) - len(missing)
            what = "images x strategies" if of_images else "clips x strategies"
            for task, outcome in track(outcomes, what, len(tasks), num_done):
                if isinstance(outcome, ValueError):
                    failed.setdefault(task.clip, str(outcome))
                else:
                    record, frames = outcome
                    video = None if frames is None else _keep(options, record, frames)
                    append({**record, "video": video, "run": run["run"]})
                    num_measured += 1
    if not (results := read_results(path)).clips:
        raise ValueError(next(iter(failed.values())))
    table, notes = compare(results), list[str]()
    console = make_console()
    table.print(console)
    if limit is not None and len(clips) < limit:
        there = f"all {len(clips)} clips of {options.clips}"
        notes.append(f"{there}: the protocol {options.protocol} has {limit}")
        console.print(f"note: {notes[0]}")
    for clip, why in failed.items():
        console.print(f"{clip} could not be measured: {why}")
    return {
        "results": str(path),
        "measured": num_measured,
        "failed": failed,
        "notes": [*notes, *table.notes],
        "rows": table.rows,
    }


def _decide(
    options: EvaluateOptions, device: torch.device, path: Path
) -> tuple[DTypeName, dict[str, Backend]]:
    """Return the dtype, and each model's backend: those of earlier runs of these results, if any.

    Timings choose, and may choose otherwise the next time.
    """
    runs = read_results(path).runs if path.is_file() else []
    runs = [run for run in runs if run["options"].get("dtype") == options.dtype]
    dtype: DTypeName = (
        runs[-1]["settings"]["dtype"] if runs else choose_dtype(options.dtype, device)
    )
    known = {label: one for run in runs for label, one in run.get("backends", {}).items()}
    return dtype, {
        label: known.get(label)
        or choose_backend(options.backend, device, dtype, find_model(model).config)
        for label, model in options.labelled_models().items()
    }


def _keep(options: EvaluateOptions, record: Record, frames: Tensor) -> str:
    """Write the video or the image of a line, and return its path in the folder."""
    if options.of_images:
        model, strategy, prompt = map(file_name, key_of(record))
        path = f"images/{model}/{strategy}/{prompt[:80]}-{record['seed']}.png"
        write_image(options.out / path, frames[0])
    else:
        path = video_path(*key_of(record))
        write_video(options.out / path, frames, record["fps"])
    return path
