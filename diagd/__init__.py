"""diagd: fast decoding of autoregressive video models, a diagonal of tokens at a time.

The names below are the public ones; they are imported when first used, so that `import diagd` and
`diagd --help` take no time.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diagd.decoding.generate_tokens import DecodingEngine, GeneratedTokens, generate_tokens
    from diagd.decoding.sampling_options import SamplingOptions
    from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
    from diagd.decoding.strategies.strategy import Diagonal, Exact, Raster, parse_strategy
    from diagd.families.checkpoints import load_model, save_model
    from diagd.gym import GymEnv as GymEnv  # not in __all__: gymnasium may be missing
    from diagd.gym import GymVectorEnv as GymVectorEnv
    from diagd.models.guidance import GuidedModel
    from diagd.models.huggingface import HuggingFaceModel
    from diagd.pipeline.generator import GeneratedVideo, VideoGenerator
    from diagd.pipeline.hf_generate import custom_generate

__version__ = "0.1.0"
__all__ = [
    "DecodingEngine",
    "Diagonal",
    "DiagonalSchedule",
    "Exact",
    "GeneratedTokens",
    "GeneratedVideo",
    "GuidedModel",
    "HuggingFaceModel",
    "Raster",
    "SamplingOptions",
    "TokenGrid",
    "VideoGenerator",
    "custom_generate",
    "generate_tokens",
    "load_model",
    "parse_strategy",
    "save_model",
]
_MODULES = {
    "DecodingEngine": "decoding.generate_tokens",
    "Diagonal": "decoding.strategies.strategy",
    "DiagonalSchedule": "decoding.schedule",
    "Exact": "decoding.strategies.strategy",
    "GeneratedTokens": "decoding.generate_tokens",
    "GeneratedVideo": "pipeline.generator",
    "GuidedModel": "models.guidance",
    "GymEnv": "gym",
    "GymVectorEnv": "gym",
    "HuggingFaceModel": "models.huggingface",
    "Raster": "decoding.strategies.strategy",
    "SamplingOptions": "decoding.sampling_options",
    "TokenGrid": "decoding.schedule",
    "VideoGenerator": "pipeline.generator",
    "custom_generate": "pipeline.hf_generate",
    "generate_tokens": "decoding.generate_tokens",
    "load_model": "families.checkpoints",
    "parse_strategy": "decoding.strategies.strategy",
    "save_model": "families.checkpoints",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'diagd' has no attribute {name!r}")
    module = importlib.import_module(f"diagd.{_MODULES[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return [*_MODULES, "__version__"]
