"""`pytest --quick`: as many tests as fit into a minute, the quickest of the last runs first.

Every run of pytest notes in its cache what each test took. A test that has not run yet counts as an
average one; of those, which are taken is decided by their names, so that they come from everywhere.
"""

import zlib

import pytest

SECONDS = 40.0  # for the tests; collecting them takes the rest of the minute
UNKNOWN = 0.1  # seconds of a test that has not run yet
NOTES = "diagd/seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        type=float,
        nargs="?",
        const=SECONDS,
        metavar="SECONDS",
        help=f"run the quickest tests only, as many as fit (default {SECONDS:g} s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Stopwatch(config))


class Stopwatch:
    """Notes what tests take, and with `--quick` leaves out those that take long."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        if getattr(self.config, "cache", None) is not None and self.seconds:
            noted = self.config.cache.get(NOTES, {})
            self.config.cache.set(NOTES, noted | self.seconds)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        left = self.config.getoption("--quick")
        if left is None or self.config.cache is None:
            return
        noted = self.config.cache.get(NOTES, {})
        took = {item: noted.get(item.nodeid, UNKNOWN) for item in items}
        chosen: set[pytest.Item] = set()
        for item in sorted(items, key=lambda i: (took[i], zlib.crc32(i.nodeid.encode()))):
            left -= took[item]
            if left < 0:
                break
            chosen.add(item)
        others = [item for item in items if item not in chosen]
        self.config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item in chosen]
