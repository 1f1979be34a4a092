"""Does the memory of `diagd play` stay flat? Many short visits, uploads among them.

A server of its own is visited again and again, by some visitors at once: each sees a few frames,
every tenth starts from a picture of its own, and leaves without a goodbye. What the server holds is
read from its process after every fiftieth visit, and compared with what it held once all had been
used for the first time.

    python runs/visits.py --out docs/results            # 3,000 visits: visits.json
    python runs/visits.py --out docs/results --hours 1  # as many as an hour takes
"""

import io
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import torch
import tyro
from PIL import Image
from websockets.sync.client import connect

from diagd.client import unpack
from diagd.files import write_json
from diagd.system import provenance, settings_of

EVERY = 50  # visits between two readings


@dataclass(frozen=True)
class Options:
    """Visit a server, and write how much memory it held."""

    out: Path  # folder for visits.json
    visits: int = 3000
    hours: float = 0.0  # instead of `visits`: for so long
    frames: int = 2  # that a visitor sees after the first picture
    at_once: int = 3  # visitors
    warm_up: int = 300  # visits before memory counts
    model: str = "doom"


def main(options: Options) -> dict[str, Any]:
    """Start the server, visit it, write what was read; returns the document written."""
    flags = ("play", "--model", options.model, "--port", "0", "--no-open")
    command = [sys.executable, "-m", "diagd", *flags, "--max-sessions", str(options.at_once)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = (re.search(r"http://([0-9.]+:\d+)", line) for line in server.stdout)
            address = next(match for match in found if match)[1]
            readings = watch(psutil.Process(server.pid), address, options)
        finally:
            server.terminate()
    settled = [held for visit, held in readings if visit >= options.warm_up]
    document = {
        "options": settings_of(options),
        **provenance(torch.device("cpu")),
        "megabytes": readings,
        "growth": round(max(settled) / settled[0] - 1, 4),
    }
    write_json(options.out / "visits.json", document)
    print(json.dumps(document))
    return document


def watch(server: psutil.Process, address: str, options: Options) -> list[tuple[int, int]]:
    """Visit, and return (visit, megabytes held) after every fiftieth visit."""
    started, numbers, readings = time.monotonic(), count(1), []
    lock, problems = threading.Lock(), list[BaseException]()
    picture = _picture()

    def visitor() -> None:
        while not problems:
            with lock:
                number = next(numbers)
                if number % EVERY == 0:
                    readings.append((number, server.memory_info().rss // 2**20))
                    print(*readings[-1], file=sys.stderr, flush=True)
            passed = time.monotonic() - started
            if passed > options.hours * 3600 if options.hours else number > options.visits:
                return
            try:
                visit(address, options.frames, picture if number % 10 == 0 else None)
            except BaseException as problem:
                problems.append(problem)

    visitors = [threading.Thread(target=visitor) for _ in range(options.at_once)]
    for thread in visitors:
        thread.start()
    for thread in visitors:
        thread.join()
    if problems:
        raise problems[0]
    return readings


def visit(address: str, frames: int, picture: bytes | None) -> None:
    """See the first picture and some frames, perhaps from a picture of one's own, and go."""
    with connect(f"ws://{address}/play", max_size=None, close_timeout=0.1) as socket:
        session, seen = "", -1
        while seen < frames:
            message = socket.recv(timeout=60)
            if isinstance(message, str):
                session = json.loads(message).get("session", session)
                continue
            header = unpack(message)[0]
            socket.send(json.dumps({"type": "seen", "frame": header["frame"]}))
            seen += 1
            if seen == 0 and picture is not None:
                url = f"http://{address}/sessions/{session}/start"
                urllib.request.urlopen(urllib.request.Request(url, picture), timeout=60).close()


def _picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (640, 360), (90, 60, 30)).save(buffer, "PNG")
    return buffer.getvalue()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
