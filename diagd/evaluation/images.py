"""Evaluate strategies on a model of images: their price, and their likeness to raster's image.

A prompt is a text or a class. Under the same noise every strategy makes an image of it, and
raster's stands in for the truth. A strategy's price is what raster's own tokens cost under its
schedule, in nats a token, with the guidance under which they were drawn.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from diagd.data.video import write_image
from diagd.decoding.model import CausalModel
from diagd.decoding.strategies.table import parse_strategy
from diagd.decoding.teacher_forcing import strategy_nll
from diagd.evaluation.comparison import METRICS, Comparison
from diagd.evaluation.options import EvaluateOptions
from diagd.evaluation.results import (
    RASTER,
    Record,
    Results,
    bias_notes,
    distance_of,
    file_name,
    grouped,
    pack,
    quality_of,
    summarize,
)
from diagd.evaluation.tables import STRATEGY, Column
from diagd.files import read_lines
from diagd.metrics.quality import likeness
from diagd.pipeline.generator import GeneratedVideo, VideoGenerator
from diagd.pipeline.prompts import seed_of

IMAGES_FILE = "images.jsonl"
IMAGES = Column("clips", "images", is_label=True)
COLUMNS = (
    *(STRATEGY, IMAGES),
    Column("nll.mean", "nats a token", "{:.3f}", better="lower"),
    Column("nll.difference", "above raster", "{:+.3f}", "nll.difference_interval"),
    *METRICS[:3],  # PSNR, SSIM and LPIPS
    Column("fid.value", "FID", "{:.1f}", better="lower"),
    Column("equal_to_raster", "= raster", "{:.1%}"),
    Column("num_steps", "steps", "{:.0f}", better="lower"),
    Column("seconds", "seconds", "{:.2f}", better="lower"),
    Column("tokens_per_second", "tokens/s", "{:.0f}", better="higher"),
    Column("speedup", "speedup", "{:.2f}x"),
)


def read_prompts(path: Path) -> list[str]:
    """Read a file of texts or classes, one a line; empty lines are left out."""
    prompts = [line.strip() for line in read_lines(path, "prompts") if line.strip()]
    if not prompts:
        raise ValueError(f"{path}: expected a text or a class a line, got none")
    if len(set(prompts)) < len(prompts):
        twice = next(one for place, one in enumerate(prompts) if one in prompts[:place])
        raise ValueError(f"{path}: {twice!r} is there twice")
    return prompts


class ImageMeter:
    """Measures images one after the other; keeps raster's of the last prompt."""

    def __init__(
        self,
        options: EvaluateOptions,
        worlds: Callable[[str], VideoGenerator],  # by the label of a model
        lpips: Callable[[Tensor, Tensor], Tensor] | None,
        fid: Callable[[Tensor], Tensor] | None,  # describes pictures for the Frechet distance
    ) -> None:
        self.options, self.worlds, self._lpips, self._fid = options, worlds, lpips, fid
        self._raster = lru_cache(maxsize=1)(partial(self._make, strategy=RASTER))

    def check(self, model: str, prompts: Sequence[str]) -> dict[str, str]:
        """Check strategies; return the error of each prompt that the model cannot read."""
        world, bad = self.worlds(model), dict[str, str]()
        for strategy in self.options.strategies():
            world.check(strategy, self.options.sampling(world.defaults))
        for prompt in prompts:
            try:
                self._read(world, prompt)
            except ValueError as error:
                bad[prompt] = str(error)
        return bad

    def __call__(self, model: str, name: str, prompt: str) -> tuple[Record, Tensor]:
        """Return the line of a strategy, and the image (1, H_px, W_px, 3)."""
        world, strategy = self.worlds(model), parse_strategy(name)
        image = raster = self._raster(model, prompt)
        measured = dict[str, list[float]]()
        if name != RASTER:
            image = self._make(model, prompt, name)
            measured = likeness(image.frames, raster.frames, self._lpips)
        row_ends = world.defaults.row_ends
        num_ids = world.config.image_vocab_size - row_ends
        if strategy.has_schedule:
            (guided, text, ids), tokens = self._read(world, prompt), raster.tokens[None]
            nll = strategy_nll(
                guided, tokens, ids, strategy, 0, prefix=text, row_ends=row_ends, num_ids=num_ids
            )
            measured["nll"] = [nll.mean().item()]
        return {
            "seed": seed_of(prompt, self.options.seed),
            "quality": measured,
            "features": {"fid": pack(self._fid(image.frames).numpy())} if self._fid else {},
            "stats": asdict(image.stats),
            "tokens": pack(image.tokens[..., : world.width - row_ends].cpu().numpy()),
            "lossless": strategy.promise,
            "frame_size_px": list(image.frames.shape[1:3]),
            "worker": os.getpid(),
        }, image.frames

    def _make(self, model: str, prompt: str, strategy: str) -> GeneratedVideo:
        world, options = self.worlds(model), self.options
        said: dict[str, Any] = {"actions" if world.text is None else "text": prompt}
        return world.generate(
            **said,
            num_frames=1,
            strategy=strategy,
            sampling=options.sampling(world.defaults),
            seed=seed_of(prompt, options.seed),
            guidance=options.guidance,
        )

    def _read(
        self, world: VideoGenerator, prompt: str
    ) -> tuple[CausalModel, Tensor | None, Tensor | None]:
        """Return the guided model, and the text or the class before the image."""
        if world.text is None:
            return world.guided(self.options.guidance), None, world.action_ids(prompt, 1, "image")
        said = world.read_text(prompt)
        assert said is not None
        return world.guided(self.options.guidance, said), said.prompt, None


def compare_images(results: Results) -> Comparison:
    """Sum up the price of each strategy, its likeness to raster and its speed."""
    groups, rows = grouped(results), summarize(results)
    for row in rows:
        model, per_second = row["model"], row["frames_per_second"]
        raster = {} if row["strategy"] == RASTER else groups.get((model, RASTER), {})
        own = groups[model, row["strategy"]]
        row["nll"] = quality_of("nll", own, raster)
        row["fid"] = distance_of("fid", own, raster)
        row["seconds"] = 1 / per_second if per_second else None
    notes = [
        "Nats a token: what raster's own tokens cost while they are decoded by a strategy, guided "
        "as they were drawn; none where a strategy has no schedule.",
        "PSNR, SSIM and = raster (the share of equal tokens) compare with raster's image of the "
        "same prompt and noise. Seconds are of decoding. Intervals are 95% over images.",
    ]
    if (detector := results.runs[-1]["metrics"]["fid"]) is None:
        notes.append("FID: not measured, it needs weights (--fid-detector FILE).")
    else:
        notes.append(f"FID: from raster's images, detector_sha256 {detector['detector_sha256']}.")
    notes += bias_notes("fid", [row["fid"] for row in rows])
    return Comparison(rows, COLUMNS, notes)


def save_image(out: Path, record: Record, image: Tensor) -> str:
    """Write the image of a line below a folder; return its path in it."""
    name = f"{file_name(record['clip'])[:80]}-{record['seed']}.png"
    path = "/".join(("images", file_name(record["model"]), file_name(record["strategy"]), name))
    write_image(out / path, image)
    return path
