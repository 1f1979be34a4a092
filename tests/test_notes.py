import logging

import pytest

from diagd.notes import without_context_warnings


def test_warnings_of_the_engine_are_held_back_for_a_while(caplog):
    logger = logging.getLogger("diagd.engine")
    with without_context_warnings():
        logger.warning("context is full")
        logger.error("trouble")
    logger.warning("context is full again")
    assert caplog.messages == ["trouble", "context is full again"]


def test_they_come_back_after_an_error():
    with pytest.raises(ZeroDivisionError), without_context_warnings():
        raise ZeroDivisionError
    assert logging.getLogger("diagd.engine").level == logging.NOTSET
