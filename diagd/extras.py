"""Packages that only some commands need: what is there, and how to get what is not."""

import importlib.util

EXTRAS = {  # as in pyproject.toml, by the names of the modules
    "doom": ("vizdoom",),
    "metrics": ("torchmetrics", "matplotlib"),
    "scale": ("ray",),
    "train": ("accelerate", "matplotlib"),
    "web": ("fastapi", "uvicorn", "websockets", "PIL"),
}


def missing_modules(extra: str) -> list[str]:
    """List the modules of an extra that are not installed; nothing is imported."""
    return [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]


def require(extra: str, purpose: str) -> None:
    """Raise ValueError, saying what to install, unless an extra is there.

    Args:
        purpose: what needs it, such as `diagd play`.
    """
    if missing := missing_modules(extra):
        raise ValueError(
            f"{purpose} needs {', '.join(missing)}: pip install 'diagd[{extra}]', "
            f"or from a clone: pip install -e '.[{extra}]'"
        )
