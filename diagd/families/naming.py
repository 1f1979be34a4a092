"""Rename the tensors of a released checkpoint: one table a family, from our names to theirs."""

from collections.abc import Mapping

from torch import Tensor

_NAMES_SHOWN = 3


def count_layers(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """Return one more than the highest number that follows a prefix such as `layers.`."""
    numbers = [name.removeprefix(prefix).partition(".")[0] for name in tensors]
    return 1 + max((int(number) for number in numbers if number.isdigit()), default=-1)


def rename(
    tensors: Mapping[str, Tensor], modules: Mapping[str, str], num_layers: int
) -> dict[str, Tensor]:
    """Return views of the tensors under our names.

    Args:
        tensors: by their names; every one has to be wanted.
        modules: our module to theirs; `{i}` runs over the layers, and `qkv 1/3` is the second third
            of the rows of `qkv`. Weights and biases follow their module.

    Raises:
        ValueError: A module without weight, or tensors that nobody asked for (named).
    """
    renamed: dict[str, Tensor] = {}
    used: set[str] = set()
    missing: list[str] = []
    for ours, theirs in modules.items():
        for i in range(num_layers if "{i}" in ours else 1):
            module, _, part = theirs.replace("{i}", str(i)).partition(" ")
            if f"{module}.weight" not in tensors:
                missing.append(f"{module}.weight")
            for kind in ("weight", "bias"):
                name = f"{module}.{kind}"
                if name in tensors:
                    used.add(name)
                    renamed[f"{ours.replace('{i}', str(i))}.{kind}"] = _part(tensors[name], part)
    unknown = [name for name in tensors if name not in used]
    problems = [describe("missing", missing)] if missing else []
    problems += [describe("unknown", unknown)] if unknown else []
    if problems:
        raise ValueError("; ".join(problems))
    return renamed


def _part(tensor: Tensor, part: str) -> Tensor:
    if not part:
        return tensor
    index, _, count = part.partition("/")
    return tensor.chunk(int(count))[int(index)]


def describe(kind: str, names: list[str]) -> str:
    """Return `2 missing tensors: a, b`, with no more names than fit a line."""
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    return f"{len(names)} {kind} tensor{'s' if len(names) > 1 else ''}: {shown}"
