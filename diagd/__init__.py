"""diagd: fast decoding of autoregressive video models, a diagonal of tokens at a time.

The names below are the public ones; they are imported when first used, so that `import diagd` and
`diagd --help` are instant.
"""

# ruff: noqa: F401, `__all__` is derived

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diagd.decoding.engine import Batch
    from diagd.decoding.generate_tokens import (
        DecodingEngine,
        GeneratedGrids,
        GeneratedTokens,
        generate_grids,
        generate_tokens,
        write_frames,
    )
    from diagd.decoding.sampling_options import SamplingOptions
    from diagd.decoding.schedule import DiagonalSchedule, FrameFormat, Section, TokenGrid, make_plan
    from diagd.decoding.strategies.table import Diagonal, Exact, Raster, parse_strategy
    from diagd.decoding.teacher_forcing import strategy_loss
    from diagd.families.checkpoints import load_model, save_model
    from diagd.gym import GymEnv, GymVectorEnv
    from diagd.models.guidance import GuidedModel
    from diagd.models.huggingface import HuggingFaceModel
    from diagd.pipeline.first_stage import FirstStage, WrittenPicture
    from diagd.pipeline.generator import GeneratedVideo, VideoGenerator
    from diagd.pipeline.glm_image import GeneratedPicture, GlmImage
    from diagd.pipeline.hf_generate import custom_generate

__version__ = "0.2.0"
_NAMES = {  # by the module that defines them
    "decoding.engine": ("Batch",),
    "decoding.generate_tokens": (
        *("DecodingEngine", "GeneratedGrids", "GeneratedTokens"),
        *("generate_grids", "generate_tokens", "write_frames"),
    ),
    "decoding.sampling_options": ("SamplingOptions",),
    "decoding.schedule": ("DiagonalSchedule", "FrameFormat", "Section", "TokenGrid", "make_plan"),
    "decoding.strategies.table": ("Diagonal", "Exact", "Raster", "parse_strategy"),
    "decoding.teacher_forcing": ("strategy_loss",),
    "families.checkpoints": ("load_model", "save_model"),
    "gym": ("GymEnv", "GymVectorEnv"),
    "models.guidance": ("GuidedModel",),
    "models.huggingface": ("HuggingFaceModel",),
    "pipeline.first_stage": ("FirstStage", "WrittenPicture"),
    "pipeline.generator": ("GeneratedVideo", "VideoGenerator"),
    "pipeline.glm_image": ("GeneratedPicture", "GlmImage"),
    "pipeline.hf_generate": ("custom_generate",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
# without those that need gymnasium, which may be missing
__all__ = sorted({*_MODULES} - {*_NAMES["gym"]})  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'diagd' has no attribute {name!r}")
    return getattr(importlib.import_module(f"diagd.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*_MODULES, "__version__"]
