"""Where a number comes from: commit, machine, versions. Every result file carries these."""

import hashlib
import os
import platform
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).resolve().parent.parent
_MODEL_SUFFIXES = (".safetensors", ".json", ".yaml", ".pt", ".pth", ".ckpt", ".jit")


def provenance(device: torch.device) -> dict[str, Any]:
    """Return commit, device, torch version and threads, ready for a JSON file."""
    on_cuda = device.type == "cuda"
    return {
        "commit": git_commit(),
        "device": torch.cuda.get_device_name(device) if on_cuda else cpu_name(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }


def settings_of(options: Any) -> dict[str, str]:
    """Spell the fields of a script's options, a dataclass, without those that are paths.

    Where files lay on one machine says nothing about what was measured.
    """
    values = ((field.name, getattr(options, field.name)) for field in fields(options))
    return {name: str(value) for name, value in values if not isinstance(value, Path)}


def git_commit(root: Path = _ROOT) -> str | None:
    """Return the commit of a checkout, with `-dirty` where files differ; None outside of one."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    except FileNotFoundError:  # no git here
        return None
    return done.stdout.strip() or None


def cpu_name() -> str:
    """Return the processor's name and the number of its cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def fingerprint(model: Path) -> str:
    """Return 12 hex digits that stand for a model: SHA-256 over its file, or the files of a folder.

    Of a folder, weights and configs count.
    """
    digest = hashlib.sha256()
    for path in [model] if model.is_file() else sorted(model.rglob("*")):
        if path == model or (path.suffix in _MODEL_SUFFIXES and path.is_file()):
            digest.update(str(path.relative_to(model)).encode() + b"\0")
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def clip_fingerprint(video: Path) -> str:
    """Return hex digits that stand for a clip: its file, and its actions if they lie beside it."""
    parts = (video, video.with_suffix(".jsonl"))
    return "-".join(fingerprint(part) for part in parts if part.is_file())
