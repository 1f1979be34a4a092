"""Episodes in a world, side by side: start scenes, and a frame for every action taken."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Discrete
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.strategies.strategy import Strategy, as_strategy
from diagd.pipeline.generator import StartScene, VideoGenerator, folder_scenes, model_scenes


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


try:
    import gymnasium
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "diagd.gym needs gymnasium: pip install -e '.[gym]'", name=error.name
    ) from None

Frames = NDArray[np.uint8]
RENDER_MODES = ["rgb_array"]


class GymEnv(gymnasium.Env[Frames, np.int64]):
    """A world model as an environment (`gymnasium.Env`); registered as `diagd/World-v0`.

    The reward is always 0.0, and no episode terminates. `reset` draws a start scene, or takes the
    one of `options={"scene": name_or_number}`, and says in `info["scene"]` which. The same seed
    and the same actions give the same episode again.

    Args:
        world: a `VideoGenerator`, the name of a bundled model, or a folder.
        scenes: folder of clips and images to start from, in place of the model's own.
        context_frames: frames of a scene that an episode goes on from; fewer where a scene has
            fewer, since all episodes start alike. Default: as the model's makers have it.
        strategy: how to decode, by name (see `diagd.decoding.strategies.strategy`) or as a value.
        sampling: how tokens are drawn; the model's own by default.
        render_mode: `rgb_array`, or None.

    Attributes:
        episodes: the world, the `names` of its actions, in the order of their numbers, and its
            `scenes`.

    Raises:
        FileNotFoundError, ValueError: no such world or scenes, or ones that do not fit.
    """

    metadata: dict[str, Any] = {"render_modes": RENDER_MODES}  # noqa: RUF012 (gymnasium's)

    def __init__(
        self,
        world: VideoGenerator | str | Path = "doom",
        *,
        scenes: str | Path | None = None,
        context_frames: int | None = None,
        strategy: Strategy | str = "k=1",
        sampling: SamplingOptions | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.episodes = Episodes(
            world,
            scenes=scenes,
            context_frames=context_frames,
            strategy=strategy,
            sampling=sampling,
        )
        self.action_space, self.observation_space = _spaces(self.episodes)
        self.metadata = _metadata(self.episodes)
        self.render_mode = _check_render_mode(render_mode)
        self._frame: Frames | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Frames, dict[str, Any]]:
        """Begin an episode; returns the last frame of its scene."""
        super().reset(seed=seed)
        start = _draw(self.np_random, self.episodes, options or {})
        self._frame = frame = self.episodes.begin([start])[0].numpy()
        return frame, {"scene": start[1].name}

    def step(self, action: np.int64) -> tuple[Frames, float, bool, bool, dict[str, Any]]:
        """Return the frame that an action leads to, 0.0, False, False and nothing more."""
        _check_step(self._frame, action, self.action_space)
        self._frame = frame = self.episodes.advance([int(action)])[0].numpy()
        return frame, 0.0, False, False, {}

    def render(self) -> Frames | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the frame that was seen last, where the render mode is `rgb_array`."""
        return self._frame.copy() if self.render_mode and self._frame is not None else None


class GymVectorEnv(VectorEnv[Frames, NDArray[np.int64], NDArray[Any]]):
    """Several episodes in one world, generated side by side as one batch of the engine.

    Each shows what a `GymEnv` with its seed would. They begin together and end together, after
    `max_episode_steps`; the step after that begins the next ones (Gymnasium's NEXT_STEP).

    Args:
        world: as of `GymEnv`.
        num_envs: how many.
        max_episode_steps: where episodes are truncated; None: nowhere.
        render_mode: `rgb_array`, or None.
        settings: what else `GymEnv` takes (scenes, context_frames, strategy, sampling).

    Raises:
        FileNotFoundError, ValueError: no such world or scenes, or ones that do not fit.
    """

    def __init__(
        self,
        world: VideoGenerator | str | Path = "doom",
        num_envs: int = 1,
        *,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        for name, value in (("num_envs", num_envs), ("max_episode_steps", max_episode_steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.episodes = Episodes(world, num_envs, **settings)
        self.num_envs, self.max_episode_steps = num_envs, max_episode_steps
        self.single_action_space, self.single_observation_space = _spaces(self.episodes)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.metadata = _metadata(self.episodes) | {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = _check_render_mode(render_mode)
        self._randoms = [seeding.np_random()[0] for _ in range(num_envs)]
        self._frames: Frames | None = None
        self._num_steps = 0

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Frames, dict[str, Any]]:
        """Begin all episodes.

        Args:
            seed: of the first one, from which the others count on; or one for each.
            options: `scene`, the name or number of a scene for all of them.

        Raises:
            ValueError: a `reset_mask` that leaves some out, another number of seeds, or no such
                scene.
        """
        options = options or {}
        if not np.all(options.get("reset_mask", True)):
            raise ValueError("episodes of one batch begin together: reset_mask must be all True")
        seeds = range(seed, seed + self.num_envs) if isinstance(seed, int) else seed
        if seeds is not None:
            if len(seeds) != self.num_envs:
                raise ValueError(f"expected {self.num_envs} seeds, got {len(seeds)}")
            self._randoms = [
                random if one is None else seeding.np_random(one)[0]
                for one, random in zip(seeds, self._randoms, strict=True)
            ]
        starts = [_draw(random, self.episodes, options) for random in self._randoms]
        self._frames, self._num_steps = self.episodes.begin(starts).numpy(), 0
        info: dict[str, Any] = {}
        for row, (_, scene) in enumerate(starts):
            info = self._add_info(info, {"scene": scene.name}, row)
        return self._frames, info

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Frames, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Take an action in every episode; or begin all anew, where the last step ended them."""
        rewards, never = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        if self._num_steps == self.max_episode_steps:
            frames, info = self.reset()
            return frames, rewards, never, never.copy(), info
        _check_step(self._frames, np.asarray(actions), self.action_space)
        self._frames = self.episodes.advance([int(action) for action in actions]).numpy()
        self._num_steps += 1
        truncated = np.full(self.num_envs, self._num_steps == self.max_episode_steps)
        return self._frames, rewards, never, truncated, {}

    def render(self) -> tuple[Frames, ...] | None:
        """Return the frames that were seen last, where the render mode is `rgb_array`."""
        return tuple(self._frames.copy()) if self.render_mode and self._frames is not None else None


def _spaces(episodes: Episodes) -> tuple[Discrete, Any]:
    shape = (*episodes.world.frame_size_px, 3)
    return Discrete(len(episodes.names)), Box(0, 255, shape, np.uint8)


def _metadata(episodes: Episodes) -> dict[str, Any]:
    return {"render_modes": RENDER_MODES, "render_fps": episodes.world.defaults.fps}


def _check_render_mode(mode: str | None) -> str | None:
    if mode not in (None, *RENDER_MODES):
        raise ValueError(f"render_mode must be rgb_array or None, got {mode!r}")
    return mode


def _check_step(seen: Frames | None, action: Any, space: gymnasium.Space[Any]) -> None:
    if seen is None:
        raise ResetNeeded("reset comes before step")
    if not space.contains(action):
        raise ValueError(f"action must be in {space}, got {action!r}")


def _draw(
    random: np.random.Generator, episodes: Episodes, options: dict[str, Any]
) -> tuple[int, StartScene]:
    """Draw the seed and the scene of an episode, unless the options name the scene."""
    seed, number = int(random.integers(2**31)), int(random.integers(len(episodes.scenes)))
    return seed, episodes.scene(options.get("scene", number))


gymnasium.register(
    "diagd/World-v0",
    entry_point="diagd.gym:GymEnv",
    vector_entry_point="diagd.gym:GymVectorEnv",
    max_episode_steps=1000,
)
