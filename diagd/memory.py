"""Sizes that cannot be are refused by arithmetic, before anything of them is allocated."""

import psutil


def check_memory(num_bytes: int, what: str) -> None:
    """Refuse what is larger than this machine's memory.

    Args:
        what: the subject of the error, with the sizes that were asked for.

    Raises:
        ValueError: it would never fit; says what was asked for and what there is.
    """
    memory = psutil.virtual_memory().total
    if num_bytes > memory:
        raise ValueError(
            f"{what} would take {_gigabytes(num_bytes)}, this machine has {_gigabytes(memory)}"
        )


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
