"""Files of every format, damaged by a seed, and what reads them: in a process of its own.

    python -m tests.attack.mutations FORMAT SEED COUNT

A reader crashes where C is at fault, so nothing is caught: the process says which attempt failed.
"""

import argparse
import json
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import av
import numpy as np
import torch
import yaml
from PIL import Image

from diagd import VideoGenerator
from diagd.data.actions import ActionVocabulary, read_actions, write_actions
from diagd.data.video import read_video, save_frames
from diagd.families.checkpoints import read_config
from diagd.families.wham.convert import npz_actions, npz_frames, npz_length
from diagd.web.play.session import SessionLog, load_log, save_log
from diagd.weight_files import read_torch_file, read_weights, write_weights
from tests.models.tiny import tiny_fields
from tests.worlds import HEIGHT_PX, NAMES, PROMPT_ACTIONS, WIDTH_PX, smooth_frames, write_world

SECONDS, MEGABYTES, LETTERS = 20, 700, 1500  # of an attempt, of all of them, of a complaint
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(3)}
Read = Callable[[Path], object]


def tensors(path: Path) -> Read:
    write_weights(path, WEIGHTS)
    return read_weights


def pickled(path: Path) -> Read:
    torch.save({"state_dict": WEIGHTS, "epoch": 3}, path)
    return read_torch_file


def pickled_long_ago(path: Path) -> Read:
    torch.save({"model": WEIGHTS}, path, _use_new_zipfile_serialization=False)
    return read_torch_file


def arrays(path: Path) -> Read:
    images = smooth_frames(3, HEIGHT_PX, WIDTH_PX).movedim(-1, 1).numpy()
    np.savez_compressed(path, images=images, actions=np.zeros((3, 16), np.int8))
    return lambda path: (list(npz_frames(path, range(npz_length(path)[0]))), npz_actions(path))


def shown(path: Path) -> Read:
    save_frames(path, smooth_frames(3, HEIGHT_PX, WIDTH_PX), fps=8)
    return read_video


def painted(path: Path) -> Read:
    Image.fromarray(smooth_frames(1, HEIGHT_PX, WIDTH_PX)[0].numpy()).save(path)
    return read_video


def filmed(path: Path) -> Read:
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = WIDTH_PX, HEIGHT_PX, "yuv420p"
        for frame in smooth_frames(5, HEIGHT_PX, WIDTH_PX).numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        container.mux(stream.encode())
    return read_video


def lines(path: Path) -> Read:
    write_actions(path, PROMPT_ACTIONS)
    return lambda path: read_actions(path, ActionVocabulary(NAMES))


def settings(path: Path) -> Read:
    path.write_text(yaml.safe_dump(tiny_fields()) if path.suffix == ".yaml" else _json())
    return read_config


def _json() -> str:
    return json.dumps(tiny_fields())


@cache
def world() -> VideoGenerator:
    return VideoGenerator.from_pretrained(write_world(Path(tempfile.mkdtemp())))


def dream(path: Path) -> Read:
    frames = smooth_frames(2, HEIGHT_PX, WIDTH_PX)
    path.write_bytes(save_log(SessionLog(frames, ("left",), 1, ()), "m"))

    def read(path: Path) -> SessionLog:  # what is read of a browser's file names no path
        try:
            return load_log(path.read_bytes(), world())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    return read


FORMATS: dict[str, Callable[[Path], Read]] = {
    "safetensors": tensors,
    "pt": pickled,
    "pth": pickled_long_ago,
    "npz": arrays,
    **dict.fromkeys(("png", "gif", "webp", "mp4"), shown),
    "jpeg": painted,
    "mkv": filmed,
    "jsonl": lines,
    **dict.fromkeys(("yaml", "json"), settings),
    "dream": dream,
}


def mutate(content: bytes, chance: random.Random) -> bytes:
    """Change some bytes, numbers or pieces, or cut what follows."""
    numbers = [0, 1, 127, 255, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**32 - 1, 2**62, 2**64 - 1]
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        place, kind = chance.randrange(max(len(content), 1)), chance.randrange(5)
        here, length = content[place:], chance.choice((1, 1, 2, 4, 8, 64))
        if kind == 0:
            here = chance.randbytes(length) + here[length:]
        elif kind == 1:
            number, order = chance.choice(numbers), chance.choice(("little", "big"))
            here = (number % 256**length).to_bytes(length, order) + here[length:]
        elif kind == 2:
            start = chance.randrange(max(len(content), 1))
            here = content[start : start + length] * chance.choice((1, 1, 2, 1000)) + here
        elif kind == 3:
            here = here[length:]
        elif not chance.randrange(4):
            here = b""
        content = content[:place] + here
    return content


def attempt(read: Read, path: Path) -> bool:
    """Read a file: it works, or is one line that names the file; return whether it works."""
    complaint = f"{path}"
    try:
        read(path)
    except (ValueError, OSError) as error:
        complaint = str(error)
    assert str(path) in complaint, complaint[:LETTERS]
    assert "\n" not in complaint
    assert len(complaint) < LETTERS, complaint[:LETTERS]
    return complaint == str(path)


def main(kind: str, seed: int, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    chance, read_ones = random.Random(f"{kind} {seed}"), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"damaged.{kind}")
        read = FORMATS[kind](path)
        whole = path.read_bytes()
        assert attempt(read, path), "the whole file is read"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(count):
            path.write_bytes(mutate(whole, chance))
            print(f"{kind} {seed}: attempt {number}", flush=True)
            started = time.monotonic()
            signal.alarm(SECONDS)
            read_ones += attempt(read, path)
            signal.alarm(0)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
            assert grown < MEGABYTES, f"{grown} MB in {time.monotonic() - started:.1f} s"
    print(f"{kind} {seed}: {read_ones} of {count} were read")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=FORMATS)
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int)
    arguments = parser.parse_args(sys.argv[1:])
    main(arguments.kind, arguments.seed, arguments.count)
