"""Measure the world in a browser against the same world in Python, and how its memory grows.

A page of `diagd export-web` in headless Chromium writes frames at a full context, with one thread
and with as many as `--threads` says; between two pages, Python does the same with `--dtype int8`.
Told are medians of rounds, of ratios, too. Time of a frame is that of its tokens, and of tokens and
picture; the page draws, beside it, in software. Nothing else should run on the machine. Needs
`pip install -e '.[test]'` and Chromium.

    python -m runs.browser --out docs/results/browser.json
    DIAGD_CXXFLAGS=-march=x86-64-v3 ATEN_CPU_CAPABILITY=avx2 \\
      python -m runs.browser --out docs/results/browser_avx2.json     # Python as on most processors
    python -m runs.browser --out docs/results/browser_memory.json --threads 1 --memory-frames 2000
    python -m runs.browser --film docs/play.webp           # of the world doom, for the README
"""

import functools
import http.server
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import tyro
from playwright.sync_api import Browser, Page, sync_playwright

from diagd.decoding.strategies.table import parse_strategy
from diagd.families.checkpoints import model_path
from diagd.files import write_json
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import model_scenes
from diagd.system import provenance, settings_of
from diagd.web.play.export import export
from diagd.web.play.options import ExportWebOptions
from diagd.web.play.session import Controls, Session, SessionLog
from runs.play import FILM_SIZE, film

TIMES = "decode_ms", "picture_ms"


@dataclass(frozen=True)
class Options:
    """Play in a browser by script and write what was measured."""

    out: Path = Path("browser.json")  # JSON file
    film: Path | None = None  # animated picture (webp) of the page being played, and no JSON
    model: str = "doom"
    strategy: str = "k=1"
    threads: int = 2
    frames: int = 30  # measured in each round, after the context is full
    rounds: int = 3
    memory_frames: int = 0  # watch the memory of a page over so many frames, instead
    chromium: Path = Path(shutil.which("chromium") or "chromium")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def hosted(model: str) -> Iterator[str]:
    """Export a world and host it; yield its address."""
    with tempfile.TemporaryDirectory() as folder:
        export(ExportWebOptions(Path(folder), model=model))
        handler = functools.partial(Quiet, directory=folder)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}/"
            server.shutdown()


@contextmanager
def playing(
    browser: Browser, address: str, strategy: str, threads: int
) -> Iterator[tuple[Page, float]]:
    """Open a page whose context is full; and seconds from the weights to its first frame."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{address}?threads={threads}")
    page.wait_for_function("document.querySelector('#computed').textContent", timeout=0)
    arrived = time.perf_counter()
    wait_for(page, 1)
    first_seconds = time.perf_counter() - arrived
    page.get_by_role("button", name=f"{strategy} ").click(timeout=120_000)
    count = "thread" if threads == 1 else "threads"
    said = page.locator("#computed").inner_text()
    if not said.endswith(f"{threads} {count}"):
        raise SystemExit(f"the page runs on other threads than asked for: {said}")
    said = "document.querySelector('#context').textContent"
    page.wait_for_function(f"/remembers (\\d+) of at most \\1/.test({said})", timeout=0)
    wait_for(page, 5)
    yield page, first_seconds
    context.close()


def wait_for(page: Page, frames: int) -> None:
    goal = int(page.get_attribute("body", "data-frames") or 0) + frames
    page.wait_for_function(f"Number(document.body.dataset.frames ?? 0) >= {goal}", timeout=0)


def times_in_browser(
    browser: Browser, address: str, options: Options, threads: int
) -> dict[str, float]:
    """Return the median times of a frame in milliseconds, and the frames drawn in a second."""
    with playing(browser, address, options.strategy, threads) as (page, first):
        started = time.perf_counter()
        wait_for(page, options.frames)
        seconds = time.perf_counter() - started
        bars = page.evaluate("diagd.readings.bars")[-options.frames :]
    found = {
        "decode_ms": median(bar["decode_ms"] for bar in bars),
        "picture_ms": median(bar["ms"] - bar["decode_ms"] for bar in bars),
    }
    return found | {"drawn_per_second": options.frames / seconds, "first_frame_seconds": first}


class Native:
    """The same world in Python, at a full context."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.world = VideoGenerator.from_pretrained(options.model, dtype="int8")
        defaults = self.world.defaults
        folder = model_path(options.model)
        scene = model_scenes(folder, self.world, defaults.context_frames)[0]
        self.controls = Controls(
            parse_strategy(options.strategy), defaults.temperature, defaults.top_p or 1.0
        )
        self.action = scene.actions[-1]
        self.session = Session(self.world, SessionLog(scene.frames, scene.actions, 0))
        for _ in range(self.world.config.frames_held):
            self.session.advance(self.action, self.controls)

    def times(self) -> dict[str, float]:
        found: dict[str, list[float]] = {name: [] for name in TIMES}
        for _ in range(self.options.frames):
            started = time.perf_counter()
            tokens = self.session.advance(self.action, self.controls)
            decoded = time.perf_counter()
            self.world.tokenizer.decode(tokens)
            found["decode_ms"].append(1e3 * (decoded - started))
            found["picture_ms"].append(1e3 * (time.perf_counter() - decoded))
        return {name: median(values) for name, values in found.items()}


def measure_speed(browser: Browser, address: str, options: Options) -> dict[str, Any]:
    """Take turns; return the median of each, and of each round's ratios of frames a second."""
    native, counts = Native(options), sorted({1, options.threads})
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(options.rounds):
        found = {"native": native.times()}
        for threads in counts:
            found[f"browser, {threads} threads"] = times_in_browser(
                browser, address, options, threads
            )
        rounds.append(found)
        print(
            {
                name: {key: round(value, 1) for key, value in one.items()}
                for name, one in found.items()
            }
        )

    def ratio(one: str, other: str, names: tuple[str, ...]) -> float:
        cost = [[sum(each[who][name] for name in names) for who in (one, other)] for each in rounds]
        return round(median(theirs / ours for ours, theirs in cost), 3)

    many, single = f"browser, {options.threads} threads", "browser, 1 threads"
    return {
        "medians": {
            who: {key: round(median(one[who][key] for one in rounds), 2) for key in rounds[0][who]}
            for who in rounds[0]
        },
        "ratios of frames a second": {
            "browser over native, tokens": ratio(many, "native", TIMES[:1]),
            "browser over native, tokens and picture": ratio(many, "native", TIMES),
            f"one thread over {options.threads}, tokens": ratio(single, many, TIMES[:1]),
        },
    }


def measure_memory(browser: Browser, address: str, options: Options) -> dict[str, Any]:
    """Read the memory of the page's process every tenth of the way, in MB."""
    found = []
    with playing(browser, address, options.strategy, options.threads) as (page, _):
        for done in range(0, options.memory_frames + 1, max(1, options.memory_frames // 10)):
            wait_for(page, max(1, options.memory_frames // 10) if done else 1)
            found.append({"frames": done, "renderer_mb": round(renderer_mb(), 1)})
            print(found[-1])
    return {"memory": found}


def renderer_mb() -> float:
    """Return the private memory of the largest process that runs a page."""
    children = psutil.Process().children(recursive=True)
    pages = [one for one in children if "--type=renderer" in " ".join(one.cmdline())]
    return max(one.memory_full_info().uss for one in pages) / 1e6


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    with hosted(options.model) as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        if options.film:
            page = browser.new_page(viewport=FILM_SIZE, color_scheme="dark")
            return film(page, f"{address}?threads={options.threads}", options.film)
        measure = measure_memory if options.memory_frames else measure_speed
        found = measure(browser, address, options)
        version = browser.version
        browser.close()
    record = {**found, "chromium": version, **settings_of(options)}
    write_json(options.out, record | provenance(torch.device("cpu")), indent=1)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
