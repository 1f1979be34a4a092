"""Pages behind a reverse proxy that serves them below a path, in the system's Chromium."""

import json

import httpx
import pytest

from tests.web.play.serving import serving, wait_for_frames, wait_until
from tests.web.proxy import proxied

expect = pytest.importorskip("playwright.sync_api").expect


def test_a_server_is_played_below_a_path(visit, world, tmp_path):
    with serving(world) as served, proxied(served.address) as address:
        assert httpx.get(address.removesuffix("world/")).status_code == 404
        page = visit(address)
        wait_for_frames(page, 2)
        pictures = "() => [...document.querySelectorAll('#scenes img')].map(i => i.naturalWidth)"
        wait_until(lambda: all(page.evaluate(pictures)))
        with page.expect_download() as download:
            page.click("#save")
        download.value.save_as(tmp_path / "dream.json")
        count = len(json.loads((tmp_path / "dream.json").read_text())["frames"])
        page.set_input_files("#load-file", tmp_path / "dream.json")
        expect(page.locator("#toast")).to_have_text(
            f"Replayed {count} frames, every token as it was."
        )
        page.get_by_role("link", name="dream in this browser").click()
        expect(page.locator("#computed")).to_contain_text("this browser")
        wait_for_frames(page, 2)
        page.get_by_role("link", name="let the server dream").click()
        expect(page.locator("#computed")).to_contain_text("native")
        wait_for_frames(page, 2)
        assert page.url == address
        page.close()  # before the server goes, of which it complains


def test_an_exported_world_is_played_below_a_path(visit, world):
    from runs.browser import hosted  # which needs playwright

    with hosted(str(world)) as site, proxied(site.split("/")[2]) as address:
        page = visit(address)
        wait_for_frames(page, 2)
        assert page.evaluate("navigator.serviceWorker.controller.scriptURL") == address + (
            "offline.js"
        )
        page.context.set_offline(True)
        page.reload()
        wait_for_frames(page, 2)


def test_a_proxy_that_changes_the_name_of_the_host_is_refused_the_socket(world):
    """As `SECURITY.md` says: a page of another host would look the same."""
    with serving(world) as served, proxied(served.address, host=served.address) as address:
        handshake = {"upgrade": "websocket", "connection": "upgrade", "origin": address[:-7]}
        handshake |= {
            "sec-websocket-version": "13",
            "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
        }
        answer = httpx.get(f"{address}play", headers=handshake)
        assert answer.status_code == 403
