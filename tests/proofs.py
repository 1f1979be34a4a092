"""Which test proves what of which model of images: the table in docs/models.md.

A test says it with `@pytest.mark.proves("Janus, Chameleon", "guidance", "diagonals")`. After a
change, write the table anew with

    python -m tests.proofs
"""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "models.md"
BEGIN, END = "<!-- written by tests/proofs.py -->\n", "<!-- end -->\n"
MODELS = (
    "LlamaGen",
    "LlamaGen-T2I",
    "Emu3",
    "Emu3.5",
    "Janus",
    "Chameleon",
    "Lumina-mGPT",
    "MammothModa2",
    "IRIS",
    "WorldVLA",
    "RynnVLA-002",
)
FEATURES = {
    "logits": "own decoder: logits within 1e-4",
    "native": "native kernels",
    "int8": "int8",
    "text": "`--text`",
    "picture": "`--image` with it",
    "pixels": "pixels",
    "guidance": "guidance",
    "raster": "raster = its own loop",
    "diagonals": "diagonals = oracle",
    "evaluate": "`evaluate`",
    "released": "released weights run",
}


def proofs() -> Iterator[tuple[str, str, Path, str]]:
    """Yield the model, the feature, the file and the test of every mark."""
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "mark.proves(" not in source:
            continue
        for function in ast.walk(ast.parse(source)):
            if not isinstance(function, ast.FunctionDef):
                continue
            for mark in function.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.proves":
                    models, *features = (ast.literal_eval(given) for given in mark.args)
                    for model in models.split(", "):
                        yield from ((model, one, path, function.name) for one in features)


def table() -> str:
    """Format the table, a row for each model, whose name links to a file of its tests."""
    found = {(model, feature): path for model, feature, path, _ in proofs()}
    lines = [["", *FEATURES.values()], ["---"] * (len(FEATURES) + 1)]
    for model in MODELS:
        file = found[model, "logits"].relative_to(TESTS.parent).as_posix()
        cells = ["yes" if (model, feature) in found else "no" for feature in FEATURES]
        lines.append([f"[{model}](../{file})", *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(page: str) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
