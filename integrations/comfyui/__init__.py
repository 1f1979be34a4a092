"""Nodes for ComfyUI: load a model, generate images with it, or continue a clip.

Only ComfyUI's conventions are used, and its progress bar where it is running.
"""

import logging
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from diagd import TokenGrid, VideoGenerator, parse_strategy
from diagd.data.actions import as_actions, idle_action
from diagd.decoding.engine import Stream
from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.strategies.table import Strategy
from diagd.pipeline.previews import paint, preview_due
from diagd.pipeline.scenes import model_scenes

try:
    from comfy.utils import ProgressBar
except ModuleNotFoundError:  # outside of ComfyUI
    ProgressBar = None

logger = logging.getLogger("diagd")
CATEGORY = "diagd"
STRATEGIES = {"diagonal": "k={}", "zipar": "zipar={}", "raster": "raster", "exact": "exact"}
HOW = {
    "strategy": (
        list(STRATEGIES),
        {"tooltip": "order of tokens; exact: raster's very tokens in fewer steps"},
    ),
    "k": ("INT", {"default": 1, "min": 1, "max": 1024, "tooltip": "of diagonal and zipar"}),
    "seed": ("INT", {"default": 0, "min": 0, "max": 2**62, "control_after_generate": True}),
}


class LoadModel:
    """Load a model: a bundled world, a folder, or `user/name` on the Hugging Face Hub."""

    CATEGORY, FUNCTION = CATEGORY, "load"
    RETURN_TYPES, RETURN_NAMES = ("DIAGD_MODEL",), ("model",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 (ComfyUI's)
        devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
        dtypes = ["auto", "fastest", "float32", "bfloat16", "float16", "int8"]
        name = {"default": "doom", "tooltip": "doom, maze, a folder, or user/name on the Hub"}
        return {"required": {"model": ("STRING", name), "device": (devices,), "dtype": (dtypes,)}}

    def load(self, model: str, device: str, dtype: Any) -> tuple[VideoGenerator]:
        return (VideoGenerator.from_pretrained(model, device, dtype),)


class GenerateImages:
    """Generate images from a text, or of a class, all of which share the model's steps."""

    CATEGORY, FUNCTION = CATEGORY, "generate"
    RETURN_TYPES = ("IMAGE",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        text = {"multiline": True, "tooltip": "what is shown; for models of classes, a class"}
        guided = {
            "default": 0.0,
            "min": 0.0,
            "max": 30.0,
            "step": 0.1,
            "tooltip": "how closely images keep to it; 1: the model as it is; 0: as its makers",
        }
        shown = {
            "default": 8,
            "min": 0,
            "max": 64,
            "tooltip": "pictures of the first image while it comes, each as long as painting it",
        }
        return {
            "required": {
                "model": ("DIAGD_MODEL",),
                "text": ("STRING", text),
                "count": ("INT", {"default": 1, "min": 1, "max": 64}),
                "guidance": ("FLOAT", guided),
                **HOW,
                "previews": ("INT", shown),
            }
        }

    def generate(
        self,
        model: VideoGenerator,
        text: str,
        count: int,
        guidance: float,
        strategy: str,
        k: int,
        seed: int,
        previews: int,
    ) -> tuple[Tensor]:
        """Return images, (count, H_px, W_px, 3) float32 in [0, 1]."""
        if model.defaults.context_frames:
            raise ValueError("this model makes videos: use Continue a clip")
        said: dict[str, Any] = {"text": text}
        if model.text is None:
            said = {"actions": [[text.strip()]] * count}
        chosen = parse_strategy(STRATEGIES[strategy].format(k))
        progress = Progress(model, chosen, 1, previews)
        images = model.generate(
            [None] * count,
            **said,
            strategy=chosen,
            seed=seed,
            guidance=guidance or None,
            on_start=progress.watch,
            on_step=progress,
        )
        progress(progress.total, images[0].frames[0])
        return (_image(torch.cat([one.frames for one in images])),)


class ContinueClip:
    """Continue a clip, or begin where the world does, by actions."""

    CATEGORY, FUNCTION = CATEGORY, "generate"
    RETURN_TYPES, RETURN_NAMES = ("IMAGE", "FLOAT"), ("frames", "fps")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        actions = {
            "default": "",
            "tooltip": "such as forward*8,left*4; the last one goes on; empty "
            "for the idle one, or a model without actions",
        }
        context = {
            "default": 0,
            "min": 0,
            "max": 1024,
            "tooltip": "frames of the clip's end that the model sees; 0: as its makers",
        }
        return {
            "required": {
                "model": ("DIAGD_MODEL",),
                "actions": ("STRING", actions),
                "num_frames": ("INT", {"default": 16, "min": 1, "max": 4096}),
                "context_frames": ("INT", context),
                **HOW,
            },
            "optional": {"frames": ("IMAGE",)},
        }

    def generate(
        self,
        model: VideoGenerator,
        actions: str,
        num_frames: int,
        context_frames: int,
        strategy: str,
        k: int,
        seed: int,
        frames: Tensor | None = None,
    ) -> tuple[Tensor, float]:
        """Return the frames that follow, (num_frames, H_px, W_px, 3) float32 in [0, 1]; and fps."""
        if frames is not None:
            kept = context_frames or model.defaults.context_frames
            clip, between = (frames[-kept:].clamp(0, 1) * 255).round().to(torch.uint8), None
        else:
            clip, between = _opening(model, context_frames)
        prompt, codec = model.read_prompt(clip, between), model.vocabulary
        for note in prompt.notes:
            logger.warning(note)
        count = model.num_grids(num_frames)
        said: str | list[str] | None = actions.strip() or None
        if codec is not None:
            said = as_actions(said or idle_action(codec), codec, count)
        ids = model.action_ids(said, count, "generated frame")
        chosen = parse_strategy(STRATEGIES[strategy].format(k))
        progress, written = Progress(model, chosen, count), list[Tensor]()
        engine = model.start(prompt, seed=seed)
        pictures = list[Tensor]()
        for tokens in engine.decode(chosen, ids, count, progress):
            written.append(tokens)
            pictures.append(model.tokenizer.decode(tokens).cpu())
            progress(engine.batch.num_steps, pictures[-1][-1])
        if model.tokenizer.temporal_compression > 1:  # painted behind the first of all
            _, before = model.prompt(prompt.frames, prompt.context_actions)
            whole = model.tokenizer.decode_after(before, torch.cat(written))
            pictures = [whole[-num_frames:].cpu()]
        return _image(torch.cat(pictures)), prompt.fps


class Progress:
    """The bar of a node, by steps of the model, and pictures beside it."""

    def __init__(
        self, model: VideoGenerator, strategy: Strategy, num_frames: int, num_previews: int = 0
    ) -> None:
        self.model, self.strategy, self.num_previews = model, strategy, num_previews
        self.stream, self.shown = None, 0
        grid = TokenGrid(num_frames, model.height, model.width)
        strategy.check(grid)
        # without a schedule, as many as there may be at most
        self.total = strategy.schedule(grid).num_steps if strategy.has_schedule else grid.num_tokens
        self.bar = ProgressBar and ProgressBar(self.total)

    def watch(self, engine: DecodingEngine) -> None:
        """Show previews of its first image, too."""
        self.stream = engine.stream

    def __call__(self, num_steps: int, picture: Tensor | None = None) -> None:
        """Show how far it is, and a picture (H_px, W_px, 3) uint8; here ComfyUI may interrupt."""
        if self.bar is not None:
            if picture is None and self.stream is not None:
                picture = self._preview(self.stream)
            image = picture if picture is None else Image.fromarray(picture.numpy())
            shown = None if image is None else ("JPEG", image, None)
            self.bar.update_absolute(min(num_steps, self.total), self.total, shown)

    def _preview(self, stream: Stream) -> Tensor | None:
        self.shown, known = preview_due(stream, self.strategy, self.num_previews, self.shown)
        if known is None:
            return None
        return paint(self.model, stream.frame_under_way().cpu(), known)


def _opening(model: VideoGenerator, context_frames: int) -> tuple[Tensor, tuple[str, ...] | None]:
    """Return the frames of a model's first start scene, and the actions between them."""
    wanted = context_frames or model.defaults.context_frames
    scenes = model_scenes(model.source.folder, model, wanted) if model.source and wanted else []
    if not scenes:
        raise ValueError("connect frames: this model has no start scene of its own")
    return scenes[0].frames, scenes[0].actions if model.vocabulary else None


def _image(frames: Tensor) -> Tensor:
    return frames.float() / 255


NODE_CLASS_MAPPINGS = {
    "DiagdLoadModel": LoadModel,
    "DiagdGenerateImages": GenerateImages,
    "DiagdContinueClip": ContinueClip,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "DiagdLoadModel": "Load model (diagd)",
    "DiagdGenerateImages": "Generate images (diagd)",
    "DiagdContinueClip": "Continue a clip (diagd)",
}
