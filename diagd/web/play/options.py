"""Options of `diagd play` and `diagd export-web`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from diagd.backends.names import DTypeChoice
from diagd.checks import check_at_least, check_values
from diagd.decoding.strategies.table import parse_strategy
from diagd.files import require_folder
from diagd.pipeline.options import MachineFlags, OutputFolder


@dataclass(frozen=True, kw_only=True)
class WorldFlags:
    """The world that a page plays, and how it begins."""

    model: str = "doom"  # the bundled model, or a checkpoint folder; it must take actions
    scenes: Path | None = None  # folder of more start scenes: images, clips with jsonl actions
    # frames of a clip that a dream starts from; default: as many as the world's makers give it
    context_frames: int | None = None
    # how frames are decoded until the page says otherwise: raster, k=2 ...; default: as the world
    strategy: str | None = None

    def __post_init__(self) -> None:
        check_at_least(self, context_frames=1)
        if self.strategy is not None:
            parse_strategy(self.strategy)
        if self.scenes is not None:
            require_folder(self.scenes, "folder of scenes")


@dataclass(frozen=True)
class PlayOptions(WorldFlags, MachineFlags):
    """Serve a page on which a world model is played, dreamt frame by frame; Ctrl-C ends it."""

    dtype: DTypeChoice = "fastest"  # of the weights; fastest: float32, bfloat16 or int8
    remember: int | None = None  # frames that the model sees: fewer are faster; default: its own
    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0 lets the whole network play
    port: int = 8421  # 0 takes any free one
    allow_host: tuple[str, ...] = ()  # further names by which browsers may call this server
    open: bool = True  # show the page in a browser
    max_sessions: int = 4  # pages that may play at once
    idle_seconds: float = 300.0  # a session in which nothing is pressed for so long ends
    recordings: Path = Path()  # folder for recordings that the end of the server cuts short

    def __post_init__(self) -> None:
        super().__post_init__()
        # the frame to come is remembered beside those that are given
        check_at_least(self, max_sessions=1, remember=(self.context_frames or 1) + 1)
        check_values(self, ("idle_seconds", 0 < self.idle_seconds < float("inf"), "above 0"))
        require_folder(self.recordings, "folder for recordings")


@dataclass(frozen=True)
class ExportWebOptions(WorldFlags):
    """Write a world as a folder of static files: whoever opens its page plays, without a server.

    Weights are rounded to 8 bits, and the page draws the very tokens that Python draws with
    `--dtype int8`. Any web host serves it; on your own machine `python -m http.server` does.
    """

    # folder to write
    out: Annotated[OutputFolder, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
