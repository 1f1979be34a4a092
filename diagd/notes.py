"""Warnings that would repeat, held back where their number is reported instead."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def without_context_warnings() -> Iterator[None]:
    """Hold back the engine's warning of every full context; its stats count dropped frames."""
    logger = logging.getLogger("diagd.engine")
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(logging.NOTSET)
