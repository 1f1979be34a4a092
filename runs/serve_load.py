"""Load `diagd serve` by OpenAI's client, and `diagd play` by ours: throughput, latency, and hours.

The model of images has random weights of the shape of Janus-Pro-1B, guided, behind one token
instead of a text; a step takes as long as with real ones. A smaller grid makes fewer steps.
Each part is one command of some minutes, and writes one file. Nothing else should run.

    python -m runs.serve_load --out docs/results/serve --strategies raster   # closed-4x6.json ...
    python -m runs.serve_load --out docs/results/serve --strategies k=1 --grid 24x24 --clients 1 8
    python -m runs.serve_load --out docs/results/serve --parts mixed --shape tiny --minutes 60 \
        --clients 4 --pause 0.4
    python -m runs.serve_load --out docs/results/serve --parts sessions --strategies k=1
    python -m runs.serve_load --out /tmp/serve --shape tiny --grid 3x5 --clients 1 4    # a try
"""

import asyncio
import base64
import contextlib
import io
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import openai
import psutil
import torch
import tyro
from openai import AsyncOpenAI
from PIL import Image

from diagd.backends.devices import device_of
from diagd.backends.names import DTypeChoice
from diagd.client import Session
from diagd.console import make_console, print_records
from diagd.data.actions import ActionVocabulary
from diagd.families.checkpoints import save_model, write_defaults
from diagd.families.defaults import image_defaults
from diagd.families.presets import PRESETS
from diagd.files import write_json
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.pipeline.generator import VideoGenerator
from diagd.system import provenance, settings_of
from diagd.tokenizers.vq import VQTokenizer, vq_model_class
from diagd.web.serve.images import encode

NAMES = ("none", "one", "two", "three")
GUIDANCE = 5.0
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2}
TINY |= {"num_kv_heads": 2, "head_dim": 32, "head_size": 64, "image_vocab_size": 64}
TINY |= {"vocab_size": 64}
BATCH = 16  # images at once
Part = Literal["closed", "open", "overhead", "preview", "mixed", "sessions"]
SHARING = {"shared": "inf", "in turns": "0"}  # share of the time up to which players share steps
PLAY = """
from diagd.cli import main
from diagd.web.play import server
server.SHARED_SHARE = float("{}")
main()
"""


@dataclass(frozen=True)
class Options:
    """Start a server, load it, and write what was measured."""

    out: Path  # folder for a JSON file of each part
    parts: tuple[Part, ...] = ("closed", "open", "overhead", "preview")
    shape: str = "janus-pro-1b"  # a preset of a model of images, or tiny
    grid: str = "4x6"  # rows x columns of tokens
    device: str = "cpu"  # or cuda, of all servers and of lone requests
    dtype: DTypeChoice = "auto"
    strategies: tuple[str, ...] = ("raster", "k=1")
    clients: tuple[int, ...] = (1, 2, 4, 8, 16)
    images: int = 1  # of each client, one after the other
    rounds: int = 5  # of lone requests
    world: str = "doom"  # of sessions
    frames: int = 240  # of all clients of sessions together
    minutes: float = 2  # of mixed load
    pause: float = 0  # seconds between two requests of its clients, on average
    seed: int = 0

    @property
    def machine(self) -> tuple[str, ...]:
        """Flags of all servers."""
        return "--device", self.device, "--dtype", self.dtype


def main(options: Options) -> None:
    """Write a model, and measure each part with servers of its own."""
    device = device_of(options.device)  # or an error before work begins
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "images"
        if {*options.parts} != {"sessions"}:
            write_images(model, options.shape, options.grid)
        for name in options.parts:
            rows = PARTS[name](model, options)
            about = {"options": settings_of(options), **provenance(device)}
            of = Path(options.world).name if name == "sessions" else options.grid
            path = options.out / f"{name}-{of}.json"
            write_json(path, {**about, "rows": rows}, indent=1)
            columns = {key: f"{{{key}}}" for key in rows[0] if key != "latencies"}
            print_records(make_console(), name, columns, rows)


def write_images(folder: Path, shape: str, grid: str) -> Path:
    """Write a model of guided images, with random weights; returns its folder."""
    height, width = map(int, grid.split("x"))
    config: ModelConfig = PRESETS["janus-pro-1b" if shape == "tiny" else shape]
    if shape == "tiny":
        config = replace(config, **TINY)
    config = replace(
        config,
        vocab_size=config.image_vocab_size + len(NAMES),
        extra_embeddings=0,
        num_action_tokens=1,
        max_positions=height * width + 1,
        grid_height=height,
        grid_width=width,
    )
    save_model(Transformer.random(config, dtype=torch.bfloat16), folder)
    ActionVocabulary(NAMES).save(folder / "actions.json")
    write_defaults(folder, image_defaults(top_p=None, guidance=GUIDANCE))
    channels = (32,) * 5 if shape == "tiny" else (128, 128, 256, 256, 512)
    blocks = len(channels)
    pixels = vq_model_class()(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        layers_per_block=2,
        latent_channels=8,
        vq_embed_dim=8,
        num_vq_embeddings=config.image_vocab_size,
    )
    VQTokenizer(pixels).save_pretrained(folder / "tokenizer")
    return folder


@dataclass(frozen=True)
class Server:
    """A server in a process of its own."""

    url: str
    process: psutil.Process

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncOpenAI]:
        given = {"base_url": f"{self.url}/v1", "api_key": "unused", "timeout": 3600}
        async with AsyncOpenAI(max_retries=0, **given) as client:
            yield client

    async def warm_up(self, strategies: Sequence[str]) -> None:
        async with self.client() as client:
            for strategy in strategies:
                await image(client, strategy, 0)


@contextlib.contextmanager
def served(model: Path, options: Options, *flags: str) -> Iterator[Server]:
    """Run `diagd serve` until the block ends, which has made one image before."""
    command = ["-m", "diagd", "serve", "--model", str(model), "--max-waiting", "1000"]
    with running(*command, "--port", "0", *options.machine, *flags) as (url, process):
        while process.is_running() and _state(url) != 200:
            time.sleep(0.2)
        server = Server(url, process)
        asyncio.run(server.warm_up(options.strategies))
        yield server


@contextlib.contextmanager
def running(*command: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run Python until the block ends; yields the first address that it prints."""
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            lines = (re.search(r"http://[\w.:]+", line) for line in process.stdout)
            if (found := next(filter(None, lines), None)) is None:  # it has ended
                log.seek(0)
                raise RuntimeError(log.read())
            yield found[0], psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _state(url: str) -> int:
    with contextlib.suppress(httpx.ConnectError):  # it may be about to end
        return httpx.get(f"{url}/health").status_code
    return 0


async def image(client: AsyncOpenAI, strategy: str, seed: int, **asked: Any) -> float:
    """Ask for an image; returns how long it took, in seconds."""
    started = time.perf_counter()
    extra = {"strategy": strategy, "seed": seed}
    answer = await client.images.generate(prompt=NAMES[1 + seed % 3], extra_body=extra, **asked)
    assert answer.data
    return time.perf_counter() - started


def quantiles(latencies: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(latencies, n=100, method="inclusive") if len(latencies) > 1 else []
    p50, p99 = (cuts[49], cuts[98]) if cuts else (latencies[0], latencies[0])
    return {"p50_s": round(p50, 3), "p99_s": round(p99, 3)}


def closed(model: Path, options: Options) -> list[dict[str, Any]]:
    """So many clients ask for one image after the other, with the batch and without."""

    async def load(server: Server, strategy: str, count: int) -> list[float]:
        async with server.client() as client:

            async def one(number: int) -> list[float]:
                seeds = [number * options.images + i for i in range(options.images)]
                return [await image(client, strategy, seed) for seed in seeds]

            latencies = await asyncio.gather(*(one(number) for number in range(count)))
        return [seconds for of_client in latencies for seconds in of_client]

    rows = list[dict[str, Any]]()
    for at_once in (BATCH, 1):
        with served(model, options, "--max-videos", str(at_once)) as server:
            for strategy in options.strategies:
                for count in options.clients:
                    started = time.perf_counter()
                    latencies = asyncio.run(load(server, strategy, count))
                    seconds = time.perf_counter() - started
                    rows.append(
                        {
                            "strategy": strategy,
                            "batch": "on" if at_once > 1 else "off",
                            "clients": count,
                            "images_per_minute": round(60 * len(latencies) / seconds, 2),
                            **quantiles(latencies),
                        }
                    )
    alone = {(row["strategy"], row["clients"]): row["images_per_minute"] for row in rows}
    for row in rows:  # those without the batch came last
        without = alone[row["strategy"], row["clients"]]
        row["over_one_by_one"] = round(row["images_per_minute"] / without, 2)
    return rows


def open_loop(model: Path, options: Options) -> list[dict[str, Any]]:
    """Requests come by chance, at rates below and above what one after another could serve."""

    async def load(server: Server, strategy: str, rate: float, count: int) -> list[float]:
        chance = random.Random(options.seed)
        async with server.client() as client:
            asking = list[asyncio.Task[float]]()
            for seed in range(count):
                asking.append(asyncio.create_task(image(client, strategy, seed)))
                await asyncio.sleep(chance.expovariate(rate))
            return await asyncio.gather(*asking)

    rows, count = list[dict[str, Any]](), max(options.clients)
    with served(model, options, "--max-videos", str(BATCH)) as server:
        for strategy in options.strategies:
            lone = asyncio.run(load(server, strategy, 1e3, 1))[0]
            for share in (0.5, 0.9, 1.5):
                started = time.perf_counter()
                latencies = asyncio.run(load(server, strategy, share / lone, count))
                seconds = time.perf_counter() - started
                row = {"strategy": strategy, "lone_s": round(lone, 3), "rate_of_lone": share}
                row["images_per_minute"] = round(60 * count / seconds, 2)
                rows.append({**row, **quantiles(latencies)})
    return rows


def overhead(model: Path, options: Options) -> list[dict[str, Any]]:
    """A lone request beside the same image made in this process, in turns."""
    world = VideoGenerator.from_pretrained(model, options.device, options.dtype)
    rows = list[dict[str, Any]]()
    with served(model, options) as server, httpx.Client(timeout=3600) as client:
        for strategy in options.strategies:
            ratios, times = list[float](), list[tuple[float, float]]()
            for seed in range(options.rounds + 1):
                started = time.perf_counter()
                video = world.generate(None, NAMES[1], 1, strategy=strategy, seed=seed)
                encode(video.frames[0], "png")
                between = time.perf_counter()
                asked = {"prompt": NAMES[1], "strategy": strategy, "seed": seed}
                answer = client.post(f"{server.url}/v1/images/generations", json=asked)
                times.append((between - started, time.perf_counter() - between))
                data = base64.b64decode(answer.json()["data"][0]["b64_json"])
                shown = np.asarray(Image.open(io.BytesIO(data))).astype(int)
                apart = np.abs(shown - video.frames[0].numpy()).max()
                if apart > 1:  # of 255, by which painting with other threads may round
                    raise RuntimeError(f"pictures of {strategy}, seed {seed} are {apart} apart")
            ratios = [served_s / own_s for own_s, served_s in times[1:]]
            own_s, served_s = (statistics.median(one) for one in zip(*times[1:], strict=True))
            row = {"strategy": strategy, "own_s": round(own_s, 4), "served_s": round(served_s, 4)}
            row["ratio"] = round(statistics.median(ratios), 4)
            rows.append({**row, "ratios": [round(one, 4) for one in ratios]})
    return rows


def preview(model: Path, options: Options) -> list[dict[str, Any]]:
    """Seconds to the first preview, alone and beside seven others."""

    async def first(server: Server, strategy: str, others: int) -> float:
        async with server.client() as client:
            beside = [asyncio.create_task(image(client, strategy, n)) for n in range(others)]
            await asyncio.sleep(1 if others else 0)
            started, asked = time.perf_counter(), {"strategy": strategy, "seed": 99}
            more = {"stream": True, "partial_images": 8, "extra_body": asked}
            stream: Any = await client.images.generate(prompt=NAMES[1], **more)
            seconds = 0.0
            async for _ in stream:
                seconds = seconds or time.perf_counter() - started
            await asyncio.gather(*beside)
        return seconds

    rows = list[dict[str, Any]]()
    with served(model, options, "--max-videos", str(BATCH)) as server:
        for strategy in options.strategies:
            alone, beside = (asyncio.run(first(server, strategy, count)) for count in (0, 7))
            row = {"strategy": strategy, "alone_s": round(alone, 3)}
            rows.append({**row, "beside_seven_s": round(beside, 3)})
    return rows


def mixed(model: Path, options: Options) -> list[dict[str, Any]]:
    """Clients of all kinds for minutes: none that waits is lost, and memory does not grow."""
    outcomes, memory = Counter[str](), list[float]()

    async def run(server: Server) -> None:
        until, chance = time.monotonic() + 60 * options.minutes, random.Random(options.seed)
        address = server.url.removeprefix("http://").split(":")

        async def patient(client: AsyncOpenAI) -> None:
            await image(client, chance.choice(options.strategies), chance.randrange(1000))
            outcomes["answered"] += 1

        async def watching(client: AsyncOpenAI) -> None:
            more = {"stream": True, "partial_images": 3}
            stream: Any = await client.images.generate(prompt=NAMES[1], **more)
            kinds = [event.type async for event in stream]
            assert kinds[-1] == "image_generation.completed"
            outcomes["watched"] += 1

        async def vanishing(_: AsyncOpenAI) -> None:
            """Go away in the midst: before the answer, within it, or after."""
            reader, writer = await asked(chance.random() < 0.5)
            await asyncio.sleep(chance.random() * 2)
            if chance.random() < 0.5:
                await reader.read(100)
                await asyncio.sleep(1)
            writer.transport.abort()
            outcomes["vanished"] += 1

        async def slow(_: AsyncOpenAI) -> None:
            """Read the answer bit by bit, to its end."""
            reader, writer = await asked(True)
            answer = b""
            while data := await reader.read(1024):
                answer += data
                await asyncio.sleep(0.05)
            writer.close()
            if b"event: image_generation.completed" not in answer:
                raise OSError(f"a slow reader was sent {answer[-100:]!r}")
            outcomes["read_slowly"] += 1

        async def asked(stream: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            body = json.dumps({"prompt": NAMES[1], "stream": stream, "partial_images": 3}).encode()
            head = "POST /v1/images/generations HTTP/1.1\r\nhost: localhost\r\n"
            head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            opened = await asyncio.open_connection(address[0], int(address[1]), limit=1024)
            opened[1].write(head.encode() + body)
            return opened

        async def malformed(_: AsyncOpenAI) -> None:
            bodies = b"{", b"[]", b'{"prompt": 3}', b'{"prompt": "dog"}', b"x" * 2**19
            async with httpx.AsyncClient() as client:
                body = chance.choice(bodies)
                answer = await client.post(f"{server.url}/v1/images/generations", content=body)
            assert answer.status_code in (400, 413), answer.text
            outcomes["refused"] += 1

        async def one(client: AsyncOpenAI) -> None:
            kinds = patient, patient, watching, vanishing, slow, malformed
            while time.monotonic() < until:
                try:
                    await chance.choice(kinds)(client)
                except (openai.OpenAIError, httpx.HTTPError, OSError) as error:
                    outcomes[f"lost: {type(error).__name__} {error}"[:200]] += 1
                await asyncio.sleep(chance.expovariate(1) * options.pause)

        async def look() -> None:
            while time.monotonic() < until:
                memory.append(server.process.memory_info().rss / 2**20)
                await asyncio.sleep(60 * options.minutes / 200)

        async with server.client() as client:
            await asyncio.gather(look(), *(one(client) for _ in range(max(options.clients))))
        await asyncio.sleep(3)  # the last to vanish are noticed
        metrics = httpx.get(f"{server.url}/metrics").text
        if not re.search(r"^diagd_rows_in_use 0\.0$", metrics, re.M):
            raise RuntimeError("sequences are in use, though nobody waits")

    with served(model, options, "--max-videos", str(BATCH)) as server:
        asyncio.run(run(server))
    lost = sum(count for what, count in outcomes.items() if what.startswith("lost"))
    tenths = [round(float(np.median(tenth)), 1) for tenth in np.array_split(memory, 10)]
    growth = round(tenths[-1] / tenths[1] - 1, 4)  # the first tenth warms up
    about = {"minutes": options.minutes, "clients": max(options.clients), "pause_s": options.pause}
    return [{**about, **outcomes, "lost": lost, "mib_of_tenths": tenths, "growth": growth}]


def sessions(_: Path, options: Options) -> list[dict[str, Any]]:
    """So many players step through a world at once; and the same, one player after the other."""
    world = ["--model", options.world, *options.machine, "--no-open", "--port", "0"]
    world += ["--max-sessions", str(max(options.clients))]
    loads, rows = [*product(options.strategies, options.clients)], list[dict[str, Any]]()
    for name, share in SHARING.items():
        with running("-c", PLAY.format(share), "play", *world) as (url, _):
            for strategy, count in loads:
                rows.append(play(url, strategy, count, options.frames, count) | {"steps": name})
            for strategy, count in loads if name == "in turns" else ():
                alone = play(url, strategy, count, options.frames, at_once=1)
                rows.append(alone | {"steps": "one after another"})
    alone = {(row["strategy"], row["clients"]): row["frames_per_second"] for row in rows}
    for row in rows:  # those one after another came last
        without = alone[row["strategy"], row["clients"]]
        row["over_one_by_one"] = round(row["frames_per_second"] / without, 2)
    return rows


def play(url: str, strategy: str, count: int, num_frames: int, at_once: int) -> dict[str, Any]:
    """Have players share `num_frames`, all of whom have begun before."""
    each = max(1, num_frames // count)

    def steps(session: Session) -> list[float]:
        latencies = list[float]()
        for number in range(each):
            started = time.perf_counter()
            session.step(number // 8 % len(session.actions))
            latencies.append(time.perf_counter() - started)
        return latencies

    with contextlib.ExitStack() as opened, ThreadPoolExecutor(at_once) as pool:
        players = list[Session]()
        for seed in range(count):
            player = Session(url, strategy=strategy, lossless=False, wait_seconds=60)
            players.append(opened.enter_context(player))
            player.reset(seed=seed)
            player.step(0)  # what is read and built first
        started = time.perf_counter()
        latencies = [seconds for of_player in pool.map(steps, players) for seconds in of_player]
        rate = count * each / (time.perf_counter() - started)
    row = {"strategy": strategy, "clients": count, "frames_per_second": round(rate, 2)}
    return row | {"of_each": round(rate / count, 2), **quantiles(latencies)}


PARTS: dict[Part, Any] = {
    "closed": closed,
    "open": open_loop,
    "overhead": overhead,
    "preview": preview,
    "mixed": mixed,
    "sessions": sessions,
}

if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
