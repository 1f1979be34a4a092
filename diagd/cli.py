"""The command line: a table of commands; parse flags into options, run, report errors.

A command is a module of `diagd.commands`: a `main` that takes a dataclass of options, whose
docstring and comments are the help, and so are the examples in the module's docstring. `OPTIONS`
says where that dataclass is: in a module that imports nothing that computes (no PyTorch), for it is
imported, and flags are checked, before the command is. Only the command chosen is imported.
"""

import ast
import contextlib
import difflib
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from diagd.extras import require

COMMANDS = {
    "generate": "dream a video from a prompt (no flags needed)",
    "plan": "steps and lanes of a schedule",
    "play": "walk through a generated world in the browser",
    "bench": "time raster and diagonal decoding side by side",
    "convert": "turn a released checkpoint into our folder",
    "attention": "where the model looks when it writes",
    "evaluate": "compare models and decoding strategies on recorded clips",
    "report": "turn an evaluation into tables, plots and a page",
    "record": "record gameplay with actions, from ViZDoom or any Gymnasium game",
    "check": "look through recorded clips before training on them",
    "tokenize": "turn recorded clips into all that training needs",
    "train": "train a world to play, sized to the time there is",
    "finetune": "train a model under the visibility of a diagonal schedule",
    "tune": "find the fastest schedule that a model can afford",
    "study": "ask people which of two videos is better, blind",
    "doctor": "what this machine is, what will run on it, and how fast",
}
# Modules of diagd in which the options of the commands are, such as `GenerateOptions`.
OPTIONS = {
    "generate": "pipeline.options",
    "plan": "commands.plan",
    "play": "web.play.options",
    "bench": "benchmark.options",
    "convert": "pipeline.options",
    "attention": "attention.options",
    "evaluate": "evaluation.options",
    "report": "evaluation.options",
    "record": "data.recorders.options",
    "check": "training.options",
    "tokenize": "training.options",
    "train": "training.options",
    "finetune": "training.options",
    "tune": "training.options",
    "study": "web.study.options",
    "doctor": "benchmark.options",
}
# Modules of extras that a command cannot start without, so that they are missed at once; what only
# one of its flags needs, a command tells by itself.
NEEDS = {
    "play": ("fastapi", "uvicorn", "websockets", "PIL"),
    "study": ("fastapi", "uvicorn"),
    "attention": ("matplotlib",),
    "evaluate": ("torchmetrics",),
    "report": ("matplotlib",),
    "train": ("accelerate", "matplotlib"),
    "finetune": ("accelerate", "matplotlib"),
    "tune": ("accelerate", "matplotlib"),
}


def main() -> None:
    """Run `diagd COMMAND [flags]`."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        print(f"diagd {importlib.import_module('diagd').__version__}")
        return
    name, *flags = arguments
    try:
        _run(name, flags)
    except (ValueError, OSError) as error:
        _fail(str(error))
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which need not be imported
            raise
        said = str(error).split(". Including")[0].split(". Of the")[0].rstrip(".")
        _fail(
            f"{said}: fewer frames or a smaller batch take less; where there is --dtype, so do "
            "bfloat16 and int8"
        )
    except KeyboardInterrupt:
        sys.exit(130)


def _run(name: str, flags: list[str]) -> None:
    """Run a command; with `--json` print its result, and whatever it says goes to stderr."""
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of: {', '.join(COMMANDS)}"
        raise ValueError(f"unknown command {name!r}, {hint}")
    parsing = importlib.import_module("diagd.flags")  # slow, and `diagd --help` is instant
    shared = parsing.read_shared(flags)
    with _stdout_to_stderr() if shared.json else contextlib.nullcontext():
        require(f"diagd {name}", *_needs(name, flags))
        if shared.threads:
            _limit_threads(shared.threads)
        parsed = parsing.parse(options_of(name), name, flags, _examples(name))
        module = importlib.import_module(f"diagd.commands.{name}")
        result: dict[str, Any] = module.main(parsed)
    if shared.json and os.environ.get("RANK", "0") == "0":  # of processes of one launch, one
        # JSON knows no NaN, which Python writes nonetheless
        strict = json.loads(json.dumps(result), parse_constant=lambda _: None)
        print(json.dumps(strict))
    if result.get("failed"):  # a part of the work; 2 says that nothing could be done
        sys.exit(1)


def options_of(name: str) -> type:
    """Return the dataclass of options of a command; what computes is not imported."""
    module = importlib.import_module(f"diagd.{OPTIONS[name]}")
    return getattr(module, f"{name.title()}Options")


def _examples(name: str) -> list[str]:
    """Read the examples of a command in the docstring of its module, which is not imported."""
    source = (Path(__file__).parent / "commands" / f"{name}.py").read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(source)) or ""
    return re.findall(r"^ *(diagd .*)", doc, re.MULTILINE)


def _needs(name: str, flags: list[str]) -> tuple[str, ...]:
    if name == "record":
        is_gym = any(flag.split("=")[0] == "--gym" for flag in flags)
        return ("gymnasium",) if is_gym else ("vizdoom",)
    return NEEDS.get(name, ())


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what Python, other processes and libraries print on stdout to stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _limit_threads(count: int) -> None:
    """Bound the threads of what computes: for libraries yet to be imported, and torch if it is."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(count)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "diagd: fast decoding of autoregressive video models",
            "",
            "usage: diagd COMMAND [flags]      diagd COMMAND --help      diagd --version",
            "",
            *rows,
            "",
            "Any command takes --json (stdout is one JSON document) and --threads N.",
        ]
    )


def _fail(message: str) -> NoReturn:
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
