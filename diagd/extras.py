"""Optional packages: which are installed, and how to install the others."""

import importlib.util
from collections.abc import Iterable

EXTRAS = {  # module names, as in pyproject.toml
    "doom": ("vizdoom",),
    "gym": ("gymnasium",),
    "robots": ("pyarrow",),
    "web": (
        *("fastapi", "starlette", "uvicorn", "websockets"),
        *("prometheus_client", "python_multipart"),
    ),
    "metrics": ("torchmetrics", "matplotlib"),
    "scale": ("ray",),
    "train": ("accelerate", "matplotlib"),
    "lora": ("peft",),
    "webgpu": ("wgpu",),
}


def missing_modules(names: Iterable[str]) -> list[str]:
    """Return those modules that are not installed, without importing any."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def require(purpose: str, *modules: str) -> None:
    """Raise ValueError, with the install command, unless the modules of an extra are installed."""
    if missing := missing_modules(modules):
        extra = next(name for name, brought in EXTRAS.items() if set(missing) <= set(brought))
        raise ValueError(
            f"{purpose} needs {', '.join(missing)}: pip install -e '.[{extra}]' in a clone of diagd"
        )
