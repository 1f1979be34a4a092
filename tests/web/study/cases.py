"""A study in miniature: real mp4 clips of one colour a system, and a real server on a free port."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from diagd.data.actions import write_actions
from diagd.data.video import write_video
from diagd.web.guard import listen
from diagd.web.study.pairs import StudyPairs, find_pairs
from diagd.web.study.server import study_server
from diagd.web.study.store import StudyStore
from tests.web.play.serving import in_a_thread

COLOURS = {"k=1": (200, 30, 30), "raster": (30, 30, 200), "k=2": (30, 160, 30)}
ACTIONS = ("none", "forward", "forward", "forward+left", "left", "left")
HEIGHT_PX, WIDTH_PX = 48, 80


def write_clip(path: Path, colour: tuple[int, int, int], num_frames: int = len(ACTIONS)) -> None:
    """Write frames of one colour, a little darker from frame to frame."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shade = torch.linspace(1, 0.7, num_frames)[:, None, None, None]
    frames = (torch.tensor(colour) * shade).round().to(torch.uint8)
    write_video(path, frames.expand(num_frames, HEIGHT_PX, WIDTH_PX, 3), fps=12)


def write_pairs(
    folder: Path, num_clips: int = 3, systems: tuple[str, ...] = ("raster", "k=1")
) -> Path:
    """Write clips with actions for every system; returns the folder."""
    for system in systems:
        for number in range(num_clips):
            path = folder / system / f"dream_{number}.mp4"
            write_clip(path, COLOURS[system])
            write_actions(path.with_suffix(".jsonl"), ACTIONS)
    return folder


@contextmanager
def running(pairs: StudyPairs, store: StudyStore, names: tuple[str, ...] = ()) -> Iterator[str]:
    """Serve a study on a free port; yields its address."""
    listening = listen("127.0.0.1", 0)
    with in_a_thread(study_server(pairs, store, 0, names), listening):
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def study(folder: Path, *compare: str) -> Iterator[tuple[str, StudyStore]]:
    """Serve the pairs of a folder; yields the address and the store behind it."""
    pairs = find_pairs(folder, compare)
    with closing(StudyStore(folder / "study.db", pairs)) as store, running(pairs, store) as address:
        yield address, store


def call(address: str, message: Any = None, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """GET, or POST a message as JSON; returns status, body and headers."""
    data = message if isinstance(message, bytes | None) else json.dumps(message).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    if data is not None:
        names = {"content-type": "application/json", **names}
    request = urllib.request.Request(address, data, names)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read(), dict(response.headers.items())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), dict(error.headers.items())


def enrol(address: str, name: str = "") -> str:
    """Enrol a rater; returns the Cookie header."""
    status, body, headers = call(f"{address}/api/raters", {"name": name})
    assert status == 200, body
    return headers["set-cookie"].partition(";")[0]


def fetch(address: str, message: Any = None, **headers: str) -> Any:
    """Call, and return the JSON document of a success."""
    status, body, _ = call(address, message, **headers)
    assert status == 200, body
    return json.loads(body)
