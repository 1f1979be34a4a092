"""Microsoft's WHAM: the Lightning checkpoints of the 200M and the 1.6B model, and its clips.

The model is a GPT with learned positions over frames of visual tokens and action tokens; its image
tokenizer is in the same file. Block versions differ in whether the norms inside the blocks have
parameters, which the tensors show; the number of heads they do not show.

The tokenizer is two vision transformers with a codebook of unit vectors between. A picture is cut
into patches; the encoder turns each into a short vector, whose direction picks the id
(arXiv:2110.04627, as in Microsoft's WHAM, doi:10.1038/s41586-025-08600-3). Attention is
bidirectional over the whole picture; positions are learned, so the size of a picture is fixed.

An action is twelve gamepad buttons and four stick axes, a token each. Which button is which, and
the order of the axes, is not published: words number them from 1, `button1+stick2=7`. A stick axis
is one of eleven bins, 5 is at rest.

Clips are npz files of `images` (T, 3, H_px, W_px) uint8 and `actions` (T, 16), at 10 fps. They are
read a row at a time (a minute of gameplay is 100 MB, a prompt is 1 MB), and nothing is unpickled:
files with Python objects in them are refused.
"""

import contextlib
import itertools
import json
import lzma
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn import functional

from diagd.checks import brief
from diagd.data.actions import action_in
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Checkpoint, Family, RecordingFormat, Source, TokenizerFolder
from diagd.families.presets import WHAM as PRESETS
from diagd.families.weights import count_layers, rename, sizes_of
from diagd.files import naming, read_json_object, require_file
from diagd.models.config import ModelConfig
from diagd.tokenizers import vq
from diagd.weight_files import Record, build_fitting, read_weights, tensors_under

NUM_BUTTONS, NUM_STICKS, NUM_BINS = 12, 4, 11
NEUTRAL = NUM_BINS // 2
_REST = {f"button{number + 1}": 0 for number in range(NUM_BUTTONS)}
_REST |= {f"stick{number + 1}": NEUTRAL for number in range(NUM_STICKS)}
_COUNTS = (2,) * NUM_BUTTONS + (NUM_BINS,) * NUM_STICKS  # values of each token of an action
FIRST_IDS = tuple(itertools.accumulate(_COUNTS[:-1], initial=0))  # local id of the value 0
_BINS = {str(number): number for number in range(NUM_BINS)} | {"min": 0, "max": NUM_BINS - 1}


@dataclass(frozen=True)
class WHAMActions:
    """WHAM's actions as an `ActionCodec`.

    Words are `button1` to `button12`, `stick1=0` to `stick4=10` (bins, also `min` and `max`) and
    `none`. Words for one axis add up, counted from rest, so that opposite keys cancel each other.
    """

    names = (
        *("none", *(name for name in _REST if name.startswith("button"))),
        *(f"{name}={end}" for name in _REST if name.startswith("stick") for end in ("min", "max")),
    )
    num_tokens = NUM_BUTTONS + NUM_STICKS
    num_ids = sum(_COUNTS)
    combines = True

    def tokens_of(self, action: str) -> tuple[int, ...]:
        """Return the local ids: one a button, then one a stick axis."""
        values = dict(_REST)
        for word in (part.strip() for part in action.split("+")):
            name, _, bin_name = word.partition("=")
            if word.startswith("button") and word in values:
                values[word] = 1
            elif name.startswith("stick") and name in values and bin_name in _BINS:
                values[name] += _BINS[bin_name] - NEUTRAL
            elif word != "none":
                raise ValueError(
                    f"unknown action {word!r}, expected words joined by + of: none, "
                    f"button1 to button{NUM_BUTTONS}, stick1=BIN to stick{NUM_STICKS}=BIN "
                    f"with BIN 0 to {NUM_BINS - 1}, min or max"
                )
        limits = zip(FIRST_IDS, values.values(), _COUNTS, strict=True)
        return tuple(first + min(max(value, 0), count - 1) for first, value, count in limits)

    def action_of(self, record: dict[str, Any]) -> str:
        """Read `{"action": WORDS or a row of numbers}` or `{"buttons": [...], "sticks": [...]}`."""
        action, buttons, sticks = (record.get(name) for name in ("action", "buttons", "sticks"))
        if isinstance(action, str):
            return action_in(record, self, "WORDS")
        if isinstance(buttons, list) and isinstance(sticks, list):
            if (len(buttons), len(sticks)) != (NUM_BUTTONS, NUM_STICKS):
                raise ValueError(
                    f"expected {NUM_BUTTONS} buttons and {NUM_STICKS} sticks, "
                    f"got {len(buttons)} and {len(sticks)}"
                )
            action = buttons + sticks
        if not isinstance(action, list) or not all(isinstance(v, int | float) for v in action):
            raise ValueError(
                f'expected {{"action": WORDS}}, {{"action": [{self.num_tokens} NUMBERS]}} or '
                f'{{"buttons": [...], "sticks": [...]}}, got {json.dumps(record)[:60]}'
            )
        return actions_of_rows([action])[0]


def actions_of_rows(rows: ArrayLike) -> list[str]:
    """Return the words of (T, 16) numbers: buttons, 0 or 1, then stick axes, bins 0 to 10."""
    values = np.asarray(rows)
    width = WHAMActions.num_tokens
    if values.ndim != 2 or values.shape[1] != width or values.dtype.kind not in "biuf":
        raise ValueError(f"actions must be (T, {width}) numbers, got {values.dtype} {values.shape}")
    counts = np.asarray(_COUNTS)
    wrong = np.argwhere(~((values >= 0) & (values < counts) & (values == np.floor(values))))
    if len(wrong):
        row, place = wrong[0]
        raise ValueError(
            f"action {row}: {list(_REST)[place]} must be a whole number from 0 to "
            f"{counts[place] - 1}, got {values[row, place]}"
        )
    return [_words(row) for row in values.astype(np.int64).tolist()]


def _words(values: Sequence[int]) -> str:
    axes = zip(_REST.items(), values, strict=True)
    words = [f"{name}={at}" if rest else name for (name, rest), at in axes if at != rest]
    return "+".join(words) or "none"


TOKENIZER_PREFIX = "context_encoders.images."  # of its weights in WHAM's checkpoints
HEAD_SIZE = 64  # where nothing says other
WHAM_KIND = "wham-vit-vqgan"
_NORM_EPS = 1e-5
_MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)  # of ImageNet, RGB in [0, 1]
_DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
_SIDE_MODULES = {
    "input_proj": "proj1",
    "positions": "pos_embeds",
    "blocks.{i}.attention_norm": "vit.{i}.ln_1",
    "blocks.{i}.qkv_proj": "vit.{i}.attn.c_attn",
    "blocks.{i}.o_proj": "vit.{i}.attn.c_proj",
    "blocks.{i}.mlp_norm": "vit.{i}.ln_2",
    "blocks.{i}.up_proj": "vit.{i}.mlp.c_fc",
    "blocks.{i}.down_proj": "vit.{i}.mlp.c_proj",
    "output_norm": "output_ln",
    "output_proj": "output_proj",
}
_TOKENIZER_MODULES = {"codebook": "vq_vae._embedding"}
_TOKENIZER_MODULES |= {
    f"{side}.{ours}": f"{side}.{theirs}"
    for side in ("encoder", "decoder")
    for ours, theirs in _SIDE_MODULES.items()
}
_LEFT_OUT = r"\.attn_mask$|^(patch_gan|target_patchgan|lpips_model)\."  # the latter for training


@dataclass(frozen=True)
class ViTVQGANConfig:
    """Sizes of the network. A picture that is no multiple of the patches is padded."""

    height_px: int
    width_px: int
    patch_size: int
    hidden_size: int
    num_layers: int  # of the encoder, and of the decoder
    head_dim: int
    code_dim: int
    codebook_size: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {brief(value)}")
        size, head_dim = self.hidden_size, self.head_dim
        if size % head_dim:
            raise ValueError(f"head_dim must divide hidden_size={size}, got {head_dim}")

    @property
    def grid(self) -> tuple[int, int]:  # rows and columns of tokens
        return -(-self.height_px // self.patch_size), -(-self.width_px // self.patch_size)


class ViTVQGAN(nn.Module):
    def __init__(self, config: ViTVQGANConfig) -> None:
        super().__init__()
        self.config = config
        patch = 3 * config.patch_size**2
        self.encoder = VisionTransformer(config, patch, config.code_dim)
        self.codebook = nn.Embedding(config.codebook_size, config.code_dim)
        self.decoder = VisionTransformer(config, config.code_dim, patch)

    def latents(self, pictures: Tensor) -> Tensor:
        """Encode to unit vectors: (B, 3, height_px, width_px) float -> (B, rows, columns, C)."""
        config = self.config
        right, below = -config.width_px % config.patch_size, -config.height_px % config.patch_size
        padded = functional.pad(pictures, (0, right, 0, below))
        patches = functional.pixel_unshuffle(padded, config.patch_size)  # (B, 3 * p * p, rows, ..)
        vectors = self.encoder(patches.flatten(2).mT)
        return functional.normalize(vectors, dim=-1).unflatten(1, config.grid)

    def nearest(self, latents: Tensor) -> Tensor:
        """Find the codes of the closest direction: (B, rows, columns, C) -> (B, rows, columns)."""
        return (latents @ functional.normalize(self.codebook.weight, dim=-1).T).argmax(dim=-1)

    def pixels(self, ids: Tensor) -> Tensor:
        """Decode: (B, rows, columns) int64 -> (B, 3, height_px, width_px) float."""
        config = self.config
        codes = functional.normalize(self.codebook(ids.flatten(1)), dim=-1)
        patches = self.decoder(codes).mT.unflatten(2, config.grid)
        pictures = functional.pixel_shuffle(patches, config.patch_size)
        return pictures[:, :, : config.height_px, : config.width_px]


class VisionTransformer(nn.Module):
    """A stack of blocks between two projections: (B, N, in_size) -> (B, N, out_size)."""

    def __init__(self, config: ViTVQGANConfig, in_size: int, out_size: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_proj = nn.Linear(in_size, size)
        self.positions = nn.Embedding(math.prod(config.grid), size)
        self.blocks = nn.ModuleList(Block(size, config.head_dim) for _ in range(config.num_layers))
        self.output_norm = nn.LayerNorm(size, _NORM_EPS)
        self.output_proj = nn.Linear(size, out_size)

    def forward(self, inputs: Tensor) -> Tensor:
        states = self.input_proj(inputs) + self.positions.weight
        for block in self.blocks:
            states = block(states)
        return self.output_proj(self.output_norm(states))


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to what came in; no biases."""

    def __init__(self, size: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attention_norm = nn.LayerNorm(size, _NORM_EPS, bias=False)
        self.qkv_proj = nn.Linear(size, 3 * size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)
        self.mlp_norm = nn.LayerNorm(size, _NORM_EPS, bias=False)
        self.up_proj = nn.Linear(size, 4 * size, bias=False)
        self.down_proj = nn.Linear(4 * size, size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        qkv = self.qkv_proj(self.attention_norm(states)).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, N, head_dim) each
        mixed = functional.scaled_dot_product_attention(query, key, value)
        states = states + self.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.up_proj(self.mlp_norm(states)), approximate="tanh")
        return states + self.down_proj(hidden)


class WHAMTokenizer(vq.FrameTokenizer):
    """A frame-by-frame `VideoTokenizer` for frames of one size."""

    weights_name = "model.safetensors"

    def __init__(self, model: ViTVQGAN) -> None:
        super().__init__(model)
        self.codebook_size, self.compression = model.config.codebook_size, model.config.patch_size

    def frame_size_px(self, height: int, width: int) -> tuple[int, int]:
        """Return the pixels of a frame, or raise ValueError for another grid than the model's."""
        config = self.model.config
        if (height, width) != config.grid:
            rows, columns = config.grid
            raise ValueError(f"a frame must be {rows}x{columns} tokens, got {height}x{width}")
        return config.height_px, config.width_px

    def _encode(self, frames: Tensor) -> Tensor:
        values = frames.movedim(-1, 1).float() / 255
        pictures = (values - _MEAN.to(values.device)) / _DEVIATION.to(values.device)
        return self.model.nearest(self.model.latents(pictures))

    def _decode(self, tokens: Tensor) -> Tensor:
        pictures = self.model.pixels(tokens.long())
        values = pictures * _DEVIATION.to(tokens.device) + _MEAN.to(tokens.device)
        return vq.paint(values * 255, "down")

    def _config(self) -> Mapping[str, object]:
        return {"kind": WHAM_KIND} | asdict(self.model.config)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "WHAMTokenizer":
        config_path, weights_path = Path(folder) / vq.CONFIG_NAME, Path(folder) / cls.weights_name
        values = read_json_object(config_path)
        values.pop("kind", None)
        with naming(f"{config_path} describes no {WHAM_KIND}", (TypeError, ValueError)):
            config = ViTVQGANConfig(**values)
        weights = read_weights(weights_path)
        if config.num_layers > len(weights):  # which would be built one by one
            raise ValueError(
                f"{config_path}: num_layers must be at most the {len(weights)} tensors of "
                f"{weights_path}, got {config.num_layers}"
            )
        return cls(build_fitting(lambda: ViTVQGAN(config), weights, weights_path))


def wham_tokenizer_from_weights(
    weights: Mapping[str, Tensor], height_px: int, width_px: int, head_size: int
) -> WHAMTokenizer:
    """Extract the tokenizer of a WHAM checkpoint, or of its part under `TOKENIZER_PREFIX`."""
    where = "the WHAM tokenizer"
    found = tensors_under(TOKENIZER_PREFIX, weights) or weights
    matrices = ["encoder.proj1.weight", "encoder.pos_embeds.weight", "vq_vae._embedding.weight"]
    if bad := [name for name in matrices if name not in found or found[name].dim() != 2]:
        raise ValueError(f"{where} has no matrix {bad[0]}")
    shapes = [found[name].shape for name in matrices]
    (hidden_size, patch), (num_positions, _), (codebook_size, code_dim) = shapes
    patch_px, num_layers = math.isqrt(patch // 3), count_layers(found, "encoder.vit.")
    config = ViTVQGANConfig(
        height_px, width_px, patch_px, hidden_size, num_layers, head_size, code_dim, codebook_size
    )
    rows, columns = config.grid
    if rows * columns != num_positions:
        raise ValueError(
            f"{where} has {num_positions} positions, but frames of {height_px}x{width_px} px have "
            f"{rows}x{columns} patches of {patch_px}x{patch_px} px"
        )
    with naming(where):
        renamed = rename(found, _TOKENIZER_MODULES, _LEFT_OUT)
    described_by = "its patches, positions and codebook"
    return WHAMTokenizer(build_fitting(lambda: ViTVQGAN(config), renamed, where, described_by))


_GPT = "predictor.gpt_model."
_BLOCK, _THEIRS = "model.layers.{i}.", "transformer.h.{i}."
_MODULES = {
    "model.embed_positions": "transformer.wpe",
    "model.embed_tokens": "lm_head",
    "model.norm": "transformer.ln_f",
    **{_BLOCK + f"self_attn.{n}_proj": _THEIRS + f"attn.c_attn {i}/3" for i, n in enumerate("qkv")},
    _BLOCK + "self_attn.o_proj": _THEIRS + "attn.c_proj",
    _BLOCK + "mlp.up_proj": _THEIRS + "mlp.c_fc",
    _BLOCK + "mlp.down_proj": _THEIRS + "mlp.c_proj",
}
_BLOCK_NORMS = {
    _BLOCK + "input_layernorm": _THEIRS + "ln_1",
    _BLOCK + "post_attention_layernorm": _THEIRS + "ln_2",
}
# of its makers' sizes, by layers and width
_NUM_HEADS = {(16, 1024): 16, (23, 1792): 14, (24, 2304): 18, (30, 3072): 24}
_DAMAGE = zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, UnicodeDecodeError
_MOST_ROW, _MOST_ROWS = 2**26, 2**20  # bytes of a row, as of a frame of 4730 x 4730 pixels; rows
NPZ_FPS = Fraction(10)  # the files do not say
SIZE_PX = (180, 300)  # height and width of the frames of both models


def _convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    gpt = tensors_under(_GPT, source.tensors)
    has_norms = "transformer.h.0.ln_1.weight" in gpt
    # tied to lm_head, which is read last where they differ
    left_out = r"^transformer\.wte\.weight$"
    weights = rename(gpt, _MODULES | (_BLOCK_NORMS if has_norms else {}), left_out)
    num_layers, hidden_size = count_layers(gpt, "transformer.h."), gpt["lm_head.weight"].shape[1]
    num_heads = source.side.get("n_head") or _NUM_HEADS.get((num_layers, hidden_size))
    if num_heads is None:
        raise ValueError(
            f"nothing tells the number of heads of {num_layers} layers of width {hidden_size}: "
            'give a config file with {"n_head": ...}'
        )
    sizes = sizes_of(weights, int(num_heads))
    patches = source.tensors[f"{TOKENIZER_PREFIX}encoder.proj1.weight"].shape[1]
    patch_px = round((patches / 3) ** 0.5)
    height_px, width_px = _frame_size_px(source)
    config = replace(
        PRESETS["wham-1.6b"],  # for what they have in common
        **sizes,
        image_vocab_size=sizes["vocab_size"] - WHAMActions.num_ids,
        max_positions=len(gpt["transformer.wpe.weight"]),
        grid_height=-(-height_px // patch_px),
        grid_width=-(-width_px // patch_px),
        norm_affine=has_norms,
        bias="transformer.h.0.attn.c_attn.bias" in gpt,
    )
    return config, weights


def _tokenizer_spec(source: Source) -> dict[str, Any]:
    """Return the hyper-parameters of the image tokenizer (`head_size`, its frame size)."""
    images = source.hyper_parameters.get("context_encoder_args", {}).get("images")
    keywords = images.get("pl_kwargs", {}) if isinstance(images, Record) else {}
    variant = keywords.get("variant") or {}
    return {**variant, **(variant.get("model_spec") or {}), **(keywords.get("model_spec") or {})}


def _frame_size_px(source: Source) -> tuple[int, int]:
    if "image_height" in source.side:
        return source.side["image_height"], source.side["image_width"]
    spec = _tokenizer_spec(source)
    height, width = spec.get("image_size_per_y_axis"), spec.get("image_size_per_x_axis")
    return (int(height), int(width)) if height and width else SIZE_PX


def _tokenizer(found: Checkpoint) -> WHAMTokenizer:
    source = found.source
    head_size = source.side.get("vq_head_size") or _tokenizer_spec(source).get("head_size")
    size_px = _frame_size_px(source)
    return wham_tokenizer_from_weights(source.tensors, *size_px, int(head_size or HEAD_SIZE))


_DEFAULTS = GenerationDefaults(
    fps=10, num_frames=10, temperature=0.9, top_p=None, exclusive_top_p=True, first_id=1
)


def _defaults(found: Checkpoint) -> GenerationDefaults:
    """In WHAM's own loop a full context drops its oldest frame before each new one."""
    # a frame that does not fit is refused where it is asked for
    held = max(1, found.config.frames_held - 1)
    return replace(_DEFAULTS, context_frames=held, keep_frames=held)


def npz_length(path: Path) -> tuple[int, Fraction]:
    with _open_array(path, "images") as (shape, _):
        return shape[0], NPZ_FPS


def npz_frames(path: Path, numbers: Iterable[int]) -> Iterator[Tensor]:
    with _open_array(path, "images") as (_, rows):
        for row in rows(numbers):
            yield torch.from_numpy(row).movedim(0, -1).contiguous()


def npz_actions(path: Path) -> list[str]:
    """Return the words that led to each frame; row t was done at frame t, and leads to t + 1."""
    with _open_array(path, "actions") as (shape, rows):
        actions = list(rows(range(shape[0]))) if shape else []
    with naming(path):
        return ["none", *actions_of_rows(actions)[:-1]]


Rows = Callable[[Iterable[int]], Iterator[NDArray]]  # of ascending numbers, one at a time


@contextlib.contextmanager
def _open_array(path: Path, name: str) -> Iterator[tuple[tuple[int, ...], Rows]]:
    """Yield the shape of an array and what reads its rows; ValueError for damage and pickles."""
    damaged = f"{require_file(path, 'clip')} cannot be read as npz (corrupt or truncated)"
    with (
        naming(f"{path} cannot be read as npz", RuntimeError),  # encrypted, or packed oddly
        naming(damaged, _DAMAGE),
        zipfile.ZipFile(path) as archive,
    ):
        names = [member.removesuffix(".npy") for member in archive.namelist()]
        if name not in names:
            found = ", ".join(map(brief, names[:9])) or "nothing"
            raise ValueError(f"{path} holds no array {name!r}, found: {found}")
        with archive.open(f"{name}.npy") as file:
            npy, where = np.lib.format, f"{path}: {name}"
            with naming(f"{where} is no npy array (corrupt or truncated)"):
                if npy.read_magic(file) != (1, 0):  # others have headers of any length
                    raise ValueError("it is not of version 1.0")
                shape, column_major, dtype = npy.read_array_header_1_0(file)
            if dtype.hasobject:
                raise ValueError(f"{where} holds Python objects, which are never unpickled")
            if column_major and len(shape) > 1:
                raise ValueError(f"{where} is stored column by column; save it in C order")
            size = archive.getinfo(f"{name}.npy").file_size - file.tell()
            if size != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{damaged}: {name} has not the size that it says")
            is_video = dtype == np.uint8 and len(shape) == 4 and shape[1] == 3 and min(shape)
            if name == "images" and not is_video:
                raise ValueError(f"{where} must be (T, 3, H_px, W_px) uint8, got {dtype} {shape}")
            start, row_size = file.tell(), math.prod(shape[1:]) * dtype.itemsize
            # rows are read one by one, and nothing has shown yet that compressed ones are real
            if row_size > _MOST_ROW or shape[:1] > (_MOST_ROWS,):
                raise ValueError(f"{where} has rows, or a number of them, beyond reason: {shape}")

            def rows(numbers: Iterable[int]) -> Iterator[NDArray]:
                for number in numbers:
                    file.seek(start + number * row_size)
                    yield np.frombuffer(bytearray(file.read(row_size)), dtype).reshape(shape[1:])

            yield shape, rows


WHAM = Family(
    name="WHAM",
    licence="Microsoft Research License: research without revenue only, no redistribution",
    files=("*.ckpt",),
    config_fields=frozenset({"n_head"}),
    signature=(f"{_GPT}transformer.wpe.weight",),
    convert=_convert,
    tokenizer=_tokenizer,
    tokenizer_folder=TokenizerFolder(WHAMTokenizer.from_pretrained, kind=WHAM_KIND),
    actions=WHAMActions(),
    recordings=RecordingFormat(".npz", npz_length, npz_frames, npz_actions),
    defaults=_defaults,
)
