"""Do long dreams drift? Their pictures, by eights of frames, beside those of the game itself.

    python -m runs.drift --data work/drift --out docs/results/world/drift.json --seeds 0 1 2
    python -m runs.drift --data work/drift --models doom=doom stage=work/world --num-clips 32

A player sees walls and monsters and acts on them; in a dream it cannot, for what was recorded went
another way. So a game in which one walks blindly is what dreams are compared with: every episode is
played twice, by its player and again with the actions of the episode before from frame 4 on, and
the dream gets those actions, too. TFD of eight frames of all clips to all frames of the blind games
is given for dreams, for the same eight of the blind games (a floor) and for players (what another
way to act is worth); late is the mean of the last three. Episodes are recorded where they are
missing. The picture has two clips of each place, the one that strays farthest at the end and the
one in the middle of that order, each as two rows: the game and the dream.
"""

from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor

from diagd.backends.names import DTypeName
from diagd.console import make_console, print_records
from diagd.data.video import contact_sheet
from diagd.files import write_json
from diagd.metrics.quality import psnr
from diagd.pipeline.generator import VideoGenerator
from diagd.system import provenance
from runs import acceptance
from runs.acceptance import EIGHT, by_eight, features, write_webp
from runs.blind import CONTEXT
from runs.blind import record as record_both

FIRST_SEED = 8_000_000
LATE = 3 * EIGHT  # frames at the end by which dreams are judged
HORIZONS = 1, 8, 16, 32, 64, 96, 120  # frames of the picture
WAYS = "dream", "game", "player"
PLACES = "maze", "defend_the_line", "health_gathering_supreme", "deathmatch", "canyon"


@dataclass(frozen=True)
class Options:
    """Compare long dreams with blind games."""

    data: Path  # folder for the episodes, kept from call to call
    out: Path = Path("drift.json")  # the picture of the first model stands beside it, as webp
    models: tuple[str, ...] = ("doom=doom",)  # LABEL=FOLDER
    remember: tuple[int, ...] = (5,)  # frames seen in dreams
    scenarios: tuple[str, ...] = PLACES
    num_clips: int = 64  # of each scenario
    frames: int = 120  # dreamt ones
    batch_size: int = 8
    dtype: DTypeName = "bfloat16"
    seeds: tuple[int, ...] = (0,)  # of dreams: one seed says little

    def __post_init__(self) -> None:
        self.clips("blind")
        if self.frames < LATE or min(self.remember) <= CONTEXT:
            raise ValueError(
                f"frames must be at least {LATE} and remember more than the {CONTEXT} given, "
                f"got {self.frames} and {self.remember}"
            )

    def clips(self, kind: str) -> acceptance.Options:
        """Return where and how the clips of a kind, `seen` or `blind`, are read."""
        frames = CONTEXT + self.frames
        return acceptance.Options(
            self.data / f"{kind}_{frames}",
            self.models,
            num_clips=self.num_clips,
            context_frames=CONTEXT,
            frames=frames,
            batch_size=self.batch_size,
        )


def record(options: Options, scenario: str) -> None:
    """Record a scenario, unless as many clips are there."""
    asked = [options.clips(kind) for kind in ("seen", "blind")]
    if all(len(acceptance.paths_of(one, scenario)) == one.num_clips for one in asked):
        return
    folders = [one.data / f"heldout_{scenario}" for one in asked]
    record_both(scenario, (folders[0], folders[1]), asked[0].frames, options.num_clips, FIRST_SEED)


def strays(dreamt: NDArray[np.float32], reference: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return clips by how far their last frames are from what is usual, the farthest first."""
    usual = reference.reshape(-1, reference.shape[-1])
    late = (dreamt[:, -LATE:].mean(1) - usual.mean(0)) / usual.std(0)
    return np.square(late).mean(1).argsort()[::-1]


def measure(options: Options, scenario: str) -> tuple[list[dict[str, Any]], Tensor]:
    """Dream under each model and memory; the picture is of the first."""
    rows, shown = [], torch.empty(0)
    for model in options.models:
        label, _, folder = model.partition("=")
        world = VideoGenerator.from_pretrained(folder, dtype=options.dtype)
        seen, clips = (
            acceptance.read(world, options.clips(kind), scenario) for kind in ("seen", "blind")
        )
        truth = clips.videos[:, CONTEXT:]
        game, player = (features(clips, one) for one in (truth, seen.videos[:, CONTEXT:]))
        known = {"game": by_eight(game, game), "player": by_eight(player, game)}
        for count, seed in product(options.remember, options.seeds):
            world.remembers = count
            dreamt = clips.paint(replace(clips, seed=seed).dream("k=1", clips.actions[:, CONTEXT:]))
            ours = features(clips, dreamt)
            likeness = torch.stack([psnr(*both) for both in zip(dreamt, truth, strict=True)])
            row = {"scenario": scenario, "model": label, "remember": count, "seed": seed}
            tfd = {"dream": by_eight(ours, game), **known}
            rows.append({**row, **tfd, "psnr": likeness.mean(0).tolist()})
            if not len(shown):
                order = strays(ours, game)
                horizons = [n - 1 for n in HORIZONS if n <= options.frames]
                chosen = order[0], order[len(order) // 2]
                shown = torch.cat([one[n, horizons] for n in chosen for one in (truth, dreamt)])
    return rows, shown


def show(rows: list[dict[str, Any]], frames: int) -> None:
    """Print the first and the last frames."""
    flat = [
        row | {f"{who}_late": np.mean(row[who][-(LATE // EIGHT) :]) for who in WAYS} for row in rows
    ]
    table = {
        "place": "{scenario}",
        "model": "{model}",
        "sees": "{remember}",
        "seed": "{seed}",
        "TFD first": "{dream[0]:.1f}",
        "late": "{dream_late:.1f}",
        "game": "{game_late:.1f}",
        "player": "{player_late:.1f}",
    }
    print_records(make_console(), f"k=1, {frames} frames", table, flat)


@torch.inference_mode()
def main(options: Options) -> None:
    """Measure every scenario, and print what was found as soon as it is."""
    found, pictures = [], []
    for scenario in options.scenarios:
        record(options, scenario)
        rows, shown = measure(options, scenario)
        found += rows
        pictures.append(shown)
        show(rows, options.frames)
    columns = len([n for n in HORIZONS if n <= options.frames])
    write_webp(options.out.with_suffix(".webp"), contact_sheet(torch.cat(pictures), columns))
    document = {"options": asdict(options), "rows": found, **provenance(torch.device("cpu"))}
    write_json(options.out, document, indent=1)


if __name__ == "__main__":
    main(tyro.cli(Options))
