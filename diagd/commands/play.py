"""Walk through a generated world in the browser.

diagd play                      # the bundled world, on http://127.0.0.1:8421
diagd play --model PATH --device cuda
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from diagd.backends.devices import DTypeChoice, device_of
from diagd.backends.prepare import Backend
from diagd.console import make_console, waiting
from diagd.families.checkpoints import model_path
from diagd.pipeline.generator import VideoGenerator
from diagd.web.address import listen, url_of
from diagd.web.play.scenes import start_scenes
from diagd.web.play.scheduler import Scheduler
from diagd.web.play.server import make_server, run, warm_up
from diagd.web.play.session import Controls


@dataclass(frozen=True)
class PlayOptions:
    """Serve a page on which a world model is played, dreamt frame by frame; Ctrl-C ends it."""

    model: str = "doom"  # the bundled model, or a checkpoint folder; it must take actions
    scenes: Path | None = None  # folder of more start scenes: images, clips with jsonl actions
    # frames of a clip that a dream starts from; default: as many as the world's makers give it
    context_frames: int | None = None
    # how frames are decoded until the page says otherwise: k=2, exact ...; default: as the world is
    strategy: str | None = None
    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0 lets the whole network play
    port: int = 8421  # 0 takes any free one
    allow_host: tuple[str, ...] = ()  # further names by which browsers may call this server
    open: bool = True  # show the page in a browser
    max_sessions: int = 4  # pages that may play at once
    idle_seconds: float = 300.0  # a session in which nothing is pressed for so long ends
    recordings: Path = Path()  # folder for recordings that the end of the server cuts short
    device: str = "cpu"  # cpu, cuda, cuda:1
    dtype: DTypeChoice = "auto"  # of the weights; auto: float32 or bfloat16, what is faster here
    # what runs the steps; auto is native on the CPU, on CUDA triton or, without it, cuda-graph
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        for name in ("context_frames", "max_sessions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < self.idle_seconds < float("inf"):
            raise ValueError(f"idle_seconds must be above 0, got {self.idle_seconds}")
        if self.scenes is not None and not self.scenes.is_dir():
            raise FileNotFoundError(f"folder of scenes not found: {self.scenes}")
        if not self.recordings.is_dir():
            raise FileNotFoundError(f"folder for recordings not found: {self.recordings}")


def main(options: PlayOptions) -> dict[str, Any]:
    """Serve until Ctrl-C; returns how many sessions and frames there were."""
    with listen(options.host, options.port) as listening:
        console = make_console()
        with waiting("waking the model"):
            scheduler, server = load(options)
        url = url_of(*listening.getsockname()[:2])
        console.print(f"dreaming at {url} in {scheduler.world.dtype} (Ctrl-C ends it)")
        run(server, listening, url if options.open else None)
    return {"url": url, "sessions": scheduler.sessions, "frames": scheduler.frames}


def load(options: PlayOptions) -> tuple[Scheduler, uvicorn.Server]:
    """Load the model and its scenes, warm it up, and return the server, not yet running.

    Raises:
        FileNotFoundError, ValueError: something is missing, or the model cannot be played.
    """
    device = device_of(options.device)
    world = VideoGenerator.from_pretrained(options.model, device, options.dtype, options.backend)
    if world.vocabulary is None:
        raise ValueError(
            f"{options.model} takes no actions, so there is nothing to play: "
            "diagd generate shows what it dreams"
        )
    defaults = world.defaults
    strategy = options.strategy or defaults.strategy(world.height).name
    top_p = 1.0 if defaults.top_p is None else defaults.top_p
    controls = Controls(strategy, defaults.temperature, top_p)
    controls.check(world)
    context_frames = options.context_frames or defaults.context_frames
    scenes = start_scenes(model_path(options.model), options.scenes, world, context_frames)
    warm_up(world, scenes[0].start, controls)
    scheduler = Scheduler(
        world, scenes, options.max_sessions, options.idle_seconds, controls=controls
    )
    hosts = (options.host, *options.allow_host)
    name = Path(options.model).name
    server = make_server(scheduler, name, context_frames, hosts, options.recordings)
    return scheduler, server
