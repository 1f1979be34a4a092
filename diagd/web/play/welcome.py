"""The description of a world that a page gets before the first frame: scenes, actions, settings."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, count, product

from pydantic import ValidationError

from diagd.data.actions import ActionCodec, idle_action
from diagd.data.vectors import VectorActions
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.table import Diagonal, Raster, Strategy, parse_strategy
from diagd.families.checkpoints import find_model
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import StartScene, folder_scenes, model_scenes
from diagd.pipeline.world_folder import WorldSource, check_strategy
from diagd.web.play.messages import Keyboard, Settings, World
from diagd.web.play.options import WorldFlags
from diagd.web.play.session import MAX_SEED, Controls, name_of


def strategy_of(flags: WorldFlags) -> Strategy:
    """Return the strategy with which a world begins, checked before its weights are read."""
    found = find_model(flags.model, adapter=flags.adapter)
    height = found.config.grid_height
    by_default = found.defaults.strategy(height)
    strategy = parse_strategy(flags.strategy) if flags.strategy else by_default
    check_strategy(found, strategy)
    return strategy


def opening(
    world: VideoGenerator, flags: WorldFlags, strategy: Strategy
) -> tuple[Controls, int, list[StartScene]]:
    """Return the controls, the frames of context and the scenes with which a world begins."""
    defaults = world.defaults
    try:
        controls = Controls(strategy, defaults.temperature, defaults.top_p or 1.0)
    except ValidationError:
        raise ValueError(
            f"{flags.model}: temperature must be in [0, 5] and top_p in [0.01, 1] to be played, "
            f"got {defaults.temperature:g} and {defaults.top_p or 1:g}"
        ) from None
    max_context = (world.remembers or world.config.frames_held) - 1  # one frame is to come
    context_frames = flags.context_frames or max(1, min(defaults.context_frames, max_context))
    scenes = folder_scenes(flags.scenes, world, context_frames) if flags.scenes else []
    if flags.scenes and not scenes:
        raise ValueError(f"no clip or image in {flags.scenes}")
    folder = WorldSource(flags.model).folder
    scenes += model_scenes(folder, world, context_frames)
    if not scenes:
        raise ValueError(f"nowhere to start: {folder} has no prompt.mp4, name a folder by --scenes")
    return controls, context_frames, with_own_names(scenes)


def with_own_names(scenes: Iterable[StartScene]) -> list[StartScene]:
    """Number those of a name that was there before: a saved dream finds its scene by its name."""
    named: dict[str, StartScene] = {}
    for scene in scenes:
        numbered = (f"{scene.name} {number}" for number in count(2))
        name = next(one for one in chain([scene.name], numbered) if one not in named)
        named[name] = replace(scene, name=name)
    return list(named.values())


def describe(
    world: VideoGenerator,
    scenes: Sequence[StartScene],
    strategies: Iterable[Strategy],
    controls: Controls,
) -> World:
    """Format what can be played: strategies with the steps of a frame where they are known."""
    assert world.vocabulary is not None
    grid = TokenGrid(1, world.height, world.width)
    return World(
        grid=(world.height, world.width),
        size_px=world.frame_size_px,
        strategies=[
            (one.name, one.schedule(grid).num_steps if one.has_schedule else None)
            for one in strategies
        ],
        controls=Settings(**vars(controls), paced=False),
        fps=float(scenes[0].fps),
        model=name_of(world),
        actions=world.vocabulary.names,
        axes=world.vocabulary.ranges if isinstance(world.vocabulary, VectorActions) else [],
        keyboard=keyboard_of(world.vocabulary),
        scenes=[scene.name for scene in scenes],
        max_seed=MAX_SEED,
    )


def offered(world: VideoGenerator) -> list[Strategy]:
    return [Raster(), *(Diagonal(lag) for lag in (4, 2, 1) if lag <= world.width)]


# Known words have the keys that games have given them for thirty years, the others number keys,
# then letters that nothing else uses.
KEYS = {
    ("KeyW", "ArrowUp"): "forward up",
    ("KeyA", "ArrowLeft"): "left turn_left",
    ("KeyS", "ArrowDown"): "back backward down",
    ("KeyD", "ArrowRight"): "right turn_right",
    ("KeyF", "Space"): "attack",
    ("Space",): "jump",
    ("KeyQ",): "strafe_left",
    ("KeyE",): "strafe_right use",
    ("KeyJ",): "look_left",
    ("KeyL",): "look_right",
    ("KeyI",): "look_up",
    ("KeyK",): "look_down",
    ("KeyC",): "sneak",
    ("KeyX",): "sprint",
    ("KeyG",): "drop",
}
KNOWN = {word: keys for keys, words in KEYS.items() for word in words.split()}
SPARE = (
    *(f"Digit{number}" for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 0)),
    *(f"Key{letter}" for letter in "ZXCBNMGHFTYUJKLIQE"),  # not P, R, O, V: the page's own
)
LABELS = {"ArrowUp": "↑", "ArrowLeft": "←", "ArrowDown": "↓", "ArrowRight": "→", "Space": "␣"}


def keyboard_of(codec: ActionCodec) -> Keyboard:
    """Assign the words of a codec to keys that are free: first keys before second ones."""
    idle = idle_action(codec)
    words = [word for word in codec.names if word != idle]
    single = [word for word in words if "+" not in word]
    keys: dict[str, tuple[str, ...]] = dict.fromkeys(single, ())
    used: set[str] = set()
    for rank, word in product(range(2), single):
        known = KNOWN.get(word.lower(), ())[rank : rank + 1]
        keys[word] += tuple(key for key in known if key not in used)
        used.update(keys[word])
    spare = [key for key in SPARE if key not in used]
    for word in single:
        if not keys[word] and spare:
            keys[word] = (spare.pop(0),)
    caps = [key for found in keys.values() for key in found]
    labels = {key: LABELS.get(key, key.removeprefix("Key").removeprefix("Digit")) for key in caps}
    joined = [word for word in words if "+" in word and set(word.split("+")) <= set(single)]
    return Keyboard(idle, keys, labels, joined, codec.combines)
