import pytest

from tests.browser import open_browser


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser
