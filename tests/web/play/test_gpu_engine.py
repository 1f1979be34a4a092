"""A GPU that writes the frames of a page: it draws what Python draws; when it is taken, and lost.

The GPU is Chromium's SwiftShader, which computes on the processor: it is slow, and so are these.
"""

import dataclasses
import itertools
import json

import pytest

from diagd.data.actions import ActionVocabulary
from diagd.families.checkpoints import save_model
from tests.browser import ON_CPU, open_browser
from tests.models.tiny import with_int8_weights
from tests.web.play.serving import wait_until
from tests.web.play.test_browser_engine import checksums, dream_of, each
from tests.worlds import (
    CONTEXT_FRAMES,
    NAMES,
    model_config,
    random_model,
    tokenizer,
    write_scenes,
)

pytestmark = pytest.mark.slow
PATIENCE_MS = 300_000

# Keeps the device of the page's worker where a test can reach it.
REMEMBER = """
const request = GPUAdapter.prototype.requestDevice;
GPUAdapter.prototype.requestDevice = async function (asked) {
  return (globalThis.device = await request.call(this, asked));
};
"""
# A processor that needs so many milliseconds for a frame.
SLOW = """
const instantiate = WebAssembly.instantiate;
WebAssembly.instantiate = async (...given) => {
  const { exports } = await instantiate(...given);
  const advance = (...order) => {
    for (const end = performance.now() + MS; performance.now() < end;);
    return exports.advance(...order);
  };
  return { exports: { ...exports, advance } };
};
"""


@pytest.fixture(scope="module")
def browser():
    with open_browser(*ON_CPU) as browser:
        yield browser


def write(folder, change=lambda model: model):
    """Write a world whose sizes are no multiples of the kernels' blocks, or of tiles."""
    config = dataclasses.replace(model_config(), hidden_size=24, intermediate_size=40, qk_norm=True)
    save_model(change(random_model(config)), folder)
    tokenizer().save_pretrained(folder / "tokenizer")
    ActionVocabulary(NAMES).save(folder / "actions.json")
    return write_scenes(folder)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Export the world, and host it as anybody does; returns its address."""
    from runs.browser import hosted  # which needs playwright

    with hosted(str(write(tmp_path_factory.mktemp("small") / "world"))) as address:
        yield address


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """Return the same world with the weights that 8 bits keep."""
    return write(tmp_path_factory.mktemp("rounded") / "world", with_int8_weights)


@pytest.fixture
def visit(visit):
    """Open pages, whose worker runs a script first."""

    def opened(url, prelude=""):
        page = visit("about:blank", quiet=False, service_workers="block")
        page.set_default_timeout(PATIENCE_MS)

        def answer(route):
            found = route.fetch()
            route.fulfill(response=found, body=prelude + found.text())

        page.route("**/worker.js", answer)
        page.goto(url)
        return page

    return opened


def wait_for(page, frames):
    page.wait_for_function(f"Number(document.body.dataset.frames ?? 0) >= {frames}")


def wait_for_engine(page, engine):
    page.wait_for_function(f"document.querySelector('#computed').textContent.includes({engine!r})")


def engines(dream):
    """Return the engines of a dream's frames, each as often as it follows another."""
    written = [frame.get("engine", "wasm") for frame in dream["frames"]]
    return [engine for engine, _ in itertools.groupby(written)]


def replayed(visit, site, tmp_path, dream):
    """Load a dream into another page, and return the toast that says how it came out."""
    page, path = visit(site), tmp_path / "dream.json"
    wait_for(page, 1)
    path.write_text(json.dumps(dream))
    page.locator("#load-file").set_input_files(path)
    page.wait_for_function("document.querySelector('#toast').textContent.startsWith('Replayed')")
    return page.locator("#toast").inner_text()


def test_frames_are_those_of_python_beyond_a_full_context(visit, site, rounded):
    page = visit(site + "?engine=webgpu&threads=2")
    wait_for(page, 4)
    page.keyboard.down("KeyW")
    page.keyboard.press("o")  # another strategy
    wait_for(page, 8)
    page.keyboard.press("o")
    wait_for(page, CONTEXT_FRAMES + 4)
    dream = dream_of(page)
    assert engines(dream) == ["webgpu"]
    assert len({chosen["strategy"] for chosen in each(dream, "controls")}) > 1
    assert len(set(each(dream, "action"))) > 1
    assert each(dream, "checksum") == list(checksums(rounded, dream, dtype="float32"))


def test_a_link_plays_what_the_gpu_wrote_again(visit, site):
    page = visit(site + "?engine=webgpu")
    wait_for(page, 3)
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Copy a link").click()
    page.wait_for_function("location.hash.startsWith('#dream=')")
    link = page.evaluate("location.hash")
    again = visit(site + link)  # nothing in the address says which engine: the dream does
    again.wait_for_function("document.querySelector('#toast').textContent.includes('Replayed')")
    assert "every token as it was" in again.locator("#toast").inner_text()


def test_a_gpu_that_is_faster_goes_on_with_the_dream(visit, site, tmp_path):
    page = visit(site, SLOW.replace("MS", "2500"))
    wait_for(page, 1)
    assert "1 thread" in page.locator("#computed").inner_text()
    wait_for_engine(page, "GPU")
    wait_for(page, 3 + int(page.get_attribute("body", "data-frames")))
    dream = dream_of(page)
    assert engines(dream) == ["wasm", "webgpu"]
    assert "every token as it was" in replayed(visit, site, tmp_path, dream)


def test_a_gpu_that_is_slower_is_given_back_and_nothing_is_said(visit, site):
    page = visit(site, REMEMBER)
    wait_for(page, 1)
    (worker,) = page.workers
    wait_until(lambda: worker.evaluate("Boolean(globalThis.device)"))
    assert worker.evaluate("device.lost.then(({ reason }) => reason)") == "destroyed"
    wait_for(page, 5 + int(page.get_attribute("body", "data-frames")))
    assert "1 thread" in page.locator("#computed").inner_text()
    assert page.locator("#toast").inner_text() == ""
    assert engines(dream_of(page)) == ["wasm"]


@pytest.mark.parametrize("how", ["device.destroy()", "crash"])
def test_a_gpu_that_is_lost_is_a_sentence_and_the_dream_goes_on(visit, site, tmp_path, how):
    page = visit(site + "?engine=webgpu", REMEMBER)
    wait_for(page, 2)
    if how == "crash":  # as a driver does
        page.context.browser.new_browser_cdp_session().send("Browser.crashGpuProcess")
    else:
        page.workers[0].evaluate(how)  # in the middle of a frame: one follows the other
    page.wait_for_function("document.querySelector('#toast').textContent.includes('GPU was lost')")
    wait_for_engine(page, "1 thread")
    wait_for(page, 3 + int(page.get_attribute("body", "data-frames")))
    dream = dream_of(page)
    assert engines(dream) == ["webgpu", "wasm"]
    assert "every token as it was" in replayed(visit, site, tmp_path, dream)


def test_a_gpu_that_draws_no_tokens_is_lost(visit, site):
    page = visit("about:blank")
    page.route(
        "**/webgpu.bin*",
        lambda route: route.fulfill(
            response=(found := route.fetch()), body=b"\0\0\xc0\x7f" * (len(found.body()) // 4)
        ),
    )
    page.goto(site + "?engine=webgpu")
    page.wait_for_function("document.querySelector('#toast').textContent.includes('GPU was lost')")
    assert "its numbers are broken" in page.locator("#toast").inner_text()
    wait_for(page, 3)
