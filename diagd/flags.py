"""Turn flags into dataclasses of options with tyro, and its errors into one line."""

import contextlib
import copy
import dataclasses
import difflib
import functools
import inspect
import io
import re
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

RowLag = Annotated[int | None, tyro.conf.arg(aliases=["-k"])]
RowLags = Annotated[tuple[int, ...], tyro.conf.arg(aliases=["-k"])]
FrameLag = Annotated[int | None, tyro.conf.arg(aliases=["-d"])]


def output_file(path: Path) -> Path:
    """Return a path, or raise OSError (which tyro does not box) if it cannot be a file."""
    if path.is_dir():
        raise OSError(f"{path} is a folder, expected a file name")
    _check_writable(path)
    if not path.parent.is_dir():
        raise OSError(f"output folder does not exist: {path.parent}")
    return path


def output_folder(path: Path) -> Path:
    """Return a path, or raise OSError if it cannot be a folder."""
    _check_writable(path)
    if path.is_file():
        raise OSError(f"{path} is a file, expected a folder")
    return path


def _check_writable(path: Path) -> None:
    folder = path
    while not folder.exists():
        folder = folder.parent
    if folder != path and not folder.is_dir():
        raise OSError(f"{path} cannot be written: {folder} is a file")
    try:
        with tempfile.TemporaryFile(dir=folder if folder.is_dir() else folder.parent):
            pass
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror})") from None


def _device(name: str) -> str:
    """Return the name of a device; whether the machine has it, PyTorch checks later."""
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", name):
        raise ValueError(f"device must look like cpu, cuda or cuda:0, got {name!r}")
    return name


def _one_word(
    metavar: str, read: Callable[[str], Any], *kinds: type
) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: isinstance(value, kinds),
        str_from_instance=lambda value: [str(value)],
    )


# Output paths: rejected at once, with the flag's name, if they cannot be written.
OutputFolder = Annotated[Path, _one_word("PATH", lambda word: output_folder(Path(word)), Path)]
OutputFile = Annotated[Path, _one_word("PATH", lambda word: output_file(Path(word)), Path)]
Device = Annotated[str, _one_word("STR", _device, str)]

Options = TypeVar("Options")
SHELLS = ("bash", "zsh")
_CONFIG = (tyro.conf.DisallowNone,)  # None means that a flag was not given
_REPHRASED = {  # pattern of tyro's words -> ours
    r"^Error parsing ": "",
    r"(?<=^Missing) from [^:]*": "",
    r"no type matching .* Got errors: - .*?: ": "",  # of the X of `X | None`
    r"invalid literal for int\(\) with base 10:": "expected a whole number, got",
    r"Exceeds the limit \((\d+) digits\).*": r"expected a whole number of at most \1 digits",
    r"could not convert string to float:": "expected a number, got",
}


@dataclasses.dataclass(frozen=True)
class Shared:
    json: tyro.conf.FlagCreatePairsOff[bool] = False  # print only one JSON document on stdout
    threads: int | None = None  # number of CPU threads; default: the number of free cores


def parse(
    options: type[Options], name: str, flags: Sequence[str], examples: Sequence[str] = ()
) -> tuple[Options, Shared]:
    """Turn flags into a command's options and the shared ones, or raise ValueError.

    `--help` prints the flags and examples, and exits.
    """
    record = _with_shared(options)
    _refuse_unknown(flags, get_type_hints(record, include_extras=True), name)
    paragraphs = (inspect.getdoc(options) or "").split("\n\n")
    lines = [line for text in paragraphs for line in textwrap.wrap(text, 78)]
    if examples:
        lines += ["", "Examples:", *(f"  {example}" for example in examples)]
    # tyro joins lines that begin with a letter, and doubles empty ones
    description = textwrap.indent("\n".join(lines), " ")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed: Any = tyro.cli(
                record, prog=f"diagd {name}", description=description, args=flags, config=_CONFIG
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        # drop its title, its box (absent unless the output is UTF-8), and everything below a rule
        said = complaint.getvalue()
        lines = said.splitlines()[1 if said.startswith("╭") else 2 :]
        text = re.split("───|-{20}", " ".join(line.strip("│╰ ") for line in lines))[0]
        for pattern, words in _REPHRASED.items():
            text = re.sub(pattern, words, text)
        raise ValueError(text) from None
    values = {field: getattr(parsed, field) for field in _fields(record)}
    own = {field: values.pop(field) for field in _fields(options)}
    return options(**own), Shared(**values)


def print_completion(commands: Mapping[str, type], shell: str = "") -> None:
    """Print a shell's completion script for `diagd` and the options of each of its commands."""
    if shell not in SHELLS:
        raise ValueError(f"--completion must be one of {', '.join(SHELLS)}, got {shell!r}")
    records = (
        Annotated[_with_shared(options), tyro.conf.subcommand(name)]
        for name, options in commands.items()
    )
    anyone: Any = Union[tuple(records)]  # noqa: UP007
    with contextlib.suppress(SystemExit):  # tyro exits
        tyro.cli(anyone, prog="diagd", args=["--tyro-print-completion", shell], config=_CONFIG)


def _refuse_unknown(flags: Sequence[str], hints: dict[str, Any], name: str) -> None:
    known = ["-h", "--help"]
    for field, hint in hints.items():
        spelled = field.replace("_", "-")
        notes = getattr(hint, "__metadata__", ())
        known.append(f"--{spelled}")
        if bool in get_args(hint) and tyro.conf.FlagCreatePairsOff not in notes:
            known.append(f"--no-{spelled}")
        for note in notes:
            known += getattr(note, "aliases", None) or ()
    for flag in flags:
        given = flag.partition("=")[0].replace("_", "-")
        if given.startswith("--") and given not in known:
            longer = [name for name in known if name.startswith(given)]
            near = longer or difflib.get_close_matches(given, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"see diagd {name} --help"
            raise ValueError(f"unknown flag {given}: {hint}")


def _fields(record: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields that are flags: a record's own, then those of the groups it inherits."""
    found = {field.name: field for field in dataclasses.fields(record) if field.init}
    names = [name for kind in record.__mro__ for name in inspect.get_annotations(kind)]
    return {name: found[name] for name in dict.fromkeys(names) if name in found}


@functools.cache
def _with_shared(options: type) -> type:
    """Add the shared flags to the options, skip their checks, and hide empty defaults."""
    fields = _fields(Shared) | _fields(options)  # a command's own flag replaces a shared one
    hints = get_type_hints(Shared, include_extras=True)
    hints |= get_type_hints(options, include_extras=True)
    shown = tyro.conf.arg(
        help_behavior_hint=lambda label: "" if label == "None" else f"(default: {label})"
    )
    record = dataclasses.make_dataclass(
        options.__name__,
        [(name, Annotated[hints[name], shown], copy.copy(fields[name])) for name in fields],
        bases=(Shared, options),
        namespace={
            "__doc__": options.__doc__,
            "__module__": options.__module__,
            "__post_init__": lambda self: None,
        },
        frozen=True,
    )
    # the help lists flags in this order, not in that of inheritance
    order = dict.fromkeys([*_fields(options), *fields])
    record.__dataclass_fields__ = {name: record.__dataclass_fields__[name] for name in order}
    return record
