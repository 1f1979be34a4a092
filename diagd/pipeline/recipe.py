"""What the command line says is to come: actions, by words or a file, and a text."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from diagd.backends.devices import device_of
from diagd.data.actions import ActionCodec, as_actions, parse_actions, read_actions
from diagd.decoding.strategies.strategy import Strategy
from diagd.pipeline.generator import GeneratedVideo, VideoGenerator
from diagd.pipeline.options import Recipe
from diagd.pipeline.prompts import Prompt, grids_of
from diagd.tokenizers.text import encode_text, read_embedding


def asked_actions(
    asked: str | None, codec: ActionCodec | None, num_frames: int, notes: list[str]
) -> list[str] | None:
    """Return one action for each frame to generate, if any were asked for.

    Args:
        asked: such as `forward*8,left*4`, whose last action goes on until the frames are full, or a
            jsonl file.
        codec: of the model's actions; None for a model without.
        notes: gets a line where an action goes on.

    Raises:
        FileNotFoundError, ValueError: no such actions, or not one for each frame.
    """
    if asked is None:
        return None
    if codec is None:
        raise ValueError("this model takes no actions")
    if asked.endswith(".jsonl"):
        return one_a_frame(read_actions(asked, codec), num_frames)
    actions = as_actions(asked, codec, num_frames)
    if 1 < (spelled := len(parse_actions(asked, codec))) < num_frames:
        notes.append(
            f"{spelled} actions for {num_frames} frames: {actions[-1]!r} goes on to the end"
        )
    return one_a_frame(actions, num_frames)


def walk_actions(walk: Path, codec: ActionCodec, num_frames: int) -> list[str]:
    """Return the model's own walk, a jsonl file, cut or repeated to one action for each frame.

    Raises:
        FileNotFoundError, ValueError: no such walk, or a damaged one; an empty one gives nothing.
    """
    if not walk.is_file():
        raise FileNotFoundError(
            f"no {walk} to follow: give --actions, such as {codec.names[-1]}*{num_frames}"
        )
    steps = read_actions(walk, codec)
    return [steps[frame % len(steps)] for frame in range(num_frames if steps else 0)]


def one_a_frame(actions: list[str], num_frames: int) -> list[str]:
    """Return the actions, or raise ValueError unless there is one for each frame."""
    if len(actions) != num_frames:
        raise ValueError(f"expected {num_frames} actions (one a frame), got {len(actions)}")
    return actions


def read_text(
    text: str | None, encoder: Path | None, embedding: Path | None, size: int
) -> Tensor | None:
    """Return the text as a model with cross-attention reads it, (1, places, size), or None.

    Args:
        size: width that the model reads; 0 for models without text.

    Raises:
        FileNotFoundError, ValueError: a text too many or too few, or one of another width.
    """
    if not size:
        if (text, encoder, embedding) != (None, None, None):
            raise ValueError("this model reads no text")
        return None
    if embedding is not None:
        states = read_embedding(embedding)
    elif text is not None and encoder is not None:
        states = encode_text(text, encoder)
    else:
        raise ValueError(
            "this model reads a text: give --text with --text-encoder FOLDER (T5), "
            "or --text-embedding FILE"
        )
    if states.shape[2] != size:
        raise ValueError(f"the model reads a text of width {size}, got {states.shape[2]}")
    return states


class PreparedWorld:
    """A world that was loaded as a recipe says, and goes on from prompts by it.

    Attributes:
        world: loaded from `folder`.
        strategy, sampling, num_frames: what the recipe says, or else the world's defaults.
        device, dtype: where its weights are, and of which type, resolved.

    Raises:
        FileNotFoundError, ValueError: something is missing or damaged (named), or does not fit.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.device = device_of(recipe.device)
        self.world = world = VideoGenerator.from_pretrained(
            recipe.model,
            self.device,
            recipe.dtype,
            recipe.backend,
            config=recipe.config,
            tokenizer=recipe.tokenizer,
        )
        self.dtype = world.dtype
        assert world.source is not None
        self.folder = world.source.folder
        self.sampling = recipe.sampling(world.defaults)
        self.num_frames = recipe.frames or world.defaults.num_frames
        self.strategy = recipe.decoding(world.defaults, world.height)
        world.check(self.strategy, self.sampling)  # before anything ran in vain
        grids_of(self.num_frames, world.tokenizer.temporal_compression)
        self._notes: list[str] = []
        self._asked = asked_actions(recipe.actions, world.vocabulary, self.num_frames, self._notes)
        text = read_text(
            recipe.text, recipe.text_encoder, recipe.text_embedding, world.config.context_size
        )
        self._text = None if text is None else text.to(self.device)

    def read(self, path: Path | None = None) -> Prompt:
        """Read a prompt, by default the world's own, with one coming action for each frame.

        Raises:
            FileNotFoundError, ValueError: a file is missing or damaged, or does not fit.
        """
        prompt = self.world.prompts.read_file(
            path or self.folder / "prompt.mp4", self.recipe.context_frames, self.num_frames
        )
        coming, codec = prompt.coming_actions, self.world.vocabulary
        if self._asked is not None:
            coming = self._asked
        elif codec is not None:
            coming = coming or walk_actions(self.folder / "walk.jsonl", codec, self.num_frames)
            coming = one_a_frame(coming, self.num_frames)
        return replace(prompt, coming_actions=coming, notes=[*prompt.notes, *self._notes])

    def generate(
        self, prompt: Prompt, num_frames: int, strategy: Strategy, seed: int
    ) -> GeneratedVideo:
        """Go on from a prompt that was read here, for so many frames."""
        return self.world.generate(
            prompt.frames,
            prompt.coming_actions[:num_frames] if self.world.vocabulary else None,
            num_frames,
            strategy=strategy,
            context_actions=prompt.context_actions,
            sampling=self.sampling,
            seed=seed,
            text=self._text,
        )
