"""Episodes in a world, side by side: start scenes, and a frame for every action taken."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from diagd.decoding.engine import DecodingEngine
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.strategies.strategy import Strategy
from diagd.decoding.strategies.table import as_strategy
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import StartScene, folder_scenes, model_scenes


class Episodes:
    """Episodes of one world, as the batch rows of one stream.

    They begin together. Old frames leave the context when it is full (see `Stream`).

    Args:
        world: a model with actions, or the name or folder of one.
        num_episodes: how many.
        scenes: folder of clips and images to start from, in place of the model's own.
        context_frames: frames of a scene that an episode goes on from; fewer where a scene has
            fewer, since all episodes start alike. Default: as the model's makers have it.
        strategy: how to decode, by name or as a value.
        sampling: how tokens are drawn; the model's own by default.

    Attributes:
        names: of the actions. scenes: where episodes may start.

    Raises:
        FileNotFoundError, ValueError: no such world or scenes, or ones that do not fit.
    """

    def __init__(
        self,
        world: VideoGenerator | str | Path,
        num_episodes: int = 1,
        *,
        scenes: str | Path | None = None,
        context_frames: int | None = None,
        strategy: Strategy | str = "k=1",
        sampling: SamplingOptions | None = None,
    ) -> None:
        if not isinstance(world, VideoGenerator):
            world = VideoGenerator.from_pretrained(world)
        if world.vocabulary is None:
            raise ValueError("this model takes no actions, so there is nothing to do in its world")
        self.world, self.names = world, world.vocabulary.names
        self.strategy, self.sampling = as_strategy(strategy), sampling
        world.check(self.strategy, sampling, num_episodes)
        self.scenes = _read_scenes(world, scenes, context_frames)
        self.engine: DecodingEngine | None = None

    def scene(self, wanted: str | int) -> StartScene:
        """Return a scene by its name or number."""
        for number, scene in enumerate(self.scenes):
            if wanted in (scene.name, number):
                return scene
        known = ", ".join(scene.name for scene in self.scenes)
        raise ValueError(
            f"scene must be a number below {len(self.scenes)} or one of: {known}; got {wanted!r}"
        )

    def begin(self, starts: Sequence[tuple[int, StartScene]]) -> Tensor:
        """Begin all episodes, each with a seed and a scene.

        Returns:
            (B, H_px, W_px, 3) uint8 RGB, the last frame of each scene.
        """
        self.engine = self.world.start_batch(
            [(scene.frames, scene.actions) for _, scene in starts],
            [seed for seed, _ in starts],
            self.sampling,
        )
        return torch.stack([scene.frames[-1] for _, scene in starts])

    def advance(self, actions: Sequence[int]) -> Tensor:
        """Take an action in each episode.

        Args:
            actions: places in `names`.

        Returns:
            (B, H_px, W_px, 3) uint8 RGB, the frames that they lead to.
        """
        assert self.engine is not None, "begin comes first"
        ids = [self.world.action_ids([self.names[action]], 1, "frame") for action in actions]
        together = torch.cat([tokens for tokens in ids if tokens is not None])
        (tokens,) = self.engine.decode(self.strategy, together, 1)
        # one by one: a batch of pictures is rounded otherwise here and there, by one of 255
        return torch.cat([self.world.tokenizer.decode(grid[None]).cpu() for grid in tokens])


def _read_scenes(
    world: VideoGenerator, folder: str | Path | None, context_frames: int | None
) -> list[StartScene]:
    wanted = world.defaults.context_frames if context_frames is None else context_frames
    if wanted < 1:
        raise ValueError(f"context_frames must be at least 1, got {wanted}")
    if folder is not None:
        found, where = folder_scenes(Path(folder), world, wanted), folder
    else:
        where = None if world.source is None else world.source.folder
        found = [] if where is None else model_scenes(where, world, wanted)
    if not found:
        raise ValueError(f"nowhere to start: no clip or image in {where}, name a folder as scenes")
    least = min(len(scene.frames) for scene in found)
    return [
        replace(
            scene,
            frames=scene.frames[-least:],
            actions=scene.actions[len(scene.actions) - least + 1 :],
        )
        for scene in found
    ]
