"""The world in the browser alone, in the system's Chromium: what it draws is what Python draws."""

import json
import shutil

import pytest

from diagd.backends.names import DTypeChoice
from diagd.decoding.strategies.table import parse_strategy
from diagd.families.checkpoints import write_defaults
from diagd.families.defaults import GenerationDefaults
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import model_scenes
from diagd.web.play.export import export
from diagd.web.play.options import ExportWebOptions
from diagd.web.play.session import Controls, Session, SessionLog, checksum_of
from tests.web.play.serving import serving, wait_for_frames, wait_until

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture(scope="module")
def site(world):
    """Export the tiny world, and host it as anybody does; returns its address."""
    from runs.browser import hosted  # which needs playwright

    with hosted(str(world)) as address:
        yield address


def dream_of(page):
    """Save the dream of a page, and read it."""
    page.get_by_role("button", name="Pause").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save session").click()
    return json.loads(download.value.path().read_text())


def checksums(world, dream, dtype: DTypeChoice = "int8"):
    """Dream a saved dream again, in Python."""
    generator = VideoGenerator.from_pretrained(world, dtype=dtype)
    scenes = model_scenes(world, generator, generator.defaults.context_frames)
    (scene,) = (one for one in scenes if one.name == dream["scene"])
    session = Session(generator, SessionLog(scene.frames, scene.actions, dream["seed"]))
    for frame in dream["frames"]:
        chosen = frame["controls"]
        controls = Controls(
            parse_strategy(chosen["strategy"]), chosen["temperature"], chosen["top_p"]
        )
        yield checksum_of(session.advance(frame["action"], controls))


def each(dream, name):
    return [frame[name] for frame in dream["frames"]]


def test_every_frame_is_that_of_python_with_two_threads(visit, site, world):
    page = visit(site + "?threads=2")
    wait_for_frames(page, 12)
    assert page.evaluate("crossOriginIsolated")
    expect(page.locator("#computed")).to_have_text("int8, this browser, 2 threads")
    page.keyboard.down("KeyW")
    wait_for_frames(page, 12)
    page.keyboard.press("o")  # another strategy
    page.keyboard.down("KeyA")
    wait_for_frames(page, 26)
    dream = dream_of(page)
    assert len(dream["frames"]) >= 45
    assert len(set(each(dream, "action"))) > 1
    assert len({chosen["strategy"] for chosen in each(dream, "controls")}) > 1
    assert each(dream, "checksum") == list(checksums(world, dream))


def test_a_world_that_remembers_less_is_the_same_here_and_in_python(visit, world, tmp_path):
    from runs.browser import hosted  # which needs playwright

    short = shutil.copytree(world, tmp_path / "short")
    write_defaults(short, GenerationDefaults(remember=3))
    with hosted(str(short)) as address:
        page = visit(address)
        wait_for_frames(page, 8)
        expect(page.locator("#context")).to_contain_text("remembers 3 of at most 3")
        dream = dream_of(page)
        found = each(dream, "checksum")
        assert found == list(checksums(short, dream))
        assert found != list(checksums(world, dream))


@pytest.mark.parametrize("answer", ["continue_", "abort"])
def test_a_dream_waits_for_the_picture_of_its_start(visit, site, answer):
    held = []
    page = visit("about:blank", quiet=False, service_workers="block")
    page.route("**/world/0.jpg", lambda route: held.append(route))
    page.goto(site)
    expect(page.locator("#computed")).to_contain_text("thread")
    page.wait_for_timeout(1000)  # in which the worker would write many frames
    assert page.get_attribute("body", "data-frames") is None
    for route in held:
        getattr(route, answer)()
    wait_for_frames(page, 8)


def test_a_link_plays_a_dream_again(visit, site):
    page = visit(site)
    wait_for_frames(page, 2)
    page.keyboard.press("2")
    page.get_by_role("button", name="Start 3").click()
    page.keyboard.down("KeyD")
    wait_for_frames(page, 13)
    dream = dream_of(page)
    page.get_by_role("button", name="Copy a link").click()
    wait_until(lambda: "#dream=" in page.evaluate("location.hash"))
    again = visit(page.evaluate("location.href"))
    expect(again.locator("#toast")).to_contain_text("every token as it was")
    replayed = dream_of(again)
    assert replayed["frames"][: len(dream["frames"])] == dream["frames"]
    assert (replayed["scene"], replayed["seed"]) == (dream["scene"], dream["seed"])


@pytest.mark.parametrize(
    "link", ["#dream=!", "#dream=AAAA", "#dream=WzAsMCxbWzEsOTksImsiLDEsMV1dXQ"]
)
def test_a_link_that_is_none_is_refused_and_the_page_plays(visit, site, link):
    page = visit(site + link)
    wait_for_frames(page, 2)
    if link != "#dream=!":
        said = "not a saved dream" if link == "#dream=AAAA" else "this dream asks for what"
        expect(page.locator("#toast")).to_contain_text(f"That did not work: {said}")


def test_a_link_pasted_over_a_dream_that_plays_is_followed(visit, site):
    page = visit(site)
    wait_for_frames(page, 2)
    page.evaluate("location.hash = '#dream=AAAA'")
    expect(page.locator("#toast")).to_contain_text("That did not work: not a saved dream.")


def test_a_browser_that_records_no_video_says_so(visit, site):
    page = visit("about:blank")
    page.add_init_script("delete globalThis.MediaRecorder")
    page.goto(site)
    wait_for_frames(page, 2)
    page.keyboard.press("v")
    expect(page.locator("#toast")).to_have_text("This browser records no video.")
    expect(page.locator("#hud-recording")).to_be_hidden()


def test_a_dream_that_is_gone_cannot_be_saved_and_the_page_says_so(visit, site):
    page = visit(site, quiet=False, service_workers="block")
    wait_for_frames(page, 2)
    page.evaluate("dispatchEvent(new ErrorEvent('error', { message: 'by the test' }))")
    expect(page.locator("#curtain-text")).to_contain_text("The page broke down (by the test)")
    page.route("**/world/world.bin*", lambda route: route.abort())
    page.click("#again")
    expect(page.locator("#curtain-text")).to_contain_text("world.bin could not be loaded")
    page.click("#keep-session")
    expect(page.locator("#toast")).to_have_text("That did not work: the dream is gone.")


def test_it_plays_without_the_host_once_it_was_loaded(visit, site):
    page = visit(site)
    wait_for_frames(page, 2)
    page.reload()  # through the service worker from its first byte
    wait_for_frames(page, 2)
    page.context.set_offline(True)
    page.reload()
    wait_for_frames(page, 3)


def test_a_host_may_redirect(visit, site):
    page = visit(site, quiet=False)  # the listing of a folder has no icon
    wait_for_frames(page, 1)
    page.reload()  # through the service worker from its first byte
    page.goto(site + "static")
    assert page.url == site + "static/"


def test_what_computes_does_not_push_the_state_out_of_a_narrow_window(visit, site):
    page = visit(site, viewport={"width": 320, "height": 640})
    wait_for_frames(page, 1)
    page.locator("#computed").evaluate("small => small.textContent += ', of another name'")
    right = page.locator("#state").evaluate("state => state.getBoundingClientRect().right")
    assert right <= 320 == page.evaluate("document.documentElement.scrollWidth")


def test_a_page_that_is_opened_as_a_file_says_what_it_needs(visit, world, tmp_path):
    export(ExportWebOptions(tmp_path / "site", model=str(world)))
    page = visit((tmp_path / "site" / "index.html").as_uri(), quiet=False)
    told = page.locator("#curtain-text span")
    expect(told).to_be_hidden()
    expect(told).to_be_visible()
    expect(told).to_have_text("(serve this folder: python -m http.server)")


def test_without_isolation_it_runs_on_one_thread(visit, site):
    page = visit(site + "?threads=2", service_workers="block")
    wait_for_frames(page, 3)
    assert not page.evaluate("crossOriginIsolated")
    expect(page.locator("#computed")).to_have_text("int8, this browser, 1 thread")


def test_without_a_gpu_one_that_is_asked_for_is_a_sentence(visit, site):
    page = visit(site + "?engine=webgpu")
    expect(page.locator("#toast")).to_contain_text("No GPU writes this dream")
    wait_for_frames(page, 3)
    expect(page.locator("#computed")).to_contain_text("thread")
    quiet = visit(site)
    wait_for_frames(quiet, 3)
    expect(quiet.locator("#toast")).to_be_hidden()


def flip(content):
    return content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("world.bin", flip, "is damaged, or no file of a world"),
        ("world.bin", lambda content: content[:-9], "is damaged, or no file of a world"),
        ("world.bin", None, "world.bin could not be loaded"),
        ("world.json", None, "world.json could not be loaded"),
        ("kernels-*", lambda _: b"\0asm\1\0\0\0\xff", "no WebAssembly with SIMD"),
    ],
)
def test_what_is_broken_is_one_sentence_on_the_page(visit, site, name, change, said):
    page = visit("about:blank", quiet=False, service_workers="block")

    def answer(route):
        if change is None:
            return route.abort()
        return route.fulfill(response=(found := route.fetch()), body=change(found.body()))

    page.route(f"**/world/{name}*", answer)
    page.route(
        "**/world/kernels.wasm", answer if name == "kernels-*" else lambda one: one.continue_()
    )
    page.goto(site)
    expect(page.locator("#curtain-text")).to_contain_text(said)
    expect(page.get_by_role("button", name="Begin again")).to_be_visible()


def test_a_video_is_kept(visit, site):
    page = visit(site)
    wait_for_frames(page, 2)
    page.keyboard.press("v")
    page.wait_for_timeout(1000)  # shorter ones have no frame in them
    with page.expect_download() as download:
        page.keyboard.press("v")
    assert download.value.suggested_filename.startswith("dream.")
    assert download.value.path().stat().st_size > 500


def test_the_server_offers_the_browser_as_its_other_engine(visit, world):
    with serving(world) as served:
        page = visit(served.url)
        wait_for_frames(page, 2)
        page.get_by_role("link", name="dream in this browser").click()
        expect(page.locator("#computed")).to_contain_text("this browser")
        wait_for_frames(page, 3)
        assert page.evaluate("crossOriginIsolated")
        expect(page.get_by_role("link", name="let the server dream")).to_be_visible()
