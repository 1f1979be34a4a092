"""Record clips of a game: one loop for every game, mp4 with a jsonl of actions for each.

Every clip is an episode with its own seed and a new player; clips share no state.

diagd record --out gameplay --clips 400 --first-seed 0      # ViZDoom
diagd record --gym MiniGrid-FourRooms-v0 --out clips
diagd record --gym CarRacing-v3 --policy racing:Driver --out clips
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diagd.console import track
from diagd.data.actions import ActionVocabulary, write_actions
from diagd.data.recorders.doom import DoomGame, open_doom
from diagd.data.recorders.gym import GymGame, open_gym
from diagd.data.recorders.options import RecordOptions
from diagd.data.video import resize, write_video

ATTEMPTS = 20
NEXT_SEED = 10_000_000  # added to the seed of an episode that ended early, for its replacement
FRAMES_PER_SECOND = 10  # approximate default rate of clips


def record(options: RecordOptions) -> dict[str, int]:
    """Record the clips that do not exist yet; count them and all `episodes` played."""
    with open_gym(options) if options.gym else open_doom(options) as game:
        repeat = options.repeat or max(round(game.steps_per_second / FRAMES_PER_SECOND), 1)
        size_px = options.size_px or game.size_px
        vocabulary = options.out / "actions.json"
        if vocabulary.is_file() and ActionVocabulary.load(vocabulary) != game.actions:
            raise ValueError(f"{options.out} holds clips with other actions: use another folder")
        options.out.mkdir(parents=True, exist_ok=True)
        game.actions.save(vocabulary)
        wanted = range(options.first_seed, options.first_seed + options.clips)
        seeds = [s for s in wanted if not all(map(Path.is_file, clip_paths(options.out, s)))]
        episodes = 0
        for seed in track(seeds, f"recording {game.name}"):
            frames, actions, tries = _play(game, seed, options, repeat)
            episodes += tries
            video_path, actions_path = clip_paths(options.out, seed)
            write_actions(actions_path, actions)
            write_video(video_path, resize(frames, *size_px), game.steps_per_second / repeat)
    if early := episodes - len(seeds):
        print(f"{early} of {episodes} episodes ended early and were replaced")
    return {"recorded": len(seeds), "clips": options.clips, "episodes": episodes}


def clip_paths(folder: Path, seed: int) -> tuple[Path, Path]:
    return folder / f"clip_{seed:06d}.mp4", folder / f"clip_{seed:06d}.jsonl"


def _play(
    game: GymGame | DoomGame, seed: int, options: RecordOptions, repeat: int
) -> tuple[Tensor, list[str], int]:
    """Return frames, the action that led to each, and the number of episodes played."""
    for attempt in range(ATTEMPTS):
        game.start(seed + attempt * NEXT_SEED)
        frames, actions = [], [game.actions.names[0]]
        picture = game.press(actions[0], options.skip)
        while picture is not None:
            if frames and picture.shape != frames[0].shape:
                raise ValueError(
                    f"{game.name}: pictures must be of one size, got {frames[0].shape} "
                    f"and then {picture.shape}"
                )
            frames.append(picture)
            if len(frames) == options.frames:
                return torch.from_numpy(np.stack(frames)), actions, attempt + 1
            actions.append(game.choose())
            picture = game.press(actions[-1], repeat)
    raise ValueError(
        f"{game.name} ended before {options.frames} frames {ATTEMPTS} times in a row: "
        "use fewer --frames, or a player that survives longer"
    )
