"""Measure `diagd play` from a scripted browser.

Chromium opens the page, holds and changes keys, and the page itself times them: key to picture is
from the key event to the screen refresh after the frame that used it was drawn. Beside it stands
what the model does without a server (`diagd bench` after a full context), and what the server does
for a client that draws nothing. Machines change their pace, so all of it is done in rounds; told
are medians of rounds, of ratios, too. Every strategy plays on its own; nothing else should run on
the machine. Needs `pip install -e '.[test]'` and Chromium.

    python runs/play.py --out work/play                      # play.json, play.md
"""

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from websockets.sync.client import connect

from diagd.client import unpack
from diagd.files import replacing, write_json, write_text
from diagd.system import provenance, settings_of
from diagd.web.guard import listen, url_of
from diagd.web.play.server import PlayOptions, load

STRATEGIES = ("k=1", "k=2", "k=4", "raster")
WARM_UP_FRAMES = 5
PARTS = "decode_ms", "picture_ms", "encode_ms", "send_ms"  # all but the last make a frame
MAX_FILM_BYTES = 3_000_000
FILM_FPS = 10
FILM_SIZE: Any = {"width": 1120, "height": 640}
# the film: what is held, and for how many seconds; a scene that is clicked, or a strategy
FILM = ("opening", ("Space", 0.8), ("KeyA", 0.8), ("KeyW", 1.2), ("Space", 0.6), ("KeyD", 1.2))
FILM += ("worms", ("Space", 0.6), ("KeyE", 0.6), ("Space", 1.0), ("KeyW", 0.8))
FILM += ("computers", ("KeyA", 1.0), ("KeyW", 1.4), "raster", ("KeyA", 2.5), "k=1", ("KeyA", 1.0))
FILM += ("medicine", ("KeyW", 2.0), ("KeyD", 0.8))


@dataclass(frozen=True)
class Options:
    """Play by script and write what was measured."""

    out: Path  # folder for play.json and play.md
    frames: int = 300  # measured with each diagonal, by the browser and by the other client
    raster_frames: int = 50  # measured with raster, which is slow
    rounds: int = 3
    model: str = "doom"
    device: str = "cpu"
    dtype: str = "fastest"  # as `diagd play` chooses
    chromium: Path = Path(shutil.which("chromium") or "chromium")


def main(options: Options) -> None:
    """Start the server, drive the browser, write the results."""
    options.out.mkdir(parents=True, exist_ok=True)
    record = PlayOptions(
        model=options.model,
        device=options.device,
        dtype=options.dtype,  # pyright: ignore[reportArgumentType]
        open=False,
        port=0,
    )
    _, server = load(record)
    with listen(record.host, record.port) as listening, sync_playwright() as driver:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        browser = driver.chromium.launch(executable_path=options.chromium)
        try:
            url = url_of(*listening.getsockname()[:2])
            rows = [
                {"round": number, "bench_frames_per_second": speeds[name]}
                | {"alone": serve_alone(url, name, options)}
                | measure(browser.new_page(), url, name, options)
                for number in range(options.rounds)
                for speeds in [bench(options)]
                for name in STRATEGIES
            ]
        finally:
            browser.close()
            server.should_exit = True
            thread.join()
    document = {
        "options": settings_of(options),
        **provenance(torch.device(options.device)),
        "rows": rows,
    }
    write_json(options.out / "play.json", document, indent=1)
    write_text(options.out / "play.md", report(document, options.out))
    print(json.dumps(document))


def bench(options: Options) -> dict[str, float]:
    """Return the frames a second of each strategy after a full context, and nothing around it."""
    command = [sys.executable, "-m", "diagd", "bench", "--json", "--baseline", "none"]
    command += ["--model", options.model, "--device", options.device, "--dtype", options.dtype]
    command += ["--temperature", "1", "--row-lag"]
    command += [name.removeprefix("k=") for name in STRATEGIES if name != "raster"]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)["rows"]
    full = max(row["context_frames"] for row in found)
    rows = [row for row in found if row["context_frames"] == full]
    return {row["strategy"]: row["frames_per_second"] for row in rows}


def serve_alone(url: str, strategy: str, options: Options) -> dict[str, float]:
    """Play with a client that throws the pictures away: frames a second, and a frame's times."""
    wanted, frames, ends = frames_of(strategy, options), [], []
    with connect(f"{url.replace('http', 'ws', 1)}/play", max_size=None) as socket:
        while len(frames) < WARM_UP_FRAMES + wanted:
            message = socket.recv()
            if isinstance(message, str):
                note = json.loads(message)
                if note["type"] == "welcome":
                    controls = note["controls"] | {"type": "adjust", "strategy": strategy}
                    socket.send(json.dumps(controls))
                continue
            header, _ = unpack(message)
            socket.send(json.dumps({"type": "seen", "frame": header["frame"]}))
            if header.get("strategy") == strategy:
                frames.append(header)
                ends.append(time.perf_counter())
    return {
        "frames_per_second": wanted / (ends[-1] - ends[-1 - wanted]),
        **mean_parts(frames[-wanted:]),
    }


def frames_of(strategy: str, options: Options) -> int:
    """Return how many frames of a strategy are measured."""
    return options.raster_frames if strategy == "raster" else options.frames


def mean_parts(frames: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean milliseconds of what a frame takes."""
    return {part: sum(frame[part] for frame in frames) / len(frames) for part in PARTS}


def measure(page: Page, url: str, strategy: str, options: Options) -> dict[str, Any]:
    """Play with one strategy by script; returns times in milliseconds, and shares."""
    headers: list[dict[str, Any]] = []
    page.on("websocket", lambda socket: socket.on("framereceived", _collector(headers)))
    page.goto(url)
    page.locator("#hud-fps").wait_for()
    click_strategy(page, strategy)
    _until(
        page,
        lambda: [h["strategy"] for h in headers[-WARM_UP_FRAMES:]] == WARM_UP_FRAMES * [strategy],
    )
    page.evaluate("() => { diagd.readings.latencies.length = 0; }")
    first = len(headers)
    wanted = frames_of(strategy, options)
    started, keys, turn = time.perf_counter(), ("KeyW", "KeyA", "KeyD"), 0
    while len(headers) - first < wanted:
        page.keyboard.down(keys[turn % 3])
        page.wait_for_timeout(130 + 37 * (turn % 5))  # keys go down anywhere within a frame
        page.keyboard.up(keys[turn % 3])
        page.wait_for_timeout(40)
        turn += 1
    seconds, frames = time.perf_counter() - started, headers[first:]
    _until(page, lambda: _frames_drawn(page) >= first + wanted)
    latencies = page.evaluate("() => diagd.readings.latencies")
    page.close()
    parts = mean_parts(frames)
    whole = sorted(sum(frame[part] for part in PARTS[:3]) for frame in frames)
    print(f"{strategy}: {len(frames)} frames, {seconds:.0f} s", file=sys.stderr)
    return {
        "strategy": strategy,
        "steps": frames[-1]["steps"],
        "frames": len(frames),
        "presses": len(latencies),
        "frames_per_second": len(frames) / seconds,
        "frame_ms": {"p50": _quantile(whole, 0.5), "p99": _quantile(whole, 0.99)},
        "key_to_picture_ms": {
            "p50": _quantile(sorted(latencies), 0.5),
            "p99": _quantile(sorted(latencies), 0.99),
        },
        "mean_ms": parts,
        "encode_and_send_share": (parts["encode_ms"] + parts["send_ms"]) / sum(parts.values()),
    }


def click_strategy(page: Page, name: str) -> None:
    """Choose a strategy on the page."""
    page.locator(f'#strategies button[data-strategy="{name}"]').click()


def film(page: Page, url: str, path: Path) -> None:
    """Play for a while and keep screenshots as an animated picture of less than 3 MB."""
    page.goto(url)
    _until(page, lambda: _frames_drawn(page) >= WARM_UP_FRAMES)
    shots: list[Image.Image] = []
    for act in FILM:
        if isinstance(act, str):
            if act in STRATEGIES:
                click_strategy(page, act)
            else:
                page.locator(f'#scenes button[title="{act}"]').click()
            page.mouse.move(2, 2)
            page.evaluate("scrollTo(0, 0)")  # a click scrolls to what it hits
            continue
        key, seconds = act
        page.keyboard.down(key)
        for _ in range(int(seconds * FILM_FPS)):
            due = time.perf_counter() + 1 / FILM_FPS
            data = page.screenshot(type="jpeg", quality=95)
            shots.append(Image.open(io.BytesIO(data)).convert("RGB").resize((840, 480)))
            page.wait_for_timeout(max(0, due - time.perf_counter()) * 1e3)
        page.keyboard.up(key)
    for quality in (80, 65, 50, 35):
        buffer = io.BytesIO()
        shots[0].save(
            buffer,
            path.suffix[1:],
            save_all=True,
            append_images=shots[1:],
            duration=1000 // FILM_FPS,
            loop=0,
            quality=quality,
            method=4,
        )
        if buffer.tell() < MAX_FILM_BYTES:
            break
    else:
        raise ValueError(f"the film has {buffer.tell()} bytes, more than {MAX_FILM_BYTES}")
    with replacing(path) as temporary:
        temporary.write_bytes(buffer.getvalue())


def report(document: dict[str, Any], out: Path) -> str:
    """Write the table of play.md, which lies in a folder."""
    script = Path(os.path.relpath(__file__, out)).as_posix()
    lines = [
        "# Play",
        "",
        f"`diagd play --model {document['options']['model']}` on {document['device']}, "
        f"{document['threads']} threads, {document['options']['dtype']}, torch "
        f"{document['torch']}; a headless Chromium on the same machine presses keys "
        f"([runs/play.py]({script})).",
        f"Medians of {document['options']['rounds']} rounds. Key to picture is from the key event "
        "to the screen refresh after the frame that used it was drawn; a frame takes decoding, "
        "painting and encoding. Alone: frames/s for a client that draws nothing; `bench`: those of "
        "`diagd bench` after a full context; in brackets, shares of it.",
        "",
        "| strategy | steps | `bench` | alone | in the browser | a frame, ms p50 | p99 over p50 "
        "| key to picture, ms p50 | in frames | p99 | encode + send |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in STRATEGIES:
        rows = [row for row in document["rows"] if row["strategy"] == name]
        bench = [row["bench_frames_per_second"] for row in rows]
        alone = [row["alone"]["frames_per_second"] for row in rows]
        browser = [row["frames_per_second"] for row in rows]
        frame = [row["frame_ms"]["p50"] for row in rows]
        tail = [row["frame_ms"]["p99"] / row["frame_ms"]["p50"] for row in rows]
        key = [row["key_to_picture_ms"]["p50"] for row in rows]
        cells = [
            name,
            str(rows[0]["steps"]),
            f"{median(bench):.1f}",
            f"{median(alone):.1f} ({_ratio(alone, bench):.2f})",
            f"{median(browser):.1f} ({_ratio(browser, bench):.2f})",
            f"{median(frame):.0f}",
            f"{median(tail):.2f}",
            f"{median(key):.0f}",
            f"{median(k * fps / 1000 for k, fps in zip(key, browser, strict=True)):.2f}",
            f"{median(row['key_to_picture_ms']['p99'] for row in rows):.0f}",
            f"{median(row['encode_and_send_share'] for row in rows):.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median of the ratios, round by round."""
    return median(one / other for one, other in zip(ours, theirs, strict=True))


def _collector(headers: list[dict[str, Any]]) -> Any:
    def collect(message: str | bytes) -> None:
        if isinstance(message, bytes):
            header, _ = unpack(message)
            if "begun" not in header:
                headers.append(header)

    return collect


def _frames_drawn(page: Page) -> int:
    return int(page.get_attribute("body", "data-frames") or 0)


def _until(page: Page, condition: Any, seconds: float = 120.0) -> None:
    """Wait; what the browser reports comes in only while Playwright is called."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"the page did not get there within {seconds:g} seconds")
        page.wait_for_timeout(20)


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


if __name__ == "__main__":
    main(tyro.cli(Options))
