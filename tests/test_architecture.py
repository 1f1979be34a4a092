"""The shape of the code base: which way imports point, and that every file stays readable."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import diagd
from diagd.cli import COMMANDS, function_of, options_of
from diagd.extras import EXTRAS

PACKAGE = Path(diagd.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 600
VAGUE_NAMES = {"utils", "util", "common", "base", "core", "helpers", "types", "misc"}

# A module imports from its own folder and from layers below its own; folders of one layer never
# import each other, and families not one another. Nowhere do imports run in a circle.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("web", "gym", "training", "benchmark"),
    ("evaluation",),
    ("pipeline",),
    ("families", "backends", "workers"),
    ("models", "tokenizers", "metrics"),
    ("decoding", "data"),
    ("weight_files", "threads", "client"),
    (
        "checks",
        "console",
        "extras",
        "files",
        "flags",
        "system",
    ),
)


def dotted(path: Path) -> tuple[str, ...]:
    """Name a module inside the package: `data/video.py` is ("data", "video")."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(node: ast.AST) -> list[str]:
    """List what the import statements inside a node name: modules, and names of them."""
    names = []
    for statement in ast.walk(node):
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            assert not statement.level, f"relative import at line {statement.lineno}"
            module = statement.module or ""
            names += [module, *(f"{module}.{alias.name}" for alias in statement.names)]
    return names


@cache
def own_imports(path: Path) -> list[tuple[str, ...]]:
    """List the modules of diagd that a module imports."""
    found = [name.split(".") for name in imports(tree(path))]
    return [tuple(parts[1:]) for parts in found if parts[0] == "diagd"]


def layer_of(module: tuple[str, ...]) -> int:
    layers = [number for number, names in enumerate(LAYERS) if module[0] in names]
    assert layers, f"diagd/{module[0]} is new: give it a place in LAYERS"
    return layers[0]


def ids(path: Path) -> str:
    return "/".join(dotted(path))


# What the table of families imports: a file or a folder each.
FAMILIES = {
    name[1] for name in own_imports(PACKAGE / "families/table.py") if name[0] == "families"
} - {"family"}


def test_imports_point_one_way():
    for path in MODULES:
        folder, *rest = dotted(path)
        is_family = folder == "families" and rest[0] in FAMILIES
        if folder == "__init__":
            continue  # the façade: it imports for type checkers only, see below
        for imported in own_imports(path):
            if imported[0] != folder:
                assert layer_of(imported) > layer_of((folder,)), (ids(path), imported)
            elif is_family and imported[1] != rest[0]:
                assert imported[1] not in FAMILIES, (ids(path), imported)


def test_imports_run_in_no_circle():
    modules = {dotted(path): path for path in MODULES if dotted(path) != ("__init__",)}
    graph = {module: set(own_imports(path)) & set(modules) for module, path in modules.items()}
    TopologicalSorter(graph).prepare()  # or it names the circle


def test_a_module_can_be_read_in_one_sitting_and_its_name_says_what_is_inside():
    lines = {ids(path): path.read_text().count("\n") for path in MODULES}
    assert not {name: count for name, count in lines.items() if count > MAX_LINES}
    assert not [name for name in lines if VAGUE_NAMES & set(name.split("/"))]


def test_no_import_hides_in_a_function_or_behind_type_checking():
    for path in MODULES:
        functions = [n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef | ast.Lambda)]
        hidden = [name for function in functions for name in imports(function)]
        assert not [name for name in hidden if name.split(".")[0] == "diagd"], ids(path)
        if dotted(path) != ("__init__",):
            assert "TYPE_CHECKING" not in path.read_text(), ids(path)


def test_what_has_no_wheel_everywhere_is_not_imported():
    for path in MODULES:
        foreign = {name.split(".")[0] for name in imports(tree(path))}
        banned = {"torchvision", "flash_attn", "decord", "lightning", "hydra", "apex"}
        assert not foreign & banned, ids(path)


def test_text_files_are_read_and_written_in_utf8_on_every_system():
    calls = [(p, node) for p in MODULES for node in ast.walk(tree(p)) if isinstance(node, ast.Call)]
    for path, call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        mode = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else ""
        is_text = name == "write_text" or (name == "read_text" and not call.args)
        is_text |= name == "open" and mode in ("r", "w", "a", "x")
        named = {word.arg for word in call.keywords}
        assert not is_text or "encoding" in named, (ids(path), ast.unparse(call))


PUBLIC = sorted(diagd._MODULES)


# Modules of the standard library that Windows lacks.
UNIX_ONLY = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog", "crypt"}


STAR = """
import sys
sys.modules["gymnasium"] = None
from diagd import *
Raster
import diagd.evaluation.evaluate, diagd.pipeline.generate as _
print("ray" in sys.modules)
"""


def foreign_at_the_top(path: Path) -> set[str]:
    """Return the packages that importing a module imports; functions may import more."""
    statements = [node for node in tree(path).body if not isinstance(node, ast.FunctionDef)]
    return {name.split(".")[0] for statement in statements for name in imports(statement)}


def test_imports_need_no_extra_no_ray_and_nothing_of_unix_alone():
    """A star needs no extra, one process of evaluations no ray, and no module at all only Unix."""
    for path in MODULES:
        assert not foreign_at_the_top(path) & {*UNIX_ONLY, "ray"}, ids(path)
    modules = {dotted(path): path for path in MODULES}
    extras = {module for brought in EXTRAS.values() for module in brought}
    left = [tuple(diagd._MODULES[name].split(".")) for name in diagd.__all__]
    needed = set(left)
    while left:
        module = left.pop()
        assert not foreign_at_the_top(modules[module]) & extras, module
        coming = {*own_imports(modules[module])} & {*modules} - needed
        needed |= coming
        left += coming
    assert len(needed) > 50
    done = subprocess.run([sys.executable, "-c", STAR], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
    assert set(PUBLIC) - set(diagd.__all__) == {"GymEnv", "GymVectorEnv"}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_can_be_imported_and_is_documented(name):
    public = getattr(diagd, name)
    assert public.__module__.startswith("diagd.")
    documentation = inspect.getdoc(public) or ""
    assert len(documentation.split()) >= 5
    assert not documentation.startswith(f"{name}(")  # what a dataclass writes by itself


def test_type_checkers_see_the_public_names_where_they_are():
    module = tree(PACKAGE / "__init__.py")
    block = next(node for node in module.body if isinstance(node, ast.If))
    seen = {
        alias.name: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert sorted(seen) == PUBLIC
    assert diagd.__all__ == sorted(diagd.__all__)
    for name, where in seen.items():
        assert getattr(diagd, name) is getattr(importlib.import_module(where or ""), name)


def test_dir_lists_the_public_names_and_no_others_before_they_are_used():
    script = "import diagd; print(*dir(diagd)); print('Raster' in vars(diagd))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    names = " ".join(sorted([*PUBLIC, "__version__"]))
    assert (done.stdout, done.stderr) == (f"{names}\nFalse\n", "")


CALLED = ("VideoGenerator", "GeneratedVideo", "DiagonalSchedule", "TokenGrid")


@pytest.mark.parametrize("name", PUBLIC)
def test_the_docstring_of_a_public_name_says_every_argument(name):
    """So do those of the methods of the classes that people call."""
    public = getattr(diagd, name)
    parts = [public]
    if name in CALLED:
        methods = [word for word, _ in inspect.getmembers(public, inspect.isroutine)]
        parts += [getattr(public, word) for word in methods if word in vars(public)]
    for part in parts:
        if part.__name__[0] == "_":
            continue
        said = set(re.findall(r"\w+", inspect.getdoc(part) or ""))
        asked = set(inspect.signature(part).parameters) - {"self", "args", "kwargs"}
        assert not asked - said, part


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'diagd' has no attribute 'Diagonals'"):
        _ = diagd.Diagonals


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_a_function_of_its_options(command):
    (options,) = inspect.signature(function_of(command)).parameters.values()
    assert options.annotation is options_of(command)
    assert options.annotation.__dataclass_params__.frozen


def test_help_and_import_are_instant():
    """Neither imports torch, nor anything else that takes a second."""
    script = """
import sys, time, diagd, diagd.cli
print({"torch", "tyro", "numpy"} & set(sys.modules), time.process_time() < 1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set() True\n", "")


CODE = [path for kind in ("cpp", "h", "js", "wgsl") for path in sorted(PACKAGE.rglob(f"*.{kind}"))]


@pytest.mark.parametrize("path", CODE, ids=lambda path: path.name)
def test_code_that_ruff_does_not_read_fits_a_hundred_columns(path):
    """Shaders have no formatter; what clang-format cannot break, a person does."""
    lines = path.read_text(encoding="utf-8").splitlines()
    wrong = {
        number for number, line in enumerate(lines, 1) if len(line) > 100 or line != line.rstrip()
    }
    assert not wrong


def test_every_file_and_folder_has_its_layer():
    names = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir()}
    listed = [name for layer in LAYERS for name in layer]
    assert sorted(listed) == sorted(names - {"__init__", "__pycache__", "assets"})
