"""Generate pictures with GLM-Image: tokens by diagonals, pixels by diffusers' `GlmImagePipeline`.

The first stage, a decoder of ours, writes a small preview and then the picture, a token for 32 x 32
pixels; behind source pictures the picture alone. The vision encoder of transformers reads those as
tokens. A diffusion transformer and a VAE paint the tokens. Reads the release's folder, a pipeline
of diffusers.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from diagd.backends.devices import device_of, dtype_of
from diagd.backends.names import Backend, DTypeChoice
from diagd.backends.prepare import NATIVE_DTYPES, choose_dtype, prepare
from diagd.checks import read_size, whole
from diagd.console import progress, waiting
from diagd.data.video import read_video, write_image
from diagd.decoding.generate_tokens import GenerationStats, generate_grids
from diagd.decoding.model import CausalModel
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.schedule import FrameFormat, Section
from diagd.decoding.strategies.table import Strategy, as_strategy
from diagd.families.checkpoints import (
    WEIGHTS_FILE,
    build_model,
    diffusers_pipeline,
    find_model,
    model_path,
    read_shards,
)
from diagd.families.defaults import GenerationDefaults, image_defaults
from diagd.files import MISFITS, naming, read_json_object, require_folder, write_bytes
from diagd.pipeline.options import GenerateOptions
from diagd.pipeline.pictures import (
    check_text,
    numbered,
    refuse_others,
    report_pictures,
    text_of,
)
from diagd.pipeline.prompts import Picture, as_frames
from diagd.weight_files import assign_weights, check_fit, read_weights, tensors_under

NAME, PIPELINE = "GLM-Image", "GlmImagePipeline"
SIDE_PX = 32  # of a token
STAGE, PROCESSOR = "vision_language_encoder", "processor"  # folders of the first stage
PAINTERS = "transformer", "vae", "scheduler", "text_encoder", "tokenizer"  # and of the second
_PREVIEW_SIDE = 16  # tokens of a square preview
_DAMAGE = (*MISFITS, OSError, SafetensorError)


def grids_of(height_px: int, width_px: int) -> tuple[FrameFormat, FrameFormat]:
    """Return the grids of the preview and of the picture, or raise ValueError for other sizes."""
    for name, size in (("height", height_px), ("width", width_px)):
        if whole(size, name) < SIDE_PX or size % SIDE_PX:
            raise ValueError(f"{name} must be a multiple of {SIDE_PX} pixels, got {size}")
    height, width = height_px // SIDE_PX, width_px // SIDE_PX
    ratio = height / width  # in the words of its processor, for the sake of rounding
    sides = int(math.sqrt(ratio) * _PREVIEW_SIDE), int(math.sqrt(1 / ratio) * _PREVIEW_SIDE)
    if not all(sides):
        raise ValueError(f"a picture of {height_px}x{width_px} pixels is too narrow for a preview")
    return FrameFormat(*sides), FrameFormat(height, width)


@dataclass(frozen=True)
class GeneratedPicture:
    """A picture that GLM-Image generated.

    Attributes:
        tokens: (height, width) int64, one for 32 x 32 pixels.
        preview: (rows, columns) int64, what it wrote first; None behind source pictures.
        pixels: (32 * height, 32 * width, 3) uint8 RGB; None where only the first stage is there.
        stats: what decoding took, of all pictures made at once.
    """

    tokens: Tensor
    preview: Tensor | None
    pixels: Tensor | None
    stats: GenerationStats

    @property
    def prior_token_ids(self) -> Tensor:
        """(1, 4 * height * width) int64, each token twice each way, as `GlmImagePipeline` asks."""
        return doubled(self.tokens)[None]


def doubled(tokens: Tensor) -> Tensor:
    return tokens.repeat_interleave(2, 0).repeat_interleave(2, 1).flatten()


@dataclass(frozen=True)
class _Asked:
    """What one picture is made of."""

    prompt: Tensor  # (P,) int64, source pictures as tokens
    sources: list[Section]
    grids: list[FrameFormat]  # to be written

    def source_tokens(self) -> list[Tensor]:
        return [
            self.prompt[one.start : one.end].view(one.frame.height, one.frame.width)
            for one in self.sources
        ]


@dataclass(frozen=True, eq=False)
class GlmImage:
    """GLM-Image: turns a text, and source pictures if there are any, into a picture.

    Args:
        model: the first stage, which writes tokens.
        encoder: reads source pictures as tokens: transformers' class without its decoder.
        processor: turns texts and pictures into prompts.
        painter: `GlmImagePipeline` of diffusers without the first stage; None: only tokens are
            generated.
        defaults: sampling of the first stage by its makers.
        dtype, backend: names of the weight type and the execution backend of the first stage.
    """

    model: CausalModel
    encoder: Any
    processor: Any
    painter: Any
    defaults: GenerationDefaults
    dtype: str
    backend: Backend

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | DTypeChoice = "auto",
        backend: Backend = "auto",
    ) -> "GlmImage":
        """Load a folder of the release, or `user/name` on the Hugging Face Hub.

        The first stage and its processor are required; without the rest, pictures are tokens.
        `dtype` and `backend` are those of `VideoGenerator.from_pretrained`. With int8, everything
        but the first stage keeps the type of the files.

        Raises:
            FileNotFoundError, ValueError: a part is missing or damaged, or is another model's.
        """
        folder, device = model_path(name_or_path), device_of(str(device))
        if (given := diffusers_pipeline(folder)) != PIPELINE:
            raise ValueError(f"{folder}: expected model_index.json of {PIPELINE}, got {given}")
        stage = require_folder(folder / STAGE, "first stage of GLM-Image")
        words = require_folder(folder / PROCESSOR, "text tokenizer and processor")
        encoder, weights, defaults = _read_stage(stage)
        with naming(f"{words}: no processor of GLM-Image", _DAMAGE):
            from transformers import GlmImageProcessor  # slow to import

            processor = GlmImageProcessor.from_pretrained(words, local_files_only=True)
        start = processor.tokenizer.convert_tokens_to_ids(processor.bos_token)
        if start != encoder.config.image_start_token_id:
            raise ValueError(
                f"{words}: its image start is id {start}, the model's "
                f"{encoder.config.image_start_token_id}: another model's"
            )
        found = find_model(stage)
        if dtype == "fastest" and backend not in ("auto", "native"):
            dtype = "auto"  # only our kernels are timed in int8
        name: Any = str(dtype).removeprefix("torch.")
        chosen = choose_dtype(name, device, found.config)
        wide, stored = dtype_of(chosen), found.weights["model.norm.weight"].dtype
        if chosen == "int8" and stored in NATIVE_DTYPES:
            wide = stored  # rounded to the same integers, in half the memory if it is bfloat16
        there = [name for name in PAINTERS[:2] if (folder / name).is_dir()]
        codes = found.config.image_vocab_size
        painter = _load_painter(folder, codes, wide, device) if there else None
        assign_weights(encoder, weights, stage, device, wide)
        own = build_model(found, device, wide)
        model, used = prepare(own, backend, chosen == "int8")
        return cls(model, encoder.eval(), processor, painter, defaults, chosen, used)

    def generate(
        self,
        text: str | list[str],
        size_px: tuple[int, int] = (1024, 1024),
        sources: Sequence[Picture] = (),
        *,
        strategy: Strategy | str = "k=1",
        sampling: SamplingOptions | None = None,
        seed: int | list[int] = 0,
        read_again: bool = True,
        on_grid: Callable[[int], object] | None = None,
        **painting: Any,
    ) -> list[GeneratedPicture]:
        """Make a picture of each text, all of them at once.

        Args:
            text: what the picture shows; what stands in quotes is written in it.
            size_px: height and width, multiples of 32.
            sources: pictures that each is made from, in any form of `VideoGenerator.generate`.
            strategy: how to decode, by name (see `diagd.decoding.strategies`) or as a value.
            sampling: how tokens are drawn; by default at the release's temperature and top-p, out
                of all codes: transformers' `generate` would draw out of the 50 likeliest.
            seed: of the draws, and of the painter's noise; picture b has seed + b, or its own.
            read_again: whether the preview is read causally, as in training, before the picture
                begins; else that sees the keys and values with which diagonals wrote it.
            on_grid: called with how many grids there are, whenever there are more.
            painting: other arguments of `GlmImagePipeline`, such as num_inference_steps.

        Raises:
            ValueError: a text, a size or a picture that the model does not read.
        """
        texts, strategy = [text] if isinstance(text, str) else list(text), as_strategy(strategy)
        pictures = [Image.fromarray(as_frames(one)[0].cpu().numpy()) for one in sources]
        asked = [self._ask(one, size_px, pictures) for one in texts]
        options = self.defaults.sampling(
            sampling, (0, self.encoder.config.vq_config.num_embeddings)
        )
        out = generate_grids(
            self.model,
            [one.prompt for one in asked],
            [one.grids for one in asked],
            strategy,
            options,
            seed,
            sections=[one.sources for one in asked],
            read_again=read_again,
            on_grid=on_grid,
        )
        seeds = seed if isinstance(seed, list) else [seed + row for row in range(len(texts))]
        made = list[GeneratedPicture]()
        for said, one, grids, own in zip(texts, asked, out.tokens, seeds, strict=True):
            pixels = self._paint(said, one, grids[-1], own, pictures, painting)
            preview = grids[0] if len(grids) > 1 else None
            made.append(GeneratedPicture(grids[-1], preview, pixels, out.stats))
        return made

    @torch.inference_mode()
    def _ask(self, text: str, size_px: tuple[int, int], pictures: list[Image.Image]) -> _Asked:
        check_text(text, NAME)
        parts: list[dict[str, Any]] = [{"type": "image"} for _ in pictures]
        chat = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
        said = self.processor.apply_chat_template(chat, tokenize=False)
        height, width = size_px
        read = self.processor(
            text=[said],
            images=pictures or None,
            target_h=height,
            target_w=width,
            return_tensors="pt",
        )
        prompt, sizes = read["input_ids"][0], read["image_grid_thw"]
        preview, picture = grids_of(height, width)
        grids = [picture] if pictures else [preview, picture]
        expected = [[1, one.height, one.width] for one in reversed(grids)]
        if sizes[len(pictures) :].tolist() != expected:
            raise ValueError(f"its processor asks for grids {sizes.tolist()}, expected {expected}")
        model, device = self.encoder, self.model.device
        if pictures:
            sizes = sizes[: len(pictures)].to(device)
            seen: Any = model.get_image_features(read["pixel_values"].to(device), sizes)
            features = seen.pooler_output  # before transformers 5.24 not in rows and columns
            features = features if features[0].ndim > 2 else torch.cat(list(features))
            ids = model.get_image_tokens(features, sizes).flatten().cpu()
            prompt = prompt.masked_scatter(prompt == model.config.image_token_id, ids)
        return _Asked(prompt.to(device), [*_sources(model.config, prompt, sizes, pictures)], grids)

    def _paint(
        self,
        text: str,
        asked: _Asked,
        tokens: Tensor,
        seed: int,
        pictures: list[Image.Image],
        painting: dict[str, Any],
    ) -> Tensor | None:
        if self.painter is None:
            return None
        sources = dict[str, Any]()
        if pictures:
            ids = torch.cat([doubled(one) for one in asked.source_tokens()])
            sizes = [[1, 2 * one.frame.height, 2 * one.frame.width] for one in asked.sources]
            sources = {
                "image": [pictures],
                "prior_token_image_ids": [ids],
                "source_image_grid_thw": [torch.tensor(sizes, device=ids.device)],
            }
        height, width = (SIDE_PX * side for side in tokens.shape)
        noise = torch.Generator(self.model.device).manual_seed(seed % 2**63)
        given = {"height": height, "width": width, "generator": noise, **sources, **painting}
        out = self.painter([text], prior_token_ids=doubled(tokens)[None], **given)
        return as_frames(out.images[0])[0]


def _sources(
    config: Any, prompt: Tensor, sizes: Tensor, pictures: Sequence[object]
) -> Iterator[Section]:
    """Yield where the tokens of source pictures stand: between an image start and an image end."""
    starts = (prompt == config.image_start_token_id).nonzero()[:, 0] + 1
    ends = (prompt == config.image_end_token_id).nonzero()[:, 0]
    counts = len(starts) - 1, len(ends)
    if counts != (len(pictures),) * 2:
        raise ValueError(f"its processor put {counts[1]} pictures in a prompt of {len(pictures)}")
    for start, end, (_, height, width) in zip(starts[:-1], ends, sizes.tolist(), strict=False):
        if end - start != height * width:
            raise ValueError(f"a source of {height}x{width} tokens has {end - start} in the prompt")
        yield Section(int(start), FrameFormat(height, width), 1)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress of libraries that load, lines of which would stand before an error's."""
    from diffusers.utils import logging as of_diffusers  # slow to import
    from transformers.utils import logging as of_transformers

    with ExitStack() as ending:
        for library in (of_diffusers, of_transformers):
            if library.is_progress_bar_enabled():
                library.disable_progress_bar()
                ending.callback(library.enable_progress_bar)
        yield


@_without_bars()
def _read_stage(folder: Path) -> tuple[Any, dict[str, Tensor], GenerationDefaults]:
    """Return the vision encoder, on the meta device, its weights, and sampling as released."""
    from transformers import GlmImageConfig, GlmImageForConditionalGeneration  # slow to import

    index = folder / "model.safetensors.index.json"
    weights = read_shards(index) if index.is_file() else read_weights(folder / WEIGHTS_FILE)
    with naming(f"{folder}: no first stage of GLM-Image", _DAMAGE):
        with torch.device("meta"):
            config = GlmImageConfig.from_pretrained(folder, local_files_only=True)
            empty = GlmImageForConditionalGeneration(config)
        check_fit(empty, weights, folder)
        encoder = empty.model
        del encoder.language_model
        drawn = folder / "generation_config.json"
        said = read_json_object(drawn) if drawn.is_file() else {}
        given = {name: said.get(name) for name in ("temperature", "top_k", "top_p")}
        if given["temperature"] is None:
            del given["temperature"]
        defaults = image_defaults(**given)
    own = tensors_under("model.", weights)
    return encoder, {name: own[name] for name in encoder.state_dict()}, defaults


@_without_bars()
def _load_painter(folder: Path, codes: int, dtype: torch.dtype, device: torch.device) -> Any:
    for name in PAINTERS:
        require_folder(folder / name, f"{name} of GLM-Image")
    # slow to import
    from diffusers.pipelines.glm_image.pipeline_glm_image import GlmImagePipeline

    with naming(f"{folder}: no second stage of GLM-Image", _DAMAGE), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions call it dtype
        absent = dict.fromkeys((STAGE, PROCESSOR))
        painter: Any = GlmImagePipeline.from_pretrained(
            folder, torch_dtype=dtype, local_files_only=True, **absent
        )
    painter.set_progress_bar_config(disable=True)
    shape, vae = painter.transformer.config, painter.vae.config
    for what, given, expected in (
        ("codes of transformer", shape.prior_vq_quantizer_codebook_size, codes),
        ("channels of vae", vae.latent_channels, shape.in_channels),
        ("pixels of a patch", painter.vae_scale_factor * shape.patch_size * 2, SIDE_PX),
    ):
        if given != expected:
            raise ValueError(f"{folder}: {what} are {given}, expected {expected}: another model's")
    return painter.to(device)


FLAGS = {  # of `diagd generate` that GLM-Image supports
    *("model", "text", "size", "prompt", "images", "out", "seed", "device", "dtype", "backend"),
    *("strategy", "row_lag", "temperature", "top_k", "top_p", "guidance"),
}
SIZE_PX = 1024, 1024


def draw_pictures(options: GenerateOptions) -> dict[str, Any]:
    """Generate pictures as options say; write them, or their tokens, and print what it took."""
    refuse_others(options, FLAGS, NAME)
    text = text_of(options, NAME)
    size_px = read_size(options.size, "size", "1024x1024") if options.size else SIZE_PX
    formats = grids_of(*size_px)
    sources = [] if options.prompt is None else [read_video(options.prompt, last=1).frames]
    formats = formats[len(sources) :]
    strategy = options.decoding(GenerationDefaults(), formats[-1].height)
    for one in formats:  # before anything is loaded
        strategy.check(one.grid)
    machine = options.device, options.dtype, options.backend
    with waiting(f"loading {options.model}"):
        pictures = GlmImage.from_pretrained(options.model, *machine)
    scale = options.guidance  # the painter's; the first stage has none
    painting: dict[str, Any] = {} if scale is None else {"guidance_scale": scale}
    what, count = f"generating {options.images} pictures, {strategy}", options.images * len(formats)
    with progress(what, count) as job:
        made = pictures.generate(
            [text] * options.images,
            size_px,
            sources,
            strategy=strategy,
            sampling=options.sampling(pictures.defaults),
            seed=options.seed,
            on_grid=job.reach,
            **painting,
        )
    note, suffix = None, None
    if pictures.painter is None:
        note = "no transformer and vae are in the folder, so tokens are written"
        suffix = ".safetensors"
    paths = numbered(options.out or Path("dream.png"), len(made), suffix)
    for path, one in zip(paths, made, strict=True):
        if one.pixels is not None:
            write_image(path, one.pixels)
        else:
            tensors = {"tokens": one.tokens, "prior_token_ids": one.prior_token_ids}
            tensors |= {} if one.preview is None else {"preview": one.preview}
            write_bytes(path, save(tensors))
    of_one = sum(frame.grid.num_tokens for frame in formats)
    stats = {"num_tokens": of_one * len(made), **asdict(made[0].stats)}
    how = f"{pictures.dtype}, {pictures.backend}"
    return report_pictures(options, strategy, stats, how, paths, note)
