"""Run the tutorials of docs/tutorials/, and keep their outputs in them.

python runs/notebooks.py [NAME ...]     # such as diagonal-decoding; all without a name
"""

import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

CONTROL = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]"
)  # of a terminal; progress bars are drawn with U+2501
TUTORIALS = Path(__file__).parents[1] / "docs/tutorials"


def execute(path: Path) -> nbformat.NotebookNode:
    """Run a notebook's cells in an empty folder; return it with the outputs.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    # `!diagd` in a cell is this environment's
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PATH": scripts, "COLUMNS": "80"}
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=1800,
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute(env=os.environ | environment)
    for cell in notebook.cells:
        if "outputs" in cell:  # warnings of libraries name folders of this machine
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
        for output in cell.get("outputs", []):
            if "text" in output:
                lines = CONTROL.sub("", output["text"]).splitlines(keepends=True)
                output["text"] = "".join(line for line in lines if "\u2501" not in line)
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main() -> None:
    names = sys.argv[1:] or sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))
    for name in names:
        path, start = TUTORIALS / f"{name}.ipynb", time.perf_counter()
        notebook = execute(path)
        nbformat.write(notebook, path)
        print(f"{name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
