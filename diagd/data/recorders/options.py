"""Options of `diagd record`."""

from dataclasses import dataclass

from diagd.checks import check_at_least, parse_size
from diagd.flags import OutputFolder


@dataclass(frozen=True)
class RecordOptions:
    """Record gameplay of a scripted or random player as mp4 clips with jsonl actions."""

    # folder for clip_SEED.mp4, clip_SEED.jsonl and actions.json; existing clips are kept
    out: OutputFolder
    gym: str | None = None  # Gymnasium environment: CarRacing-v3, module:Game-v0; default: ViZDoom
    # player: random or your own module:name; in ViZDoom explorer, roamer, hunter, sentry
    policy: str | None = None
    actions: str | None = None  # module:name of a dict from action names to the game's actions
    # ViZDoom scenario: maze, defend_the_line, health_gathering_supreme, deathmatch, canyon, or
    # another one of the vizdoom package; default: maze
    scenario: str | None = None
    clips: int = 400  # number of clips, one episode each
    frames: int = 64  # frames per clip
    first_seed: int = 0  # clip i uses seed first_seed + i; keep held-out clips far from training
    repeat: int | None = None  # game steps per frame, all with one action
    skip: int = 0  # idle game steps before the first frame
    size: str | None = None  # frame size HxW in pixels, multiples of 16; default: by the game

    def __post_init__(self) -> None:
        check_at_least(self, clips=1, frames=1, repeat=1, first_seed=0, skip=0)
        owner = "Gymnasium environments (--gym ID)" if self.gym is None else "ViZDoom"
        name = "actions" if self.gym is None else "scenario"
        if getattr(self, name) is not None:
            raise ValueError(f"--{name} is only for {owner}")
        _ = self.size_px

    @property
    def size_px(self) -> tuple[int, int] | None:
        return parse_size(self.size, unit=16, least=16)
