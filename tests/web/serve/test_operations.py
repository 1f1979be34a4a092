"""Keys, states, metrics, logs, bounds, and clients that go away."""

import json
import logging
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from diagd.web.serve.gate import JsonLines
from diagd.web.serve.options import ServeOptions
from tests.web.play.serving import wait_until
from tests.web.serve.serving import IMAGES, serving

KEY = "sk-of-a-test"
ASKED = {"prompt": "left", "seed": 1}


def test_who_has_no_key_is_refused(serve, tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("# of friends\nsk-of-a-friend\n")
    served = serve(api_key=KEY, api_keys=keys)
    for key in (KEY, "sk-of-a-friend"):
        client = served.client(api_key=key)
        assert [one.id for one in client.models.list()] == ["tiny-images"]
        url = client.images.generate(prompt="left", response_format="url").data[0].url
        assert httpx.get(url).status_code == 200  # whoever knows the name may see it
    for key in (KEY[:-1], KEY + "t", "# of friends", "x"):
        with pytest.raises(openai.AuthenticationError, match="a valid API key is needed"):
            served.client(api_key=key).images.generate(prompt="left")
    for path in ("/metrics", "/v1/models", "/nowhere"):
        assert httpx.get(served.url + path).status_code == 401
    assert httpx.get(f"{served.url}/health").json() == {"status": "ready"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"host": "0.0.0.0"}, "host 0.0.0.0 needs --api-key or --api-keys, or --allow-anyone"),
        ({"api_key": "short"}, "key must have 8 or more printable characters"),
        ({"cors": ("example.org",)}, "cors must be origins such as https://example.org, got 'ex"),
        ({"cors": ("https://example.org/",)}, "cors must be origins such as"),
        ({"root_path": "images"}, "root_path must be a path such as /images, got 'images'"),
        ({"max_seconds": 0}, "max_seconds must be above 0, got 0"),
        ({"max_videos": 0}, "max_videos must be at least 1, got 0"),
    ],
)
def test_options_are_checked_at_the_door(flags, message):
    with pytest.raises(ValueError, match=message):
        ServeOptions(**flags)


def test_a_file_of_keys_has_some(tmp_path):
    (tmp_path / "keys.txt").write_text("# none\n\n")
    with pytest.raises(ValueError, match=r"keys.txt has no key, expected one per line"):
        ServeOptions(api_keys=tmp_path / "keys.txt")
    assert ServeOptions(host="0.0.0.0", allow_anyone=True).keys() == []


def test_pages_may_ask_where_their_origin_is_named(serve):
    served = serve(cors=("https://pages.example",))
    headers = {"origin": "https://pages.example", "access-control-request-method": "POST"}
    preflight = httpx.options(served.url + IMAGES, headers=headers)
    assert preflight.headers["access-control-allow-origin"] == "https://pages.example"
    answer = served.post(json=ASKED, headers={"origin": "https://pages.example"})
    assert answer.headers["access-control-allow-origin"] == "https://pages.example"
    foreign = served.post(json=ASKED, headers={"origin": "https://other.example"})
    assert (foreign.status_code, "may not use" in foreign.text) == (403, True)
    assert "access-control-allow-origin" not in foreign.headers


def test_other_names_and_pages_are_refused_by_default(served):
    for headers in ({"host": "evil.example"}, {"origin": "https://pages.example"}):
        assert served.post(json=ASKED, headers=headers).status_code == 403


def test_a_full_line_is_refused_and_told_when_to_come_back(serve):
    served = serve(max_videos=1, max_waiting=2)
    with ThreadPoolExecutor(4) as pool, served.held_up():
        pending = [pool.submit(served.post, json=ASKED) for _ in range(3)]
        wait_until(lambda: served.scheduler.num_waiting + len(served.scheduler.running) == 3)
        answer = served.post(json=ASKED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert served.post(json={**ASKED, "stream": True}).status_code == 429
    assert {one.result().status_code for one in pending} == {200}


def test_more_than_ever_fits_is_not_told_to_come_back(serve):
    answer = serve(max_videos=1, max_waiting=2).post(json={**ASKED, "n": 4})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert answer.json()["error"]["message"] == "expected at most 3 at once, got 4"


def test_below_a_path_of_a_proxy_addresses_have_it(serve):
    served = serve(root_path="/images", api_key=KEY, allow_host=("pages.example",))
    assert httpx.get(f"{served.url}/health").status_code == 200
    headers = {"authorization": f"Bearer {KEY}", "host": "pages.example"}
    headers["x-forwarded-proto"] = "https"
    answer = served.post(json={**ASKED, "response_format": "url"}, headers=headers)
    url = answer.json()["data"][0]["url"]
    assert url.startswith("https://pages.example/images/v1/pictures/")
    path = url.removeprefix("https://pages.example/images")
    assert httpx.get(served.url + path).status_code == 200


def test_who_goes_away_frees_the_rows_at_once(serve, images):
    served = serve(max_videos=2)
    scheduler = served.scheduler
    for stream in (False, True):
        with served.held_up():
            address = served.url.removeprefix("http://").split(":")
            for _ in range(3):  # the first is begun, then others wait
                body = json.dumps({**ASKED, "strategy": "raster", "stream": stream}).encode()
                head = f"POST {IMAGES} HTTP/1.1\r\nhost: localhost\r\n"
                head += f"content-length: {len(body)}\r\n\r\n"
                with socket.create_connection((address[0], int(address[1]))) as line:
                    line.sendall(head.encode() + body)
                    wait_until(
                        lambda: (
                            scheduler.num_waiting or len(scheduler.running) > len(scheduler.gone)
                        )
                    )
                wait_until(lambda: scheduler.gone and not scheduler.num_waiting)
        wait_until(lambda: not scheduler.running)
    assert served.metric("diagd_rows_in_use") == 0
    assert served.metric("diagd_frames_total") == 0
    assert served.post(json=ASKED).status_code == 200


def test_clients_take_turns(serve, tmp_path):
    """One that asks for much does not hold up one that asks for little."""
    (tmp_path / "keys.txt").write_text(f"{KEY}\nsk-of-a-friend")
    served, order = serve(api_keys=tmp_path / "keys.txt", max_videos=1), list[int]()

    def ask(key, count):
        served.client(api_key=key).images.generate(prompt="left", n=count)
        order.append(count)

    with ThreadPoolExecutor(2) as pool, served.held_up():
        pool.submit(ask, KEY, 8)
        wait_until(lambda: served.scheduler.num_waiting == 7)
        pool.submit(ask, "sk-of-a-friend", 1)
        wait_until(lambda: served.scheduler.num_waiting == 8)
    assert order == [1, 8]


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        ({"content": b"{"}, 400, "invalid_value"),
        ({"content": b"x" * 300_000}, 413, "request_too_large"),
    ],
)
def test_a_body_that_is_none_is_refused(served, sent, status, code):
    answer = served.post(**sent)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_a_path_that_is_none_is_refused(served):
    for method, path, status in (("GET", "/v1/nowhere", 404), ("GET", IMAGES, 405)):
        answer = httpx.request(method, served.url + path)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, None)


def test_what_takes_too_long_is_given_up(serve):
    served = serve(max_seconds=0.2)
    with served.held_up():
        answer = served.post(json=ASKED)
        assert answer.json()["error"]["message"] == "request took longer than 0.2 seconds"
        streamed = served.post(json={**ASKED, "stream": True}).text
        assert "event: error" in streamed
        assert "request took longer" in streamed
    wait_until(lambda: not served.scheduler.running)


def test_metrics_count_what_happened(serve):
    served = serve()
    for _ in range(2):
        served.post(json={**ASKED, "n": 2})
    assert served.metric("diagd_frames_total") == 4
    assert served.metric("diagd_tokens_total") == 4 * 15
    assert served.metric("diagd_steps_total") > 0
    assert served.metric("diagd_rows") == 16
    assert served.metric("diagd_first_picture_seconds_count") == 2
    assert served.metric("diagd_resident_bytes") > 2**20
    assert served.metric(f'diagd_requests_total{{route="{IMAGES}",status="200"}}') == 2
    assert served.metric(f'diagd_request_seconds_count{{route="{IMAGES}"}}') == 2


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log_is_lines_of_json_without_prompts(serve, log_prompts, caplog):
    caplog.set_level(logging.INFO, "diagd.serve")
    serve(log_prompts=log_prompts).post(json={**ASKED, "n": 2})

    def requests():
        lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
        return [one for one in lines if one["event"] == "request"]

    wait_until(requests)  # the answer arrives before its line is written
    (line,) = requests()
    about = {"method": "POST", "route": IMAGES, "status": 200, "images": 2, "strategy": "k=1"}
    assert about.items() <= line.items()
    assert line["client"] == "127.0.0.1"
    assert ("left" in json.dumps(line)) == log_prompts


def test_nobody_is_served_while_the_model_is_loaded(images):
    with serving(images, loads=False) as served:
        answer = served.post(json=ASKED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
        assert answer.headers["retry-after"] == "5"
        health = httpx.get(f"{served.url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})


def test_a_model_that_is_none_ends_the_command(command, tmp_path):
    outcome = command("serve", "--model", tmp_path, "--port", 0)
    outcome.assert_refused("no model, expected a folder")


def test_a_server_that_is_told_to_end_finishes_what_runs_and_refuses_what_comes(spawn, images):
    flags = "--model", images, "--port", 0, "--dtype", "float32", "--json"
    process = spawn("-m", "diagd", "serve", *flags)
    url = next(line for line in iter(process.stderr.readline, "") if "http://" in line)
    url = url.split(" at ")[1].split("/v1")[0]
    wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
    body = json.dumps({**ASKED, "n": 10}).encode()
    head = f"POST {IMAGES} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    asked = b"HTTP/1.1 100 Continue\r\n\r\n"  # for the body
    with socket.create_connection(("127.0.0.1", int(url.split(":")[2]))) as line:
        line.sendall(f"{head}expect: 100-continue\r\n\r\n".encode())
        assert line.recv(len(asked), socket.MSG_WAITALL) == asked
        line.sendall(body[:-1])
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/health").json() == {"status": "draining"})
        answer = httpx.post(url + IMAGES, json=ASKED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        line.sendall(body[-1:])
        assert line.recv(15, socket.MSG_WAITALL) == b"HTTP/1.1 200 OK"
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, json.loads(out)["requests"] > 3) == (0, True)
