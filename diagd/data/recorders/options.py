"""Options of `diagd record`."""

from dataclasses import dataclass

from diagd.checks import check_at_least, parse_size
from diagd.flags import OutputFolder


@dataclass(frozen=True)
class RecordOptions:
    """Record a program that plays a game, as mp4 clips with jsonl actions beside them."""

    # folder for clip_SEED.mp4, clip_SEED.jsonl and actions.json; clips there are kept
    out: OutputFolder
    gym: str | None = None  # a Gymnasium environment: CarRacing-v3, module:Game-v0; else ViZDoom
    # player: random or module:name of your own; in ViZDoom explorer, roamer, hunter, sentry
    policy: str | None = None
    actions: str | None = None  # module:name of a dict from names to the game's actions
    # maze, defend_the_line, health_gathering_supreme, deathmatch, canyon, or another of the
    # vizdoom package; maze unless given
    scenario: str | None = None
    clips: int = 400  # how many clips, one episode each
    frames: int = 64  # frames a clip
    first_seed: int = 0  # clip i uses seed first_seed + i; keep held-out clips far from training
    repeat: int | None = None  # game steps from frame to frame, all with one action
    skip: int = 0  # game steps of doing nothing before the first frame
    size: str | None = None  # HxW of a frame in pixels, multiples of 16; else what suits the game

    def __post_init__(self) -> None:
        check_at_least(self, clips=1, frames=1, repeat=1, first_seed=0, skip=0)
        owner = "a Gymnasium environment, --gym ID" if self.gym is None else "ViZDoom"
        name = "actions" if self.gym is None else "scenario"
        if getattr(self, name) is not None:
            raise ValueError(f"--{name} is for {owner}")
        _ = self.size_px

    @property
    def size_px(self) -> tuple[int, int] | None:
        return parse_size(self.size, unit=16, least=16)
