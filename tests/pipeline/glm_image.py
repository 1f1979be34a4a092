"""A folder as GLM-Image's release has it, with tiny random weights."""

import json
import shutil
from pathlib import Path
from typing import Any

from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_glm_image import GlmImageTransformer2DModel
from diffusers.pipelines.glm_image.pipeline_glm_image import GlmImagePipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    ByT5Tokenizer,
    GlmImageProcessor,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)
from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

STAGE = Path(__file__).parents[1] / "fixtures" / "glm_image_tiny"
CODES, START, END, PICTURE = 64, 64, 65, 130
TEMPLATE = (
    "{% for one in messages %}{% for part in one['content'] %}{% if part['type'] == 'image' %}"
    f"<|dit_token_{START}|><|image|><|dit_token_{END}|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def write_processor(folder: Path, start: int = START) -> None:
    words = [f"<|dit_token_{number}|>" for number in range(72)]
    words += ["[UNK]", "a", "red", "house", *map(str, range(40))]
    words += [f"word{number}" for number in range(PICTURE - 2 - len(words))]
    words += ["<sop>", "<eop>", "<|image|>"]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    special = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=f"<|dit_token_{start}|>",
        unk_token="[UNK]",
        eos_token=f"<|dit_token_{END}|>",
        pad_token="word0",
        extra_special_tokens=special,
    )
    size = {"shortest_edge": 1024, "longest_edge": 100_000}  # pixels in all
    eyes = GlmImageImageProcessorPil(patch_size=16, temporal_patch_size=1, merge_size=1, size=size)
    GlmImageProcessor(eyes, fast, chat_template=TEMPLATE).save_pretrained(folder)


def write_painter(folder: Path, codes: int = CODES, channels: int = 4, blocks: int = 4) -> None:
    transformer = GlmImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=16,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=codes,
    )
    sizes: dict[str, Any] = {  # whose annotations are of one number each
        "down_block_types": ("DownEncoderBlock2D",) * blocks,
        "up_block_types": ("UpDecoderBlock2D",) * blocks,
        "block_out_channels": (4,) * blocks,
        "latents_mean": [0.0] * channels,
        "latents_std": [1.0] * channels,
    }
    vae = AutoencoderKL(
        latent_channels=channels,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **sizes,
    )
    t5 = T5Config(vocab_size=384, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    parts = {
        "transformer": transformer,
        "vae": vae,
        "text_encoder": T5EncoderModel(t5),
        "tokenizer": ByT5Tokenizer(),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }
    pipeline = GlmImagePipeline(**parts, processor=None, vision_language_encoder=None)  # pyright: ignore[reportArgumentType]
    pipeline.save_pretrained(folder)


def write_release(folder: Path, painter: bool = True) -> Path:
    shutil.copytree(STAGE / "vision_language_encoder", folder / "vision_language_encoder")
    write_processor(folder / "processor")
    index = json.loads((STAGE / "model_index.json").read_text())
    if painter:
        write_painter(folder)
        index = json.loads((folder / "model_index.json").read_text()) | index
    index["processor"] = ["transformers", "GlmImageProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
