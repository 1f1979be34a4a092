"""WorldVLA (arXiv:2506.21539): a Chameleon that predicts what a robot's camera sees next.

Every frame is asked for anew, from the one before it and an action of seven numbers:

    BOS, SENTENCE, image start, height, width, rows of codes, image end,
    action start, seven bins, action end, turn end, image start, height, width -> rows of codes

So a world of two frames that reads one again: what stands before its rows is a prefix, and what
stands between the two are conditioning tokens. Only ids of this prompt are kept. Each row of codes
ends in a token, as Lumina-mGPT's, from which it was trained; `grid_height` and `grid_width` in
config.json say another size than 32 x 32 codes, which are 512 pixels.

RynnVLA-002 (arXiv:2511.17502) writes the images of two cameras a frame, with an end, a start and a
size between them. No grid of rows holds these, so it is refused.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from diagd.families.chameleon.family import (
    SIGNATURE,
    TURN_END,
    build,
    grid_of,
    size_names,
    tokenizer_of,
    visual_ids,
)
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Family, ReleasedFormat, Source
from diagd.families.words import check_known, read_words
from diagd.files import require_file
from diagd.models.config import ModelConfig

SENTENCE = "Generate the image based on the current image and the action."
_CLASS = "ChameleonXLLMXForConditionalGeneration_ck"
_BETWEEN = ("<eoss>", "<reserved10000>", "<reserved15000>", TURN_END)  # ends of image, action, turn
_NUM_BINS, _FIRST_BIN = 256, 10002
_SIDE = 32  # codes of an image of 512 px
# of LIBERO's actions: shifts and turns along three axes, and the gripper
_LOWEST = (-0.9375, -0.9375, -0.9375, -0.32571429, -0.375, -0.375, -1.0)
_HIGHEST = (0.9375, 0.9375, 0.9375, 0.375, 0.375, 0.375, 1.0)
_STILL = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)


@dataclass(frozen=True)
class RobotActions:
    """Actions of a robot arm, `move(X,Y,Z,ROLL,PITCH,YAW,GRIP)`, in the tokens of the prompt."""

    names = ("none",)
    num_tokens = 14
    num_ids = len(_BETWEEN) + 3 + _NUM_BINS  # three of image start, height and width
    combines = False

    def tokens_of(self, action: str) -> tuple[int, ...]:
        """Return what stands between two images; numbers beyond the ranges count as their ends."""
        lowest, highest = np.array(_LOWEST), np.array(_HIGHEST)
        scaled = 2 * (np.array(_numbers(action)) - lowest) / (highest - lowest + 1e-8) - 1
        edges = np.linspace(-1, 1, _NUM_BINS)
        bins = np.digitize(scaled.clip(-1, 1), edges) - 1 + len(_BETWEEN) + 3
        image_end, action_start, action_end, turn_end, *size = range(len(_BETWEEN) + 3)
        return (image_end, action_start, *bins.tolist(), action_end, turn_end, *size)

    def action_of(self, record: dict[str, Any]) -> str:
        """Read `{"action": [X, Y, Z, ROLL, PITCH, YAW, GRIP]}`, or an action in words."""
        action = record.get("action")
        if isinstance(action, list):
            action = f"move({','.join(map(str, action))})"
        if not isinstance(action, str):
            raise ValueError(f'expected {{"action": SEVEN_NUMBERS}}, got {json.dumps(record)[:60]}')
        _numbers(action)
        return action


def _numbers(action: str) -> Sequence[float]:
    if action == "none":
        return _STILL
    match = re.fullmatch(r"move\((.*)\)", action)
    try:
        numbers = tuple(map(float, match[1].split(","))) if match else ()
    except ValueError:
        numbers = ()
    if len(numbers) != len(_STILL) or not all(map(math.isfinite, numbers)):
        raise ValueError(
            f"unknown action {action!r}, expected none or move(X,Y,Z,ROLL,PITCH,YAW,GRIP)"
        )
    return numbers


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    if any(name.startswith("action_head.") for name in source.tensors):
        raise ValueError(
            "RynnVLA-002 writes images of two cameras a frame, and only models of one camera are "
            "known here"
        )
    vocabulary, folder = source.side["vocabulary_map"], source.path.parent
    height, width = grid_of(source.side, _SIDE)
    require_file(folder / "tokenizer.json", "text tokenizer")
    words = read_words(folder)
    said = words(SENTENCE, add_special_tokens=False).input_ids
    check_known(words, [words.bos_token_id, *said], vocabulary)
    size = [vocabulary[name] for name in size_names(height, width)]
    bins = [vocabulary[f"<reserved{_FIRST_BIN + number}>"] for number in range(_NUM_BINS)]
    prefix = [words.bos_token_id, *said, *size]
    return build(
        source,
        visual_ids(vocabulary, has_row_ends=True),
        [*(vocabulary[name] for name in _BETWEEN), *size, *bins],
        prefix,
        grid_height=height,
        grid_width=width + 1,
        num_action_tokens=RobotActions.num_tokens,
        prefix_length=len(prefix),
    )


def _is_one(source: Source) -> bool:
    return any(str(name).startswith(_CLASS) for name in source.side.get("architectures") or [])


WORLDVLA = Family(
    name="WorldVLA",
    licence="code: Apache-2.0; weights: Chameleon Research License: research only",
    released=ReleasedFormat(
        files=("*.index.json", "model.safetensors"),
        config_fields=frozenset({"vocabulary_map"}),
        signature=SIGNATURE,
        convert=_convert,
        fits=_is_one,
    ),
    tokenizer=tokenizer_of,
    actions=RobotActions(),
    defaults=lambda found: GenerationDefaults(
        fps=20,
        context_frames=1,
        temperature=0.0,
        top_p=None,
        remember=2,
        keep_frames=1,
        row_ends=True,
    ),
)
