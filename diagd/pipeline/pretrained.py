"""What a video generator is made of, read from disk: model, tokenizer, actions, habits.

A folder of ours holds config.json and model.safetensors, `tokenizer/`, `actions.json` and, where
the family has its own, `habits.json`. A released checkpoint is read as it is; what it does not hold
(Cosmos' tokenizer, MineWorld's) is named by the user.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from diagd.data.actions import ActionCodec, ActionVocabulary
from diagd.decoding.sampling import SamplingOptions
from diagd.families.checkpoints import FoundModel, build_model, find_model, model_path
from diagd.families.mineworld.actions import MinecraftActions
from diagd.families.tokenizer_loading import load_tokenizer
from diagd.families.wham.actions import WHAMActions
from diagd.families.wham.tokenizer import WHAMTokenizer, wham_tokenizer_from_weights
from diagd.families.wham.weights import frame_size_px, tokenizer_spec
from diagd.files import write_text
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.tokenizers.vq import VideoTokenizer, VQTokenizer

TOKENIZER_FOLDER, ACTIONS_FILE, HABITS_FILE = "tokenizer", "actions.json", "habits.json"
CODECS: dict[str, ActionCodec] = {"WHAM": WHAMActions(), "MineWorld": MinecraftActions()}


@dataclass(frozen=True)
class Habits:
    """How the makers of a model use it; every flag of `diagd generate` can say otherwise.

    Attributes:
        fps: frames a second of its videos.
        context_frames: frames of the prompt that it sees.
        num_frames: frames to generate.
        row_lag: the paper's choice of k for it.
        overlap: whether a frame starts row_lag * height steps after the one before.
        temperature, top_p, exclusive_top_p: how tokens are drawn (see `SamplingOptions`).
        keep_frames: frames that stay when the context is full; None: half of what it holds.
        first_id: lowest visual id at the first place of a frame.
    """

    fps: float = 8.75
    context_frames: int = 4
    num_frames: int = 16
    row_lag: int = 1
    overlap: bool = False
    temperature: float = 1.0
    top_p: float | None = 0.9
    exclusive_top_p: bool = False
    keep_frames: int | None = None
    first_id: int = 0

    def sampling(
        self, options: SamplingOptions | None, valid_range: tuple[int, int] | Tensor
    ) -> SamplingOptions:
        """Return how tokens are drawn: as asked for, or by habit; in the range, unless one is."""
        options = options or SamplingOptions(self.temperature, top_p=self.top_p)
        if options.valid_range is not None:
            return options
        return replace(options, valid_range=valid_range, exclusive_top_p=self.exclusive_top_p)


@dataclass(frozen=True)
class Parts:
    """The parts of a world model; `vocabulary` is None for a model without actions."""

    family: str
    model: Transformer
    tokenizer: VideoTokenizer
    vocabulary: ActionCodec | None
    habits: Habits


def load_parts(
    name_or_path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> Parts:
    """Load a checkpoint with its tokenizer and actions, or a bundled model.

    Args:
        config: a config file to read instead of the one beside the weights.
        tokenizer: a tokenizer folder to use instead of the checkpoint's own. TorchScript
            (`encoder.jit`, `decoder.jit`) is loaded, and so run, only from a folder named here.

    Raises:
        FileNotFoundError, ValueError: something is missing or damaged (named), or does not fit.
    """
    found = find_model(name_or_path, config)
    folder = model_path(name_or_path)
    eyes = _tokenizer(found, folder, tokenizer)
    if eyes.codebook_size != found.config.image_vocab_size:
        raise ValueError(
            f"{folder}: the model has {found.config.image_vocab_size} visual ids, "
            f"its tokenizer {eyes.codebook_size} codes"
        )
    vocabulary = _vocabulary(found, folder)
    habits = _habits(found, folder)
    return Parts(
        found.family, build_model(found, device, dtype), eyes.to(device), vocabulary, habits
    )


def save_parts(found: FoundModel, target: Path, tokenizer: Path | None) -> list[str]:
    """Write what belongs to a released checkpoint besides its weights; returns the names.

    Raises:
        FileNotFoundError, ValueError: the tokenizer is missing, damaged, or does not fit.
    """
    written: dict[str, str] = {}
    if found.family != "Cosmos":  # whose TorchScript stays where the user put it
        eyes = _tokenizer(found, found.path.parent, tokenizer)
        assert isinstance(eyes, VQTokenizer | WHAMTokenizer)
        exact = {"dtype": torch.float32} if isinstance(eyes, VQTokenizer) else {}
        eyes.save_pretrained(target / TOKENIZER_FOLDER, **exact)
        written[ACTIONS_FILE] = json.dumps({"kind": found.family})
    written[HABITS_FILE] = json.dumps(asdict(_habits(found, found.path.parent)))
    for name, text in written.items():
        write_text(target / name, text + "\n")
    return [*written, *([f"{TOKENIZER_FOLDER}/"] if found.family != "Cosmos" else [])]


def _tokenizer(found: FoundModel, folder: Path, given: str | Path | None) -> VideoTokenizer:
    if given is not None:
        return load_tokenizer(given, allow_torchscript=True)
    if found.family == "WHAM":
        assert found.source is not None
        head_size = int(found.source.side.get("vq_head_size", 0)) or int(
            tokenizer_spec(found.source).get("head_size", 64)
        )
        size_px = frame_size_px(found.source)
        return wham_tokenizer_from_weights(found.source.tensors, *size_px, head_size)
    if found.family == "MineWorld":
        return _mineworld_tokenizer(found)
    if found.family == "Cosmos" or not (folder / TOKENIZER_FOLDER).is_dir():
        raise ValueError(
            f"{found.path}: its tokenizer is not with it: name the folder with --tokenizer"
        )
    return load_tokenizer(folder / TOKENIZER_FOLDER)


def _mineworld_tokenizer(found: FoundModel) -> VideoTokenizer:
    """Build the VQ-VAE that MineWorld's YAML names, from the main checkpoint or its own file."""
    assert found.source is not None
    settings = found.source.side
    for key in ("model", "params", "tokenizer_config", "params"):
        settings = settings.get(key, {})
    if "config_path" not in settings:
        raise ValueError(
            f"{found.path}: no config names its tokenizer: name the folder with --tokenizer"
        )
    root = found.path.parent
    inside = {n: t for n, t in found.source.tensors.items() if n.startswith("tokenizer.")}
    return VQTokenizer.from_checkpoint(
        root / settings["config_path"], inside or root / settings["ckpt_path"]
    )


def _vocabulary(found: FoundModel, folder: Path) -> ActionCodec | None:
    config = found.config
    if not config.num_action_tokens:
        return None
    codec = CODECS.get(found.family) or _read_codec(folder / ACTIONS_FILE)
    num_ids = config.vocab_size - config.image_vocab_size
    if (codec.num_ids, codec.num_tokens) != (num_ids, config.num_action_tokens):
        raise ValueError(
            f"{folder}: actions.json names {codec.num_ids} action ids and {codec.num_tokens} "
            f"tokens an action, the model has {num_ids} and {config.num_action_tokens}"
        )
    return codec


def _read_codec(path: Path) -> ActionCodec:
    try:
        kind = json.loads(path.read_text()).get("kind") if path.is_file() else None
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError):
        kind = None  # told by ActionVocabulary
    return CODECS[kind] if kind in CODECS else ActionVocabulary.load(path)


def _habits(found: FoundModel, folder: Path) -> Habits:
    config = found.config
    if found.family == "Cosmos":
        small = config.num_layers <= 16
        return Habits(
            fps=25,
            context_frames=9,
            num_frames=24,
            row_lag=2 if small else 1,
            overlap=True,
            top_p=0.7 if config.context_size else 0.8,
        )
    if found.family == "WHAM":
        frame = config.tokens_per_frame + config.num_action_tokens
        held = config.max_positions // frame - 1
        return Habits(
            fps=10,
            context_frames=held,
            num_frames=10,
            temperature=0.9,
            top_p=None,
            exclusive_top_p=True,
            keep_frames=held,
            first_id=1,
        )
    if found.family == "MineWorld":
        return Habits(fps=20, context_frames=1, num_frames=15, top_p=0.8)
    path = folder / HABITS_FILE
    if not path.is_file():
        return Habits()
    try:
        return replace(Habits(), **json.loads(path.read_text()))
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
        raise ValueError(f"{path}: no habits of a model: {error}") from None


def visual_ranges(habits: Habits, config: ModelConfig) -> tuple[int, int] | Tensor:
    """Return the visual ids that may be drawn: one range, or one for each place of a frame."""
    if not habits.first_id:
        return 0, config.image_vocab_size
    ranges = torch.zeros(config.grid_height, config.grid_width, 2, dtype=torch.int64)
    ranges[..., 1] = config.image_vocab_size
    ranges[0, 0, 0] = habits.first_id
    return ranges


def prefix_ids(config: ModelConfig) -> Sequence[int]:
    """Return the ids before the first frame: those that follow the vocabulary (Cosmos' BOV)."""
    return range(config.vocab_size, config.vocab_size + config.prefix_length)
