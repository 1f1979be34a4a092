"""What `diagd report` is told."""

from dataclasses import dataclass
from pathlib import Path

from diagd.flags import OutputFolder


@dataclass(frozen=True)
class ReportOptions:
    """Write report.html and report.md with their pictures from an evaluation's results."""

    results: Path  # folder that diagd evaluate wrote
    out: OutputFolder | None = None  # folder to write; default: the same one
    title: str = "Diagonal decoding: quality and speed"  # of the page
    examples: int = 4  # clips shown as strips and videos, where the evaluation saved videos

    def __post_init__(self) -> None:
        if self.examples < 0:
            raise ValueError(f"examples must be at least 0, got {self.examples}")
