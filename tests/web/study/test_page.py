"""The page in a real browser: needs Chromium and playwright, and says so where they are missing."""

import re

import pytest

from tests.web.proxy import proxied
from tests.web.study.cases import study, write_pairs

LEFT = """() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 8;
  const pen = canvas.getContext("2d");
  pen.drawImage(document.getElementById("left"), 0, 0, 8, 8);
  const [red, , blue] = pen.getImageData(4, 4, 1, 1).data;
  return red + blue > 100 && (red > blue ? "red" : "blue");  // black before a frame is shown
}"""


@pytest.fixture
def page(browser):
    """Yield a page in a window of its own; errors on its console fail the test."""
    context = browser.new_context(viewport={"width": 390, "height": 780})
    opened = context.new_page()
    opened.set_default_timeout(60_000)  # the machine may be busy
    complaints, foreign = [], []
    opened.on("console", lambda said: complaints.append(said.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: foreign.append(request.url))
    yield opened
    context.close()
    assert complaints == getattr(opened, "expected_complaints", [])
    assert all(re.match(r"(http://127\.0\.0\.1|blob:http://127|data:,)", url) for url in foreign)


def enter(page, address, name=""):
    page.goto(address)
    page.wait_for_selector("#welcome:visible")
    page.keyboard.type(name)  # the field has the focus
    page.keyboard.press("Enter")
    page.wait_for_selector("#answers button:enabled")


def is_red_left(page):
    return page.wait_for_function(LEFT).json_value() == "red"


def step(page):
    return page.inner_text("#step") if page.is_visible("#trial") else "done"


def press(page, key):
    """Press a key, and wait until another question is asked and can be answered."""
    before = step(page)
    page.keyboard.press(key)
    page.wait_for_function(
        "before => document.getElementById('step').textContent !== before"
        " || !document.getElementById('done').hidden",
        arg=before,
    )
    if step(page) != "done":
        page.wait_for_selector("#answers button:enabled")


def test_a_study_is_answered_by_keyboard_and_the_counts_are_right(page, tmp_path):
    """For quality always the red video, for consistency neither, then always the blue one."""
    with study(write_pairs(tmp_path)) as (address, store):
        enter(page, address, "ann")
        for _ in range(3):
            red_is_left = is_red_left(page)
            press(page, "1" if red_is_left else "3")
            press(page, "ArrowDown")
            press(page, "ArrowRight" if red_is_left else "ArrowLeft")
        assert page.inner_text("#summary") == "All 9 answers are saved."
        results = store.results()
        cells = results["comparisons"][0]["questions"]
        assert results["comparisons"][0]["first"] == "k=1"  # the red one
        assert cells["quality"]["raters"]["ann"]["win"] == cells["quality"]["overall"]["total"] == 3
        assert cells["consistency"]["overall"]["tie"] == 3
        assert cells["controllability"]["overall"]["lose"] == 3
        page.goto(f"{address}/results?key={store.results_key}")
        bars = page.locator("svg.bar").evaluate_all("all => all.map(one => one.ariaLabel)")
        assert bars == ["3 win, 0 tie, 0 lose", "0 win, 3 tie, 0 lose", "0 win, 0 tie, 3 lose"]


def test_a_rater_goes_back_and_changes_an_answer(page, tmp_path):
    with study(write_pairs(tmp_path, 1)) as (address, store):
        enter(page, address)
        assert page.is_disabled("#back")
        press(page, "1")
        press(page, "b")
        assert page.get_attribute("[data-choice=left]", "aria-pressed") == "true"
        press(page, "2")
        assert [vote.outcome for vote in store.votes()] == ["tie"]
        assert step(page) == "Pair 1 of 1, question 2 of 3"


def test_a_rater_goes_on_where_they_stopped(browser, page, tmp_path):
    """After a reload; in another browser the same name is another rater."""
    with study(write_pairs(tmp_path)) as (address, store):
        enter(page, address, "ann")
        for key in "1231":
            press(page, key)
        assert step(page) == "Pair 2 of 3, question 2 of 3"
        page.reload()
        page.wait_for_selector("#answers button:enabled")
        assert step(page) == "Pair 2 of 3, question 2 of 3"
        elsewhere = browser.new_context()
        other = elsewhere.new_page()
        enter(other, address, "Ann")
        assert step(other) == "Pair 1 of 3, question 1 of 3"
        elsewhere.close()
        assert len(store.votes()) == 4


def test_both_videos_loop_in_step_with_the_actions(page, tmp_path):
    with study(write_pairs(tmp_path, 1)) as (address, _):
        enter(page, address)
        page.wait_for_selector("#actions li.now")  # the videos are there
        page.evaluate(
            """() => {
              window.seen = { apart: [], times: [], actions: new Set() };
              const watch = () => {
                const [left, right] = document.querySelectorAll("video");
                const apart = Math.abs(left.currentTime - right.currentTime);
                if (!left.paused && !right.paused) seen.apart.push(apart);
                seen.times.push(left.currentTime);
                seen.actions.add(document.querySelector("#actions li.now").title);
                requestAnimationFrame(watch);
              };
              watch();
            }"""
        )
        page.wait_for_function(
            "() => seen.times.filter((time, i) => i && time < seen.times[i - 1]).length >= 2"
        )
        apart, actions = page.evaluate("() => [seen.apart, [...seen.actions]]")
        assert sorted(apart)[len(apart) // 2] < 1 / 12  # seconds; a frame
        assert set(actions) == {"none", "forward", "forward+left", "left"}
        page.keyboard.press("p")
        assert page.evaluate(
            "() => [...document.querySelectorAll('video')].map(v => v.paused)"
        ) == [True, True]
        assert page.inner_text("#pause span") == "Play"


def test_a_rater_who_comes_back_to_a_server_that_was_away_is_not_enrolled_again(page, tmp_path):
    with study(write_pairs(tmp_path)) as (address, store):
        enter(page, address, "ann")
        press(page, "1")
        page.route("**/api/study", lambda route: route.abort())
        page.reload()
        page.wait_for_selector("#error:visible")
        page.unroute("**/api/study")
        page.keyboard.press("Enter")
        page.wait_for_selector("#answers button:enabled")
        assert step(page) == "Pair 1 of 3, question 2 of 3"
        press(page, "2")
        assert len({vote.rater for vote in store.votes()}) == 1
        page.expected_complaints = ["Failed to load resource: net::ERR_FAILED"]


def test_an_answer_that_is_not_saved_is_said_in_words_and_asked_again(page, tmp_path):
    """The server is away, comes back on the same port, and the rater goes on."""
    with study(write_pairs(tmp_path, 1)) as (address, store):
        page.route("**/api/answers", lambda route: route.abort())  # holds from the next page on
        enter(page, address)
        page.keyboard.press("1")
        page.wait_for_selector("#error:visible")
        words = "Not saved: The server does not answer. Try again in a moment."
        assert page.inner_text("#error") == words
        assert store.votes() == []
        page.unroute("**/api/answers")
        press(page, "1")
        assert page.is_hidden("#error")
        assert len(store.votes()) == 1
        page.expected_complaints = ["Failed to load resource: net::ERR_FAILED"]


def test_a_study_is_answered_below_the_path_of_a_proxy(page, tmp_path):
    with (
        study(write_pairs(tmp_path, 1)) as (address, store),
        proxied(address.removeprefix("http://")) as below,
    ):
        enter(page, below)
        assert page.evaluate("document.styleSheets[0].cssRules.length") > 9
        press(page, "1")
        assert len(store.votes()) == 1
        page.goto(f"{below}results?key={store.results_key}")
        assert page.evaluate("document.styleSheets[0].cssRules.length") > 9
