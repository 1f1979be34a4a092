"""Eight pages at once: nobody is lost, everybody is served, and memory stays flat."""

import threading
import time
from pathlib import Path

import pytest

from diagd.web.play.server import short_collections
from tests.web.play.serving import serving, wait_until

CLIENTS = 8
MAX_GROWTH_BYTES = 40 * 2**20


def memory_bytes():
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def drive(served, seconds, everybody, results):
    """Play so long once all are there, with keys, strategies, new dreams; append what was seen."""
    with served.page() as page:
        frames, keys = [], ("left", "forward", "right", "none")
        everybody.wait(30)  # on a busy machine a page may come a second after the others
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            header, picture = page.frame()
            assert picture[:2] == b"\xff\xd8"
            frames.append(header["frame"])
            turn = len(frames)
            if turn % 3 == 0:
                page.send("act", action=keys[turn % 4], id=turn)
            if turn % 20 == 0:
                strategy = ("k=1", "k=2", "raster")[turn // 20 % 3]
                page.send("adjust", strategy=strategy, temperature=1, top_p=0.9, paced=False)
            if turn % 50 == 0:
                page.send("begin", scene=turn // 50 % 5, seed=turn)
            if turn % 70 == 0:
                page.send("record", on=turn // 70 % 2 == 1)
        results.append(frames)


def run(served, seconds):
    results, everybody = [], threading.Barrier(CLIENTS)
    given = served, seconds, everybody, results
    threads = [threading.Thread(target=drive, args=given) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 30)
    assert len(results) == CLIENTS  # else a client has seen an error
    for frames in results:
        assert frames == list(range(1, len(frames) + 1))  # nothing lost, nothing twice
    counts = sorted(map(len, results))
    assert counts[-1] <= 2 * counts[0] + 10, counts
    return sum(counts)


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="NO MEMORY TEST: needs /proc")
@pytest.mark.parametrize(
    "seconds", [2, pytest.param(60, marks=pytest.mark.slow)], ids=["short", "a minute"]
)
def test_eight_pages_are_served_and_memory_stays_flat(seconds, world):
    with serving(world, max_sessions=CLIENTS) as served, short_collections():
        run(served, min(seconds / 2, 5))  # allocators and thread pools have grown by then
        before = memory_bytes()
        total = run(served, seconds)
        assert total >= 8 * seconds
        assert memory_bytes() - before < MAX_GROWTH_BYTES
        wait_until(lambda: not served.scheduler.players)
