"""Checks of options; each raises ValueError."""

import operator
import re
from collections.abc import Mapping, Set
from typing import Any, SupportsIndex


def check_at_least(options: Any, **bounds: int) -> None:
    """Reject numbers (or any of several) below their bound, NaN, and integers beyond 64 bits."""
    for name, bound in bounds.items():
        value = getattr(options, name)
        values = value if isinstance(value, tuple) else (value,)
        if any(one is not None and not one >= bound for one in values):
            raise ValueError(f"{name} must be at least {bound}, got {value}")
        if any(isinstance(one, int) and one >= 2**63 for one in values):
            raise ValueError(f"{name} must fit in 64 bits, got {value}")


MAX_MESSAGE = 600  # characters


def shorten(message: str) -> str:
    """Shorten the middle of a message that quotes a huge value."""
    if (left_out := len(message) - MAX_MESSAGE) <= 0:
        return message
    head = MAX_MESSAGE * 2 // 3
    return f"{message[:head]} ... [{left_out} characters] ... {message[head + left_out :]}"


def brief(value: object, length: int = 60, depth: int = 3) -> str:
    """Format a value like `repr`, truncated if it is long or deeply nested.

    Parts that are not shown are never visited: aliases in a file can multiply lists.
    """
    if isinstance(value, str | bytes | bytearray):
        text = repr(value[: length + 1])
    elif isinstance(value, int) and abs(value) >= 10**length:
        text = f"{value.bit_length()}-bit integer"
    elif isinstance(value, list | tuple | Mapping | Set) and value:
        parts = list[str]()
        for one in value:
            if not depth or sum(map(len, parts)) >= length:
                parts.append("...")
                break
            parts.append(brief(one, length, depth - 1))
            if isinstance(value, Mapping):
                parts[-1] += f": {brief(value[one], length, depth - 1)}"
        start, end = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
        text = f"{start}{', '.join(parts)}{end}"
    else:
        text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def parse_size(text: str | None, unit: int, least: int) -> tuple[int, int] | None:
    """Read `HEIGHTxWIDTH` in pixels, multiples of a unit, or raise ValueError."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)x(\d+)", text, flags=re.ASCII)
    size_px = (int(found[1]), int(found[2])) if found else (0, 0)
    if min(size_px) < least or size_px[0] % unit or size_px[1] % unit:
        raise ValueError(
            f"size must be height x width in pixels (64x96), multiples of {unit} and at least "
            f"{least}, got {text!r}"
        )
    return size_px


def check_values(options: Any, *rules: tuple[str, bool, str]) -> None:
    """Raise ValueError for the first broken rule (name, whether it holds, what it requires)."""
    for name, is_valid, expected in rules:
        if not is_valid:
            raise ValueError(f"{name} must be {expected}, got {brief(getattr(options, name))}")


def whole(value: SupportsIndex, name: str) -> int:
    """Return a whole number as an int, or raise ValueError."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {brief(value)}") from None


def read_size(text: str, name: str, example: str) -> tuple[int, int]:
    """Read a text HEIGHTxWIDTH, such as the example, or raise ValueError with the name."""
    if not (match := re.fullmatch(r"(\d{1,6})x(\d{1,6})", text.strip(), flags=re.ASCII)):
        raise ValueError(
            f"{name} must look like HEIGHTxWIDTH (for example {example}), got {text!r}"
        )
    return int(match[1]), int(match[2])
