"""A GPU that writes the frames of a page: what it draws is what Python draws; when it is taken, and lost.

The GPU is Chromium's SwiftShader, which computes on the processor: it is slow, and so are these.
"""

import dataclasses
import os
import shutil

import pytest

from diagd.data.actions import ActionVocabulary
from diagd.decoding.strategies.table import parse_strategy
from diagd.families.checkpoints import save_model
from diagd.pipeline.generator import VideoGenerator
from diagd.web.play.session import Controls, Session, SessionStart, checksum_of
from diagd.web.play.welcome import start_scenes
from tests.models.tiny import with_int8_weights
from tests.web.play.serving import wait_until
from tests.worlds import NAMES, model_config, random_model, tokenizer, write_scenes

playwright = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[test]'")
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
    """Start the system's Chromium with WebGPU on its CPU, or skip the test."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("NO BROWSER TESTS: no chromium found (apt-get install chromium)")
    arguments = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        arguments.append("--no-sandbox")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=arguments)
        yield browser
        browser.close()


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
def visit(browser):
    """Open pages, whose worker runs a script first; they must not complain."""
    contexts, complaints = [], []

    def visit(url, prelude=""):
        contexts.append(browser.new_context(service_workers="block"))
        contexts[-1].set_default_timeout(PATIENCE_MS)
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))

        def answer(route):
            found = route.fetch()
            route.fulfill(response=found, body=prelude + found.text())

        page.route("**/worker.js", answer)
        page.goto(url)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not complaints


def wait_for(page, frames):
    page.wait_for_function(f"Number(document.body.dataset.frames ?? 0) >= {frames}")


def dream_of(page):
    page.get_by_role("button", name="Pause").click()
    page.wait_for_timeout(500)
    return page.evaluate(
        "new Promise((resolve) => import('./static/play.js').then(({ connection }) => resolve(connection)))"
    )
