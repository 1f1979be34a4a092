"""diagd: fast decoding of autoregressive video models, a diagonal of tokens at a time.

The names below are the public ones; they are imported when first used, so that `import diagd` and
`diagd --help` take no time.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diagd.decoding.engine import DiagonalEngine
    from diagd.decoding.exact import ExactEngine, ExactOptions
    from diagd.decoding.generate import GeneratedTokens, generate_tokens
    from diagd.decoding.sampling import SamplingOptions
    from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
    from diagd.families.checkpoints import load_model
    from diagd.families.own_format import save_model
    from diagd.models.guidance import GuidedModel
    from diagd.models.huggingface import HuggingFaceModel
    from diagd.pipeline.generator import VideoGenerator
    from diagd.pipeline.hf_generate import custom_generate

__version__ = "0.1.0"
__all__ = [
    "DiagonalEngine",
    "DiagonalSchedule",
    "ExactEngine",
    "ExactOptions",
    "GeneratedTokens",
    "GuidedModel",
    "HuggingFaceModel",
    "SamplingOptions",
    "TokenGrid",
    "VideoGenerator",
    "custom_generate",
    "generate_tokens",
    "load_model",
    "save_model",
]
_MODULES = {
    "DiagonalEngine": "decoding.engine",
    "DiagonalSchedule": "decoding.schedule",
    "ExactEngine": "decoding.exact",
    "ExactOptions": "decoding.exact",
    "GeneratedTokens": "decoding.generate",
    "GuidedModel": "models.guidance",
    "HuggingFaceModel": "models.huggingface",
    "SamplingOptions": "decoding.sampling",
    "TokenGrid": "decoding.schedule",
    "VideoGenerator": "pipeline.generator",
    "custom_generate": "pipeline.hf_generate",
    "generate_tokens": "decoding.generate",
    "load_model": "families.checkpoints",
    "save_model": "families.own_format",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'diagd' has no attribute {name!r}")
    module = importlib.import_module(f"diagd.{_MODULES[name]}")
    return getattr(module, name)
