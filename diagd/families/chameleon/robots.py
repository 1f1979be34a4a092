"""WorldVLA (arXiv:2506.21539), RynnVLA-002 (2511.17502): what a robot's cameras see next.

Every frame is asked for anew, from the one before it and an action of seven numbers:

    BOS, SENTENCE, image start, height, width, rows of codes, image end,
    action start, seven bins, action end, turn end, image start, height, width -> rows of codes

So a world of two frames that reads one again: what stands before its rows is a prefix, and what
stands between the two are conditioning tokens. Only ids of this prompt are kept. Each row of codes
ends in a token, as Lumina-mGPT's, from which it was trained; `grid_height` and `grid_width` in
config.json say another size than 32 x 32 codes, which are 512 pixels.

RynnVLA-002 sees and writes the images of two cameras, the third-person one and the one at the
wrist, and is asked in another sentence:

    BOS, SENTENCE, image, image, action, turn end, image start, height, width -> rows of codes,
    image end, image start, height, width -> rows of codes

So the rows of both are one grid, with a seam of four tokens. Its makers train it with the sentence
below; their code of evaluation still has WorldVLA's. `sentence` in config.json says another.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from diagd.data.vectors import VectorActions
from diagd.families.chameleon.images import (
    DEFAULT,
    IMAGE_END,
    SIGNATURE,
    TURN_END,
    build_decoder,
    grid_of,
    pixel_tokenizer,
    size_names,
    visual_ids,
)
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Family, Source
from diagd.models.config import ModelConfig
from diagd.tokenizers.text import read_words, text_ids

SENTENCE = "Generate the image based on the current image and the action."
SENTENCE_OF_TWO = (
    "Generate the next image based on the provided sequence of historical images and corresponding "
    "actions."
)
_CLASS = "ChameleonXLLMXForConditionalGeneration_ck"
_ACTIONS_OF_TWO = "action_head.output_projection.model.fc2.bias"  # as many as an action has
# ends of image, action, turn
_BETWEEN = (IMAGE_END, "<reserved10000>", "<reserved15000>", TURN_END)
_NUM_BINS, _FIRST_BIN = 256, 10002
# of LIBERO's actions: shifts and turns along three axes, and the gripper
_LOWEST = (-0.9375, -0.9375, -0.9375, -0.32571429, -0.375, -0.375, -1.0)
_HIGHEST = (0.9375, 0.9375, 0.9375, 0.375, 0.375, 0.375, 1.0)
_STILL = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)


_VECTORS = VectorActions(
    axes=("X", "Y", "Z", "ROLL", "PITCH", "YAW", "GRIP"),
    lowest=_LOWEST,
    highest=_HIGHEST,
    bins=_NUM_BINS,
    rest=_STILL,
)


@dataclass(frozen=True)
class RobotActions:
    """Vectors of a robot arm, `move(X,Y,Z,ROLL,PITCH,YAW,GRIP)`, in the tokens of the prompt."""

    num_cameras: int = 1

    names = _VECTORS.names
    num_ids = len(_BETWEEN) + 3 + _NUM_BINS  # three of image start, height and width
    combines = True

    @property
    def num_tokens(self) -> int:
        return 14 + self.num_seam_tokens

    @property
    def num_seam_tokens(self) -> int:
        """Tokens between the images of two cameras: image end, image start, height, width."""
        return 4 * (self.num_cameras - 1)

    def tokens_of(self, action: str) -> tuple[int, ...]:
        """Return what stands between two frames, then within one; numbers are clipped."""
        lowest, highest = np.array(_LOWEST), np.array(_HIGHEST)
        scaled = 2 * (_VECTORS.numbers_of(action) - lowest) / (highest - lowest + 1e-8) - 1
        edges = np.linspace(-1, 1, _NUM_BINS)
        bins = np.digitize(scaled.clip(-1, 1), edges) - 1 + len(_BETWEEN) + 3
        image_end, action_start, action_end, turn_end, *size = range(len(_BETWEEN) + 3)
        seam = (image_end, *size)[: self.num_seam_tokens]
        return (image_end, action_start, *bins.tolist(), action_end, turn_end, *size, *seam)

    def action_of(self, record: dict[str, Any]) -> str:
        """Read `{"action": WORDS, a list of seven numbers, or {AXIS: NUMBER}}`."""
        return _VECTORS.action_of(record)


def _convert_robot(
    source: Source, codec: RobotActions, sentence: str
) -> tuple[ModelConfig, dict[str, Tensor]]:
    length = len(source.tensors.get(_ACTIONS_OF_TWO, _STILL))
    if length != len(_STILL):
        raise ValueError(f"actions must be LIBERO's {len(_STILL)} numbers, got {length}")
    vocabulary, folder = source.side["vocabulary_map"], source.path.parent
    height, width = grid_of(source.side, DEFAULT.grid_height)
    said = text_ids(read_words(folder, source.side), source.side.get("sentence", sentence))
    size = [vocabulary[name] for name in size_names(height, width)]
    bins = [vocabulary[f"<reserved{_FIRST_BIN + number}>"] for number in range(_NUM_BINS)]
    prefix = [*said, *size]
    config, weights = build_decoder(
        source,
        visual_ids(vocabulary, has_row_ends=True),
        [*(vocabulary[name] for name in _BETWEEN), *size, *bins],
        prefix,
        grid_height=codec.num_cameras * height,
        grid_width=width + 1,
        num_action_tokens=codec.num_tokens,
        num_seam_tokens=codec.num_seam_tokens,
        prefix_length=len(prefix),
    )
    # positions are relative, and its makers' loop goes on past those that a config names
    taken = len(prefix) + 2 * (config.tokens_per_frame + codec.num_tokens)
    return replace(config, max_positions=max(config.max_positions, taken)), weights


_ROBOT_DEFAULTS = GenerationDefaults(
    fps=20, context_frames=1, temperature=0.0, top_p=None, remember=2, keep_frames=1, row_ends=True
)
WORLDVLA = Family(
    name="WorldVLA",
    licence="code: Apache-2.0; weights: Chameleon Research License: research only",
    signature=SIGNATURE,
    convert=partial(_convert_robot, codec=RobotActions(), sentence=SENTENCE),
    fits=lambda source: _CLASS in str(source.side.get("architectures")),
    tokenizer=pixel_tokenizer,
    actions=RobotActions(),
    defaults=lambda found: _ROBOT_DEFAULTS,
)
RYNNVLA = replace(
    WORLDVLA,
    name="RynnVLA-002",
    signature=(_ACTIONS_OF_TWO,),
    convert=partial(_convert_robot, codec=RobotActions(2), sentence=SENTENCE_OF_TWO),
    fits=lambda source: True,
    actions=RobotActions(2),
)
