"""MineWorld checkpoints, and other LLaMAs over visual tokens with action tokens between frames.

The weights are a plain Hugging Face LLaMA. Its YAML config, or a Hugging Face config.json, has the
sizes; without one, they are those of the released models.

An action is a set of buttons and a camera turn, written `forward+jump+camera(-5,12.5)`: degrees of
pitch (down is positive), then yaw (right is positive). Source: MineWorld's token layout
(arXiv:2504.08388), VPT's recordings and its mu-law camera bins (arXiv:2206.11795).
"""

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from diagd.data.actions import action_in, parse_call
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Checkpoint, Family, Source
from diagd.families.presets import MINEWORLD as PRESETS
from diagd.families.weights import llama_fields
from diagd.files import read_json_object
from diagd.models.config import ModelConfig
from diagd.tokenizers.vq import VQTokenizer, load_vq_model
from diagd.weight_files import read_tensors, tensors_under

# Local ids 0 to 22. The last three have ids but no slot: the model never sees them.
BUTTONS = (
    *("use", "attack", "forward", "back", "left", "right", "jump", "sneak", "sprint", "drop"),
    *("swapHands", "pickItem", "inventory", "ESC"),
    *(f"hotbar.{number}" for number in range(1, 10)),
)
NUM_BINS = 21  # of the camera, per axis
FIRST_PITCH = len(BUTTONS)
FIRST_YAW = FIRST_PITCH + NUM_BINS
BEGIN, NULL, END = range(FIRST_YAW + NUM_BINS, FIRST_YAW + NUM_BINS + 3)
MAX_DEGREES = 90.0
MU = 11.4887
DEGREES_PER_PIXEL = 360 / 2400  # of mouse movement
LOOK_DEGREES = 5.0  # turn per frame of `look_left`

# Tokens 3 to 9 of an action give the pressed button of each group. For the hotbar the lowest
# pressed number counts; in other groups two buttons cancel each other.
HOTBAR = tuple(name for name in BUTTONS if name.startswith("hotbar."))
GROUPS = (
    HOTBAR,
    *(("forward", "back"), ("left", "right"), ("sprint", "sneak"), ("use", "attack")),
    *(("jump",), ("drop", "pickItem")),
)
SEEN_BUTTONS = tuple(name for group in (*GROUPS[1:], HOTBAR) for name in group)
LOOKS = {
    **{"look_left": (0.0, -LOOK_DEGREES), "look_right": (0.0, LOOK_DEGREES)},
    **{"look_up": (-LOOK_DEGREES, 0.0), "look_down": (LOOK_DEGREES, 0.0)},
}

VPT_KEYS = {
    **{"w": "forward", "s": "back", "a": "left", "d": "right", "space": "jump"},
    **{"left.shift": "sneak", "left.control": "sprint", "q": "drop", "e": "inventory"},
    **{"f": "swapHands", "escape": "ESC"},
    **{str(number): f"hotbar.{number}" for number in range(1, 10)},
}
VPT_MOUSE = {0: "attack", 1: "use", 2: "pickItem"}
VPT_CONFLICTS = (
    *(("forward", "back"), ("left", "right"), ("jump", "sneak")),
    *(("sprint", "sneak"), ("attack", "use")),
)

_JOIN = re.compile(r"\+(?![^()]*\))")  # a plus outside brackets


@dataclass(frozen=True)
class MinecraftActions:
    """MineWorld's actions as an `ActionCodec`.

    Words are the buttons (except `inventory`, `swapHands` and `ESC`, which have no token),
    `camera(PITCH,YAW)` in degrees, `look_left` and the like for 5 degrees, and `none`. Camera words
    add up. The last two local ids are unused.
    """

    names = ("none", *SEEN_BUTTONS, *LOOKS)
    num_tokens = 3 + len(GROUPS) + 1
    num_ids = END + 1 + 2
    combines = True

    def tokens_of(self, action: str) -> tuple[int, ...]:
        """Return the local ids: begin, pitch, yaw, seven groups of buttons, end."""
        pressed, pitch, yaw = _parse(action)
        camera = FIRST_PITCH + camera_bin(pitch), FIRST_YAW + camera_bin(yaw)
        return (BEGIN, *camera, *(_group_token(group, pressed) for group in GROUPS), END)

    def action_of(self, record: dict[str, Any]) -> str:
        """Parse one line of an action file, in any of three forms.

        - ours: `{"action": "forward+camera(0,10)"}`;
        - a VPT recording: `{"keyboard": {"keys": [...]}, "mouse": {"dx", "dy", "buttons"}, ...}`.
          Unknown keys and further fields are ignored, opposite buttons dropped, and degrees
          truncated toward zero, as MineWorld does;
        - an action of the MineRL environment: `{"forward": 1, ..., "camera": [PITCH, YAW]}`.
        """
        if "action" in record:
            return action_in(record, self, "WORDS")
        if "keyboard" in record and "mouse" in record:
            return _vpt_action(record["keyboard"], record["mouse"])
        if record:
            return _environment_action(record)
        raise ValueError("expected an action, a VPT recording or button names, got {}")


def camera_bin(degrees: float) -> int:
    """Return the bin of a turn, 0 to 20 (10 for none): mu-law, clipped at 90 degrees."""
    share = min(max(degrees / MAX_DEGREES, -1.0), 1.0)
    curved = math.copysign(math.log1p(MU * abs(share)) / math.log1p(MU), share)
    half = NUM_BINS // 2
    return round(curved * half + half)


def _group_token(group: Sequence[str], pressed: Iterable[str]) -> int:
    held = [name for name in group if name in pressed]
    alone = len(held) == 1 or (held and group is HOTBAR)
    return BUTTONS.index(held[0]) if alone else NULL


def _parse(action: str) -> tuple[set[str], float, float]:
    pressed, pitch, yaw = set[str](), 0.0, 0.0
    for word in (part.strip() for part in _JOIN.split(action)):
        if word in SEEN_BUTTONS:
            pressed.add(word)
        elif word != "none":
            turn = LOOKS.get(word) or parse_call(word, "camera", 2)
            if turn is None and word.startswith("camera"):
                raise ValueError(f"expected camera(PITCH,YAW) in degrees, got {word!r}")
            if turn is None:
                known = ", ".join((*MinecraftActions.names, "camera(PITCH,YAW)"))
                raise ValueError(f"unknown action {word!r}, expected words joined by + of: {known}")
            pitch, yaw = pitch + turn[0], yaw + turn[1]
    return pressed, pitch, yaw


def _words(pressed: Iterable[str], pitch: float, yaw: float) -> str:
    words = [name for name in SEEN_BUTTONS if name in pressed]
    if pitch or yaw:
        turn = (repr(float(degrees)).removesuffix(".0") for degrees in (pitch, yaw))
        words.append(f"camera({','.join(turn)})")
    return "+".join(words) or "none"


def _vpt_action(keyboard: Any, mouse: Any) -> str:
    keys = keyboard.get("keys") if isinstance(keyboard, dict) else None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f'expected "keyboard": {{"keys": [NAME, ...]}}, got {_short(keyboard)}')
    buttons = mouse.get("buttons") if isinstance(mouse, dict) else None
    if not isinstance(buttons, list) or not _numbers([mouse.get("dx"), mouse.get("dy"), *buttons]):
        raise ValueError(
            f'expected "mouse": {{"dx": PX, "dy": PX, "buttons": [0, 1, 2]}}, got {_short(mouse)}'
        )
    names = [VPT_KEYS.get(key.removeprefix("key.keyboard.")) for key in keys]
    pressed = {name for name in (*names, *map(VPT_MOUSE.get, buttons)) if name}
    for pair in VPT_CONFLICTS:
        if pressed.issuperset(pair):
            pressed -= set(pair)
    return _words(pressed, *(int(mouse[axis] * DEGREES_PER_PIXEL) for axis in ("dy", "dx")))


def _environment_action(record: Mapping[str, Any]) -> str:
    if unknown := [name for name in record if name not in (*BUTTONS, "camera")]:
        raise ValueError(
            f"unknown button {unknown[0]!r}, expected camera or one of: {', '.join(BUTTONS)}"
        )
    camera = record.get("camera", [0, 0])
    if not isinstance(camera, list) or len(camera) != 2 or not _numbers(camera):
        raise ValueError(f'expected "camera": [PITCH, YAW] in degrees, got {_short(camera)}')
    buttons = {name: value for name, value in record.items() if name != "camera"}
    for name, value in buttons.items():
        if value not in (0, 1):
            raise ValueError(f"button {name} must be 0 or 1, got {_short(value)}")
    return _words([name for name, value in buttons.items() if value], *camera)


def _numbers(values: Iterable[Any]) -> bool:
    largest = sys.float_info.max  # JSON in Python has NaN, and unlimited integers
    return all(isinstance(v, int | float) and -largest <= v <= largest for v in values)


def _short(value: Any) -> str:
    return json.dumps(value)[:60]


_TOKENIZER, _TRANSFORMER = "tokenizer.", "transformer."  # prefixes of a main checkpoint
_EMBEDDING = "model.embed_tokens.weight"


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    weights = {
        name.removeprefix(_TRANSFORMER): tensor
        for name, tensor in source.tensors.items()
        if not name.startswith(_TOKENIZER)
    }
    side = _yaml_section(source.side, "transformer_config") or source.side  # or LlamaConfig's
    released, ours = PRESETS["mc-ar-300m"], MinecraftActions
    num_queries = len(weights["model.layers.0.self_attn.q_proj.weight"])
    height = side.get("grid_height", released.grid_height)
    width = side.get("grid_width", released.grid_width)
    actions = side.get("num_action_tokens", ours.num_tokens)
    usual = {"num_attention_heads": max(num_queries // released.head_dim, 1)}
    usual |= {"max_position_embeddings": released.frames_held * (height * width + actions)}
    config = ModelConfig(
        **llama_fields(weights, usual | dict(side), released),
        image_vocab_size=int(side.get("image_vocab_size", len(weights[_EMBEDDING]) - ours.num_ids)),
        grid_height=height,
        grid_width=width,
        num_action_tokens=actions,
        tie_embeddings="lm_head.weight" not in weights,
    )
    return config, weights


def _yaml_section(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    for key in ("model", "params", name, "params"):
        fields = fields.get(key, {})
    return fields


def _tokenizer(found: Checkpoint) -> VQTokenizer:
    """Build the tokenizer named in the YAML, from the main checkpoint or its own file."""
    config, tensors = _tokenizer_file(found, "config_path"), found.source.tensors
    is_inside = any(name.startswith(_TOKENIZER) for name in tensors)
    weights = tensors if is_inside else _tokenizer_file(found, "ckpt_path")
    return mineworld_tokenizer(config, weights)


def _tokenizer_file(found: Checkpoint, field: str) -> Path:
    """Find a file that the YAML names relative to the authors' root, `checkpoints/` or `vae/`."""
    name, folder = None, found.path.parent
    with suppress(AttributeError):  # of a malformed section
        name = _yaml_section(found.source.side, "tokenizer_config").get(field)
    if not isinstance(name, str):
        raise ValueError(
            f"{found.path}: tokenizer not found: give its folder as --tokenizer, or "
            f"its {field} in the YAML"
        )
    beside = folder / "vae" / Path(name).name
    named = (root / name for root in (folder, folder.absolute().parent))
    return next(filter(Path.is_file, named), beside)


def mineworld_tokenizer(config: Path, weights: Path | Mapping[str, Tensor]) -> VQTokenizer:
    """Load the VQ-VAE of a main checkpoint, under `tokenizer.model.`, or of `vae.ckpt`."""
    fields = read_json_object(config)
    tensors = read_tensors(weights) if isinstance(weights, Path) else weights
    tensors = tensors_under(_TOKENIZER, tensors) or tensors
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    where = weights if isinstance(weights, Path) else "the tokenizer"
    return VQTokenizer(load_vq_model(fields, config, plain, where), pixel_rounding="down")


MINEWORLD = Family(
    name="MineWorld",
    licence="code: MIT; weights: taken down in May 2025",
    files=("*.ckpt", "model.safetensors", "pytorch_model.bin"),
    config_fields=frozenset({"model", "model_type", "num_attention_heads"}),
    signature=(_EMBEDDING, _TRANSFORMER + _EMBEDDING),
    convert=_convert,
    tokenizer=_tokenizer,
    actions=MinecraftActions(),
    defaults=lambda found: GenerationDefaults(fps=20, context_frames=1, num_frames=15, top_p=0.8),
)
