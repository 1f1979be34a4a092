"""The modes of `diagd evaluate`: the flags, files and baselines of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diagd.evaluation.results import (
    BASELINES,
    IMAGES_FILE,
    LIKELIHOOD_FILE,
    RESULTS_FILE,
    REVISIT_BASELINES,
)

DRIFT_FRAMES = 256  # generated unless another number is given
OF_CLIPS = (
    *("protocol", "frames", "context_frames", "fps", "start", "fvd_detector", "fvd_resize"),
    *("teacher_forced", "drift", "revisit", "revisit_actions"),
)
OF_IMAGES = "guidance", "fid_detector", "efd_detector"
NO_IMAGES: dict[str, str] = dict.fromkeys(
    OF_IMAGES, "{flag} is for images: {clips} is no file of prompts"
)
FRAME_BY_FRAME = "{mode} is measured frame by frame: leave {flag} out"
IN_THIS_PROCESS = "teacher_forced runs in this process: leave --workers out"


@dataclass(frozen=True, eq=False)
class Mode:
    """A way to evaluate; `options` are `EvaluateOptions`."""

    name: str
    file: str = RESULTS_FILE  # of its results, in --out
    baselines: tuple[str, ...] = BASELINES  # measured beside the strategies
    unit: str = "clips x strategies"  # of progress
    refused: Mapping[str, str] = field(default_factory=lambda: NO_IMAGES)  # flag -> its error
    # options -> frames to generate, unless --frames says how many there are
    generated: Callable[[Any], int | None] = lambda options: None
    # (given, all) frames of a clip -> frames to read of it: least, most
    read: Callable[[int, int], tuple[int, int]] = lambda given, frames: (frames, frames)


CONTINUATION = Mode("continuation")
LIKELIHOOD = Mode(
    "teacher_forced",
    LIKELIHOOD_FILE,
    baselines=(),
    refused={**NO_IMAGES, "workers": IN_THIS_PROCESS, "address": IN_THIS_PROCESS},
)
DRIFT = Mode(
    "drift",
    refused=NO_IMAGES | {"fvd_detector": FRAME_BY_FRAME},
    generated=lambda options: DRIFT_FRAMES,
    read=lambda given, frames: (given + 1, frames),
)
REVISIT = Mode(
    "revisit",
    baselines=REVISIT_BASELINES,
    refused=NO_IMAGES
    | {
        "frames": "revisit sets the number of frames: leave frames out",
        "fvd_detector": FRAME_BY_FRAME,
    },
    generated=lambda options: 2 * options.revisit + 1,
    read=lambda given, frames: (given, given),
)
IMAGES = Mode(
    "images",
    IMAGES_FILE,
    baselines=(),
    unit="images x strategies",
    refused=dict.fromkeys(OF_CLIPS, "{flag} is for clips: leave it out with a file of prompts"),
)
BY_FLAG = {"teacher_forced": LIKELIHOOD, "drift": DRIFT, "revisit": REVISIT}
