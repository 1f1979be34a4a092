"""Does shooting a monster remove it? Dreams that fire beside dreams that wait, and the game itself.

    python -m runs.kills --out docs/results/world/kills.json

Held-out episodes of the two places with monsters are played until one stays in the sights. From
there the game fires for eight frames, or waits for as many: the same episode twice, which ViZDoom
repeats exactly. The world dreams both ways from the same four frames. A small network, trained on
other episodes as the tokenizer paints them, says in which pictures a living monster is in the
sights; what it says of the game stands beside what the game's own labels say. It has seen other
such moments both ways, too: who learns from players alone takes a flash for a monster, since those
who fire have one before them. Another network says in which pictures the gun fires: it should when
it is asked to, and then alone.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from rich.progress import track
from torch import Tensor, nn

from diagd.console import make_console, print_records
from diagd.data.recorders.doom import AIM, DoomGame, open_doom, view_of
from diagd.data.recorders.options import RecordOptions
from diagd.data.video import contact_sheet, resize
from diagd.files import write_json
from diagd.pipeline.generator import VideoGenerator
from diagd.system import provenance
from runs.acceptance import Clips, ids_of, write_webp

REPEAT = 4  # game steps a frame, as in training
CONTEXT = 4
AHEAD = 8  # frames after the moment
NEAR = 0.004  # area of a monster that counts as one: 86 pixels
SEEDS = {"training": 3_000_000, "checking": 4_000_000, "moments": 5_000_000}
BRANCHES = "attack", "none"
SHOWN = 4  # moments of the picture
# The middle, without the gun, whose fire would tell that somebody aims; and the gun
ROWS = {"aimed": (0.25, 0.625), "fires": (0.5, 1.0)}


@dataclass(frozen=True)
class Options:
    """Measure whether shots hit, in a world and in the game."""

    out: Path = Path("kills.json")  # the picture stands beside it, as webp
    model: str = "doom"
    scenarios: tuple[str, ...] = ("defend_the_line", "deathmatch")
    training: int = 90  # episodes, and moments, of each scenario for the networks
    moments: int = 64  # of each scenario
    epochs: int = 8
    seed: int = 0


class Played(NamedTuple):
    """Frames of an episode."""

    pictures: Tensor  # (T, H_px, W_px, 3) uint8
    actions: list[str]  # that led to each
    aimed: list[bool]  # whether a living monster is in the sights, by the game's labels

    def known(self, frames: int) -> tuple[list[str], list[bool]]:
        """Return what repeats exactly: of pictures, smoke does not."""
        return self.actions[:frames], self.aimed[:frames]


def in_sights(game: DoomGame) -> bool:
    """Whether a monster, and one near enough to be seen, would be hit."""
    monsters = view_of(game.state).monsters
    return any(one.area >= NEAR and abs(one.offset) <= max(one.width, AIM) for one in monsters)


def play(game: DoomGame, seed: int, frames: int, told: Iterable[str | None] = ()) -> Played | None:
    """Play an episode, with actions told for the first frames; None where it ends too early."""
    game.start(seed)
    told, picture = iter(told), game.press("none", 0)
    pictures, actions, aimed = [], ["none"], []
    while picture is not None:
        pictures.append(picture)
        aimed.append(in_sights(game))
        if len(pictures) == frames:
            shown = resize(torch.from_numpy(np.stack(pictures)), *game.size_px)
            return Played(shown, actions, aimed)
        actions.append(next(told, None) or game.choose())
        picture = game.press(actions[-1], REPEAT)
    return None


def episodes(game: DoomGame, first_seed: int, frames: int) -> Iterator[tuple[Played, int]]:
    """Play whole episodes, without an end; yield the seed of each, too."""
    for seed in itertools.count(first_seed):
        if (played := play(game, seed, frames)) is not None:
            yield played, seed


class Judge(nn.Module):
    """Answers a question about a picture, which it sees a part of."""

    def __init__(self, rows: tuple[float, float]) -> None:
        super().__init__()
        self.rows = rows  # first and last that it sees, as shares of the height
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(
            *layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, 1)
        )

    def forward(self, pictures: Tensor) -> Tensor:
        """Return logits (N,) of pictures (N, H_px, W_px, 3) uint8."""
        height, width = pictures.shape[1:3]
        top, bottom = (round(height * share) for share in self.rows)
        middle = pictures[:, top:bottom, width // 4 : -width // 4]
        return self.layers(middle.permute(0, 3, 1, 2).float() / 127.5 - 1)[:, 0]

    @torch.inference_mode()
    def sees(self, pictures: Tensor) -> Tensor:
        """Return (N,) bool."""
        return torch.cat([self(part) > 0 for part in pictures.split(64)])


def painted(world: VideoGenerator, pictures: Tensor) -> Tensor:
    """Return pictures as the tokenizer paints them, in which dreams are seen, too."""
    with torch.inference_mode():
        parts = [world.tokenizer.decode(world.tokenizer.encode(p)) for p in pictures.split(8)]
    return torch.cat(parts).clone()


def train(pictures: Tensor, true: Tensor, rows: tuple[float, float], options: Options) -> Judge:
    """Train on pictures (N, H_px, W_px, 3) uint8, mirrored ones too, with both answers alike."""
    torch.manual_seed(options.seed)
    judge = Judge(rows)
    steps = options.epochs * (len(pictures) // 64)
    adam = torch.optim.AdamW(judge.parameters(), lr=2e-3, weight_decay=0.05)
    rate = torch.optim.lr_scheduler.OneCycleLR(adam, 2e-3, total_steps=steps)
    weight = (~true).sum() / true.sum()
    for _ in track(range(steps), description="training a judge"):
        drawn = torch.randint(len(pictures), (64,))
        batch = pictures[drawn]
        batch = batch.flip(2) if torch.rand(()) < 0.5 else batch
        loss = F.binary_cross_entropy_with_logits(
            judge(batch), true[drawn].float(), pos_weight=weight
        )
        adam.zero_grad()
        loss.backward()
        adam.step()
        rate.step()
    return judge.eval()


def moments_of(game: DoomGame, first_seed: int) -> Iterator[dict[str, Played]]:
    """Yield both branches of moments, without an end, each of CONTEXT + AHEAD frames."""
    for whole, seed in episodes(game, first_seed, 48):
        steady = zip(whole.aimed[CONTEXT - 1 :], whole.aimed[CONTEXT:], strict=False)
        start = next((CONTEXT + 1 + i for i, both in enumerate(steady) if all(both)), None)
        if start is None:
            continue
        branches = {}
        for name in BRANCHES:
            again = play(game, seed, start + AHEAD, [*whole.actions[1:start], *[name] * AHEAD])
            if again is not None and again.known(start) == whole.known(start):
                branches[name] = Played(*(part[start - CONTEXT :] for part in again))
        if len(branches) == len(BRANCHES):
            yield branches


def lessons(game: DoomGame, first_seed: int, count: int) -> dict[str, list[Played]]:
    """Play episodes, and as many moments both ways, where fire says nothing of who is in sight."""
    played = [one for one, _ in itertools.islice(episodes(game, first_seed, 64), count)]
    both = list(itertools.islice(moments_of(game, first_seed + 500_000), count))
    return {"played": played} | {name: [one[name] for one in both] for name in BRANCHES}


def answers_in(played: list[Played]) -> dict[str, Tensor]:
    """Return to each question, whose parts of a picture are ROWS, (frames of all,) bool."""
    return {
        "aimed": torch.tensor([aimed for one in played for aimed in one.aimed]),
        "fires": torch.tensor(["attack" in action for one in played for action in one.actions]),
    }


def score(said: Tensor, there: Tensor) -> dict[str, Any]:
    """Return how often a judge says yes where it is true, and where not; None of no picture."""
    parts = {"hits": said[there], "misses": said[~there]}
    shares = {name: one.float().mean().item() if len(one) else None for name, one in parts.items()}
    return shares | {"true": int(there.sum()), "false": int((~there).sum())}


def right(score: dict[str, Any]) -> str:
    """Spell how often a judge is right, both answers alike."""
    return "-" if None in score.values() else f"{(score['hits'] + 1 - score['misses']) / 2:.0%}"


def measure(
    world: VideoGenerator, scenario: str, options: Options
) -> tuple[dict[str, Any], Tensor]:
    """Return the share of moments with a monster in the sights, or fire, by frame, and pictures."""
    with open_doom(RecordOptions(out=Path(), scenario=scenario, policy="sentry")) as game:
        learnt = list(itertools.chain(*lessons(game, SEEDS["training"], options.training).values()))
        checking = lessons(game, SEEDS["checking"], options.training // 4)
        moments = list(itertools.islice(moments_of(game, SEEDS["moments"]), options.moments))
    pictures = painted(world, torch.cat([one.pictures for one in learnt]))
    checked = {
        part: (painted(world, torch.cat([one.pictures for one in held])), answers_in(held))
        for part, held in checking.items()
    }
    row: dict[str, Any] = {"scenario": scenario, "judges": {}}
    judges = {}
    for name, true in answers_in(learnt).items():
        judges[name] = train(pictures, true, ROWS[name], options)
        row["judges"][name] = {
            part: score(judges[name].sees(seen), answers[name])
            for part, (seen, answers) in checked.items()
        }
    shown = []
    for name in BRANCHES:
        videos = torch.stack([one[name].pictures for one in moments])
        tokens = torch.stack([world.tokenizer.encode(video) for video in videos])
        ids = ids_of(world, [one[name].actions for one in moments])
        clips = Clips(world, videos, tokens, ids, CONTEXT, 1, options.seed)
        dreamt = clips.paint(clips.dream("k=1", ids[:, CONTEXT:]))
        truth = clips.paint(tokens[:, CONTEXT:])
        said_of = {"labels": torch.tensor([one[name].aimed[CONTEXT:] for one in moments])}
        for question, judge in judges.items():
            for who, seen in (("game", truth), ("dream", dreamt)):
                said_of[f"{question} {who}"] = judge.sees(seen.flatten(0, 1)).view(len(seen), -1)
        row[name] = {who: said.float().mean(0).tolist() for who, said in said_of.items()}
        shown += [truth[:SHOWN], dreamt[:SHOWN]]
    return row, torch.stack(shown, 1).flatten(0, 2)


@torch.no_grad()
def main(options: Options) -> None:
    """Measure every scenario; print the share that is still in the sights at the last frames."""
    world = VideoGenerator.from_pretrained(options.model, dtype="float32")
    rows, pictures = [], []
    for scenario in options.scenarios:
        with torch.enable_grad():
            row, shown = measure(world, scenario, options)
        rows.append(row)
        pictures.append(shown)
    write_webp(options.out.with_suffix(".webp"), contact_sheet(torch.cat(pictures), AHEAD))
    write_json(
        options.out,
        {"options": asdict(options), "rows": rows, **provenance(torch.device("cpu"))},
        indent=1,
    )
    flat = []
    for row in rows:
        for branch in BRANCHES:
            late = {who: np.mean(share[-3:]) for who, share in row[branch].items()}
            fires = {who: np.mean(row[branch][f"fires {who}"]) for who in ("game", "dream")}
            flat.append({"scenario": row["scenario"], "told": branch, **late, "gun": fires})
    columns = {
        "place": "{scenario}",
        "told to": "{told}",
        "there: labels": "{labels:.0%}",
        "game": "{aimed game:.0%}",
        "dream": "{aimed dream:.0%}",
        "fires: game": "{gun[game]:.0%}",
        "in dream": "{gun[dream]:.0%}",
    }
    print_records(make_console(), "a monster is still there after 6 to 8 frames", columns, flat)
    for row in rows:
        for name, parts in row["judges"].items():
            rights = ", ".join(f"{part} {right(one)}" for part, one in parts.items())
            print(f"{row['scenario']}: how often the judge of {name!r} is right: {rights}")


if __name__ == "__main__":
    main(tyro.cli(Options))
