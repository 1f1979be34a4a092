"""Diagonal decoding inside Hugging Face `generate`.

model.generate(prompt, custom_generate=diagd.custom_generate(schedule), do_sample=False)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from diagd.decoding.generate import generate_tokens
from diagd.decoding.plan import RowStart
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import DiagonalSchedule
from diagd.models.huggingface import HuggingFaceModel

_UNDERSTOOD = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)


def custom_generate(
    schedule: DiagonalSchedule,
    actions: Tensor | None = None,
    context_frames: int = 0,
    row_start: RowStart = "temporal",
    valid_range: tuple[int, int] | Tensor | None = None,
    seed: int = 0,
) -> Callable[..., Tensor]:
    """Make the callable that `generate(custom_generate=...)` takes.

    `do_sample`, `temperature`, `top_k` and `top_p` are those of the call's generation config; any
    other logits processor is an error, and so is more than one sequence a prompt. The schedule says
    how much is generated, so `max_new_tokens` plays no part.

    Returns:
        A callable that returns (B, P + T * (n + height * width)) int64, the prompt first.
    """

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        generation_config: GenerationConfig,
        **_: Any,
    ) -> Tensor:
        foreign = [type(p).__name__ for p in logits_processor if not isinstance(p, _UNDERSTOOD)]
        if foreign:
            raise ValueError(f"diagonal decoding knows no logits processors, got {foreign}")
        for name in ("num_beams", "num_return_sequences"):
            if getattr(generation_config, name) not in (None, 1):
                raise ValueError(f"{name} must be 1, got {getattr(generation_config, name)}")
        sampling = SamplingOptions(valid_range=valid_range)
        if generation_config.do_sample:
            top_k, top_p = generation_config.top_k, generation_config.top_p
            temperature = generation_config.temperature
            sampling = SamplingOptions(
                1.0 if temperature is None else temperature, top_k or None, top_p, valid_range
            )
        out = generate_tokens(
            HuggingFaceModel(model),
            input_ids,
            schedule,
            actions,
            context_frames,
            row_start,
            sampling,
            seed,
        )
        frames = out.tokens.flatten(2)
        if actions is not None:
            frames = torch.cat([actions.to(frames.device), frames], dim=2)
        return torch.cat([input_ids, frames.flatten(1)], dim=1)

    return decode
