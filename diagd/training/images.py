"""Pictures with texts or classes, as images that a model is finetuned on (`finetune --images`).

Pictures are tokenized once, into shards beside their folder; prompts are the family's own. A model
that is guided learns a share of the images without their texts, as its makers train it.
"""

from dataclasses import replace

import torch

from diagd.data.captioned import Captioned, find_captioned
from diagd.families.checkpoints import load_text, tokenizer_of
from diagd.families.family import Checkpoint
from diagd.files import naming
from diagd.pipeline.world_folder import codec_of, wrap_tokenizer
from diagd.system import only_writer
from diagd.tokenizers.shards import codebook_fingerprint, read_shards, write_image_shards
from diagd.tokenizers.text import TextIds
from diagd.training.corpus import split_clips
from diagd.training.options import FinetuneOptions
from diagd.training.sequences import TokenImages

DROP = 0.1  # LlamaGen's share of classes and texts left out in training, and that of most others
HELD_OUT = 0.1


def read_images(
    options: FinetuneOptions, found: Checkpoint
) -> tuple[TokenImages, TokenImages | None]:
    """Tokenize a folder's pictures for a model, or read their tokens; hold out every tenth.

    Raises:
        ValueError: a model that makes no images of texts or classes; a picture that is damaged,
            too small or without a text; a text that does not fit the model; an unknown class.
        FileNotFoundError: no pictures, or a text of one is missing.
    """
    assert options.images is not None
    config, defaults = found.config, found.defaults
    text_folder, codec = found.family.text, codec_of(found)
    if defaults.context_frames:
        raise ValueError(f"images are for image models; {options.init} continues clips")
    if text_folder and text_folder.encoder:
        raise ValueError(
            f"{options.init} cannot be finetuned: its text encoder is stored elsewhere"
        )
    text = load_text(found)
    if text is None and codec is None:
        raise ValueError(f"images need a model of texts (in its text/) or classes: {options.init}")
    pictures = find_captioned(options.images, "label" if text is None else "text")
    taken = config.max_positions - config.tokens_per_frame

    def prompt_of(one: Captioned) -> TextIds:
        with naming(one.where):
            if text is not None:
                said = text(one.said)
            else:
                assert codec is not None
                known = [codec.tokens_of(name) for name in (one.said, "none")]
                ids = torch.tensor(known) + config.image_vocab_size
                said = TextIds(ids[:1], ids[1:])
            if (length := said.prompt.shape[1]) > taken:
                raise ValueError(f"text must be at most {taken} tokens, got {length}")
        return said

    said = [prompt_of(one) for one in pictures]  # before the work of tokenizing
    tokenizer = wrap_tokenizer(found, tokenizer_of(found))
    if torch.cuda.is_available():
        tokenizer = tokenizer.to("cuda")
    size_px = tokenizer.frame_size_px(config.grid_height, config.grid_width)
    with only_writer(folder := options.token_folder):
        write_image_shards(tokenizer, pictures, folder, size_px)
    images = TokenImages(
        read_shards(folder).tokens.flatten(1),
        [one.prompt[0] for one in said],
        [one.unconditional[0] for one in said],
        (DROP if defaults.guidance != 1 else 0.0) if options.drop is None else options.drop,
        codebook_fingerprint(tokenizer),
        defaults.row_ends,
    )
    train, held_out = split_clips(range(len(pictures)), HELD_OUT)
    return _part(images, train), _part(replace(images, drop=0.0), held_out) if held_out else None


def _part(images: TokenImages, numbers: list[int]) -> TokenImages:
    return replace(
        images,
        tokens=images.tokens[numbers],
        prompts=[images.prompts[n] for n in numbers],
        unconditional=[images.unconditional[n] for n in numbers],
    )
