"""Diagonal decoding inside Hugging Face `generate` (docs/use.md)."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
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
# Arguments of `generate` and fields of its config that are obeyed, here or before a callable runs:
# all others are rejected, including those that a later transformers adds.
_OBEYED = {
    *("custom_generate", "inputs", "input_ids", "attention_mask", "logits_processor", "streamer"),
    *("negative_prompt_ids", "negative_prompt_attention_mask", "guidance_scale", "use_cache"),
    *("generation_config", "max_length", "max_new_tokens", "do_sample", "temperature", "top_k"),
    *("top_p", "bos_token_id", "pad_token_id", "token_healing", "transformers_version"),
}
_HARMLESS = {"cache_implementation": ("dynamic", "static"), "disable_compile": (True,)}
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def custom_generate(
    schedule: DiagonalSchedule,
    actions: Tensor | None = None,
    context_frames: int = 1,
    valid_range: tuple[int, int] | Tensor | None = None,
    seed: int = 0,
) -> Callable[..., Tensor]:
    """Make a callable for `generate(custom_generate=...)` of transformers.

    It generates the tokens of `diagd.generate_tokens`; `do_sample`, `temperature`, `top_k`,
    `top_p`, `guidance_scale` and `negative_prompt_ids` are those of the call, and a `streamer` gets
    the tokens at the end. Any other argument that would change `generate` is a ValueError that
    names it: pictures, caches, criteria, processors, several sequences per prompt. The schedule
    sets the length: `max_new_tokens` must allow it, and avoids transformers' warning about its own
    limit; the end-of-sequence id of the model's config is ignored.

    Args:
        schedule: step of every token, and the number of frames.
        actions: (B, T, n) int64, the n conditioning tokens before each frame.
        context_frames: frames of the grid's size at the end of the prompt; 0 for text alone.
        valid_range: ids that may be sampled (see `SamplingOptions`).
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
        **inputs: Any,  # a parameter named here would be passed twice
    ) -> Tensor:
        given, has_limit = _arguments(inputs)
        length = input_ids.shape[1]
        new_tokens = schedule.grid.num_tokens + (0 if actions is None else actions[0].numel())
        with ExitStack() as ending:
            if streamer := given.get("streamer"):
                ending.callback(streamer.end)  # after an error too: its reader waits for it
            _refuse_unknown(given, generation_config, model)
            foreign = [type(p).__name__ for p in logits_processor if not isinstance(p, _UNDERSTOOD)]
            if foreign:
                raise ValueError(f"logits processors are not supported, got {foreign}")
            prompts = _unpadded(input_ids, given.get("attention_mask"), "prompts")
            if has_limit and (limit := generation_config.max_length - length) < new_tokens:
                raise ValueError(f"max_new_tokens must be at least {new_tokens}, got {limit}")
            sampling = SamplingOptions(valid_range=valid_range)
            if generation_config.do_sample:
                names = "temperature", "top_k", "top_p"  # as flags of the call, or as processors
                drawn = {n: getattr(p, n) for p in logits_processor for n in names if hasattr(p, n)}
                temperature = drawn.pop("temperature", 1.0)
                sampling = SamplingOptions(temperature, **drawn, valid_range=valid_range)
            for module in model.modules():
                if module.training:
                    ending.callback(setattr, module, "training", True)
            decoder = wrapped = HuggingFaceModel(model)  # ends training mode
            for processor in logits_processor:
                if isinstance(processor, _Guidance):
                    decoder = _guided(wrapped, prompts, processor)
                    rows = (decoder.prompts_of(p, r, len(prompts)) for r, p in enumerate(prompts))
                    taken = new_tokens + max(len(one) for row in rows for one in row)
                    if taken > decoder.max_positions:
                        raise ValueError(
                            "guidance needs prompts and frames to fit a context of "
                            f"{decoder.max_positions} tokens, got {taken}"
                        )
            frames = generate_tokens(
                decoder, prompts, schedule, actions, context_frames, sampling=sampling, seed=seed
            ).tokens.flatten(2)
            if actions is not None:
                frames = torch.cat([actions.to(frames.device), frames], dim=2)
            written = frames.flatten(1).to(input_ids.device)
            if streamer:
                for tokens in written.T.cpu():
                    streamer.put(tokens)
            return torch.cat([input_ids, written], dim=1)

    return decode


def _arguments(inputs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the arguments of `generate`'s caller, and whether they include a limit.

    A callable gets neither streamer nor assistant, and cannot tell which inputs `generate` added:
    only the frame of that call tells.
    """
    frame = inspect.currentframe()
    while frame and frame.f_code is not _GENERATE:
        frame = frame.f_back
    if frame is None:  # called by other code
        return inputs, False
    here, names = frame.f_locals, [*inspect.signature(GenerationMixin.generate).parameters][1:-1]
    has_limit = here["generation_config"].max_new_tokens or not here["has_default_max_length"]
    return {name: here[name] for name in names} | here["kwargs"], bool(has_limit)


def _refuse_unknown(
    given: Mapping[str, Any], generation_config: GenerationConfig, model: PreTrainedModel
) -> None:
    usual = generation_config._get_default_generation_params()
    usual["eos_token_id"] = model.generation_config.eos_token_id
    fields = {name: getattr(generation_config, name) for name in vars(GenerationConfig())}
    refused = [
        f"{name}={value}" if isinstance(value, int | float) else name
        for name, value in {**given, **fields}.items()
        if name not in _OBEYED and not name.startswith("_")
        # tensors cannot be compared
        if isinstance(value, Tensor)
        or value not in (None, False, [], usual.get(name), *_HARMLESS.get(name, ()))
    ]
    if refused:
        raise ValueError(f"arguments not supported by diagonal decoding: {', '.join(refused)}")


def _unpadded(ids: Tensor, mask: Tensor | None, what: str) -> list[Tensor]:
    """Return the tokens of each row (B, P) without left padding."""
    if mask is None:
        return list(ids)
    if mask.shape != ids.shape or (mask.diff() < 0).any() or not mask[:, -1].all():
        raise ValueError(f"{what} must be padded on the left only (see their attention_mask)")
    return [row[own.bool()] for row, own in zip(ids, mask, strict=True)]


def _guided(model: HuggingFaceModel, prompts: list[Tensor], processor: _Guidance) -> GuidedModel:
    given = processor.unconditional_context
    unconditional, mask = given["input_ids"], given["attention_mask"]
    if unconditional is None:
        others = [prompt[-1:] for prompt in prompts]
    else:
        others = _unpadded(unconditional, mask, "negative prompts")
    return GuidedModel(model, others, [*map(len, prompts)], processor.guidance_scale)
