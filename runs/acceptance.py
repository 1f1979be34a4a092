"""Is a world worth walking in? What it dreams of held-out clips by scenario, in one table.

    python -m runs.acceptance --data work/doom
    python -m runs.acceptance --data work/doom --models maze=maze --scenarios maze

For every scenario (a folder `heldout_SCENARIO` of clips with actions) and every model: how much
closer to the truth dreams are than a copy of the last given frame where the picture moves, whether
left and right turn the view, what `k=1` costs, whether a longer context pays, whether dreams drift,
and whether a place is the same after a turn away and back. A model that lacks an action takes the
nearest one that it knows. Raster dreams are decoded exactly, the same tokens in fewer steps, and
end after eight frames. Each call measures what is missing, or was measured with other weights or
options, and ends with the table of all that was measured under its options, the newest row of each
model and scenario, and with the pictures of a model's scenarios below each other, in the order of
their names. `acceptance.jsonl` holds the numbers by clip. docs/results/world keeps the table and
the stacked pictures.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from PIL import Image
from rich.progress import track
from torch import Tensor

from diagd.backends.devices import dtype_of
from diagd.backends.prepare import choose_dtype
from diagd.data.actions import ActionCodec, ActionVocabulary, read_actions
from diagd.data.video import contact_sheet, read_video, write_image
from diagd.decoding.generate_tokens import generate_tokens
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.table import Raster
from diagd.decoding.teacher_forcing import strategy_nll
from diagd.evaluation.comparison import walk
from diagd.evaluation.results import appending
from diagd.families.checkpoints import model_path
from diagd.files import read_json_lines, replacing, write_text
from diagd.metrics.frechet import frechet_distance
from diagd.metrics.quality import frame_features, psnr
from diagd.pipeline.generator import VideoGenerator
from diagd.system import clip_fingerprint, fingerprint, provenance, settings_of
from diagd.training.options import parse_mixture
from runs.acceptance_table import CONTEXTS, STRATEGIES, table

EIGHT = 8  # frames a drift is read from; frames that one turns away
TURN_FRAMES = 4
SHOWN = 2  # clips of a picture


@dataclass(frozen=True)
class Options:
    """Compare world models on recorded clips that none was trained on."""

    data: Path  # folder with heldout_SCENARIO, as runs/doom_data.sh records it
    models: tuple[str, ...] = ("doom=doom",)  # LABEL=FOLDER
    scenarios: tuple[str, ...] = ()  # none: all that are there
    out: Path = Path("work/acceptance")  # for acceptance.jsonl, acceptance.md and pictures
    num_clips: int = 64
    context_frames: int = 4
    frames: int = 64  # of a clip, the given ones included
    batch_size: int = 1
    seed: int = 0
    # of the weights, as `diagd play` chooses
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self) -> None:
        if wrong := [model for model in self.models if "=" not in model.strip("=")]:
            raise ValueError(f"models must look like LABEL=FOLDER, got {wrong[0]!r}")
        if self.frames < (least := max(self.context_frames + EIGHT, max(CONTEXTS) + 1)):
            raise ValueError(f"frames must be at least {least}, got {self.frames}")


@dataclass(frozen=True)
class Clips:
    """The clips of a scenario as a model sees them.

    Attributes:
        videos: (N, T, H_px, W_px, 3) uint8.
        tokens: (N, T, height, width) int64.
        actions: (N, T) int64, ids of the model.
    """

    world: VideoGenerator
    videos: Tensor
    tokens: Tensor
    actions: Tensor
    context_frames: int
    batch_size: int
    seed: int

    @property
    def last(self) -> Tensor:
        """The last given picture of each clip, (N, H_px, W_px, 3) uint8."""
        return self.videos[:, self.context_frames - 1]

    def dream(self, strategy: str, future: Tensor) -> Tensor:
        """Continue every clip by actions (N, F) int64: tokens (N, F, height, width)."""
        world, count = self.world, self.context_frames
        given = torch.cat([self.actions[..., None], self.tokens.flatten(2)], dim=2)
        prompts = given[:, :count].flatten(1)[:, 1:]
        sampling = world.sampling()
        grid = TokenGrid(future.shape[1], world.height, world.width)
        parts = []
        for start in track(range(0, len(prompts), self.batch_size), description=strategy):
            rows = slice(start, start + self.batch_size)
            out = generate_tokens(
                world.model,
                prompts[rows],
                strategy,
                future[rows, :, None],
                count,
                sampling=sampling,
                seed=self.seed + start,
                grid=grid,
                max_slots=world.window(count)[0],
            )
            parts.append(out.tokens)
        return torch.cat(parts)

    def paint(self, tokens: Tensor) -> Tensor:
        """Return (N, F, H_px, W_px, 3) uint8."""
        return torch.stack([self.world.tokenizer.decode(clip) for clip in tokens])

    def always(self, names: list[str]) -> Tensor:
        """Return the same actions for every clip, (N, F) int64."""
        return ids_of(self.world, [names]).expand(len(self.tokens), -1)


def main(options: Options) -> None:
    """Measure what is missing, model by model, and write the table."""
    path = options.out / "acceptance.jsonl"
    cpu = torch.device("cpu")
    dtype = choose_dtype(options.dtype, cpu)
    asked = settings_of(replace(options, dtype=dtype))
    for name in ("models", "scenarios"):
        del asked[name]
    here = sorted(folder.name[8:] for folder in options.data.glob("heldout_*"))
    with appending(path) as append:
        known = read_json_lines(path)
        for model, scenario in product(options.models, options.scenarios or here):
            label, _, folder = model.partition("=")
            about = {"options": asked, "weights": fingerprint(model_path(folder))}
            clips = [clip_fingerprint(path) for path in paths_of(options, scenario)]
            key = {"model": label, "scenario": scenario, **about, "clips": clips}
            if not any(row.items() >= key.items() for row in known):
                world = VideoGenerator.from_pretrained(folder, dtype=dtype_of(dtype))
                picture = options.out / f"{scenario}-{label}.png"
                measured = measure(read(world, options, scenario), picture)
                append(key | measured | provenance(cpu))
    rows = [row for row in read_json_lines(path) if row["options"] == asked]
    newest = {(row["scenario"], row["model"]): row for row in rows}
    text = table([newest[key] for key in sorted(newest)])
    write_text(options.out / "acceptance.md", text)
    for label in {row["model"] for row in rows}:
        stack(options.out.glob(f"*-{label}.png"), options.out / f"{label}.webp")
    stack(options.out.glob("*-turns.png"), options.out / "turns.webp")
    print(text)


def stack(pictures: Iterable[Path], path: Path) -> None:
    """Write pictures of one width below each other, in the order of their names."""
    parts = []
    for one in sorted(pictures):
        with Image.open(one) as picture:
            parts.append(np.asarray(picture))
    write_webp(path, torch.from_numpy(np.concatenate(parts)))


def write_webp(path: Path, picture: Tensor) -> None:
    """Write a picture (H_px, W_px, 3) uint8, small enough for git."""
    with replacing(path) as temporary:
        Image.fromarray(picture.numpy()).save(temporary, "WEBP", quality=80)


def paths_of(options: Options, scenario: str) -> list[Path]:
    """Return the clips of a scenario."""
    return sorted((options.data / f"heldout_{scenario}").glob("clip_*.mp4"))[: options.num_clips]


@torch.inference_mode()
def read(world: VideoGenerator, options: Options, scenario: str) -> Clips:
    """Read the clips of a scenario."""
    paths = paths_of(options, scenario)
    recorded = ActionVocabulary.load(options.data / f"heldout_{scenario}" / "actions.json")
    videos = torch.stack([read_video(path, options.frames).frames for path in paths])
    taken = [read_actions(p.with_suffix(".jsonl"), recorded)[: options.frames] for p in paths]
    tokens = torch.stack([world.tokenizer.encode(video) for video in videos])
    ids = ids_of(world, taken)
    numbers = options.context_frames, options.batch_size, options.seed
    return Clips(world, videos, tokens, ids, *numbers)


def ids_of(world: VideoGenerator, taken: list[list[str]]) -> Tensor:
    """Return what a model reads for the actions of each clip, (N, T) int64."""
    known = world.vocabulary
    assert known is not None
    ids = [[known.tokens_of(nearest(name, known))[0] for name in names] for names in taken]
    return torch.tensor(ids) + world.tokenizer.codebook_size


def nearest(name: str, known: ActionCodec) -> str:
    """Return the action itself, what is known of its parts, or `none`."""
    if name in known.names:
        return name
    return next((part for part in name.split("+") if part in known.names), "none")


@torch.inference_mode()
def measure(clips: Clips, picture: Path) -> dict[str, Any]:
    """Return all numbers of a model on the clips of a scenario, by clip; write its pictures."""
    given = clips.context_frames
    truth = clips.videos[:, given:]
    future = clips.actions[:, given:]
    coded = clips.paint(clips.tokens[:, given : given + EIGHT])
    raster = clips.paint(clips.dream("exact", future[:, :EIGHT]))
    diagonal = clips.paint(clips.dream("k=1", future))
    copies = clips.last[:, None].expand_as(truth)
    shown = torch.cat([one[:SHOWN, :EIGHT] for one in (truth, coded, raster, diagonal)], dim=1)
    write_image(picture, contact_sheet(shown.flatten(0, 1), EIGHT))
    return {
        "tokenizer_psnr": psnr(coded, truth[:, :EIGHT]).mean(1).tolist(),
        "copy_psnr": psnr(copies, truth).tolist(),
        "psnr": {"raster": psnr(raster, truth[:, :EIGHT]).tolist(),
                 "k=1": psnr(diagonal, truth).tolist()},
        "tfd": drift(clips, diagonal, truth),
        "turns": turns(clips, picture.with_stem(f"{picture.stem}-turns")),
        "revisit": revisit(clips),
        "nats": {str(one): nats(clips, one) for one in parse_mixture(STRATEGIES)},
        "nats_after": {str(count): nats_after(clips, count) for count in CONTEXTS},
    }  # fmt: skip


def drift(clips: Clips, video: Tensor, truth: Tensor) -> list[float]:
    """Return the Frechet distance of each eight of frames to all true ones."""
    return by_eight(features(clips, video), features(clips, truth))


def features(clips: Clips, video: Tensor) -> NDArray[np.float32]:
    """Return what TFD sees of the frames of videos that go on after the clips, (N, T, D)."""
    tokenizer: Any = clips.world.tokenizer
    both = torch.cat([clips.last[:, None], video], dim=1)
    latents = (torch.cat([tokenizer.latents(part) for part in one.split(8)]) for one in both)
    return torch.stack([frame_features(one) for one in latents]).numpy()


def by_eight(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> list[float]:
    """Return the Frechet distance of each eight frames of (N, T, D) to all of another."""
    parts = (ours[:, at : at + EIGHT] for at in range(0, ours.shape[1] - EIGHT + 1, EIGHT))
    return [
        frechet_distance(*(one.reshape(-1, one.shape[-1]) for one in (p, theirs))) for p in parts
    ]


def turns(clips: Clips, picture: Path) -> dict[str, list[int]]:
    """Turn left and right from the same frames: by how many columns the pictures move right.

    The picture shows left turns leftwards from the middle, and right turns rightwards. Recorded
    turns, each after another of its kind, say how far the measure can be believed.
    """
    videos = {
        name: clips.paint(clips.dream("k=1", clips.always([name] * TURN_FRAMES)))
        for name in ("left", "right")
    }
    sheet = [
        frame
        for clip, last in enumerate(clips.last[:SHOWN])
        for frame in (*videos["left"][clip].flip(0), last, *videos["right"][clip])
    ]
    write_image(picture, contact_sheet(torch.stack(sheet), 2 * TURN_FRAMES + 1))
    dreamt = {
        name: [shift_px(*pair) for pair in zip(clips.last, video[:, 0], strict=True)]
        for name, video in videos.items()
    }
    return dreamt | {f"recorded_{name}": recorded_shifts(clips, name) for name in videos}


def recorded_shifts(clips: Clips, name: str) -> list[int]:
    """Return by how many columns pictures moved right at a turn that goes on, one a clip."""
    turning = clips.actions == clips.always([name])
    found = [(turn[1:] & turn[:-1]).nonzero() for turn in turning]
    return [
        shift_px(video[int(frames[0])], video[int(frames[0]) + 1])
        for video, frames in zip(clips.videos, found, strict=True)
        if len(frames)
    ]


def shift_px(before: Tensor, after: Tensor) -> int:
    """Return by how many columns a picture moved right, of a third of its width at most.

    It is the shift whose overlap differs least in the upper half, where no weapon stands still.
    """
    before, after = (one[: len(one) // 2].float() for one in (before, after))
    width = before.shape[1]
    errors = {}
    for shift in range(-(width // 3), width // 3 + 1):
        old = before[:, max(0, -shift) : width - max(0, shift)]
        new = after[:, max(0, shift) : width - max(0, -shift)]
        errors[shift] = (old - new).abs().mean().item()
    return min(errors, key=errors.__getitem__)


def revisit(clips: Clips) -> dict[str, list[float]]:
    """Turn away and back; PSNR to the first picture at the turning point, at the end, by chance."""
    video = clips.paint(clips.dream("k=1", clips.always(walk("left", "right", "none", EIGHT))))
    pictures = {"turned": video[:, EIGHT], "back": video[:, -1], "chance": clips.last.roll(1, 0)}
    return {name: psnr(one, clips.last).tolist() for name, one in pictures.items()}


def nats(clips: Clips, strategy: Any) -> list[list[float]]:
    """Return what a token costs on the frames after the first, as many as fit: (N, frames)."""
    model, frame = clips.world.model, clips.tokens[0, 0].numel()
    most = (model.max_positions + 1) // (1 + frame)  # the first one has no action before it
    parts = [
        strategy_nll(model, tokens[None, :most], ids[None, :most, None], strategy)
        for tokens, ids in zip(clips.tokens, clips.actions, strict=True)
    ]
    return torch.cat(parts).mean((2, 3)).tolist()


def nats_after(clips: Clips, count: int) -> list[float]:
    """Return what a token of a frame costs after `count` others: the same frames for any count."""
    model, most = clips.world.model, max(CONTEXTS) + 1
    targets = range(most, clips.tokens.shape[1] + 1, most)
    found = [
        strategy_nll(
            model,
            clips.tokens[clip : clip + 1, end - count - 1 : end],
            clips.actions[clip : clip + 1, end - count - 1 : end, None],
            Raster(),
        )[:, -1].mean()
        for clip, end in product(range(len(clips.tokens)), targets)
    ]
    return torch.stack(found).view(-1, len(targets)).mean(1).tolist()


if __name__ == "__main__":
    main(tyro.cli(Options))
