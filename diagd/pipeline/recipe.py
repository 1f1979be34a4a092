"""How a video is made, whatever it goes on from: what one prompt and many have in common."""

from dataclasses import replace
from pathlib import Path

from diagd.backends.devices import device_of
from diagd.decoding.strategies.strategy import Strategy
from diagd.pipeline.coming import asked_actions, one_a_frame, read_text, walk_actions
from diagd.pipeline.generated_video import GeneratedVideo
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.options import Recipe
from diagd.pipeline.prompt_tokens import grids_of
from diagd.pipeline.prompts import Prompt


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
