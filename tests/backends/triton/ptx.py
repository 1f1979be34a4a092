"""What a kernel reads and writes of its arguments before it waits for the kernel before it."""

import re
from collections import Counter
from typing import Any

WAIT = "griddepcontrol.wait"
ACCESS = re.compile(r"(?:ld|st|atom|red)\.global\S*|cp\.(?:async|reduce)\S*global\S*")
ADDRESS = re.compile(r"\[\s*(%rd\d+)[^\]]*\]")
PARAMETER = re.compile(r"ld\.param\.b64\s+(%rd\d+), \[\w+_param_(\d+)\]")
RESULT = re.compile(r"(?:@!?%p\d+ )?[a-z]\S*\s+(%rd\d+), (.*);")


def pointers(signature: Any) -> list[str]:
    """Return the names of a kernel's arguments, as its machine code counts them."""
    names = list[str]()

    def add(name: str, kind: Any) -> None:
        if isinstance(kind, tuple):
            for one in kind:
                add(name, one)
        elif kind != "constexpr":
            names.append(name)

    for name, kind in signature.items():
        add(name, kind)
    return names


def origins(lines: list[str], names: list[str]) -> dict[str, set[str]]:
    """Return the arguments that the 64-bit registers are computed from, but by no load."""
    found = dict[str, set[str]]()
    for register, number in PARAMETER.findall("\n".join(lines)):
        if int(number) < len(names):
            found.setdefault(register, set()).add(names[int(number)])
    moves = [match.groups() for line in lines if "[" not in line and (match := RESULT.match(line))]
    while True:
        size = sum(map(len, found.values()))
        for register, sources in moves:
            for source in re.findall(r"%rd\d+", sources):
                found.setdefault(register, set()).update(found.get(source, ()))
        if sum(map(len, found.values())) == size:
            return found


def accesses(ptx: str, signature: Any) -> dict[str, dict[str, int]]:
    """Count accesses to arguments before and after the wait, such as {"before": {"ld x": 3}}.

    Raises:
        ValueError: not one wait, or one that may be jumped over; an address of nowhere.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    waits = [number for number, line in enumerate(lines) if line.startswith(WAIT)]
    if len(waits) != 1:
        raise ValueError(f"{len(waits)} waits")
    jumps = re.findall(r"bra(?:\.uni)?\s+(\$\w+);", "\n".join(lines[: waits[0]]))
    labels = {line.partition(":")[0] for line in lines[waits[0] :] if line.startswith("$")}
    if labels & set(jumps):
        raise ValueError("the wait may be jumped over")
    known = origins(lines, pointers(signature))
    counts = {"before": Counter[str](), "after": Counter[str]()}
    for number, line in enumerate(lines):
        if (access := ACCESS.search(line)) is None:
            continue
        address = ADDRESS.findall(line)[-1]
        kind = "ld" if access[0].startswith("cp") else access[0].partition(".")[0]
        if len(known.get(address, ())) < 1:
            raise ValueError(f"an address of nowhere: {line}")
        for name in known[address]:
            counts["before" if number < waits[0] else "after"][f"{kind} {name}"] += 1
    return {when: dict(count) for when, count in counts.items()}
