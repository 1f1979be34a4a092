"""Keep the tables of an evaluation, and of its figures those that carry a claim.

    diagd report --results work/study --out work/study/report
    python runs/keep_report.py work/study/report docs/results/study frontier

Copies report.md without the sections of figures and videos that are not named.
"""

import re
import shutil
from pathlib import Path
from typing import Annotated

import tyro

from diagd.files import write_text

SECTION = re.compile(r"^(?=## )", flags=re.MULTILINE)
LINK = re.compile(r"\]\((?:figures|videos)/([\w.-]+)\)")


def keep(
    report: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    figures: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
) -> None:
    """Copy a report's tables and the named figures.

    Args:
        report: folder that `diagd report` wrote.
        out: folder for report.md and the figures.
        figures: names of files in report/figures, without `.png`.
    """
    kept = {f"{name}.png" for name in figures}
    sections = SECTION.split((report / "report.md").read_text(encoding="utf-8"))
    text = "".join(one for one in sections if set(LINK.findall(one)) <= kept)
    write_text(out / "report.md", LINK.sub(r"](\1)", text))
    for name in kept:
        shutil.copy(report / "figures" / name, out / name)


if __name__ == "__main__":
    tyro.cli(keep)
