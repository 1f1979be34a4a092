"""Half-open and slow connections against the study's real server (`diagd play` has the same)."""

import contextlib
import json
import socket
import sys
import time

import pytest

from diagd.web import guard
from diagd.web.guard import MAX_CONNECTIONS
from tests.web.play.serving import wait_until
from tests.web.study.cases import call, enrol, fetch, study, write_pairs

HALF_A_REQUEST = b"GET / HTTP/1.1\r\nHost: "
HALF_A_BODY = (
    b"POST /api/raters HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n\r\n{"
)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with study(write_pairs(tmp_path_factory.mktemp("pairs"), 1)) as (address, _):
        yield address


@pytest.fixture
def lines(address):
    """Open connections that say so much and no more; they end with the test."""
    port = int(address.rpartition(":")[2])
    with contextlib.ExitStack() as stack:

        def open_lines(count, words=b"", source="127.0.0.1"):
            opened = []
            for _ in range(count):
                line = socket.create_connection(("127.0.0.1", port), 10, (source, 0))
                opened.append(stack.enter_context(line))
                line.sendall(words)
            return opened

        yield open_lines


def is_closed(line):
    """Return True if the server ends a connection within the socket's timeout."""
    try:
        while line.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("words", [b"", HALF_A_REQUEST, HALF_A_BODY], ids=["", "header", "body"])
def test_half_open_connections_starve_nobody(words, address, lines):
    port = int(address.rpartition(":")[2])
    opened = lines(260, words % port if b"%d" in words else words)
    started = time.monotonic()
    for _ in range(5):
        rater = enrol(address)
        assert fetch(f"{address}/api/study", cookie=rater)["trials"]
    assert time.monotonic() - started < guard.SECONDS_TO_ASK / 2
    assert is_closed(opened[0])  # the longest silent went first


@pytest.mark.skipif(
    sys.platform != "linux", reason="NO SECOND ADDRESS: only Linux has all of 127/8"
)
def test_who_holds_most_connections_loses_them_first(lines):
    (honest,) = lines(1, HALF_A_REQUEST)  # the oldest of all
    greedy = lines(MAX_CONNECTIONS + 30, HALF_A_REQUEST, source="127.0.0.2")
    assert is_closed(greedy[0])
    honest.settimeout(0.2)
    assert not is_closed(honest)


def test_a_request_comes_to_its_end_in_time_or_never(address, lines, monkeypatch):
    """Bytes that dribble in are no request; neither are those after an answer."""
    monkeypatch.setattr(guard, "SECONDS_TO_ASK", 0.5)
    port = int(address.rpartition(":")[2])
    whole = b"GET /study.css HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % port
    for first in (b"", whole):
        (line,) = lines(1, first)
        ended = time.monotonic() + 5
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < ended:
                line.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() < ended, "it dribbles on for ever"


def test_a_body_that_never_ends_is_answered_in_words(address, lines, monkeypatch):
    monkeypatch.setattr("diagd.web.study.server.MAX_SECONDS_OF_BODY", 0.3)
    (line,) = lines(1, HALF_A_BODY % int(address.rpartition(":")[2]))
    head, _, body = line.recv(4096).partition(b"\r\n\r\n")
    assert b" 408 " in head.splitlines()[0]
    assert json.loads(body or line.recv(4096)) == {"detail": "the request took too long"}


@pytest.mark.parametrize(
    ("rest", "status"), [(b"zz\r\n", b" 400 "), (None, b" 404 ")], ids=["at once", "answered"]
)
def test_a_body_that_is_no_http_leaves_no_trace_in_the_log(rest, status, address, lines, caplog):
    request = b"POST /nobody HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    (line,) = lines(1, request + (rest or b""))
    line.settimeout(5)
    assert status in line.recv(4096).splitlines()[0]
    with contextlib.suppress(ConnectionError):
        line.sendall(b"zz\r\n")
    assert is_closed(line)
    assert {said.levelname for said in caplog.records} <= {"WARNING"}


def test_answers_that_nobody_reads_are_given_up(address, lines, monkeypatch):
    monkeypatch.setattr(guard, "SECONDS_TO_ASK", 0.5)
    size = len(call(f"{address}/study.js")[1])
    port = int(address.rpartition(":")[2])
    whole = b"GET /study.js HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % port
    (line,) = lines(1)
    lost, lose = set(), guard.PatientProtocol.connection_lost

    def note(protocol, error):
        lose(protocol, error)
        lost.add(protocol.client)

    monkeypatch.setattr(guard.PatientProtocol, "connection_lost", note)
    count = 16 * 2**20 // size  # more than the two kernels keep
    with contextlib.suppress(TimeoutError, ConnectionError):
        line.sendall(whole * count)
    wait_until(lambda: line.getsockname() in lost)
    received = 0
    with contextlib.suppress(ConnectionError):
        while data := line.recv(2**20):
            received += len(data)
    assert 0 < received < count * size
    assert call(f"{address}/study.js")[0] == 200
