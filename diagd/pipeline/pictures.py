"""What `diagd generate` does with pictures of models of two stages, beside generating them."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from diagd.console import make_console, print_records
from diagd.decoding.strategies.table import Strategy
from diagd.pipeline.options import GenerateOptions

COLUMNS = {
    "": "{strategy}",
    "tokens": "{num_tokens}",
    "steps": "{num_steps}",
    "seconds": "{seconds:.2f}",
    "tokens/s": "{tokens_per_second:.0f}",
}


def refuse_others(options: GenerateOptions, flags: set[str], model: str) -> None:
    """Raise ValueError for a flag that is set, but not among those of a model."""
    for field in fields(options):
        if field.name not in flags and getattr(options, field.name) != field.default:
            raise ValueError(f"{field.name} is for other models than {model}: leave it out")


def text_of(options: GenerateOptions, model: str) -> str:
    """Return the text that a picture is made of; ValueError if none is given."""
    if options.text is None:
        raise ValueError(f'{model} makes pictures of texts: give --text, such as "a house"')
    check_text(options.text, model)
    return options.text


def check_text(text: str, model: str) -> None:
    if not text.strip():
        raise ValueError(f"{model} makes pictures of texts: expected a text, got an empty one")


def numbered(path: Path, count: int, suffix: str | None = None) -> list[Path]:
    """Return a path for each picture: the one given, or NAME-0, NAME-1, ... of several."""
    names = [f"{path.stem}-{i}" for i in range(count)] if count > 1 else [path.stem]
    return [path.with_stem(name).with_suffix(suffix or path.suffix) for name in names]


def report_pictures(
    options: GenerateOptions,
    strategy: Strategy,
    stats: dict[str, Any],
    how: str,
    paths: Sequence[Path],
    why_tokens: str | None,
) -> dict[str, Any]:
    """Print what pictures took; return the command's report.

    Args:
        how: type of the weights, and the backend if there is a choice.
        why_tokens: the reason if only tokens are written.
    """
    console, run = make_console(), {"strategy": strategy.name, **stats}
    if why_tokens is not None:
        console.print(f"note: {why_tokens}")
    print_records(console, f"{options.model}, {how}", COLUMNS, [run])
    written = list(map(str, paths))
    console.print(f"wrote {' and '.join(written)}")
    pictures, tokens = (None, written) if why_tokens is not None else (written, None)
    return {"output": written[0], "pictures": pictures, "tokens": tokens, "runs": [run]}
