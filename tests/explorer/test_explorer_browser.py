"""The explorer in a real browser: every control, hostile text, accessibility, light, dark and on a phone. ``make test-browser``."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from chromium import AXE, BROWSER_TESTS, needs_axe
from explorer_browser import Page
from explorer_runs import PATIENCE, SOON, Written, numbered, samples
from report_hostile import SETS, hostile_run
from report_payloads import PAYLOADS
from report_stories import tell_story

pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium, or make test-browser")
pytest.importorskip("uvicorn", reason="no uvicorn: pip install 'inrun[serve]'")
pytestmark = BROWSER_TESTS
VIEWS = ("samples", "pair", "groups", "runs")


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def browser(downloads):
    opened = Page(downloads)
    yield opened
    opened.driver.quit()


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    from explorer_serving import TOKEN, serving

    folder = tmp_path_factory.mktemp("browser")
    first = tell_story(folder / "python-texts")
    second = tell_story(folder / "again", steps=200, folds=1)
    with serving(first, second) as (address, found):
        yield address, TOKEN, found


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    from explorer_serving import TOKEN, serving

    folder = tmp_path_factory.mktemp("browser")
    names = ("<img src=x onerror=window.__pwned=1>", "'\"><script>window.__pwned=1<script>")
    with serving(*(hostile_run(folder / name) for name in names)) as (address, found):
        yield address, TOKEN, found


def rows(browser):
    return browser.run("return [...document.querySelectorAll('#list .sample')].map((e) => e.innerText)")


def test_token_leaves_the_address_and_stays_known(browser, story):
    address, token, _ = story
    browser.open(address, token)
    assert token not in browser.driver.current_url
    assert browser.run("return document.cookie") == ""  # scripts cannot read it
    browser.driver.refresh()
    browser.wait("return document.documentElement.dataset.ready === 'yes'")
    assert len(rows(browser)) == 25
    browser.check_quiet(address)


def test_wrong_token_shows_nothing(browser, story):
    address, _, _ = story
    browser.driver.delete_all_cookies()
    browser.driver.get(f"{address}/?token=wrong")
    assert "needs the token" in browser.find("body").text and not browser.all("script")


def test_every_control_of_the_samples(browser, story):
    address, token, _ = story
    browser.open(address, token)
    first = rows(browser)
    browser.pick("set", "docs")
    assert rows(browser) != first
    browser.choose("order", "up")
    assert "−" in rows(browser)[0]
    browser.pick("sort", "times used")
    browser.pick("limit", "100")
    assert len(rows(browser)) == 100
    browser.click("#next")
    assert browser.find("#count").text.startswith("101–200 of 1,200")
    browser.click("#next-below")
    browser.click("#previous")
    browser.click("#first")
    assert browser.find("#count").text.startswith("1–100") and not browser.find("#previous").is_enabled()
    browser.write("search", "NOISE-0")
    assert "that match" in browser.find("#count").text and all("noise-0" in r for r in rows(browser))
    browser.write("search", "")
    browser.pick("filter-column", "domain")
    browser.pick("filter-test", "is")
    browser.pick("filter-choice", 0)
    browser.click("#filter-form button")
    browser.pick("filter-column", "score")
    browser.pick("filter-test", "<")
    browser.find("#filter-value").send_keys("0.0001")
    browser.click("#filter-form button")
    assert len(browser.all("#filters li")) == 2 and "that match" in browser.find("#count").text
    browser.pick("filter-column", "owner")
    browser.pick("filter-test", "is empty")
    browser.click("#filter-form button")
    browser.pick("filter-test", "contains")
    browser.find("#filter-value").clear()
    browser.find("#filter-value").send_keys("ann")
    browser.click("#filter-form button")
    assert browser.find("#count").text.startswith("0–0 of 0")  # no owner, and one with "ann" in it
    for _ in range(4):
        browser.click("#filters button")
    assert browser.find("#count").text.endswith("1,200 samples")
    browser.find("#filter-value").clear()
    browser.pick("filter-column", "score")
    browser.find("#filter-value").send_keys("much")
    browser.click("#filter-form button")
    assert "needs a number" in browser.find("#notice").text
    browser.click("#filters button")
    assert not browser.find("#notice").is_displayed()
    browser.look()
    browser.console = [c for c in browser.console if "400 (Bad Request)" not in c]
    browser.check_quiet(address)


def test_marks_are_set_shown_and_exported(browser, story, downloads):
    address, token, found = story
    browser.open(address, token)
    browser.click("#list .sample:nth-child(2) [data-mark=drop]")
    assert browser.find("#list .sample:nth-child(2) [data-mark=drop]").get_attribute("aria-pressed") == "true"
    browser.click("#list .sample:nth-child(3) [data-mark=keep]")
    browser.click("#list .sample:nth-child(3) [data-mark=keep]")  # and off again
    browser.click("#list .sample:nth-child(3) [data-mark=look]")
    assert browser.find("#marks-count").text == "1 drop, 1 look"
    browser.click("#marks summary")
    browser.click("#show-marked")
    assert len(rows(browser)) == 2
    browser.pick("scope", 0)
    for mark in ("keep", "look", ""):
        browser.click(f"[data-bulk='{mark}']")
    assert rows(browser) == [] and browser.find("#marks-count").text == "none"
    browser.click("#filters button")
    browser.write("search", "noise-")
    browser.pick("scope", 1)
    browser.click("[data-bulk=drop]")
    noise = len(found.marks.of(0))
    assert 50 < noise < 200 and browser.find("#marks-count").text == f"{noise} drop"
    browser.click("#export")
    until = time.monotonic() + 20
    while not (downloads / "marks.jsonl").is_file():
        assert time.monotonic() < until
        time.sleep(0.1)
    lines = [json.loads(line) for line in (downloads / "marks.jsonl").read_text().splitlines()]
    assert len(lines) == noise and {line["mark"] for line in lines} == {"drop"}
    browser.click("[data-bulk='']")
    assert found.marks.of(0) == {}
    browser.check_quiet(address)


def test_one_sample(browser, story):
    address, token, _ = story
    browser.open(address, token)
    browser.click("#list .sample .link")
    assert browser.find("#one").is_displayed() and "Value at each use" in browser.find("#one").text
    bars = browser.run("return document.querySelector('#one-chart svg').innerHTML")
    browser.pick("one-set", "docs")
    assert browser.run("return document.querySelector('#one-chart svg').innerHTML") != bars
    browser.click("#one summary")
    assert len(browser.all("#one-uses tbody tr")) == len(browser.all("#one-chart rect"))
    browser.click("#one-marks [data-mark=look]")
    browser.click("#one-close")
    assert not browser.find("#one").is_displayed()
    browser.click("#list .sample .mark-row [aria-pressed=true]")
    browser.check_quiet(address)


def test_two_sets_groups_and_runs(browser, story):
    address, token, _ = story
    browser.open(address, token)
    browser.click("#tab-pair")
    assert len(browser.all("#pair-chart rect")) > 50 and "1,200 samples" in browser.find("#pair-caption").text
    browser.pick("pair-y", "code")
    assert "Correlation 1" in browser.find("#pair-caption").text
    browser.pick("pair-x", "docs")
    browser.run("document.querySelector('#pair-chart rect').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    browser.settle()
    assert browser.find("#samples").is_displayed() and browser.all("#filters li")
    assert "of 1 sample" in browser.find("#count").text or int(browser.find("#count").text.split(" of ")[1].split()[0]) < 20
    browser.click("#tab-pair")
    narrowed = browser.find("#pair-caption").text
    browser.click("#pair-filtered")
    assert browser.find("#pair-caption").text != narrowed
    browser.click("#pair-table button")
    assert len(browser.all("#filters li")) == 2

    browser.click("#tab-groups")
    seen = {browser.run("return document.querySelector('#groups-chart svg').innerHTML")}
    for value in ("total", "mean", "sum"):
        browser.choose("measure", value)
        seen.add(browser.run("return document.querySelector('#groups-chart svg').innerHTML"))
    assert len(seen) == 3
    browser.pick("stages", "5")
    browser.click("#groups-legend .key")
    assert browser.find("#groups-legend .key").get_attribute("aria-pressed") == "false"
    assert browser.run("return document.activeElement === document.querySelector('#groups-legend .key')")
    browser.pick("by", "owner")
    assert "python.org" in browser.find("#groups-table").text and "(no value)" in browser.find("#groups-table").text
    browser.click("#groups-table button")
    assert "owner is" in browser.find("#filters").text

    browser.click("#tab-runs")
    assert "python-texts" in browser.find("#runs-table").text and len(browser.all("#loss-chart path")) == 2
    browser.click("#loss-legend .key")
    assert len(browser.all("#loss-chart path")) == 1
    assert len(browser.all("#compare-chart rect")) > 50 and len(browser.all("#compare-table tbody tr")) == 20
    was = browser.find("#compare-caption").text
    assert was.startswith("Compared sample by sample, by id. ")
    for field, value in (("compare-x", "docs"), ("compare-y", "docs"), ("compare-key", "id"), ("compare-a", 1), ("compare-b", 0)):
        browser.pick(field, value)
    assert browser.find("#compare-caption").text != was
    browser.click("#compare-table button")
    assert browser.find("#one").is_displayed() and browser.find("#title").text == "again"
    browser.click("#one-close")
    browser.pick("run", 0)
    assert browser.find("#title").text == "python-texts"
    browser.check_quiet(address)


def test_runs_of_other_data_are_compared_by_document(browser, tmp_path):
    from explorer_serving import TOKEN, serving

    every = list(range(30))
    runs = [numbered(tmp_path / "all", every), numbered(tmp_path / "curated", every[3:])]
    with serving(*runs) as (address, _):
        browser.open(address, TOKEN)
        browser.click("#tab-runs")
        caption = browser.find("#compare-caption").text
        assert caption.startswith(
            "Compared by document: the scores of all samples with the same one are added up (81 sample ids mean"
        )
        assert "27 documents. Correlation 1" in caption and browser.find("#compare-key").get_attribute("value") == "c:document"
        assert browser.find("#compare-table th").text == "document"
        browser.pick("compare-key", "sample id")
        caption = browser.find("#compare-caption").text
        assert caption.startswith("Careful: 81 sample ids mean pieces of different documents in the two runs, so unrelated samples")
        browser.pick("compare-a", 1)
        browser.pick("compare-b", 0)  # other runs, asked anew
        assert browser.find("#compare-key").get_attribute("value") == "c:document"
        browser.check_quiet(address)


def test_keyboard_alone_is_enough(browser, story):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def press(*keys):
        ActionChains(browser.driver).send_keys(*keys).perform()
        browser.settle()

    address, token, _ = story
    browser.open(address, token)
    reached = []
    for _ in range(14):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        reached.append(browser.run("const e = document.activeElement; return e.id || e.name || e.className"))
    assert reached[0] == "skip" and {"theme", "run", "set", "follow", "tab-samples", "search", "sort", "filter-column"} <= set(
        reached
    )
    browser.run("document.getElementById('tab-samples').focus()")
    press(Keys.ARROW_RIGHT)
    assert browser.find("#pair").is_displayed() and browser.find("#tab-pair").get_attribute("aria-selected") == "true"
    press(Keys.ARROW_LEFT)
    browser.run("document.querySelector('#list .link').focus()")
    press(Keys.ENTER)
    assert browser.find("#one").is_displayed()
    press(Keys.ESCAPE)
    assert not browser.find("#one").is_displayed()
    assert browser.run("return document.activeElement.className") == "link"  # back where it was opened
    browser.check_quiet(address)


#: Notes when the page first showed each badge, by its own clock: a driver on a busy machine asks late.
NOTE_BADGES = """
const badge = document.getElementById("badge");
window.__badges = {};
const note = () => { if (!badge.hidden) window.__badges[badge.textContent] ??= Date.now() / 1000; };
new MutationObserver(note).observe(badge, { childList: true, characterData: true, subtree: true, attributes: true });
"""


def seen_after(browser, run):
    """Wait until the page shows the last step that is on disk; return how many seconds later that was."""
    wanted = f"in progress: up to step {run.step - 1}"
    browser.wait(f"return window.__badges['{wanted}'] !== undefined", PATIENCE)
    return browser.run(f"return window.__badges['{wanted}']") - run.on_disk_at()


def test_a_run_being_written_is_followed(browser, tmp_path):
    from explorer_serving import TOKEN, serving

    run = Written(tmp_path / "live")
    run.ledger.register_samples(samples())
    run.steps(2)
    with serving(run.path, every=1.0) as (address, _):
        browser.open(address, TOKEN)
        assert "in progress: up to step 1" in browser.find("#badge").text
        browser.run(NOTE_BADGES)
        browser.write("search", "zebra")
        for count in (1, 4):
            run.steps(count)
            late = seen_after(browser, run)
            print(f"seen after {late:.1f} s")
            assert 0 < late < SOON
        browser.settle()
        assert browser.find("#search").get_attribute("value") == "zebra" and len(rows(browser)) == 12
        browser.run("document.querySelector('#list .sample:nth-child(4) [data-mark=keep]').focus()")
        held = browser.run("return document.activeElement.closest('li').dataset.id")
        run.steps(1)
        assert seen_after(browser, run) < SOON
        browser.settle()
        assert browser.run("return document.activeElement.closest('li')?.dataset.id") == held  # wherever it stands now
        browser.click("#follow")
        time.sleep(2.5)
        browser.settle()  # a question that was under way
        run.steps(1)
        time.sleep(4)
        assert browser.find("#badge").text.endswith(f"up to step {run.step - 2}")
        browser.click("#follow")
        seen_after(browser, run)
        run.ledger.close()
        browser.wait("return document.getElementById('badge').hidden", PATIENCE)
        browser.check_quiet(address)
        browser.driver.get("about:blank")


def test_hostile_text_does_nothing(browser, hostile):
    address, token, _ = hostile
    browser.open(address, token)
    assert len(PAYLOADS) >= 150
    browser.pick("limit", "100")
    for place in range(len(SETS)):
        browser.pick("set", place)
        for view in VIEWS:
            browser.click(f"#tab-{view}")
    browser.click("#tab-samples")
    seen = set()
    while True:
        seen |= set(browser.run("return [...document.querySelectorAll('#list .text')].map((e) => e.textContent)"))
        if not browser.find("#next").is_enabled():
            break
        browser.click("#next")
    for text in ("{{7*7}}", "<svg/onload=window.__pwned=1>", "⟨U+202E⟩gnp.exe⟨U+202C⟩", "NUL ⟨U+0000⟩ in the middle"):
        assert text in seen
    for link in browser.all("#list .link")[:12]:
        browser.run("arguments[0].click()", link)
        browser.settle()
        browser.click("#one summary")
        browser.click("#one-close")
    for column in ("id", "domain", "source", "owner", "text"):
        browser.pick("filter-column", column)
        browser.pick("filter-test", "is")
        browser.pick("filter-choice", 3)
        browser.click("#filter-form button")
        browser.click("#filters button")
    for payload in PAYLOADS[:12]:
        browser.write("search", payload[:400])
    browser.write("search", "")
    browser.click("#tab-groups")
    for by in range(3):
        browser.pick("by", by)
        for key in range(len(browser.all("#groups-legend .key"))):  # each click draws the legend again
            browser.run("document.querySelectorAll('#groups-legend .key')[arguments[0]].click()", key)
    browser.run("document.querySelector('#groups-table button').click()")
    browser.settle()
    browser.click("#tab-pair")
    browser.run("document.querySelector('#pair-table button').click()")
    browser.settle()
    browser.click("#tab-runs")
    for key in ("id", "domain", "owner"):
        browser.pick("compare-key", key)
    browser.pick("compare-a", 1)
    browser.run("document.querySelector('#compare-table button').click()")
    browser.settle()
    touch = "for (const t of arguments[1]) arguments[0].dispatchEvent(new Event(t, {bubbles: true}))"
    for element in browser.all("main bdi, main .text, main .chip")[:80]:
        browser.run(touch, element, ["mouseover", "focus", "pointerenter"])
    alive = "svg a, svg image, img, iframe, object, embed, base, [onerror], [onload], [onclick]"
    assert browser.run("return document.querySelectorAll(arguments[0]).length", alive) == 0
    assert browser.run("return [...document.scripts].every((s) => s.src.startsWith(location.origin + '/assets/'))")
    browser.check_quiet(address)


def test_policy_holds(browser, hostile):
    """Scripts, styles and requests that are not the explorer's are refused: what the other tests rely on is switched on."""
    address, token, _ = hostile
    browser.open(address, token)
    browser.run(
        """const s = document.createElement("script"); s.textContent = "window.__pwned = 1"; document.body.append(s);
        const i = new Image(); i.src = "https://example.org/pixel.png"; document.body.append(i);
        document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.__pwned=1'>");
        fetch("https://example.org/").catch(() => {});"""
    )
    time.sleep(0.5)
    assert browser.run("return window.__pwned") is None
    assert len(browser.run("return window.__errors")) >= 4
    with pytest.raises(AssertionError):
        browser.check_quiet(address)


@pytest.mark.parametrize("which", ["story", "hostile"])
@pytest.mark.parametrize("width", [390, 768])
def test_page_never_scrolls_sideways(browser, which, width, request):
    address, token, _ = request.getfixturevalue(which)
    browser.open(address, token, width=width, height=844)
    for view in VIEWS:
        browser.click(f"#tab-{view}")
        assert browser.run("return document.documentElement.scrollWidth") <= width, view


@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("which", "width"), [("story", 1200), ("story", 390), ("hostile", 1200)])
def test_axe_finds_nothing(browser, which, scheme, width, request):
    address, token, _ = request.getfixturevalue(which)
    browser.open(address, token, width=width, scheme=scheme)
    browser.run("document.getElementById('marks').open = true")
    browser.click("#list .sample [data-mark=drop]")
    browser.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})  # axe is not the page's own
    try:
        browser.run(AXE.read_text(encoding="utf-8"))
        for view in (*VIEWS, "one"):
            if view == "one":
                browser.click("#tab-samples")
            browser.click("#list .sample .link" if view == "one" else f"#tab-{view}")
            found = browser.axe_violations()
            assert found == [], (view, found)
    finally:
        browser.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})


def test_theme_follows_the_system_and_the_switch(browser, story):
    address, token, _ = story
    for scheme in ("light", "dark"):
        browser.open(address, token, scheme=scheme)
        browser.check_theme(scheme)


def test_pictures(browser, story, tmp_path):
    """Take the screenshots of docs/explorer.md (into docs/images under ``make test-browser``)."""
    address, token, _ = story
    folder = Path(os.environ.get("INRUN_SCREENSHOTS") or tmp_path)
    browser.open(address, token, height=900)
    browser.choose("order", "up")
    browser.click("#list .sample:nth-child(1) [data-mark=drop]")
    browser.run("document.activeElement.blur(); scrollTo(0, 0)")
    browser.picture(folder / "explorer-samples.png")
    browser.click("#list .sample:nth-child(1) [data-mark=drop]")
    browser.open(address, token, height=1000, scheme="dark")
    browser.click("#tab-pair")
    browser.picture(folder / "explorer-pair.png")
    browser.open(address, token, width=390, height=844, scale=2)
    browser.picture(folder / "explorer-phone.png")
    for name in ("samples", "pair", "phone"):
        assert 10_000 < (folder / f"explorer-{name}.png").stat().st_size < 400_000, name


def test_no_thread_is_left():
    assert not [t for t in threading.enumerate() if t.name == "inrun-follower" and not t.daemon]
