"""A whole world-model folder in miniature: random weights, 3 x 5 tokens a frame, 24 x 40 px.

Everything `diagd generate` reads is in it, so commands run end to end in milliseconds. The codebook
of the tokenizer is made of latents of pictures, so different frames have different tokens.
"""

import dataclasses
import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from diagd.data.actions import ActionVocabulary, write_actions
from diagd.data.video import write_image, write_video
from diagd.families.checkpoints import save_model
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.tokenizers.shards import TokenClips
from diagd.tokenizers.vq import VQTokenizer, vq_model_class
from tests.models.tiny import tiny_fields

HEIGHT, WIDTH, PATCH_PX = 3, 5, 8
HEIGHT_PX, WIDTH_PX = HEIGHT * PATCH_PX, WIDTH * PATCH_PX
NUM_CODES = 20
CONTEXT_FRAMES = 8  # frames the model can hold
NAMES = ("none", "forward", "left", "right")
PROMPT_ACTIONS = ("none", "forward", "left", "left", "right")
WALK = ("forward", "left", "right")
SHARD_CODES, SHARD_NAMES = 11, ("none", "left", "right")


def smooth_frames(num_frames: int, height_px: int, width_px: int, seed: int = 0) -> Tensor:
    """Draw clouds of colour that a video codec can keep; (T, height_px, width_px, 3) uint8."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(num_frames, 3, 3, 4, generator=generator)
    pixels = functional.interpolate(coarse, (height_px, width_px), mode="bicubic")
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).movedim(1, -1).contiguous()


def model_config(
    num_action_tokens: int = 1, height: int = HEIGHT, width: int = WIDTH
) -> ModelConfig:
    """Describe a two-layer MC-AR with 3-D RoPE for the little grid, or another."""
    fields = tiny_fields(
        hidden_size=32,
        intermediate_size=48,
        vocab_size=NUM_CODES + (len(NAMES) if num_action_tokens else 0),
        image_vocab_size=NUM_CODES,
        max_positions=CONTEXT_FRAMES * (height * width + num_action_tokens) - num_action_tokens,
        grid_height=height,
        grid_width=width,
        num_action_tokens=num_action_tokens,
        position="rope3d",
    )
    return ModelConfig(**fields)


def random_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """Seeded weights ten times the usual width, so that greedy decoding has something to choose."""
    model = Transformer.random(config, seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(10)
    return model


@cache
def tokenizer() -> VQTokenizer:
    """Return a random tokenizer whose codes are latents of smooth frames."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = vq_model_class()(
            in_channels=3 * PATCH_PX**2,
            out_channels=3 * PATCH_PX**2,
            block_out_channels=(8,),
            latent_channels=4,
            vq_embed_dim=4,
            num_vq_embeddings=NUM_CODES,
            norm_num_groups=2,
            mid_block_add_attention=False,
        )
    wrapped = VQTokenizer(model)
    with torch.no_grad():
        latents = wrapped.latents(smooth_frames(4, HEIGHT_PX, WIDTH_PX, seed=1))
        wrapped.codebook.copy_(latents.movedim(1, -1).flatten(0, 2)[::3])
        model.decoder.conv_out.weight.mul_(4)  # else all codes look alike
    return wrapped


def write_world(
    folder: Path, num_action_tokens: int = 1, height: int = HEIGHT, width: int = WIDTH
) -> Path:
    """Write a checkpoint folder with tokenizer, actions, prompt and walk; returns the folder.

    Args:
        height, width: of a frame, in tokens.
    """
    save_model(random_model(model_config(num_action_tokens, height, width)), folder)
    tokenizer().save_pretrained(folder / "tokenizer")
    prompt = smooth_frames(5, height * PATCH_PX, width * PATCH_PX, seed=2)
    write_video(folder / "prompt.mp4", prompt, fps=8)
    if num_action_tokens:
        ActionVocabulary(NAMES).save(folder / "actions.json")
        write_actions(folder / "prompt.jsonl", PROMPT_ACTIONS)
        write_actions(folder / "walk.jsonl", WALK)
    return folder


def write_scenes(world: Path, height: int = HEIGHT, width: int = WIDTH) -> Path:
    """Give a world four pictures to start from; returns its folder."""
    (world / "scenes").mkdir()
    for seed in range(3, 7):
        view = smooth_frames(1, height * PATCH_PX, width * PATCH_PX, seed)[0]
        write_image(world / "scenes" / f"view-{seed}.png", view)
    return world


def clips_of(num_clips: int = 4, num_frames: int = 6, seed: int = 0) -> TokenClips:
    """Draw 2 x 3 clips in which the action shifts every token of its frame: easy to learn."""
    generator = torch.Generator().manual_seed(seed)
    actions = torch.randint(len(SHARD_NAMES), (num_clips, num_frames), generator=generator)
    start = torch.randint(SHARD_CODES, (num_clips, 1, 2, 3), generator=generator)
    tokens = (start + actions.cumsum(1)[..., None, None]) % SHARD_CODES
    return TokenClips(tokens.to(torch.int16), actions.to(torch.int16), SHARD_CODES, SHARD_NAMES)


def write_shard(folder: Path, clips: TokenClips, codebook: str = "0" * 16) -> Path:
    """Write clips as the only shard of a folder; returns the folder."""
    folder.mkdir()
    metadata = {
        "clips": json.dumps([f"clip_{number}" for number in range(len(clips.tokens))]),
        "codebook": codebook,
        "codebook_size": str(clips.codebook_size),
        "compression": "8",
        "action_names": json.dumps(list(clips.action_names)),
    }
    tensors = {"tokens": clips.tokens, "actions": clips.actions}
    save_file(tensors, folder / "shard_00000.safetensors", metadata)
    return folder


def write_shard_model(folder: Path, frames: int = 6) -> Path:
    """Write a checkpoint for the clips of `clips_of`, without a tokenizer; returns the folder."""
    config = dataclasses.replace(
        model_config(),
        vocab_size=SHARD_CODES + len(SHARD_NAMES),
        image_vocab_size=SHARD_CODES,
        grid_height=2,
        grid_width=3,
        max_positions=frames * 7 - 1,
    )
    save_model(random_model(config), folder)
    ActionVocabulary(SHARD_NAMES).save(folder / "actions.json")
    return folder
