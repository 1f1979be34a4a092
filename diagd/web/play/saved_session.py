"""A session as a JSON document: its start, its seed and one short row a frame; no pixels of frames.

Start frames are kept as they are (deflated RGB), so that the same model writes the same again.
What comes back in is checked like anything from outside.
"""

import base64
import binascii
import zlib
from typing import Any

import torch

from diagd.pipeline.generator import VideoGenerator
from diagd.web.play.session import (
    Controls,
    FrameRecord,
    PastSession,
    PendingStart,
    Session,
    SessionStart,
    check_action,
)

FORMAT = "diagd-session-1"
MAX_FRAMES = 20_000  # of a session: forty minutes at the pace of the bundled world
MAX_START_FRAMES = 64


def save(session: Session | PastSession, model: str) -> dict[str, Any]:
    """Write a session down."""
    frames, records = session.start.frames, list(session.history)
    return {
        "format": FORMAT,
        "model": model,
        "seed": session.start.seed,
        "start": {
            "shape": list(frames.shape),
            "pixels": base64.b64encode(zlib.compress(frames.numpy().tobytes())).decode(),
            "actions": list(session.start.actions),
        },
        "frames": [[r.action, *vars(r.controls).values(), r.checksum] for r in records],
    }


def load(document: Any, world: VideoGenerator) -> PendingStart:
    """Read what `save` wrote.

    Raises:
        ValueError: no such document, or one of a model with other frames or actions.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"this is no saved dream (expected a JSON file with format {FORMAT})")
    start, rows = document.get("start"), document.get("frames")
    if not isinstance(start, dict) or not isinstance(rows, list):
        raise ValueError("the saved dream has no start or no frames")
    if len(rows) > MAX_FRAMES:
        raise ValueError(f"a dream has at most {MAX_FRAMES} frames, this one has {len(rows)}")
    shape, actions = start.get("shape"), start.get("actions")
    if not (isinstance(shape, list) and len(shape) == 4 and all(type(n) is int for n in shape)):
        raise ValueError("the saved dream's start has no shape")
    height_px, width_px = world.frame_size_px
    if not 1 <= shape[0] <= MAX_START_FRAMES:
        raise ValueError(
            f"a saved dream starts with 1 to {MAX_START_FRAMES} frames, got {shape[0]}"
        )
    if shape[1:] != [height_px, width_px, 3]:
        given = "x".join(map(str, shape[1:3]))
        raise ValueError(
            f"the saved dream has frames of {given} pixels, this model {height_px}x{width_px}"
        )
    if not isinstance(actions, list) or len(actions) != shape[0] - 1:
        raise ValueError(f"the saved dream's start needs {shape[0] - 1} actions")
    pixels = _inflate(start.get("pixels"), shape[0] * height_px * width_px * 3)
    frames = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(shape)
    for action in actions:
        check_action(action, world)
    replay = tuple(_frame_record(row, world) for row in rows)
    return PendingStart(SessionStart(frames, tuple(actions), document.get("seed", -1)), replay)


def _frame_record(row: Any, world: VideoGenerator) -> FrameRecord:
    if not isinstance(row, list) or len(row) != 5 or type(row[4]) is not int:
        raise ValueError(f"a frame of a saved dream must have five entries, got {str(row)[:60]}")
    action, strategy, temperature, top_p, checksum = row
    if type(strategy) is int:  # a row_lag, as it was written before strategies had names
        strategy = f"k={strategy}"
    controls = Controls(strategy, temperature, top_p)
    controls.check(world)
    return FrameRecord(check_action(action, world), controls, checksum)


def _inflate(text: Any, size: int) -> bytes:
    """Undo base64 and deflate; never makes more than `size` bytes."""
    try:
        inflater = zlib.decompressobj()
        pixels = inflater.decompress(base64.b64decode(text, validate=True), size)
    except (zlib.error, binascii.Error, TypeError, ValueError):
        raise ValueError("the saved dream's start frames are damaged") from None
    if len(pixels) != size:
        raise ValueError("the saved dream's start frames are damaged")
    return pixels
