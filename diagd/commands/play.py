"""Walk through a generated world in the browser.

diagd play                      # the bundled world, on http://127.0.0.1:8421
diagd play --model PATH --device cuda
"""

from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from diagd.backends.devices import device_of
from diagd.console import make_console, waiting
from diagd.decoding.strategies.table import parse_strategy
from diagd.families.checkpoints import model_path
from diagd.pipeline.generator import VideoGenerator
from diagd.web.guard import listen, url_of
from diagd.web.play.app import create_app
from diagd.web.play.export import pack
from diagd.web.play.options import ExportWebOptions, PlayOptions
from diagd.web.play.scheduler import Scheduler
from diagd.web.play.server import PlayServer, run, warm_up
from diagd.web.play.session import Controls
from diagd.web.play.welcome import start_scenes


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
    """Load the model and its scenes, warm it up, and return the server, not yet running."""
    device = device_of(options.device)
    world = VideoGenerator.from_pretrained(options.model, device, options.dtype, options.backend)
    world.remembers = options.remember or world.remembers
    if world.vocabulary is None or not world.defaults.context_frames:
        kind = "takes no actions" if world.vocabulary is None else "makes single images"
        raise ValueError(
            f"{options.model} {kind}, so there is nothing to play: "
            "diagd generate shows what it dreams"
        )
    defaults = world.defaults
    chosen = options.strategy
    strategy = parse_strategy(chosen) if chosen else defaults.strategy(world.height)
    top_p = 1.0 if defaults.top_p is None else defaults.top_p
    controls = Controls(strategy, defaults.temperature, top_p)
    controls.check(world)
    max_context = (world.remembers or world.config.frames_held) - 1  # one frame is to come
    context_frames = options.context_frames or max(1, min(defaults.context_frames, max_context))
    scenes = start_scenes(model_path(options.model), options.scenes, world, context_frames)
    warm_up(world, scenes[0], controls)
    scheduler = Scheduler(world, scenes, options.max_sessions, options.idle_seconds, controls)
    hosts = (options.host, *options.allow_host)
    export = ExportWebOptions(Path(), options.model, options.scenes, context_frames)
    name = Path(options.model).name
    app = create_app(scheduler, name, context_frames, hosts, pack=partial(pack, export))
    return scheduler, PlayServer(app, scheduler, options.recordings)
