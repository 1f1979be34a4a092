"""Microsoft's WHAM: the Lightning checkpoints of the 200M and the 1.6B model, and its clips.

The model is a GPT with learned positions over frames of visual tokens and action tokens; its image
tokenizer is in the same file. Block versions differ in whether the norms inside the blocks have
parameters, which the tensors show; the number of heads they do not show.

Clips are npz files of `images` (T, 3, H_px, W_px) uint8 and `actions` (T, 16), at 10 fps. They are
read a row at a time (a minute of gameplay is 100 MB, a prompt is 1 MB), and nothing is unpickled:
files with Python objects in them are refused.
"""

import contextlib
import lzma
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diagd.checks import brief
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Checkpoint, Family, RecordingFormat, Source, TokenizerFolder
from diagd.families.presets import WHAM as PRESETS
from diagd.families.weights import count_layers, rename, sizes_of
from diagd.families.wham.actions import (
    WHAMActions,
    actions_of_rows,
)
from diagd.families.wham.tokenizer import (
    HEAD_SIZE,
    TOKENIZER_PREFIX,
    WHAM_KIND,
    WHAMTokenizer,
    wham_tokenizer_from_weights,
)
from diagd.files import naming, require_file
from diagd.models.config import ModelConfig
from diagd.weight_files import Record, tensors_under

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
