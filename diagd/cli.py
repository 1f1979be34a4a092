"""The command line: a table of commands; parse flags into options, run, report errors.

A command is a function that takes a dataclass of options; the docstring and comments of that class
are its help, and its examples are in the docstring of the function's module. Only the chosen
command is imported, after its options, whose modules do not import PyTorch.
"""

import contextlib
import difflib
import importlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from diagd.checks import check_at_least, shorten
from diagd.extras import require


class Command(NamedTuple):
    """A row of the table."""

    summary: str
    # `module:function` inside diagd, which takes options and returns a JSON document; the options
    # are a dataclass of the module `options` beside it, such as `GenerateOptions`
    run: str
    # modules of an extra that the command always needs; it checks the needs of single flags itself
    needs: tuple[str, ...] = ()
    owns_out: bool = False  # locks its folder `--out` against other processes


TRAIN = ("accelerate", "matplotlib")
TOUR = """\
diagd makes autoregressive video models fast: each step decodes a diagonal of
tokens. A world model is bundled, so these commands work at once:

  diagd generate   continue a clip of the bundled world, and write dream.mp4
  diagd play       walk through that world in the browser
  diagd doctor     measure what this machine can do

`record`, `tokenize` and `train` make a world of your own game; `tune` finds the
fastest strategy for a model. All commands: diagd --help"""
COMMANDS = {
    "generate": Command("generate video from a prompt (no flags needed)", "pipeline.generate:main"),
    "plan": Command("count the steps and lanes of a schedule", "pipeline.plan:main"),
    "play": Command(
        "walk through a generated world in the browser",
        "web.play.server:play",
        needs=("fastapi", "uvicorn", "websockets"),
    ),
    "serve": Command(
        "serve a model to programs: images by OpenAI's API, videos",
        "web.serve.server:serve",
        needs=("fastapi", "uvicorn", "prometheus_client", "python_multipart"),
    ),
    "export-web": Command(
        "export a world to a web page that needs no server",
        "web.play.export:export",
        needs=("fastapi",),
        owns_out=True,
    ),
    "bench": Command("time raster and diagonal decoding side by side", "benchmark.bench:main"),
    "convert": Command("convert a released checkpoint to our format", "pipeline.convert:main"),
    "attention": Command(
        "measure where a model attends",
        "evaluation.attention:report_attention",
        needs=("matplotlib",),
    ),
    "evaluate": Command(
        "compare models and decoding strategies on recorded clips",
        "evaluation.evaluate:main",
        needs=("torchmetrics",),
    ),
    "report": Command(
        "turn an evaluation into tables, plots and a page",
        "evaluation.report:main",
        needs=("matplotlib",),
    ),
    "record": Command(
        "record gameplay with actions, from ViZDoom or any Gymnasium game",
        "data.recorders.recording:record",
        owns_out=True,
    ),
    "check": Command("validate recorded clips before training", "training.check:main"),
    "tokenize": Command(
        "tokenize recorded clips for training",
        "training.corpus:tokenize",
        owns_out=True,
    ),
    "train": Command(
        "train a playable world model within a time budget",
        "training.train:pretrain",
        needs=TRAIN,
        owns_out=True,
    ),
    "finetune": Command(
        "finetune a model for diagonal decoding",
        "training.train:finetune",
        needs=TRAIN,
        owns_out=True,
    ),
    "tune": Command(
        "find the fastest strategy that keeps a model's quality",
        "training.tuning:main",
        needs=("matplotlib",),
    ),
    "study": Command(
        "run a blind study: which of two videos is better?",
        "web.study.server:main",
        needs=("fastapi", "uvicorn"),
    ),
    "doctor": Command("report this machine's hardware, kernels and speed", "benchmark.doctor:main"),
}


def main() -> None:
    """Run `diagd COMMAND [flags]`."""
    name, *flags = sys.argv[1:] or [""]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters outside its encoding become escapes
            stream.reconfigure(errors="backslashreplace")
    if "--json" in flags:
        sys.excepthook = _unexpected
    try:
        if not sys.argv[1:]:
            print(TOUR)
        elif name in ("-h", "--help"):
            print(_usage())
        elif name == "--version":
            print(f"diagd {importlib.import_module('diagd').__version__}")
        elif name == "--completion":
            parsing = importlib.import_module("diagd.flags")
            parsing.print_completion({name: options_of(name) for name in COMMANDS}, *flags[:1])
        else:
            _run(name, flags)
        print(end="", flush=True)
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except (ValueError, OSError) as error:
        _fail(str(error))
    except RuntimeError as error:
        said = str(error).split(". Including")[0].split(". Of the")[0].rstrip(".")
        # torch's own error classes, without importing torch
        if type(error).__name__ == "AcceleratorError":
            _fail(
                f"{said.splitlines()[0]}: the GPU's context is lost, and this process with it; "
                "if it happens again, try --backend cuda-graph, and please report it"
            )
        if type(error).__name__ != "OutOfMemoryError" and "can't allocate memory" not in said:
            raise
        said = said.rpartition("err == 0. ")[2]
        _fail(
            f"{said}: use fewer frames, a smaller batch, or --dtype bfloat16 or int8 if available"
        )
    except KeyboardInterrupt:
        sys.exit(130)


def _run(name: str, flags: list[str]) -> None:
    """Run a command; with `--json` print its result, and everything else on stderr."""
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of: {', '.join(COMMANDS)}"
        raise ValueError(f"unknown command {name!r}, {hint}")
    needs = COMMANDS[name].needs
    if name == "record":
        is_gym = any(flag.split("=")[0] == "--gym" for flag in flags)
        needs = ("gymnasium",) if is_gym else ("vizdoom",)
    require(f"diagd {name}", *needs)
    parsing = importlib.import_module("diagd.flags")  # slow; keep `diagd --help` instant
    with contextlib.ExitStack() as held:
        if "--json" in flags:
            held.enter_context(_stdout_to_stderr())
        options, shared = parsing.parse(options_of(name), name, flags, _examples(name))
        check_at_least(shared, threads=1)
        if shared.threads:  # for libraries imported later, and torch if it is imported
            for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
                os.environ[variable] = str(shared.threads)
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(shared.threads)
        run = function_of(name)
        if COMMANDS[name].owns_out:
            held.enter_context(importlib.import_module("diagd.system").only_writer(options.out))
        result = run(options)
    if shared.json and os.environ.get("RANK", "0") == "0":  # only the first process of a launch
        # JSON has no NaN, which Python would write
        strict = json.loads(json.dumps(result), parse_constant=lambda _: None)
        print(json.dumps(strict))
    if result.get("failed"):  # part of the work failed; exit code 2 means that nothing was done
        sys.exit(1)


def options_of(name: str) -> type:
    """Import the dataclass of a command's options, without PyTorch."""
    package = COMMANDS[name].run.rpartition(".")[0]
    options = importlib.import_module(f"diagd.{package}.options")
    return getattr(options, f"{name.title().replace('-', '')}Options")


def function_of(name: str) -> Callable[[Any], dict[str, Any]]:
    module, function = _place_of(name)
    return getattr(importlib.import_module(f"diagd.{module}"), function)


def _place_of(name: str) -> list[str]:
    return COMMANDS[name].run.split(":")


def _examples(name: str) -> list[str]:
    """Read a command's examples from its module's docstring, without importing the module."""
    path = Path(__file__).parent.joinpath(*_place_of(name)[0].split(".")).with_suffix(".py")
    doc = path.read_text(encoding="utf-8").split('"""')[1]
    return re.findall(rf"^ *(diagd {name}\b.*)", doc, re.MULTILINE)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what Python, other processes and libraries print on stdout to stderr."""
    print(end="", flush=True)
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    table = "\n".join(f"  {name:<{width}}  {row.summary}" for name, row in COMMANDS.items())
    return f"""diagd: fast decoding of autoregressive video models

usage: diagd COMMAND [flags]      diagd COMMAND --help      diagd --version

{table}

Every command accepts --json (print one JSON document on stdout, {{"error": ...}}
on failure) and --threads N.
diagd --completion bash (or zsh) prints a script that completes flags with Tab."""


def _fail(message: str) -> NoReturn:
    line = _line_of(message)
    if "--json" in sys.argv:
        print(json.dumps({"error": line}), flush=True)
    print("error:", line, file=sys.stderr)
    sys.exit(2)


def _unexpected(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Report a bug in diagd: traceback on stderr, and still one JSON document on stdout."""
    sys.__excepthook__(kind, error, traceback)
    print(json.dumps({"error": _line_of(f"{kind.__name__}: {error}")}), flush=True)


def _line_of(message: str) -> str:
    return " ".join(shorten(message).split())
