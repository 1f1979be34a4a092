"""Video tokenizers: the interface for the pipeline, and a frame-by-frame one with a codebook.

VQ-GANs of taming-transformers and its descendants are loaded into diffusers' VQModel.
"""

import gc
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any, Literal, Protocol, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from diagd.checks import brief
from diagd.data.video import resize, stretch
from diagd.files import MISFITS, naming, read_json_object, write_json
from diagd.weight_files import assign_weights, check_fit, read_tensors, rename_by, write_weights

PixelRounding = Literal["nearest", "down"]
BATCH_SIZE = 8  # frames encoded or decoded at once
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
# Arguments of `VQTokenizer` in diffusers' config.json; omitted if default.
_OURS = ("pixel_rounding", "stretch_frames", "by_product")


class VideoTokenizer(Protocol):
    """A tokenizer of the pipeline: T frames <-> 1 + (T - 1) / temporal_compression grids of ids."""

    codebook_size: int  # ids lie in [0, codebook_size)
    compression: int  # pixels per token, along height and along width
    temporal_compression: int = 1  # frames per grid after the first

    def frame_size_px(self, height: int, width: int) -> tuple[int, int]:
        """Return the size in pixels of a frame of height x width tokens: (H_px, W_px)."""
        return height * self.compression, width * self.compression

    def fit_frames(self, frames: Tensor, height_px: int, width_px: int) -> Tensor:
        """Crop and scale (T, H_px, W_px, 3) uint8 RGB to a size, as the model's authors do."""
        return resize(frames, height_px, width_px)

    def encode(self, frames: Tensor) -> Tensor:
        """(T, H_px, W_px, 3) uint8 RGB -> (grids, height, width) int64."""
        ...

    def decode(self, tokens: Tensor) -> Tensor:
        """(grids, height, width) integer -> (T, H_px, W_px, 3) uint8 RGB."""
        ...

    def decode_after(self, context: Tensor, written: Tensor) -> Tensor:
        """Decode the grids `written`, as `decode` does, after those of their context.

        Grids of several frames are decoded together with all before them, whose frames come first.
        """
        needs_first = self.temporal_compression > 1
        return self.decode(torch.cat([context, written]) if needs_first else written)

    def to(self, device: torch.device | str) -> Self:
        """Move the model, and return itself; results lie on the device of their input."""
        ...


class FrameTokenizer(VideoTokenizer):
    """Encode and decode frames independently, `batch_size` at a time.

    Subclasses add sizes, encoding and decoding of a batch, and the stored config.
    """

    batch_size = BATCH_SIZE
    weights_name = WEIGHTS_NAME

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model.eval()  # diffusers annotates its methods wrongly

    def _encode(self, frames: Tensor) -> Tensor: ...
    def _decode(self, tokens: Tensor) -> Tensor: ...
    def _config(self) -> Mapping[str, object]: ...

    def to(self, device: torch.device | str) -> Self:
        self.model.to(device)
        return self

    @torch.inference_mode()
    def encode(self, frames: Tensor) -> Tensor:
        return self._in_batches(self._encode, frames)

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        return self._in_batches(self._decode, tokens)

    def _in_batches(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        device = next(self.model.parameters()).device
        chunks = [function(chunk.to(device)) for chunk in rows.split(self.batch_size)]
        return torch.cat(chunks).to(rows.device)

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Write config.json and weights, each atomically; float32 keeps every bit."""
        weights = {name: weight.to(dtype) for name, weight in self.model.state_dict().items()}
        write_weights(Path(folder) / self.weights_name, weights)
        write_json(Path(folder) / CONFIG_NAME, self._config(), indent=2)


class TokenizerWrapper(VideoTokenizer):
    """A frame-by-frame tokenizer that wraps another one."""

    def __init__(self, tokenizer: VideoTokenizer) -> None:
        self.tokenizer, self.compression = tokenizer, tokenizer.compression
        self.codebook_size = tokenizer.codebook_size

    def to(self, device: torch.device | str) -> Self:
        self.tokenizer.to(device)
        return self


class RowEnds(TokenizerWrapper):
    """A tokenizer whose grids have an extra column: the id after its codes ends each row."""

    def __init__(self, tokenizer: VideoTokenizer) -> None:
        super().__init__(tokenizer)
        self.codebook_size += 1
        self.fit_frames = tokenizer.fit_frames

    def frame_size_px(self, height: int, width: int) -> tuple[int, int]:
        return self.tokenizer.frame_size_px(height, width - 1)

    def encode(self, frames: Tensor) -> Tensor:
        return functional.pad(self.tokenizer.encode(frames), (0, 1), value=self.codebook_size - 1)

    def decode(self, tokens: Tensor) -> Tensor:
        return self.tokenizer.decode(tokens[..., :-1])


class TwoCameras(TokenizerWrapper):
    """A tokenizer of frames made of two pictures, one above the other, coded separately."""

    def frame_size_px(self, height: int, width: int) -> tuple[int, int]:
        height_px, width_px = self.tokenizer.frame_size_px(height // 2, width)
        return 2 * height_px, width_px

    def fit_frames(self, frames: Tensor, height_px: int, width_px: int) -> Tensor:
        height, width = frames.shape[1:3]
        if height % 2 or 10 * height * width_px < 7 * width * height_px:
            raise ValueError(
                "frames must hold the pictures of two cameras, third-person above wrist, "
                f"{width_px}x{height_px} pixels or the same aspect ratio, got {width}x{height}"
            )
        return _together(self.tokenizer.fit_frames(_apart(frames), height_px // 2, width_px))

    def encode(self, frames: Tensor) -> Tensor:
        return _together(self.tokenizer.encode(_apart(frames)))

    def decode(self, tokens: Tensor) -> Tensor:
        return _together(self.tokenizer.decode(_apart(tokens)))


def _apart(rows: Tensor) -> Tensor:
    """(T, 2 * H, ...) -> (2 * T, H, ...), the upper half of each first."""
    return rows.unflatten(1, (2, -1)).flatten(0, 1)


def _together(halves: Tensor) -> Tensor:
    return halves.unflatten(0, (-1, 2)).flatten(1, 2)


class VQTokenizer(FrameTokenizer):
    """A frame-by-frame tokenizer with a learned codebook: a VQModel of 3 * p * p channels."""

    # Number type of `decode`; models that output pixels rather than patches stay in float32.
    # bfloat16 changes a level of the bundled world by at most 2 of 255.
    painting = torch.float32

    def __init__(
        self,
        model: Any,
        pixel_rounding: PixelRounding = "nearest",
        stretch_frames: bool = False,
        by_product: bool = False,
    ) -> None:
        """Wrap diffusers' VQModel.

        `stretch_frames` scales frames without cropping; `by_product` encodes by the largest dot
        product with a code, not by the smallest distance.
        """
        super().__init__(model)
        if stretch_frames:
            self.fit_frames = stretch
        channels, painted = model.config["in_channels"], model.config["out_channels"]
        self.patch_size = math.isqrt(max(channels, 0) // 3)
        if not self.patch_size or not channels == painted == 3 * self.patch_size**2:
            raise ValueError(
                "in_channels and out_channels must be the same 3 * p * p (3, 12, 27, 48), "
                f"got {channels} and {painted}"
            )
        if pixel_rounding not in get_args(PixelRounding):
            known = " or ".join(get_args(PixelRounding))
            raise ValueError(f"pixel_rounding must be {known}, got {brief(pixel_rounding)}")
        self.pixel_rounding: PixelRounding = pixel_rounding
        self.by_product = by_product
        self.codebook_size = len(self.codebook)
        self.compression = self.patch_size * 2 ** (len(model.config["block_out_channels"]) - 1)

    @property
    def codebook(self) -> Tensor:
        """The code vectors, (codebook_size, C) float32."""
        return self.model.quantize.embedding.weight

    def _encode(self, frames: Tensor) -> Tensor:
        """Replace each patch by the id of its nearest code (the lowest id on ties)."""
        return self.nearest(self.latents(frames))

    def _decode(self, tokens: Tensor) -> Tensor:
        codes = self.codebook[tokens.long()]  # (T, h, w, C)
        fast = self.painting == torch.bfloat16 and self.model.config.in_channels > 3
        with torch.autocast(codes.device.type, torch.bfloat16, enabled=fast):
            values = self.pixels(codes.movedim(-1, 1)).float()
        return paint((values + 1) * 127.5, self.pixel_rounding)

    def latents(self, frames: Tensor) -> Tensor:
        """Encode without quantization, differentiably: uint8 frames -> (T, C, h, w)."""
        folded = functional.pixel_unshuffle(normalise(frames), self.patch_size)
        folded = folded.contiguous(memory_format=memory_format(self.model))
        return self.model.encode(folded).latents

    def nearest(self, latents: Tensor) -> Tensor:
        """Find the closest codes: (T, C, h, w) -> (T, h, w) int64."""
        vectors = latents.movedim(1, -1).float()
        half_norms = 0 if self.by_product else self.codebook.square().sum(dim=1) / 2
        distances = half_norms - vectors.flatten(0, -2) @ self.codebook.T  # half of the squares
        return distances.argmin(dim=-1).unflatten(0, vectors.shape[:-1])

    def pixels(self, codes: Tensor) -> Tensor:
        """Decode code vectors, differentiably: (T, C, h, w) -> (T, 3, H_px, W_px) about [-1, 1]."""
        codes = codes.contiguous(memory_format=memory_format(self.model))
        spatial = codes if self.model.config.norm_type == "spatial" else None
        folded = self.model.decoder(self.model.post_quant_conv(codes), spatial)
        return functional.pixel_shuffle(folded, self.patch_size)

    def _config(self) -> Mapping[str, object]:
        config = json.loads(self.model.to_json_string())
        if self.pixel_rounding != "nearest":
            config["pixel_rounding"] = self.pixel_rounding
        if self.fit_frames is stretch:
            config["stretch_frames"] = True
        if self.by_product:
            config["by_product"] = True
        return config

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "VQTokenizer":
        """Load a tokenizer written by diffusers or `save_pretrained`."""
        config_path, weights_path = Path(folder) / CONFIG_NAME, Path(folder) / WEIGHTS_NAME
        config = read_json_object(config_path)
        ours = {name: config.pop(name) for name in _OURS if name in config}
        model = load_vq_model(config, config_path, read_tensors(weights_path), weights_path)
        with naming(config_path, MISFITS):
            return cls(model, **ours)


def load_vq_model(
    config: dict[str, Any], path: Path, weights: Mapping[str, Tensor], where: str | Path
) -> Any:
    """Build the model of a config around its weights, which must match it, as float32.

    Sizes claimed by the config alone are never allocated. Errors name the path of the config, and
    `where` the weights are from.
    """
    kind, layers = config.get("_class_name"), config.get("layers_per_block", 1)
    if kind != "VQModel":
        raise ValueError(f"{path}: _class_name must be VQModel, got {brief(kind)}")
    counts = [layers, *(len(value) for value in config.values() if isinstance(value, list))]
    if not isinstance(layers, int) or max(counts) > len(weights):
        raise ValueError(
            f"{path}: layers_per_block and the number of blocks must be at most the "
            f"{len(weights)} tensors of {where}, got {brief(layers, 20)}"
        )
    vq_model = vq_model_class()
    with naming(f"{path}: not the config of a VQModel", MISFITS), torch.device("meta"):
        model: Any = vq_model.from_config(config)
    check_fit(model, weights, where)
    own = {name: value.clone() for name, value in weights.items()}  # the file may change
    assign_weights(model, own, where)
    return model.to(memory_format=memory_format(model))


def vq_model_class() -> Any:
    """Import only diffusers' VQModel: its package would import other models, for seconds."""
    collecting = gc.isenabled()
    gc.disable()  # imports create no garbage, and looking for some takes a quarter of the time
    try:
        for name in ("autoencoders", "transformers", "unets"):
            load_lazily("diffusers.models", name)
        return import_module("diffusers.models.autoencoders.vq_model").VQModel
    finally:
        if collecting:
            gc.enable()


def load_lazily(parent: str, child: str) -> None:
    """Make a package import its modules when their names are used, not all at once."""
    if (full := f"{parent}.{child}") in sys.modules:
        return
    spec: Any = find_spec(full)  # the package is installed
    package = module_from_spec(spec)

    def load(name: str) -> Any:
        del package.__getattr__
        spec.loader.exec_module(package)
        return getattr(package, name)

    package.__getattr__ = load
    sys.modules[full] = package
    setattr(sys.modules[parent], child, package)


def memory_format(model: Any) -> torch.memory_format:
    """Choose channels last, faster on a CPU; pixel models keep diffusers' bits without it."""
    return torch.channels_last if model.config.in_channels > 3 else torch.contiguous_format


def normalise(frames: Tensor) -> Tensor:
    """Scale to the model's range: (T, H_px, W_px, 3) uint8 -> (T, 3, H_px, W_px) in [-1, 1]."""
    return frames.movedim(-1, 1).float() / 127.5 - 1


def paint(levels: Tensor, rounding: PixelRounding) -> Tensor:
    """Convert to pixels: (T, 3, H_px, W_px) about [0, 255] -> (T, H_px, W_px, 3) uint8."""
    levels = levels.round() if rounding == "nearest" else levels.floor()
    return levels.clamp(0, 255).to(torch.uint8).movedim(1, -1).contiguous()


_PARTS = re.compile(r"(encoder|decoder|quantize|quant_conv|post_quant_conv)\.")
# Names of LlamaGen and taming-transformers, and those of diffusers' VQModel.
_RENAMED = (
    (r"^encoder\.(conv_blocks|down)\.", "encoder.down_blocks."),
    (r"^decoder\.(conv_blocks|up)\.", "decoder.up_blocks."),
    (r"\.(res|block)\.", ".resnets."),
    (r"\.attn\.", ".attentions."),
    (r"\.(down|up)sample\.", r".\1samplers.0."),
    (r"\.mid\.(0|block_1)\.", ".mid_block.resnets.0."),
    (r"\.mid\.(1|attn_1)\.", ".mid_block.attentions.0."),
    (r"\.mid\.(2|block_2)\.", ".mid_block.resnets.1."),
    (r"\.norm_out\.", ".conv_norm_out."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"(attentions\.\d+)\.norm\.", r"\1.group_norm."),
    (r"(attentions\.\d+)\.([qkv])\.", r"\1.to_\2."),
    (r"(attentions\.\d+)\.proj_out\.", r"\1.to_out.0."),
)


def read_vqgan(
    tensors: Mapping[str, Tensor], where: Path, by_direction: bool = False, **how: Any
) -> VQTokenizer:
    """Build a tokenizer from the tensors of a VQ-GAN; those of its training are dropped.

    With `by_direction`, latents are compared with codes by direction, and codes have length 1.
    Errors name `where` the tensors are from; `how` are further arguments of `VQTokenizer`.
    """
    weights = {
        # linear layers of attention are 1x1 convolutions there
        name: tensor.flatten(1) if "attentions." in name and tensor.ndim == 4 else tensor
        for name, tensor in rename_by(_RENAMED, tensors).items()
        if _PARTS.match(name) and name != "quantize.codebook_used"
    }
    count = len({name.split(".")[2] for name in weights if "encoder.down_blocks." in name})
    if "decoder.up_blocks.0.upsamplers.0.conv.weight" not in weights and count > 1:
        # taming numbers a decoder's blocks from the largest resolution
        block = r"^(decoder\.up_blocks)\.(\d+)"
        turned = [(block, lambda at: f"{at[1]}.{count - 1 - int(at[2])}")]
        weights = rename_by(turned, weights)
    first = "encoder.down_blocks.0.resnets."
    with naming(f"{where}: not a VQ-GAN", KeyError):
        codes = weights["quantize.embedding.weight"].float()
        block = "encoder.down_blocks.{}.resnets.0.conv1.weight"
        channels = [len(weights[block.format(i)]) for i in range(count)]
        latent_channels = len(weights["encoder.conv_out.weight"])
    if by_direction:  # for codes of length 1, the nearest direction is the nearest code
        weights["quantize.embedding.weight"] = functional.normalize(codes, dim=-1)
    attend = [
        ["Attn" * (f"{side}_blocks.{i}.attentions.0.to_q.weight" in weights) for i in range(count)]
        for side in ("encoder.down", "decoder.up")
    ]
    fields = {
        "_class_name": "VQModel",
        "down_block_types": [f"{kind}DownEncoderBlock2D" for kind in attend[0]],
        "up_block_types": [f"{kind}UpDecoderBlock2D" for kind in attend[1]],
        "block_out_channels": channels,
        "layers_per_block": len({name.split(".")[4] for name in weights if first in name}),
        "latent_channels": latent_channels,
        "num_vq_embeddings": codes.shape[0],
        "vq_embed_dim": codes.shape[-1],
    }
    return VQTokenizer(load_vq_model(fields, where, weights, where), **how)
