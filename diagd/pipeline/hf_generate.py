"""Diagonal decoding inside Hugging Face `generate` (docs/use.md)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from diagd.decoding.generate_tokens import generate_tokens
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import DiagonalSchedule
from diagd.models.guidance import GuidedModel
from diagd.models.huggingface import HuggingFaceModel

_Guidance = UnbatchedClassifierFreeGuidanceLogitsProcessor
_UNDERSTOOD = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, _Guidance)


def custom_generate(
    schedule: DiagonalSchedule,
    actions: Tensor | None = None,
    context_frames: int = 1,
    valid_range: tuple[int, int] | Tensor | None = None,
    seed: int = 0,
) -> Callable[..., Tensor]:
    """Make a callable for `generate(custom_generate=...)` of transformers.

    It writes what `diagd.generate_tokens` writes; `do_sample`, `temperature`, `top_k`, `top_p`,
    `guidance_scale` and `negative_prompt_ids` are those of the call. Any other logits processor is
    an error, and so is more than one sequence a prompt. The schedule says how much is generated:
    `max_new_tokens` has to allow it, and keeps transformers from warning of its own limit.

    Args:
        schedule: which token is written when, and how many frames.
        actions: (B, T, n) int64, the n conditioning tokens that stand before each frame.
        context_frames: frames of the grid's size at the prompt's end; 0 for a prompt of text alone.
        valid_range: ids that may be written (see `SamplingOptions`).
        seed: of the draws, 64 bits; batch row b uses seed + b.

    Returns:
        A callable that returns (B, P + T * (n + height * width)) int64, the prompt first.
    """
    if not isinstance(schedule, DiagonalSchedule):
        raise ValueError(f"schedule must be a DiagonalSchedule, got {schedule!r}")

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        generation_config: GenerationConfig,
        **inputs: Any,  # a parameter that is named here is passed twice
    ) -> Tensor:
        foreign = [type(p).__name__ for p in logits_processor if not isinstance(p, _UNDERSTOOD)]
        if foreign:
            raise ValueError(f"diagonal decoding knows no logits processors, got {foreign}")
        if (mask := inputs.get("attention_mask")) is not None and not mask.all():
            raise ValueError("prompts must be of one length, got one with masked tokens")
        new_tokens = schedule.grid.num_tokens + (0 if actions is None else actions[0].numel())
        if (given := generation_config.max_new_tokens or new_tokens) < new_tokens:
            raise ValueError(f"the schedule writes {new_tokens} tokens, got max_new_tokens={given}")
        only = {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
        for name, value in only.items():
            if getattr(generation_config, name) not in (None, value):
                raise ValueError(f"{name} must be {value}, got {getattr(generation_config, name)}")
        sampling = SamplingOptions(valid_range=valid_range)
        if generation_config.do_sample:
            names = "temperature", "top_k", "top_p"  # of the call's flags, or passed as processors
            drawn = {n: getattr(p, n) for p in logits_processor for n in names if hasattr(p, n)}
            temperature = drawn.pop("temperature", 1.0)
            sampling = SamplingOptions(temperature, **drawn, valid_range=valid_range)
        in_training = [module for module in model.modules() if module.training]
        try:
            decoder = wrapped = HuggingFaceModel(model)  # which ends training mode
            for processor in logits_processor:
                if isinstance(processor, _Guidance):
                    decoder = _guided(wrapped, input_ids, processor)
                    if (length := input_ids.shape[1] + new_tokens) > decoder.max_positions:
                        raise ValueError(
                            "guidance needs prompt and frames in one context of "
                            f"{decoder.max_positions} tokens, got {length}"
                        )
            frames = generate_tokens(
                decoder, input_ids, schedule, actions, context_frames, sampling=sampling, seed=seed
            ).tokens.flatten(2)
        finally:
            for module in in_training:
                module.training = True
        if actions is not None:
            frames = torch.cat([actions.to(frames.device), frames], dim=2)
        return torch.cat([input_ids, frames.flatten(1)], dim=1)

    return decode


def _guided(model: HuggingFaceModel, prompt: Tensor, processor: _Guidance) -> GuidedModel:
    given = processor.unconditional_context
    unconditional, mask = given["input_ids"], given["attention_mask"]
    if mask is not None and not mask.all():
        raise ValueError("negative prompts must be of one length, got one with masked tokens")
    if unconditional is None:
        unconditional = prompt[:, -1:]
    return GuidedModel(model, unconditional, prompt.shape[1], processor.guidance_scale)
