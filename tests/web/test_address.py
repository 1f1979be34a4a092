import socket

import pytest

from diagd.web.guard import listen, url_of


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),  # any address of this machine will do
        ("::", "http://[::1]:80"),
        ("box.example", "http://box.example:80"),
    ],
)
def test_an_address_is_one_that_a_browser_takes(host, url):
    assert url_of(host, 80) == url


@pytest.mark.parametrize("port", [-1, 2**16, 70000])
def test_a_port_that_cannot_be_is_refused(port):
    with pytest.raises(ValueError, match=rf"port must be in \[0, 65536\), got {port}"):
        listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "127.0.0.1:80"])
def test_a_host_that_is_no_name_is_named(host):
    with pytest.raises(ValueError, match=f"cannot listen on '{host}': "):
        listen(host, 0)


@pytest.mark.parametrize(("system", "option"), [("posix", 1), ("nt", 0)])
def test_a_port_is_used_again_at_once_only_where_that_is_not_sharing(system, option, monkeypatch):
    monkeypatch.setattr("diagd.web.guard.os.name", system)
    with listen("127.0.0.1", 0) as listening:
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == option


def test_the_end_of_an_answer_waits_for_no_word_of_the_client():
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_port_0_is_any_that_is_free():
    with listen("127.0.0.1", 0) as one, listen("127.0.0.1", 0) as other:
        assert one.getsockname()[1] != other.getsockname()[1]
