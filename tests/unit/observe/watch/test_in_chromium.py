"""The pages of `hybridflow watch` in a browser: at three widths, in light and dark colours, by
keyboard alone, and while the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybridflow.observe.rollouts import dump_path, dump_rollouts
from hybridflow.observe.tracker import Tracker
from hybridflow.observe.watch.pages import Pages, Watched
from hybridflow.observe.watch.server import WatchServer
from tests.unit.observe.watch.chromium import Chromium, chromium, is_installed
from tests.unit.observe.watch.recorded_run import (
    DUMPED,
    NEEDLE,
    PROMPTS,
    STEPS,
    metrics,
    record,
    samples,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="Chromium is not installed"),
]
WIDTHS = (390, 820, 1440)
PAGES = {
    "": "#alarms .alarm, #charts svg",
    "rollouts": "table.results tbody tr",
    f"rollouts?text={NEEDLE}": "mark",
    f"rollouts?group=none&to_step={STEPS}": ".error",
    f"group?kind=rollouts&step={STEPS}&uid=0": "article .tokens span.more5",
    f"sample?kind=rollouts&step={STEPS}&row=1": ".turn.tool",
    "compare": "#content svg",
    "answers?show=all": "table.results tbody tr",
    "sample?kind=rollouts&step=7&row=1": "#content h2",
}
FOCUSED = "document.activeElement"
FOCUSABLE = "#content a, #content input, #content select, #content button, #content summary, nav a"
CONTRAST = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("profile") / "chromium") as started:
        yield started


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return record(folder / "first", "first"), record(folder / "second", "second", 0.9)


@pytest.fixture(scope="module")
def address(runs: tuple[Path, Path]) -> Iterator[str]:
    with served(*runs) as found:
        yield found


@contextmanager
def served(run: Path, other: Path) -> Iterator[str]:
    both = [Watched.of(path) for path in (run, other)]
    for one in both:
        list(one.index.refresh())
    server = WatchServer(Pages(*both), 0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server.address
    finally:
        server.close()
        thread.join(10)


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_and_its_text_can_be_read(
    browser: Chromium, address: str, width: int, is_dark: bool
) -> None:
    browser.window(width, is_dark)
    browser.complaints.clear()
    browser.open(address + "rollouts")
    over_steps = browser.value("document.querySelector('a[href^=prompt]').getAttribute('href')")
    for page, part in {**PAGES, over_steps: "table.results tbody tr"}.items():
        browser.open(address + page)
        assert browser.value(f"document.querySelectorAll({part!r}).length") > 0, page
        assert browser.value("document.documentElement.scrollWidth") == width, page
        found = browser.value(CONTRAST)
        assert found["texts"] > 8 and found["low"] == {}, (page, found["low"])
        is_shown = "window.matchMedia('(prefers-color-scheme: dark)').matches"
        assert browser.value(is_shown) == is_dark
    [missing] = browser.complaints  # the page of a sample that does not exist
    assert "404" in missing


@pytest.mark.parametrize("page", ["rollouts", "compare", "answers", ""])
def test_the_tab_key_reaches_everything_in_order_and_shows_where_it_is(
    browser: Chromium, address: str, page: str
) -> None:
    browser.window(820, False)
    browser.open(address + page)
    browser.value(f"window.all = [...document.querySelectorAll({FOCUSABLE!r})]")
    count = browser.value("all.length")
    reached = []
    browser.press("Tab")
    assert browser.value(f"{FOCUSED}.className") == "skip"
    while len(reached) < count:
        browser.press("Tab")
        style = f"getComputedStyle({FOCUSED})"
        name = browser.value(f"{FOCUSED}.outerHTML.slice(0, 80)")
        assert browser.value(f"{style}.outlineStyle") != "none", name
        assert browser.value(f"parseFloat({style}.outlineWidth)") >= 1, name
        assert browser.value(f"{FOCUSED}.getBoundingClientRect().top") < 900, name  # in the window
        at = browser.value(f"all.indexOf({FOCUSED})")
        assert at >= 0 or browser.value(f"{FOCUSED}.matches('pre, [tabindex=\"0\"]')"), name
        reached += [at] if at >= 0 else []
    assert reached == list(range(count))


def test_a_search_by_keyboard_finds_its_rows(browser: Chromium, address: str) -> None:
    browser.window(1440, False)
    browser.open(address)
    browser.follow(lambda: browser.press("/"))  # to the page of samples
    browser.press("/")
    assert browser.value(f"{FOCUSED}.name") == "text"
    browser.type(NEEDLE.lower())
    browser.follow(lambda: browser.press("Enter"))
    found = browser.value(
        "[...document.querySelectorAll('tbody tr')].map((row) =>"
        " [row.querySelector('a').innerText, row.querySelector('mark').innerText])"
    )
    assert found == [[f"rollouts {step}", NEEDLE] for step in reversed(DUMPED)]
    assert browser.value("document.querySelector('#content > p.muted').innerText").startswith(
        f"{len(DUMPED)} of "
    )
    browser.open(address + "rollouts")  # pages of results, then groups, with the arrow keys
    for key, page in (("ArrowRight", "page 2 of 3"), ("ArrowLeft", "page 1 of 3")):
        browser.follow(lambda key=key: browser.press(key))
        assert page in browser.value("document.getElementById('content').innerText")
    browser.open(address + f"group?kind=rollouts&step={STEPS}&uid=1")
    browser.follow(lambda: browser.press("ArrowRight"))
    assert browser.value("document.querySelector('h2').innerText").startswith("Group 2 of")


def test_two_runs_are_compared_by_keyboard(browser: Chromium, address: str) -> None:
    browser.window(1440, True)
    browser.open(address)
    tab_to(browser, "innerText", "Compare")
    browser.follow(lambda: browser.press("Enter"))
    text = browser.value("document.getElementById('content').innerText")
    assert "actor.optim.lr\t5e-06\t9e-06" in text
    tab_to(browser, "innerText", "Answers of both")
    browser.follow(lambda: browser.press("Enter"))
    tab_to(browser, "name", "show")
    for _ in range(10):
        if browser.value(f"{FOCUSED}.value") == "all":
            break
        browser.press("ArrowDown")
    tab_to(browser, "innerText", "Show")
    browser.follow(lambda: browser.press("Enter"))
    assert browser.value("document.querySelectorAll('tbody tr').length") == len(PROMPTS)
    assert browser.value("document.querySelectorAll('tbody td:nth-child(3) pre').length") == 4


def tab_to(browser: Chromium, name: str, value: str) -> None:
    """Press Tab until the focused element has this property."""
    for _ in range(60):
        browser.press("Tab")
        if browser.value(f"{FOCUSED}.{name}") == value:
            return
    pytest.fail(f"the Tab key does not reach {value}")


def test_a_new_step_appears_without_a_reload_and_an_ended_server_is_told(
    browser: Chromium, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    run = record(tmp_path / "live", "live")
    browser.window(820, False)
    with served(run, runs[1]) as address:
        browser.open(address)
        browser.value("window.kept = true; document.querySelector('summary').focus()")
        browser.press("Enter")  # closes the configuration
        assert browser.value("document.querySelector('details').open") is False
        assert f"step {STEPS} of" in text_of(browser, "status")
        with Tracker(run, ("jsonl",)) as tracker:
            tracker.log(STEPS + 1, metrics(STEPS + 1))
        later = STEPS + 1
        dump_rollouts(dump_path(run / "rollouts", later), samples(later, 1))
        browser.wait(lambda: f"step {later} of" in text_of(browser, "status"), "the step is shown")
        is_drawn = f"[...document.querySelectorAll('#charts svg')].some((one) => JSON.parse(one.dataset.hover).x.includes({later}))"
        browser.wait(lambda: browser.value(is_drawn), "it is in the charts")
        browser.wait(lambda: "64 samples" in text_of(browser, "alive"), "its dump is indexed")
        assert browser.value("window.kept") is True  # the same page
        assert browser.value(f"{FOCUSED}.tagName") == "SUMMARY"
        assert browser.value("document.querySelector('details').open") is False
    browser.wait(lambda: "has ended" in text_of(browser, "alive"), "the page says so")


def text_of(browser: Chromium, name: str) -> str:
    return browser.value(f"document.getElementById({name!r}).innerText")
