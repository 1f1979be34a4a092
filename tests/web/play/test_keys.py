"""Who may play: programs show a key, people are asked for it once."""

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from diagd.client import Session
from diagd.web.play.options import PlayOptions
from tests.web.play.serving import drawn, wait_until

KEY = "a key & of 40% friends".replace(" ", "-")


def test_who_has_no_key_gets_nothing_but_the_form(serve):
    served = serve(api_key=KEY)
    for headers in ({}, {"authorization": f"Bearer {KEY}t"}, {"cookie": "diagd=1"}):
        page = httpx.get(served.url, headers=headers)
        assert (page.status_code, 'name="key"' in page.text) == (401, True)
        for path in ("/static/play.js", "/scenes/0.jpg", "/world/world.json", "/sessions/x/y"):
            answer = httpx.get(served.url + path, headers=headers)
            assert (answer.status_code, answer.json()["detail"]) == (
                401,
                "a valid API key is needed",
            )
        with pytest.raises(InvalidStatus) as refused:
            connect(f"ws://{served.address}/play", additional_headers=headers).__enter__()
        assert refused.value.response.status_code == 401
    with pytest.raises(ConnectionError, match=r"HTTP 401 \(a valid api_key is needed\)$"):
        Session(served.url, api_key="of somebody else")
    assert not served.scheduler.sessions
    assert httpx.get(f"{served.url}/static/style.css").status_code == 200  # of the form


def test_programs_show_a_key_of_the_file(serve, tmp_path):
    (tmp_path / "keys").write_text(f"sk-of-a-friend\n{KEY}\n")
    served = serve(api_keys=tmp_path / "keys")
    for key in ("sk-of-a-friend", KEY):
        with Session(served.url, api_key=key) as session:
            start = session.reset(b"P6 5 3 255 " + bytes(45))  # an upload
            assert session.step("left").shape == start.shape


def test_the_form_gives_a_cookie_that_is_no_key(serve):
    served = serve(api_key=KEY)
    with httpx.Client(base_url=served.url) as page:
        wrong = page.post("/", data={"key": "of somebody else"})
        assert (wrong.status_code, "not known here" in wrong.text) == (401, True)
        assert page.post("/", content=b"key=" + b"x" * 2000).status_code == 413
        let_in = page.post("/?engine=server", data={"key": f" {KEY}\n"})
        assert (let_in.status_code, let_in.headers["location"]) == (303, "./?engine=server")
        cookie = let_in.headers["set-cookie"].lower()
        assert KEY not in cookie
        assert "httponly" in cookie
        assert "samesite=lax" in cookie
        assert "path" not in cookie  # it is for the path of a proxy
        assert page.get("/").status_code == page.get("/scenes/0.jpg").status_code == 200
        (name,) = page.cookies
        forged = {"cookie": f"{name}={'0' * 64}"}
    assert httpx.get(served.url, headers=forged).status_code == 401


def test_a_foreign_page_cannot_send_the_form(serve):
    served = serve(api_key=KEY)
    headers = {"origin": "http://evil.example"}
    assert httpx.post(served.url, data={"key": KEY}, headers=headers).status_code == 403


def test_people_are_asked_once_and_play(serve, visit):
    served = serve(api_key=KEY)
    page = visit(f"{served.url}/#seed=3", quiet=False)  # the status of the form is an error's
    page.fill("input", KEY)
    page.click("button")
    wait_until(lambda: drawn(page) > 1)
    assert page.url == f"{served.url}/#seed=3"
    page.reload()
    wait_until(lambda: drawn(page) > 1)


def test_other_machines_need_a_key():
    message = "host 0.0.0.0 needs --api-key or --api-keys, or --allow-anyone"
    with pytest.raises(ValueError, match=message):
        PlayOptions(host="0.0.0.0")
    assert PlayOptions(host="0.0.0.0", allow_anyone=True).keys() == []
