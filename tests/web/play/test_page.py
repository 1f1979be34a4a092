"""The page in a real browser: the system's Chromium, headless. No test of it runs without one."""

import contextlib
import io
import itertools
import json
import re
import time
from base64 import b64decode
from functools import cache

import numpy as np
import pytest
from PIL import Image

from diagd.data.video import read_video, write_image
from diagd.web.play.player import from_picture, to_jpeg
from diagd.web.play.session import Session, load_log
from tests.web.play.serving import serving, wait_for_frames, wait_until
from tests.worlds import HEIGHT_PX, WIDTH_PX, smooth_frames, write_scenes, write_world

expect = pytest.importorskip("playwright.sync_api").expect
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def shared(world):
    """One server for the tests that leave it as it was."""
    with serving(world, max_sessions=3) as served:
        yield served


@pytest.fixture
def page(visit, shared):
    """Open a page of the shared server that has drawn a frame."""
    page = visit(shared.url)
    wait_for_frames(page, 1)
    return page


def picture(page):
    """Return the canvas as a data URL."""
    return page.locator("#stage").evaluate("canvas => canvas.toDataURL()")


def only_player(served):
    """Return the player, once the pages of former tests are gone."""
    wait_until(lambda: len(served.scheduler.players) == 1)
    return next(iter(served.scheduler.players.values()))


def text(page, selector, pattern):
    expect(page.locator(selector)).to_have_text(re.compile(pattern), timeout=PATIENCE_MS)


def test_the_page_loads_and_the_world_moves(visit, shared):
    page = visit(shared.url)
    wait_for_frames(page, 3)
    text(page, "#state", "^live$")
    text(page, "#steps", "^7$")
    text(page, "#hud-fps", r"^\d+\.\d frames/s$")
    expect(page.locator("#curtain")).to_be_hidden()
    text(page, "#computed", "^float32, native$")
    text(page, "#scenes", "1 opening2 view 3.*your own")
    pressed = page.locator("#scenes [aria-pressed=true]")
    expect(pressed).to_have_text("1 opening")
    page.get_by_role("button", name="Start 3: view 4").click()
    expect(pressed).to_have_text("3 view 4")


def test_a_key_is_timed_and_shown(visit, shared):
    page = visit(shared.url)
    for key, action in (("KeyA", "left"), ("ArrowRight", "right")):
        wait_for_frames(page, 2)
        page.keyboard.down(key)
        text(page, "#hud-action", f"^{action}$")
        text(page, "#latency", r"^\d+ ms p50, \d+ p99$")
        page.keyboard.up(key)
        expect(page.locator("#hud-action")).to_be_hidden()


def test_a_slow_world_says_so_and_what_helps(visit, serve, monkeypatch):
    """A frame that takes more than a second, as on a machine that is too slow."""
    served = serve()
    tokenizer = served.scheduler.world.tokenizer
    paint = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda *given: time.sleep(1.3) or paint(*given))
    page = visit(served.url)
    wait_for_frames(page, 3)
    text(page, "#hud-fps", r"^0\.[3-7]\d frames/s$")
    expect(page.locator("#faster")).to_be_hidden()  # nothing that is known to be faster
    page.get_by_role("button", name="raster").click()
    text(page, "#faster", r"^A frame takes a while here\. Faster: the strategy k=1\.$")
    page.keyboard.down("KeyA")
    expect(page.locator("#hud-action")).to_have_text("left …", timeout=900)  # before its picture
    text(page, "#hud-action", "^left$")
    monkeypatch.setattr(tokenizer, "decode", paint)
    expect(page.locator("#faster")).to_be_hidden(timeout=PATIENCE_MS)


def test_a_key_changes_the_picture(visit, shared, generator):
    """What is shown is what its actions lead to; without the key it would be something else."""
    page = visit(shared.url)
    player = only_player(shared)
    wait_for_frames(page, 2)
    page.keyboard.press("KeyW")  # a key that is let go at once counts, too
    wait_until(lambda: "forward" in (record.action for record in player.session.history))
    page.keyboard.down("KeyW")
    text(page, "#hud-action", "^forward$")
    page.keyboard.press("KeyP")
    wait_until(lambda: player.paused and player not in shared.scheduler.served)
    text(page, "#context", rf"^frame {len(player.session.history)} of")
    shown = np.array(Image.open(io.BytesIO(b64decode(picture(page).partition(",")[2]))))[..., :3]
    document = page.request.get(f"{shared.url}/sessions/{player.id}/session.json").text()
    actions = [row["action"] for row in json.loads(document)["frames"]]
    assert set(actions) == {"none", "forward"}

    def last_picture(replace):
        saved = load_log(document, generator, shared.scheduler.scenes)
        session = Session(generator, saved)
        frames = [
            session.advance(replace.get(record.action, record.action), record.controls)
            for record in saved.history
        ]
        return (
            from_picture(to_jpeg(generator.tokenizer.decode(frames[-1])[0])).numpy().astype(float)
        )

    right, wrong = (abs(last_picture(r) - shown).mean() for r in ({}, {"forward": "none"}))
    assert right < 1  # one JPEG, two decoders
    assert wrong > 2


def test_switching_the_strategy_changes_the_steps_shown(page):
    for name, steps in (("raster", 15), ("k=4", 13), ("k=2", 9), ("k=1", 7)):
        page.get_by_role("button", name=name).click()
        text(page, "#steps", f"^{steps}$")
        expect(page.get_by_role("button", name=name)).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("KeyO")
    text(page, "#steps", "^15$")
    text(page, "#grid-caption", "15 steps, .* 1.0 tokens a step")


def test_the_whole_page_can_be_driven_by_keys(page):
    page.locator("#stage").focus()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("() => document.activeElement.id"))
    assert {"pause", "restart", "record", "save", "load", "temperature", "top-p", "seed"} <= reached
    page.locator("#temperature").focus()
    page.keyboard.press("Home")
    text(page, "#temperature-value", "0, greedy")
    wait_for_frames(page, 2)
    page.locator(".key").first.focus()
    page.keyboard.down("Enter")
    text(page, "#hud-action", "forward")
    page.keyboard.up("Enter")


def test_a_seed_can_be_typed_while_a_dream_plays_and_a_bad_one_gives_way(page, shared):
    seed = page.locator("#seed")
    seed.fill("4711")
    wait_for_frames(page, 3)
    expect(seed).to_have_value("4711")
    seed.press("Enter")
    player = only_player(shared)
    wait_until(lambda: player.session is not None and player.session.start.seed == 4711)
    page.click("#pause")
    seed.fill("1.5")
    page.click("#restart")
    text(page, "#toast", "A seed is a whole number from 0 to 4294967295")
    expect(seed).to_have_value("4711")
    wait_for_frames(page, 2)
    text(page, "#state", "^live$")


def test_a_button_whose_key_is_down_is_let_go_with_its_focus(page):
    page.locator(".key").first.focus()
    page.keyboard.down("Enter")
    text(page, "#hud-action", "forward")
    page.locator("#restart").focus()
    expect(page.locator("#hud-action")).to_be_hidden()
    page.keyboard.up("Enter")


def test_keys_have_the_letters_of_the_keyboard_that_is_here(visit, shared, browser):
    """A French one: what is W to the browser has Z on it. Shortcuts are letters, wherever."""
    page = visit(shared.url)
    page.add_init_script(
        "navigator.keyboard.getLayoutMap = async () => new Map([['KeyW', 'z'], ['KeyA', 'q']])"
    )
    page.reload()
    wait_for_frames(page, 1)
    text(page, ".key.forward kbd", "^Z ↑$")
    text(page, ".key.left kbd", "^Q ←$")
    text(page, ".key.right kbd", "^D →$")
    press = "(body, key) => body.dispatchEvent(new KeyboardEvent('keydown', key))"
    for letter, code, pressed in (("p", "KeyR", "true"), ("з", "KeyP", "false")):
        key = {"key": letter, "code": code, "bubbles": True}
        page.locator("body").evaluate(press, key)
        expect(page.locator("#pause")).to_have_attribute("aria-pressed", pressed)


def test_a_server_that_hangs_is_given_up(visit, shared, monkeypatch):
    """Twenty seconds go by at once, in which nothing comes: the dream is paused."""
    monkeypatch.setattr("diagd.web.play.scheduler.ALIVE_SECONDS", 1e9)
    page = visit(shared.url, quiet=False)
    page.clock.install()
    page.reload()
    wait_for_frames(page, 2)
    page.click("#pause")
    players = shared.scheduler.players
    wait_until(lambda: all(one.paused and one.seen == one.sent for one in players.values()))
    page.clock.fast_forward(20_100)
    text(page, "#toast", "Connected again")
    wait_for_frames(page, 2)


def test_the_recording_of_a_dream_that_was_lost_is_downloaded(visit, shared):
    page = visit(shared.url, quiet=False)
    sockets = []

    def connect(socket):
        socket.connect_to_server()
        sockets.append(socket)

    page.route_web_socket("**/play", connect)
    page.reload()
    wait_for_frames(page, 2)
    page.click("#record")
    text(page, "#hud-recording", r"REC (0\.[5-9]|[1-9]\.\d) s")
    with page.expect_download() as download:
        sockets[0].close()
    assert download.value.suggested_filename == "dream.mp4"
    text(page, "#toast", "Connected again")
    wait_for_frames(page, 2)


def test_a_picture_that_cannot_be_drawn_ends_the_dream_in_words(page, shared):
    player = only_player(shared)
    page.evaluate(
        """() => {
          const draw = createImageBitmap;
          createImageBitmap = () => {
            createImageBitmap = draw;
            return Promise.reject(new Error("no memory"));
          };
        }"""
    )
    text(page, "#curtain-text", r"^The picture could not be drawn \(no memory\)\.$")
    page.click("#again")
    wait_for_frames(page, 2)
    assert only_player(shared) is not player  # the old dream is given up


def test_a_page_that_is_opened_in_the_background_waits_to_be_seen(visit, shared):
    page = visit(shared.url)
    hide = "Object.defineProperty(document, 'hidden', { get: () => true })"
    page.add_init_script(hide)
    page.reload()
    text(page, "#state", "^live$")
    player = only_player(shared)
    wait_until(lambda: player.paused and player.seen == player.sent)
    expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("KeyA")
    wait_for_frames(page, 2)


def test_the_page_comes_back_when_the_server_does(visit, world):
    with serving(world) as served:
        port = served.port
        page = visit(served.url, quiet=False)
        wait_for_frames(page, 2)
        page.get_by_role("button", name="k=2").click()
        text(page, "#steps", "^9$")
    text(page, "#curtain-text", "connection to the server was lost")
    with serving(world, port=port):
        text(page, "#toast", "Connected again")
        wait_for_frames(page, 3)
        text(page, "#steps", "^9$")  # the controls have outlived the server
        expect(page.locator("#curtain")).to_be_hidden()


def test_a_recording_is_a_playable_mp4(page, tmp_path):
    page.click("#record")
    text(page, "#hud-recording", r"REC [1-9]\.\d s")
    with page.expect_download() as download:
        page.click("#record")
    assert download.value.suggested_filename == "dream.mp4"
    download.value.save_as(tmp_path / "dream.mp4")
    video = read_video(tmp_path / "dream.mp4")
    assert len(video.frames) >= 8
    assert video.frames.shape[1:] == (HEIGHT_PX, WIDTH_PX, 3)


def test_a_session_is_saved_and_replayed_exactly(visit, shared, tmp_path, monkeypatch):
    page = visit(shared.url)
    wait_for_frames(page, 3)
    page.keyboard.press("KeyA")
    wait_for_frames(page, 3)
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(tmp_path / "dream.json")
    count = len(json.loads((tmp_path / "dream.json").read_text())["frames"])
    page.set_input_files("#load-file", tmp_path / "dream.json")
    text(page, "#toast", f"Replayed {count} frames, every token as it was")
    # again: frames of the first replay go on to come, until the second one begins
    begin, held = shared.scheduler.begin, []
    monkeypatch.setattr(shared.scheduler, "begin", lambda *given: held.append(given))
    page.set_input_files("#load-file", tmp_path / "dream.json")
    text(page, "#toast", f"Replaying {count} frames")
    wait_for_frames(page, 3)
    expect(page.locator("#toast")).to_have_text(f"Replaying {count} frames")
    shared.server.servers[0].get_loop().call_soon_threadsafe(begin, *held.pop())
    text(page, "#toast", f"Replayed {count} frames, every token as it was")


def test_a_dream_is_shared_as_a_link_and_a_picture_of_one_s_own_is_not(visit, shared, tmp_path):
    page = visit(shared.url, quiet=False)
    wait_for_frames(page, 2)
    page.get_by_role("button", name="Start 3").click()
    page.keyboard.down("KeyA")
    wait_for_frames(page, 5)
    page.click("#pause")
    page.get_by_role("button", name="Copy a link").click()
    wait_until(lambda: "#dream=" in page.evaluate("location.hash"))
    page.reload()
    text(page, "#toast", r"^Replayed \d+ frames, every token as it was\.$")
    expect(page.locator("#scenes [aria-pressed=true]")).to_have_text("3 view 4")
    page.evaluate("location.hash = '#dream=AAAA'")  # pasted over it
    text(page, "#toast", "^That did not work: not a saved dream: Input should be an object")
    write_image(tmp_path / "view.png", smooth_frames(1, 60, 90, seed=9)[0])
    page.set_input_files("#upload-file", tmp_path / "view.png")
    text(page, "#toast", "begins in your picture")
    page.get_by_role("button", name="Copy a link").click()
    text(page, "#toast", "^That did not work: a dream that begins in a picture of your own has no")


def test_engines_of_one_server_read_each_other_s_dreams(visit, world, tmp_path):
    with serving(world, dtype="int8") as served:
        pages = [visit(served.url + query, quiet=False) for query in ("", "?engine=browser")]
        for page, other in (pages, pages[::-1]):
            wait_for_frames(page, 2)
            page.get_by_role("button", name="Start 2").click()
            page.keyboard.down("KeyD")
            wait_for_frames(page, 4)
            page.click("#pause")
            with page.expect_download() as download:
                page.click("#save")
            download.value.save_as(tmp_path / "dream.json")
            other.set_input_files("#load-file", tmp_path / "dream.json")
            text(other, "#toast", r"^Replayed \d+ frames, every token as it was\.$")
        document = json.loads((tmp_path / "dream.json").read_text())
        assert document["scene"] == "view 3"
        for change, said in (
            ({"format": "diagd-session-2"}, "got 'diagd-session-2' (of another version of diagd)"),
            ({"model": "maze"}, "a dream of the world 'maze', not of"),
        ):
            (tmp_path / "other.json").write_text(json.dumps(document | change))
            for page in pages:
                page.set_input_files("#load-file", tmp_path / "other.json")
                expect(page.locator("#toast")).to_contain_text(said)
        for page in pages:  # before the server goes, of which they complain
            page.close()


def test_a_number_of_frames_is_shown_where_there_is_one(visit, shared):
    page = visit(shared.url)
    page.add_init_script(
        """new MutationObserver(() => {
          for (const id of ["hud-fps", "fps"]) {
            const text = document.getElementById(id)?.textContent ?? "";
            if (/^0(\\.0+)?( |$)/.test(text)) document.title = "zero";
          }
        }).observe(document, { childList: true, subtree: true, characterData: true });"""
    )
    page.reload()
    text(page, "#hud-fps", r"^\d+\.\d frames/s$")
    page.click("#pause")
    text(page, "#hud-fps", "^paused$")
    text(page, "#fps", "^-$")
    page.wait_for_timeout(1200)  # in which what was under way arrives, and the page looks again
    text(page, "#hud-fps", "^paused$")
    expect(page.locator("#pause")).to_have_text("Resume")
    assert page.title() == "diagd play"


def test_the_page_fills_the_screen(visit, shared):
    page = visit(shared.url)
    wait_for_frames(page, 1)
    page.get_by_role("button", name="Full screen").click()
    leave = page.get_by_role("button", name="Leave full screen")
    expect(leave).to_be_visible()
    stage, window = page.locator(".stage").bounding_box(), page.viewport_size
    assert (stage["width"], stage["height"]) == (window["width"], window["height"])
    page.keyboard.press("KeyP")
    text(page, "#hud-fps", "^paused$")
    leave.click()
    expect(page.get_by_role("button", name="Full screen", exact=True)).to_be_visible()
    page.keyboard.press("KeyP")


def test_a_picture_of_one_s_own_and_one_that_is_none(visit, shared, tmp_path):
    write_image(tmp_path / "view.png", smooth_frames(1, 60, 90, seed=9)[0])
    (tmp_path / "fake.png").write_text("no picture")
    page = visit(shared.url, quiet=False)
    wait_for_frames(page, 1)
    page.set_input_files("#upload-file", tmp_path / "view.png")
    text(page, "#toast", "begins in your picture")
    expect(page.locator("#scenes .upload")).to_have_attribute("aria-pressed", "true")
    page.set_input_files("#upload-file", tmp_path / "fake.png")
    text(page, "#toast", "That did not work: expected a PNG, JPEG, WebP or BMP image")
    wait_for_frames(page, 2)


def test_two_pages_play_at_once_and_a_third_is_told_why_not(visit, world):
    with serving(world, max_sessions=2) as served:
        pages = [visit(served.url), visit(served.url)]
        for page in pages:
            wait_for_frames(page, 3)
        pages[0].get_by_role("button", name="k=2").click()
        text(pages[0], "#steps", "^9$")
        text(pages[1], "#steps", "^7$")
        third, fourth = visit(served.url), visit(served.url)
        text(fourth, "#curtain-text", "^All 2 places are taken: 1 before you.$")
        text(fourth, "#state", "^waiting for a place$")
        fourth.keyboard.press("KeyA")  # harms nothing
        pages[0].close()
        wait_for_frames(third, 2)  # its turn has come
        expect(third.locator("#curtain")).to_be_hidden()
        text(fourth, "#curtain-text", "you are next")
        for page in (fourth, third, pages[1]):  # before the server goes, of which they complain
            page.close()


def test_an_end_is_told_in_words_and_a_button_begins_again(page, shared):
    player = only_player(shared)
    page.click("#record")
    text(page, "#hud-recording", r"REC (0\.[5-9]|[1-9]\.\d) s")
    loop = shared.server.servers[0].get_loop()
    loop.call_soon_threadsafe(shared.scheduler.end, player, "The dream is over.")
    text(page, "#curtain-text", "The dream is over.")
    for button, name in (("#keep-video", "dream.mp4"), ("#keep-session", "dream.json")):
        with page.expect_download() as download:
            page.click(button)
        assert download.value.suggested_filename == name
    page.click("#again")
    wait_for_frames(page, 2)


@pytest.fixture(scope="module")
def shaped(tmp_path_factory):
    """Serve worlds of other shapes, by (height, width) in tokens."""
    with contextlib.ExitStack() as stack:

        @cache
        def serve(*shape):
            folder = write_world(tmp_path_factory.mktemp("shaped"), 1, *shape)
            return stack.enter_context(serving(write_scenes(folder, *shape)))

        yield serve


def boxes(page, *selectors):
    return [page.locator(selector).first.bounding_box() for selector in selectors]


@pytest.mark.parametrize("shape", [(8, 8), (12, 8), (3, 24)], ids=["square", "tall", "wide"])
def test_picture_and_keys_fit_into_the_window(shape, visit, shaped):
    page = visit(shaped(*shape).url)
    wait_for_frames(page, 1)
    for window in ((1280, 720), (1440, 900), (390, 844), (844, 390)):
        page.set_viewport_size({"width": window[0], "height": window[1]})
        stage, pad = boxes(page, ".stage", "#pad")
        for box in (stage, pad):
            assert min(box["x"], box["y"]) >= 0
            assert box["x"] + box["width"] <= window[0]
            assert box["y"] + box["height"] <= window[1]
        assert min(stage["width"], stage["height"]) >= 120
        ratio = shape[1] / shape[0]  # the box has the picture's shape, unless it is too flat
        assert stage["width"] / stage["height"] == pytest.approx(ratio, rel=0.01) or ratio == 8
        on_its_side = window[1] < 480
        assert stage["y"] + stage["height"] <= pad["y"] or on_its_side
        assert pad["x"] + pad["width"] <= stage["x"] or not on_its_side
        assert page.locator("html").evaluate("page => page.scrollWidth") <= window[0]


@pytest.mark.parametrize("shape", [(8, 8), (12, 8), (3, 24)], ids=["square", "tall", "wide"])
def test_a_phone_shows_picture_keys_scenes_strategies_tokens_in_this_order(shape, visit, shaped):
    page = visit(shaped(*shape).url, viewport={"width": 390, "height": 844}, has_touch=True)
    wait_for_frames(page, 1)
    column = boxes(page, ".stage", "#pad", "#scenes", "#strategies", "#grid", ".readings")
    for above, below in itertools.pairwise(column):
        assert above["y"] + above["height"] <= below["y"]
    grid = column[4]
    assert grid["width"] / grid["height"] == pytest.approx(shape[1] / shape[0], rel=0.1)


@pytest.mark.parametrize("widths", [(320, 390), (768, 1440)], ids=["thumbs", "mouse"])
def test_nothing_sticks_out_at_any_width(widths, visit, shared):
    page = visit(shared.url, has_touch=widths[0] < 500)
    wait_for_frames(page, 1)
    for width in widths:
        page.set_viewport_size({"width": width, "height": 800})
        assert page.locator("html").evaluate("page => page.scrollWidth") <= width
        if width < 500:
            box = page.locator(".key").first.bounding_box()
            assert min(box["width"], box["height"]) >= 48  # a thumb
            page.locator(".key.left").dispatch_event("pointerdown", {"pointerId": 1})
            text(page, "#hud-action", "left")
            page.locator(".key.left").dispatch_event("pointerup", {"pointerId": 1})
            expect(page.locator("#hud-action")).to_be_hidden()
