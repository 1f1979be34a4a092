"""The shape of the code base: which way imports point, and that every file stays readable."""

import ast
import importlib
import inspect
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import diagd
from diagd.cli import COMMANDS

PACKAGE = Path(diagd.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 250
VAGUE_NAMES = {"utils", "util", "common", "base", "core", "helpers", "types", "misc"}

# A module imports from layers below its own only; members of one layer never import each other.
LAYERS = (
    ("__main__",),
    ("cli",),
    (
        *("attention_maps", "bench", "convert", "dream", "evaluate", "finetuning", "hf_generate"),
        *("plan_report", "report", "training", "tune", "web"),
    ),
    ("attention_figure", "dream_inputs", "dream_report", "frame_attention"),
    ("reporting", "training_loop"),
    ("evaluation",),
    ("flags", "notes", "plots", "provenance", "recipe"),
    ("benchmark", "pipeline", "teacher_forced"),
    ("backends", "pretrained", "prompts"),
    ("data", "decoding", "metrics", "models"),
    ("kernels", "unpickling"),
)
# Inside a package a file imports files listed before it only.
ORDER = {
    "decoding": (
        *("schedule", "layout", "visibility", "plan", "teacher_forcing", "sampling", "inputs"),
        *("runner", "engine", "costs", "frontier", "rules", "exact", "zipar", "generate"),
        "ways",
    ),
    "models": (
        *("config", "presets", "cache", "rotary", "layers", "attention", "stack", "transformer"),
        *("torch_files", "weight_files", "naming", "cosmos", "wham", "mineworld", "released"),
        "checkpoints",
        *("positional_start", "inference", "native_weights", "native", "llama"),
        *("slot_cache", "huggingface", "guidance", "attention_capture"),
    ),
    "data": (
        *(
            "workers",
            "video",
            "actions",
            "minecraft_actions",
            "wham_actions",
            "wham_clips",
            "clips",
        ),
        *("tokenizer_files", "tokenizer_inputs", "vq_models", "tokenizers", "fsq"),
        *("cosmos_tokenizer", "vit_vqgan", "wham_tokenizer", "tokenizer_loading", "tokenizer_init"),
        *("text", "token_shards"),
        *("sequences", "tokenizer_trainer", "tokenizer_training", "doom"),
    ),
    "metrics": ("weights", "frechet", "quality", "latents", "lpips", "fvd"),
    "evaluation": (
        *("results", "statistics", "captions", "protocol", "clips", "measure", "workers", "table"),
        "likelihood",
    ),
    "reporting": ("tables", "pictures", "plots", "page", "examples"),
    "kernels": ("compiler",),
    "benchmark": ("attention_variants", "ceilings", "steps", "rows"),
    "web": (
        *("clip_decoder", "guard", "keys", "pictures", "session", "saved", "scenes", "uploads"),
        *("messages", "player", "hall", "server", "play"),
        *("study_pairs", "study_results", "study_trials", "study_store", "study_guard"),
        *("study_page", "study_chart", "study_server", "study_making", "study"),
    ),
}


def dotted(path: Path) -> tuple[str, ...]:
    """Name a module inside the package: `data/video.py` is ("data", "video")."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(node: ast.AST) -> list[str]:
    """List the modules that the import statements inside a node name."""
    names = []
    for statement in ast.walk(node):
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            assert not statement.level, f"relative import at line {statement.lineno}"
            names.append(statement.module or "")
    return names


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


every_module = pytest.mark.parametrize("path", MODULES, ids=ids)


@every_module
def test_imports_point_one_way(path):
    module = dotted(path)
    if module == ("__init__",):
        return  # the façade: it imports for type checkers only, see below
    for imported in own_imports(path):
        if len(module) > 1 and imported[0] == module[0]:
            order = ORDER[module[0]]
            assert module[1] in order, f"{ids(path)} is new: give it a place in ORDER"
            assert order.index(imported[1]) < order.index(module[1]), imported
        else:
            assert layer_of(imported) > layer_of(module), imported


@pytest.mark.parametrize("package", ORDER)
def test_every_file_of_a_package_has_its_place(package):
    files = {path.stem for path in (PACKAGE / package).glob("*.py")} - {"__init__"}
    assert files == set(ORDER[package])


@every_module
def test_a_module_can_be_read_in_one_sitting(path):
    lines = path.read_text().count("\n")
    assert lines <= MAX_LINES, f"{ids(path)} has {lines} lines: split it"


@every_module
def test_file_names_say_what_is_inside(path):
    assert not VAGUE_NAMES & set(dotted(path))


@every_module
def test_no_import_hides_in_a_function_or_behind_type_checking(path):
    module = tree(path)
    functions = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    hidden = [name for function in functions for name in imports(function)]
    assert not [name for name in hidden if name.split(".")[0] == "diagd"]
    if dotted(path) != ("__init__",):
        assert "TYPE_CHECKING" not in path.read_text()


@every_module
def test_what_has_no_wheel_everywhere_is_not_imported(path):
    foreign = {name.split(".")[0] for name in imports(tree(path))}
    assert not foreign & {"torchvision", "flash_attn", "decord", "lightning", "hydra", "apex"}


@every_module
def test_modules_classes_and_functions_say_what_they_are_for(path):
    module = tree(path)
    if not module.body:
        return
    assert ast.get_docstring(module), "module docstring"
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


@pytest.mark.parametrize("name", diagd.__all__)
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
    assert sorted(seen) == diagd.__all__ == sorted(diagd.__all__)
    for name, where in seen.items():
        assert getattr(diagd, name) is getattr(importlib.import_module(where or ""), name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'diagd' has no attribute 'Diagonal'"):
        _ = diagd.Diagonal


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_options_beside_a_main_that_takes_them(command):
    where, summary = COMMANDS[command]
    module_name, _, class_name = where.partition(":")
    module = importlib.import_module(module_name)
    options = getattr(module, class_name)
    assert summary
    assert options.__dataclass_params__.frozen
    assert [p.annotation for p in inspect.signature(module.main).parameters.values()] == [options]


def test_help_and_import_are_instant():
    """Neither imports torch, nor anything else that takes a second."""
    script = "import sys, diagd, diagd.cli; print({'torch', 'tyro', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_layers_name_what_exists():
    names = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir()}
    listed = [name for layer in LAYERS for name in layer]
    assert len(set(listed)) == len(listed)
    assert set(listed) <= names
    assert all(upper != lower for upper, lower in pairwise(LAYERS))
