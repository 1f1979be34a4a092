"""A folder of prompts, each with a video: whole or not there, and none made twice.

Beside NAME.mp4 lies NAME.json, which is written after it: what the video goes on from and how it
was made. A prompt that has both is done. One that cannot be read is told at the end, and the others
go on.
"""

import json
import time
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from diagd.console import progress
from diagd.data.video import IMAGE_SUFFIXES, save_frames
from diagd.families.checkpoints import model_path
from diagd.families.clip_files import VIDEO_SUFFIXES, recording_formats
from diagd.files import write_json
from diagd.pipeline.prompts import seed_of
from diagd.pipeline.recipe import PreparedWorld, Recipe
from diagd.system import fingerprint, only_writer, provenance
from diagd.workers import Pool, do_tasks

# Paths, whose files may have moved; of a model its contents count.
_MAY_DIFFER = {"model", "config", "tokenizer", "text_encoder", "text_embedding"}


@dataclass(frozen=True)
class Continued:
    """A prompt and what it went on with.

    Attributes:
        record: how that was made; JSON types.
        frames: (T, H_px, W_px, 3) uint8, the context and then what was generated.
    """

    record: dict[str, Any]
    frames: Tensor
    fps: float


class PromptWorker:
    """Goes on from prompts, one after the other, by one recipe.

    Raises:
        FileNotFoundError, ValueError: the world cannot be loaded, or not decode so.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._prepared = PreparedWorld(recipe)
        self._seed = recipe.seed
        self._provenance = provenance(self._prepared.device)

    def __call__(self, path: Path) -> Continued:
        """Read a prompt and generate."""
        started, prepared = time.perf_counter(), self._prepared
        prompt = prepared.read(path)
        seed = seed_of(path.stem, self._seed)
        video = prepared.generate(prompt, prepared.num_frames, prepared.strategy, seed)
        record = {
            "prompt": path.name,
            "strategy": prepared.strategy.name,
            "sampling": asdict(prepared.sampling),
            "seed": seed,
            "context_actions": prompt.context_actions,
            "actions": prompt.coming_actions,
            "notes": prompt.notes,
            "stats": asdict(video.stats),
            "wall_seconds": time.perf_counter() - started,  # with tokenizing and painting
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "dtype": prepared.dtype,
            **self._provenance,
        }
        return Continued(record, torch.cat([prompt.frames, video.frames]), prompt.fps)


def continue_prompts(recipe: Recipe, prompts: Path, out: Path, pool: Pool) -> dict[str, Any]:
    """Make the videos that are not there yet.

    Returns:
        How many are `generated` and were `done_before`, and of each prompt that `failed` why.

    Raises:
        FileNotFoundError, ValueError: no prompts, no such world, or videos of another recipe.
    """
    paths = find_prompts(prompts)
    if out.resolve() == prompts.resolve():
        raise ValueError(f"out must be another folder than the prompts', got {out}")
    settings = _settings(recipe)
    failed: dict[str, str] = {}
    with only_writer(out):
        missing = [path for path in paths if not _is_done(path.stem, out, settings)]
        num_done = len(paths) - len(missing)
        with progress("prompts", len(paths), num_done) as job:
            for path, made in do_tasks(missing, partial(PromptWorker, recipe), pool):
                if isinstance(made, ValueError):
                    failed[path.name] = str(made)
                else:
                    _write(made, path.stem, out, settings)
                job.advance()
    return {
        "out": str(out),
        "generated": len(missing) - len(failed),
        "done_before": num_done,
        "failed": failed,
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    """Say what was made, and what was not and why."""
    before = f", {report['done_before']} were there before" if report["done_before"] else ""
    console.print(f"{report['generated']} videos written to {report['out']}{before}")
    if failed := report["failed"]:
        console.print(f"prompts without a video: {len(failed)}")
        for name, why in failed.items():
            console.print(f"  {name}: {why}")


def find_prompts(folder: Path) -> list[Path]:
    """List the videos, pictures and recordings of a folder by name; not those of its subfolders.

    Raises:
        FileNotFoundError: no such folder, or none in it.
        ValueError: two of one name, whose videos would be one.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"folder of prompts not found: {folder}")
    suffixes = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES, *recording_formats())
    paths: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() not in suffixes or path.name.startswith(".") or path.is_dir():
            continue
        if path.stem in paths:
            raise ValueError(f"two prompts have one name: {paths[path.stem]} and {path}")
        paths[path.stem] = path
    if not paths:
        raise FileNotFoundError(f"no prompts ({', '.join(suffixes)}) in {folder}")
    return list(paths.values())


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return the flags of a recipe, and what stands for the model's weights."""
    flags = {field.name: getattr(recipe, field.name) for field in fields(Recipe)}
    paths = {name: str(value) for name, value in flags.items() if isinstance(value, Path)}
    return {"weights": fingerprint(model_path(recipe.model)), **flags, **paths}


def _is_done(name: str, out: Path, settings: dict[str, Any]) -> bool:
    """Say whether a prompt has its video; ValueError if it is one of other settings."""
    path = out / f"{name}.json"
    if not path.is_file():
        return False
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["settings"]
        found = {setting: before[setting] for setting in settings}
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{path}: expected what diagd generate writes beside a video") from None
    for setting, value in found.items():
        if setting not in _MAY_DIFFER and value != settings[setting]:
            raise ValueError(
                f"{path} was made with {setting}={value}, now {settings[setting]}; "
                "choose another --out"
            )
    return (out / f"{name}.mp4").is_file()


def _write(made: Continued, name: str, out: Path, settings: dict[str, Any]) -> None:
    """Write the video, then the file that says it is there."""
    save_frames(out / f"{name}.mp4", made.frames, made.fps)
    write_json(out / f"{name}.json", {**made.record, "settings": settings}, indent=1)
