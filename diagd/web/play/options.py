"""Options of `diagd play` and `diagd export-web`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from diagd.backends.names import DTypeChoice
from diagd.checks import check_at_least, check_values
from diagd.decoding.strategies.table import parse_strategy
from diagd.files import require_folder
from diagd.pipeline.options import AdapterFlag, MachineFlags, OutputFolder
from diagd.web.options import AccessFlags, ReplicaFlags


@dataclass(frozen=True, kw_only=True)
class WorldFlags(AdapterFlag):
    """The world that a page plays, and how it begins."""

    model: str = "doom"  # bundled model or checkpoint folder; it must take actions
    scenes: Path | None = None  # folder of more start scenes: images, or clips with jsonl actions
    # frames of a scene that the model starts from; default: the model's own
    context_frames: int | None = None
    # decoding strategy at the start: raster, k=2 ...; default: the model's own
    strategy: str | None = None

    def __post_init__(self) -> None:
        check_at_least(self, context_frames=1)
        if self.strategy is not None:
            parse_strategy(self.strategy)
        if self.scenes is not None:
            require_folder(self.scenes, "folder of scenes")


@dataclass(frozen=True)
class PlayOptions(WorldFlags, ReplicaFlags, AccessFlags, MachineFlags):
    """Play a world model in the browser, generated frame by frame; Ctrl-C stops the server."""

    dtype: DTypeChoice = "fastest"  # weight type; fastest: float32, bfloat16 or int8
    # context of the model in frames; fewer are faster; default: its own
    remember: int | None = None
    port: int = 8421  # 0: any free port
    open: bool = True  # open the page in a browser
    max_sessions: int = 4  # maximum number of players at once, of each replica
    idle_seconds: float = 300.0  # end sessions without input after this time
    recordings: Path = Path()  # folder for recordings under way when the server stops

    def __post_init__(self) -> None:
        for group in (WorldFlags, ReplicaFlags, AccessFlags):
            group.__post_init__(self)
        # the frame to come is remembered beside those that are given
        check_at_least(self, max_sessions=1, remember=(self.context_frames or 1) + 1)
        check_values(self, ("idle_seconds", 0 < self.idle_seconds < float("inf"), "above 0"))
        require_folder(self.recordings, "folder for recordings")


@dataclass(frozen=True)
class ExportWebOptions(WorldFlags):
    """Export a world as static files: a page to play it on without a server.

    Weights are int8, and the page generates the same tokens as Python with
    `--dtype int8`. Any web server will do; locally, `python -m http.server`.
    """

    # folder to write
    out: Annotated[OutputFolder, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
