import pytest

from diagd.web.guard import check_host, check_origin


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8421",
        "127.0.0.1:8421",
        "[::1]",
        "[::1]:8421",
        "192.168.1.4",
        "Box:1",
        "my_box:8421",
    ],
)
def test_own_names_and_addresses_are_let_in(host):
    assert check_host([host], {"box", "my_box"}) is None


@pytest.mark.parametrize(
    "host",
    [
        "",
        "[",
        "evil.example",
        "my_boxes",
        "localhost.evil.example:80",
        "127.0.0.1.evil.example",
        "localhost#.evil.example",
        "localhost?.evil.example",
        "localhost/.evil.example",
        "localhost\\.evil.example",
        "localhost@evil.example",
        "evil.example@localhost",
        "localhost:80@evil.example",
        "localhost:80:80",
        "localhost:",
        "localhost:http",
        "localhost:123456",
        "localhost.",  # another name to a browser, which keeps the dot
        "localhost ",
        "localhost\n",
        "localhost, evil.example",
        "l\u00f6calhost",
        "localho\u017ft",  # lower case of its upper case is localhost
        "127.0.0.1%00.evil.example",
        "127.0.0.\u0661",
        "127.1",
        "::1",
        "[::1",
        "[::1]evil.example",
        "[::1%eth0]",
        "[localhost]",
        "[127.0.0.1]",
    ],
)
def test_foreign_names_are_not(host):
    assert "does not answer to the name" in (check_host([host], {"box", "my_box"}) or "")


@pytest.mark.parametrize("hosts", [[], ["localhost", "localhost"]])
def test_there_is_one_host(hosts):
    assert check_host(hosts, ()) == "expected one Host header"


def test_origins_are_the_server_s_own_or_absent():
    hosts = ["localhost:8421"]
    assert check_origin([], hosts) is None
    assert check_origin(["http://localhost:8421"], hosts) is None
    assert check_origin(["https://LOCALHOST:8421"], hosts) is None
    assert check_origin(["https://localhost"], ["localhost"]) is None  # nobody says :80, or :443
    for origin in (
        "null",
        "",
        "http://localhost",
        "http://localhost:84210",
        "http://127.0.0.1:8421",
    ):
        assert "may not use this server" in (check_origin([origin], hosts) or "")
    assert check_origin(["http://localhost:8421", "http://evil.example"], hosts)
    assert check_origin(["https://evil.example"], ["localhost"])
