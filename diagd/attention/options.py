"""Options of `diagd attention`."""

from dataclasses import dataclass
from pathlib import Path

from diagd.decoding.strategies.strategy import check_at_least
from diagd.flags import Device, OutputFile, output_file


@dataclass(frozen=True)
class AttentionOptions:
    """Measure which tokens those of a frame attend to, and draw a figure."""

    model: str = "doom"  # the bundled model, or a checkpoint folder
    clips: Path | None = None  # video or folder of videos, .jsonl beside; default: the model's own
    num_clips: int = 8  # of a folder, the first so many by name
    frame: int = 1  # which frame, from 0; of a clip, the first FRAME + 1 are read
    layer: int | None = None  # draw this layer's map; default: the mean of all
    head: int | None = None  # draw this head's map; default: the mean of all
    device: Device = "cpu"  # cpu, cuda, cuda:1
    output: OutputFile = Path("attention.png")  # the numbers go beside it as .json

    def __post_init__(self) -> None:
        check_at_least(self, frame=1, num_clips=1)
        if self.output.suffix != ".png":
            raise ValueError(f"output must end in .png, got {self.output}")
        for path in (self.output, self.output.with_suffix(".json")):
            output_file(path)
