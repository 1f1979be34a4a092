"""Write a world as a page that plays without a server.

diagd export-web site                 # the bundled world
python -m http.server -d site         # and http://localhost:8000 plays it
diagd export-web site --model worlds/mine --scenes my-pictures
"""

import json
import zlib
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from diagd.backends.native.wasm import Play, pack_world, places_of
from diagd.backends.webgpu.shader import describe_shaders
from diagd.console import make_console, waiting
from diagd.decoding.sampling import ValidRanges
from diagd.decoding.schedule import TokenGrid, steps_of_frame
from diagd.files import write_bytes
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.world_folder import CARD_FILE, WorldSource, load_parts
from diagd.tokenizers.vq import VQTokenizer
from diagd.web.play.messages import Manifest, to_json
from diagd.web.play.options import ExportWebOptions, WorldFlags
from diagd.web.play.player import to_jpeg
from diagd.web.play.welcome import describe, offered, opening, strategy_of

STATIC, KERNELS = (Path(__file__).with_name(name) for name in ("static", "kernels"))
WORLD_FILE, MANIFEST = "world.bin", "world.json"
PAGE, HERE = '<html lang="en">', '<html lang="en" data-engine="browser">'
FIRST = "Connecting</p>"  # what the page says until its scripts run, which they do not from a file
LATE = 'Connecting <span class="late">(serve this folder: python -m http.server)</span></p>'


def export(options: ExportWebOptions) -> dict[str, Any]:
    """Write the page, the kernels, the world, its scenes and its card into a folder."""
    with waiting("packing the world"):
        files = page_files() | pack(options)
    for name, content in files.items():
        write_bytes(options.out / name, content)
    size = sum(map(len, files.values()))
    console = make_console()
    console.print(f"wrote {options.out}: {len(files)} files, {size / 1e6:.1f} MB")
    serve = f"python -m http.server -d {quote(str(options.out))}"
    console.print(f"play it: {serve}, then http://localhost:8000")
    return {"files": {name: len(content) for name, content in files.items()}, "bytes": size}


def page_files() -> dict[str, bytes]:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    page = page.replace(PAGE, HERE, 1).replace(FIRST, LATE, 1)
    static = {path.name: path.read_bytes() for path in sorted(STATIC.iterdir())}
    return {
        "index.html": page.encode(),
        "offline.js": static.pop("offline.js"),  # a service worker sees what is below
        **{f"static/{name}": content for name, content in static.items() if name != "index.html"},
    }


def pack(options: WorldFlags) -> dict[str, bytes]:
    """Return the files of a world and its kernels by name; ValueError if no browser can play it."""
    if not (strategy := strategy_of(options)).has_schedule:
        raise ValueError(f"strategy {strategy} has no schedule: a browser decodes by schedules")
    if getattr(strategy, "row_start", "") == "learnt":
        raise ValueError(f"strategy {strategy}: pages feed no learnt stand-in, use another one")
    parts = load_parts(options.model, adapter=options.adapter)
    codec, config, defaults = parts.vocabulary, parts.model.config, parts.defaults
    if codec is None or codec.combines:
        what = "whose actions join freely" if codec else "without actions"
        raise ValueError(f"{options.model}: a world {what} cannot be played in a browser")
    if not isinstance(parts.tokenizer, VQTokenizer) or defaults.keep_frames is not None:
        raise ValueError(f"{options.model}: only worlds as diagd trains them play in a browser")
    source = WorldSource(options.model)
    world = VideoGenerator(parts.model, config, parts.tokenizer, codec, defaults, source)
    controls, context_frames, scenes = opening(world, options, strategy)
    strategies = list(dict.fromkeys([*offered(world), strategy]))
    prompts = [world.prompt(scene.frames, scene.actions) for scene in scenes]
    sampling, grid = controls.sampling(world), TokenGrid(1, world.height, world.width)
    where = world.height, world.width, config.vocab_size, torch.device("cpu")
    play = Play(
        [(tokens[0], len(grids)) for tokens, grids in prompts],
        world.ids_of(codec.names)[0],
        [one.schedule(grid) for one in strategies],
        world.window(context_frames)[0],
        ValidRanges.resolve(sampling.valid_range, *where),
        defaults.top_k or 0,
        sampling.exclusive_top_p,
    )
    packed = pack_world(parts.model, parts.tokenizer, play)
    try:
        shaders, vectors = describe_shaders(parts.model, places_of(packed))
        text = json.dumps(shaders, separators=(",", ":"))
        gpu = {"webgpu.json": text.encode(), "webgpu.bin": vectors}
    except ValueError:
        gpu = {}  # a browser's GPU cannot run it
    manifest = Manifest(
        **vars(describe(world, scenes, strategies, controls)),
        bytes=len(packed),
        version=f"{zlib.crc32(b''.join([packed, *gpu.values()])):08x}",
        gpu=bool(gpu),
        written_at=[steps_of_frame(order) for order in play.orders],
    )
    card = source.folder / CARD_FILE
    return {
        **{f"world/{path.name}": path.read_bytes() for path in sorted(KERNELS.glob("*.wasm"))},
        **{f"world/{i}.jpg": to_jpeg(scene.frames[-1]) for i, scene in enumerate(scenes)},
        **({"world/README.md": card.read_bytes()} if card.is_file() else {}),
        **{f"world/{name}": content for name, content in gpu.items()},
        f"world/{WORLD_FILE}": packed,
        f"world/{MANIFEST}": to_json(manifest).encode(),
    }
