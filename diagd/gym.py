"""A world as an environment of Gymnasium: one episode, or several side by side as one batch."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diagd.backends.names import DTypeChoice
from diagd.checks import check_at_least, whole
from diagd.client import Session
from diagd.data.vectors import VectorActions, spell
from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.strategies.table import Strategy, as_strategy
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import StartScene, folder_scenes, model_scenes

try:
    import gymnasium
    from gymnasium.error import ResetNeeded
    from gymnasium.spaces import Box, Discrete
    from gymnasium.utils import seeding
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "diagd.gym needs gymnasium: pip install -e '.[gym]'", name=error.name
    ) from None

World = VideoGenerator | str | Path
Frames = NDArray[np.uint8]
RENDER_MODES = ["rgb_array"]
_IMPORTED_BY = os.getpid()


class GymVectorEnv(VectorEnv[Frames, NDArray[Any], NDArray[Any]]):
    """Several episodes in one world, generated side by side as one batch of the engine.

    Each equals a `GymEnv` with its seed. All start together and end together, after
    `max_episode_steps`; the next step starts new ones (Gymnasium's NEXT_STEP).

    Args:
        world: as for `GymEnv`.
        num_envs: number of episodes.
        max_episode_steps: length after which episodes are truncated; None: never.
        render_mode: `rgb_array`, or None.
        scenes: folder of clips and images to start from, instead of the model's own; the first
            one unlike the model's training data raises a warning.
        context_frames: frames of a scene in the context, or fewer if the shortest scene has
            fewer. Default: the model's own.
        strategy: decoding strategy, by name or as a value.
        sampling: sampling options; default: the model's own.
        dtype: for a world given by name, as in `VideoGenerator.from_pretrained`: `auto`,
            `fastest`, `int8`, or a dtype of torch.
        url: of a world that `diagd play` serves (see `diagd.client.Session`); each episode is a
            session. The server has the world, its start scenes, context_frames, sampling and dtype.
        api_key: for a server that asks for one.
    """

    world: VideoGenerator  # of one that is here, not at a url
    scenes: list[StartScene]  # of it; all have as many frames

    def __init__(
        self,
        world: World = "doom",
        num_envs: int = 1,
        *,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        scenes: str | Path | None = None,
        context_frames: int | None = None,
        strategy: Strategy | str = "k=1",
        sampling: SamplingOptions | None = None,
        dtype: torch.dtype | DTypeChoice = "auto",
        url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        self.num_envs, self.max_episode_steps = whole(num_envs, "num_envs"), max_episode_steps
        whole(1 if max_episode_steps is None else max_episode_steps, "max_episode_steps")
        check_at_least(self, num_envs=1, max_episode_steps=1)
        if render_mode not in (None, *RENDER_MODES):
            raise ValueError(f"render_mode must be rgb_array or None, got {render_mode!r}")
        chosen = as_strategy(strategy)
        if url is not None:
            own = (world, scenes, context_frames, sampling, dtype)
            if own != ("doom", None, None, None, "auto"):
                names = "world, scenes, context_frames, sampling and dtype"
                raise ValueError(f"{names} must be left out: the server at url has them")
            self._played = _Elsewhere(url, num_envs, chosen, api_key)
        else:
            self._played = _Here(world, scenes, context_frames, chosen, sampling, dtype)
            self.world, self.scenes = self._played.world, self._played.scenes
        self.names = self._played.names  # of actions, by their numbers
        self.single_action_space = Discrete(len(self.names))
        if axes := self._played.axes:  # actions are vectors
            _, lowest, highest = (np.array(column) for column in zip(*axes, strict=True))
            self.single_action_space = Box(lowest, highest, dtype=np.float64)
        self.single_observation_space = Box(0, 255, (*self._played.size_px, 3), np.uint8)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.metadata = {
            "render_modes": RENDER_MODES,
            "render_fps": self._played.fps,
            "autoreset_mode": AutoresetMode.NEXT_STEP,
        }
        self.render_mode = render_mode
        self.randoms = [seeding.np_random()[0] for _ in range(num_envs)]
        self._frames: Frames | None = None  # (B, H_px, W_px, 3), seen last
        self._num_steps = 0  # since a reset
        self._scene_names = np.empty(0, object)  # of the scenes that it began with

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Frames, dict[str, Any]]:
        """Start all episodes, as `GymEnv.reset`; seeds count up from one, or are given for each."""
        options = options or {}
        if not np.all(options.get("reset_mask", True)):
            raise ValueError("reset_mask must be all True: episodes of one batch start together")
        if isinstance(seed, int | np.integer):
            seed = range(int(seed), int(seed) + self.num_envs)
        if seed is not None and len(seed) != self.num_envs:
            raise ValueError(f"expected {self.num_envs} seeds, got {len(seed)}")
        for row, one in enumerate(() if seed is None else seed):
            if one is not None:
                self.randoms[row] = seeding.np_random(whole(one, "seed"))[0]
        names = self._played.scene_names
        drawn = [(int(r.integers(2**31)), int(r.integers(len(names)))) for r in self.randoms]
        scenes = [self._scene(options.get("scene", number)) for _, number in drawn]
        self._frames = self._played.begin(scenes, [seed for seed, _ in drawn])
        self._num_steps = 0
        self._scene_names = np.array([names[number] for number in scenes], dtype=object)
        return self._frames.copy(), self._info(scene=self._scene_names)

    def _info(self, **values: NDArray[Any]) -> dict[str, Any]:
        """Return values of all episodes, each with its mask, in Gymnasium's format."""
        return values | {f"_{name}": np.ones(self.num_envs, bool) for name in values}

    def _scene(self, wanted: str | int) -> int:
        names = self._played.scene_names
        for number, name in enumerate(names):
            if wanted in (name, number):
                return number
        known = f"a number below {len(names)} or one of: {', '.join(names)}"
        raise ValueError(f"scene must be {known}; got {wanted!r}")

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[Frames, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Apply an action in every episode; or restart all, if the last step ended them.

        `info` has, for each, its start `scene`, the name of the `action`, and the number of the
        `frame`, counted from 1 at the start.
        """
        rewards, never = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        if self._num_steps == self.max_episode_steps:
            frames, info = self.reset()
            return frames, rewards, never, never.copy(), info
        if self._frames is None:
            raise ResetNeeded("reset must be called before step")
        if not self.action_space.contains(np.asarray(actions)):
            raise ValueError(f"action must be in {self.action_space}, got {actions!r}")
        names = [spell(action) if self._played.axes else self.names[action] for action in actions]
        self._frames = self._played.step(names)
        self._num_steps += 1
        truncated = np.full(self.num_envs, self._num_steps == self.max_episode_steps)
        info = self._info(
            scene=self._scene_names,
            action=np.array(names, dtype=object),
            frame=np.full(self.num_envs, self._num_steps),
        )
        return self._frames.copy(), rewards, never, truncated, info

    def render(self) -> tuple[Frames, ...] | None:
        """Return the latest frames, if the render mode is `rgb_array`."""
        if self.render_mode is None or self._frames is None:
            return None
        return tuple(self._frames.copy())

    def close_extras(self, **kwargs: Any) -> None:
        """Give the places of a server back."""
        self._played.close()


class GymEnv(gymnasium.Env[Frames, Any]):
    """A world model as an environment (`gymnasium.Env`); registered as `diagd/World-v0`.

    The reward is always 0.0, and no episode terminates. `reset` draws a start scene, or uses that
    of `options={"scene": name_or_number}`; `info["scene"]` is its name. The same seed and actions
    repeat an episode. An action is the number of one of the world's; where these are vectors, a
    vector in their ranges. Old frames leave the context when it is full. `episodes`, a batch of
    one, has the `names` of its actions by number and, without a url, the `world` and its `scenes`.

    Args:
        world: a `VideoGenerator`, the name of a bundled model, or a folder.
        render_mode: `rgb_array`, or None.
        settings: scenes, context_frames, strategy, sampling, dtype, url and api_key, as for
            `GymVectorEnv`.
    """

    metadata: dict[str, Any] = {"render_modes": RENDER_MODES}  # noqa: RUF012 (gymnasium's)

    def __init__(
        self, world: World = "doom", *, render_mode: str | None = None, **settings: Any
    ) -> None:
        self.episodes = GymVectorEnv(
            world, 1, max_episode_steps=None, render_mode=render_mode, **settings
        )
        self.action_space = self.episodes.single_action_space
        self.observation_space = self.episodes.single_observation_space
        self.metadata = self.episodes.metadata
        self.render_mode = render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Frames, dict[str, Any]]:
        """Start an episode; return the last frame of its scene."""
        super().reset(seed=seed)
        self.episodes.randoms = [self.np_random]
        (frame,), info = self.episodes.reset(options=options)
        return frame, {"scene": info["scene"][0]}

    def step(self, action: Any) -> tuple[Frames, float, bool, bool, dict[str, Any]]:
        """Apply an action; return the next frame, 0.0, False, False, and its info."""
        (frame,), *_, info = self.episodes.step(np.array([action]))
        own = {name: value[0] for name, value in info.items() if not name.startswith("_")}
        return frame, 0.0, False, False, own

    def render(self) -> Frames | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the latest frame, if the render mode is `rgb_array`."""
        shown = self.episodes.render()
        return None if shown is None else shown[0]

    def close(self) -> None:
        """Give the place of a server back."""
        self.episodes.close()


class _Here:
    """Episodes of a world in this process, as one batch of the engine."""

    def __init__(
        self,
        world: World,
        scenes: str | Path | None,
        context_frames: int | None,
        strategy: Strategy,
        sampling: SamplingOptions | None,
        dtype: torch.dtype | DTypeChoice,
    ) -> None:
        if os.getpid() != _IMPORTED_BY:  # PyTorch would wait for threads that a fork does not have
            torch.set_num_threads(1)
        if not isinstance(world, VideoGenerator):
            world = VideoGenerator.from_pretrained(world, dtype=dtype)
        elif dtype != "auto":
            raise ValueError(f"dtype must be left out: this world is loaded, in {world.dtype}")
        if world.vocabulary is None:
            raise ValueError("this model takes no actions, so it cannot be an environment")
        world.check(strategy, sampling)
        self.world, self.strategy, self.sampling = world, strategy, sampling
        self.names, self.size_px = world.vocabulary.names, world.frame_size_px
        codec = world.vocabulary
        self.axes = codec.ranges if isinstance(codec, VectorActions) else []
        self.fps = world.defaults.fps
        self.scenes = _read_scenes(world, scenes, context_frames)
        if scenes is not None:
            world.warn_of_foreign(scene.frames for scene in self.scenes)
        self.scene_names = [scene.name for scene in self.scenes]
        self._engine: DecodingEngine | None = None

    def begin(self, numbers: list[int], seeds: list[int]) -> Frames:
        scenes = [self.scenes[number] for number in numbers]
        self._engine = self.world.start(
            [scene.frames for scene in scenes],
            context_actions=[scene.actions for scene in scenes],
            sampling=self.sampling,
            seed=seeds,
        )
        return torch.stack([scene.frames[-1] for scene in scenes]).numpy()

    def step(self, actions: list[str]) -> Frames:
        assert self._engine is not None
        ids = [self.world.ids_of([action]) for action in actions]
        (tokens,) = self._engine.decode(self.strategy, torch.cat(ids), 1)
        # one by one: a batch of images differs by 1 of 255 in a few pixels
        pictures = [self.world.tokenizer.decode(grid[None]).cpu() for grid in tokens]
        return torch.cat(pictures).numpy()

    def close(self) -> None:
        self._engine = None


class _Elsewhere:
    """Episodes of a world that is served, each a session; they step at the same time."""

    def __init__(self, url: str, num_envs: int, strategy: Strategy, api_key: str | None) -> None:
        with ExitStack() as opened:
            settings: dict[str, Any] = {"strategy": strategy.name, "api_key": api_key}
            sessions = [opened.enter_context(Session(url, **settings)) for _ in range(num_envs)]
            self._threads = opened.enter_context(ThreadPoolExecutor(num_envs))
            self.close = opened.pop_all().close
        self.sessions, one = sessions, sessions[0]
        self.names, self.size_px, self.fps = one.actions, one.size_px, one.fps
        self.axes = one.axes
        self.scene_names = one.scenes

    def begin(self, numbers: list[int], seeds: list[int]) -> Frames:
        return np.stack(list(self._threads.map(Session.reset, self.sessions, numbers, seeds)))

    def step(self, actions: list[str]) -> Frames:
        return np.stack(list(self._threads.map(Session.step, self.sessions, actions)))


def _read_scenes(
    world: VideoGenerator, folder: str | Path | None, context_frames: int | None
) -> list[StartScene]:
    wanted = world.defaults.context_frames if context_frames is None else context_frames
    if wanted < 1:
        raise ValueError(f"context_frames must be at least 1, got {wanted}")
    if folder is not None:
        found = folder_scenes(Path(folder), world, wanted)
    else:
        folder = world.source and world.source.folder
        found = model_scenes(folder, world, wanted) if folder else []
    if not found:
        raise ValueError(f"no start scene: {folder} has no clip or image, give a folder as scenes")
    length = min(len(scene.frames) for scene in found)
    return [
        replace(one, frames=one.frames[-length:], actions=one.actions[len(one.frames) - length :])
        for one in found
    ]


gymnasium.register(
    "diagd/World-v0",
    entry_point="diagd.gym:GymEnv",
    vector_entry_point="diagd.gym:GymVectorEnv",
    max_episode_steps=1000,
)
