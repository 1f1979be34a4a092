"""The command line: a table of commands; parse flags into options, run, report errors.

A command is a module of `diagd.commands`: a `main` that takes a dataclass of options, whose
docstring and comments are the help. Only the module of the command chosen is imported.
"""

import contextlib
import importlib
import inspect
import io
import json
import re
import sys
from typing import Any, NoReturn

COMMANDS = {
    "generate": "dream a video from a prompt (no flags needed)",
    "plan": "steps and lanes of a schedule",
    "play": "walk through a generated world in the browser",
    "bench": "time raster and diagonal decoding side by side",
    "convert": "turn a Cosmos, WHAM or MineWorld checkpoint into our folder",
    "attention": "where the model looks when it writes",
    "evaluate": "compare models and decoding strategies on recorded clips",
    "report": "turn an evaluation into tables, plots and a page",
    "record": "record gameplay with actions, from ViZDoom or any Gymnasium environment",
    "check": "look through recorded clips before training on them",
    "tokenize": "turn recorded clips into all that training needs",
    "train": "train a world to play, sized to the time there is",
    "finetune": "train a model under the visibility of a diagonal schedule",
    "tune": "find the fastest schedule that a model can afford",
    "study": "ask people which of two videos is better, blind",
}


def main() -> None:
    """Run `diagd COMMAND [flags]`."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        sys.exit(0 if arguments else 2)
    name, *flags = arguments
    if name not in COMMANDS:
        _fail(f"unknown command {name!r}, expected one of: {', '.join(COMMANDS)}")
    as_json = "--json" in flags
    try:
        result = _run(name, [flag for flag in flags if flag != "--json"])
    except (ValueError, OSError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    if as_json:
        print(json.dumps(result))


def _run(name: str, flags: list[str]) -> dict[str, Any]:
    try:
        module = importlib.import_module(f"diagd.commands.{name}")
    except ModuleNotFoundError as error:
        extra = {"accelerate": "train", "matplotlib": "train", "torchmetrics": "metrics"}
        web = "fastapi", "uvicorn", "starlette", "pydantic", "websockets", "PIL"
        extra |= dict.fromkeys(web, "web")
        if error.name not in extra:
            raise
        raise ValueError(
            f"{name} needs {error.name}: pip install 'diagd[{extra[error.name]}]'"
        ) from None
    (options,) = inspect.signature(module.main).parameters.values()
    return module.main(parse(options.annotation, name, flags))


def parse(options: type, name: str, flags: list[str]) -> Any:
    """Turn flags into an options record; its errors are one line and exit code 2."""
    import tyro  # slow to import, and `diagd --help` is instant

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(options, prog=f"diagd {name}", args=flags)
    except SystemExit as stop:
        if stop.code:
            _fail(re.sub(r"[─│╭╮╰╯•]+", " ", complaint.getvalue()))
        raise


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "diagd: fast decoding of autoregressive video models",
            "",
            "usage: diagd COMMAND [flags]      diagd COMMAND --help      any command takes --json",
            "",
            *rows,
        ]
    )


def _fail(message: str) -> NoReturn:
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
