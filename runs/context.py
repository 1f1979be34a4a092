"""Time a frame by how many frames a world sees, in turns; nothing else may run beside it.

    python -m runs.context --out docs/results/world/context.json
    python -m runs.context --models doom=doom before=work/before --dtypes int8 float32

Streams have outgrown their context before they are timed. Their own frames are among those that
they see, so what sees two has one to look back on: the smallest context that there is.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

from diagd.backends.names import DTypeName
from diagd.console import make_console, print_records, track
from diagd.data.video import read_video
from diagd.families.checkpoints import model_path
from diagd.files import write_json
from diagd.pipeline.generator import VideoGenerator
from diagd.system import provenance


@dataclass(frozen=True)
class Options:
    """What is timed."""

    out: Path = Path("context.json")
    models: tuple[str, ...] = ("doom=doom",)  # LABEL=FOLDER
    remember: tuple[int, ...] = (2, 3, 5, 8)  # frames seen; the first is what the others are over
    dtypes: tuple[DTypeName, ...] = ("int8", "bfloat16", "float32")
    rounds: int = 12  # of a frame of each
    strategy: str = "k=1"


def frames_of(
    world: VideoGenerator, folder: str, remember: int, options: Options
) -> Iterator[Tensor]:
    """Return an iterator of frames' tokens, which are written as they are asked for."""
    world.remembers, count = remember, remember + options.rounds
    engine = world.start(read_video(model_path(folder) / "prompt.mp4").frames[-1:])
    return engine.decode(options.strategy, world.action_ids(["forward"] * count, count, "frame"))


def main(options: Options) -> None:
    """Time, print and write."""
    rows = []
    for dtype in options.dtypes:
        streams = {}
        for model in options.models:
            label, _, folder = model.partition("=")
            for remember in options.remember:
                world = VideoGenerator.from_pretrained(folder, dtype=dtype)
                frames = frames_of(world, folder, remember, options)
                for _ in range(remember):
                    next(frames)
                streams[label, remember] = frames
        seconds = {key: list[float]() for key in streams}
        for _ in track(range(options.rounds), f"timing {dtype}"):
            for key, frames in streams.items():
                started = time.perf_counter()
                next(frames)
                seconds[key].append(time.perf_counter() - started)
        for (label, remember), taken in seconds.items():
            first = seconds[label, options.remember[0]]
            ratios = [one / other for one, other in zip(taken, first, strict=True)]
            row = {"model": label, "dtype": dtype, "remember": remember, "seconds": taken}
            row |= {"median_ms": 1e3 * statistics.median(taken)}
            rows.append(row | {"over_first": statistics.median(ratios)})
    table = {"model": "{model}", "dtype": "{dtype}", "sees": "{remember}"}
    table |= {"a frame, ms": "{median_ms:.1f}", "over the first": "{over_first:.2f}"}
    print_records(make_console(), f"{options.strategy}, frames in turns", table, rows)
    document = {"options": asdict(options), "rows": rows, "threads": torch.get_num_threads()}
    write_json(options.out, {**document, **provenance(torch.device("cpu"))}, indent=1)


if __name__ == "__main__":
    main(tyro.cli(Options))
