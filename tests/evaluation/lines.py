"""Results written by hand, and a folder of little clips."""

import json
from pathlib import Path

import numpy as np

from diagd.data.actions import write_actions
from diagd.data.video import write_video
from diagd.evaluation.results import pack
from tests.worlds import HEIGHT_PX, NAMES, WIDTH_PX, smooth_frames


def clip_line(strategy, clip, psnr=(), model="tiny", run=0, features=None, steps=None, fps=2.0):
    stats = None
    if steps is not None:
        stats = {
            "num_steps": steps,
            "frames_per_second": fps,
            "tokens_per_second": 15 * fps,
            "num_fed": 15,
            "num_dropped_frames": 0,
        }
    decoding = {"tokens": pack(np.arange(15)), "promise": "no"} if steps else {}
    packed = {name: pack(np.array(values)) for name, values in (features or {}).items()}
    return {
        "kind": "clip",
        "run": run,
        "model": model,
        "strategy": strategy,
        "clip": clip,
        "quality": {"psnr": list(psnr)} if psnr else {},
        "features": packed,
        "stats": stats,
        **decoding,
        "fps": 8.0,
        "video": None,
    }


def run_line(*models, run=0):
    settings = {
        "num_frames": 5,
        "context_frames": 2,
        "seed": 7,
        "revisit": None,
        "dtype": "float32",
        "sampling": {"temperature": 1.0, "top_k": None, "top_p": 0.9},
    }
    return {
        "kind": "run",
        "run": run,
        "mode": "continuation",
        "settings": settings,
        "metrics": dict.fromkeys(("lpips", "stlpips", "fvd", "fid", "efd")),
        "models": dict.fromkeys(models or ("tiny",), "0123456789ab"),
        "clips": {},
        "tokenizer": None,
        "options": {"workers": 0, "out": "work/<study>"},
        "commit": "abc123",
        "device": "a machine",
        "torch": "2.13",
        "threads": 1,
        "python": "3.11",
    }


def write_lines(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_clips(folder: Path, count: int = 3, num_frames: int = 6) -> Path:
    folder.mkdir(exist_ok=True)
    for clip in range(count):
        frames = smooth_frames(num_frames, HEIGHT_PX, WIDTH_PX, seed=10 + clip)
        write_video(folder / f"clip_{clip}.mp4", frames, fps=8)
        actions = [NAMES[(clip + t) % len(NAMES)] if t else "none" for t in range(num_frames)]
        write_actions(folder / f"clip_{clip}.jsonl", actions)
    return folder
