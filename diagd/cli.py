"""The command line: a table of commands; parse flags into options, run, report errors.

A command is a dataclass of options (its docstring and comments are the help) beside a `main` that
takes it. Only the module of the command chosen is imported.
"""

import contextlib
import importlib
import io
import json
import re
import sys
from typing import Any, NoReturn

COMMANDS = {
    "generate": ("diagd.dream:GenerateOptions", "dream a video from a prompt (no flags needed)"),
    "plan": ("diagd.plan_report:PlanOptions", "steps and lanes of a schedule"),
    "play": ("diagd.web.play:PlayOptions", "walk through a generated world in the browser"),
    "bench": ("diagd.bench:BenchOptions", "time raster and diagonal decoding side by side"),
    "convert": (
        "diagd.convert:ConvertOptions",
        "turn a Cosmos, WHAM or MineWorld checkpoint into our folder",
    ),
    "attention": ("diagd.attention_maps:AttentionOptions", "where the model looks when it writes"),
    "evaluate": ("diagd.evaluate:EvaluateOptions", "compare schedules on recorded clips"),
    "report": ("diagd.report:ReportOptions", "turn an evaluation into tables, plots and a page"),
    "record": ("diagd.data.doom:RecordOptions", "record gameplay with actions from ViZDoom"),
    "tokenize": (
        "diagd.data.tokenizer_training:TokenizeOptions",
        "train a tokenizer, or turn clips into token shards",
    ),
    "train": ("diagd.training:TrainOptions", "train a world model on token shards"),
    "finetune": (
        "diagd.finetuning:FinetuneOptions",
        "train a model under the visibility of a diagonal schedule",
    ),
    "tune": ("diagd.tune:TuneOptions", "find the fastest schedule that a model can afford"),
    "study": ("diagd.web.study:StudyOptions", "ask people which of two videos is better, blind"),
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
    module_name, _, class_name = COMMANDS[name][0].partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        extra = {"accelerate": "train", "matplotlib": "train", "torchmetrics": "metrics"}
        web = "fastapi", "uvicorn", "starlette", "pydantic", "websockets", "PIL"
        extra |= dict.fromkeys(web, "web")
        if error.name not in extra:
            raise
        raise ValueError(
            f"{name} needs {error.name}: pip install 'diagd[{extra[error.name]}]'"
        ) from None
    return module.main(parse(getattr(module, class_name), name, flags))


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
    rows = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
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
