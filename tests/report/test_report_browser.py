"""The report in a real browser: hostile text, switches, accessibility, phone and print. ``make test-browser`` runs it."""

from __future__ import annotations

import base64
import json
import os
import time
from pathlib import Path

import pytest

from chromium import AXE, BROWSER_TESTS, Chromium, needs_axe
from inrun.report import build_report
from report_hostile import SETS, hostile_run
from report_payloads import PAYLOADS
from report_stories import tell_story

pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium, or make test-browser")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

pytestmark = BROWSER_TESTS


class Browser(Chromium):
    """Chromium with a report."""

    unused = ("fetch",)

    def open(self, path: Path, width: int = 1200, height: int = 1000, scheme: str = "light", scale: float = 1) -> None:
        """Load a page afresh."""
        self.begin(width, height, scheme, scale)
        self.driver.get(path.as_uri())
        self.run("try { localStorage.clear(); } catch (e) {}")
        self.wait_until_ready()

    def check_quiet(self) -> None:
        """Nothing ran that should not, nothing was fetched, nothing was complained about."""
        self.check_nothing_ran()
        assert [u for u in self.requests if not (u.startswith("file://") and u.partition("#")[0].endswith(".html"))] == []
        assert len(self.requests) == 1


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.driver.quit()


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    run = tell_story(tmp_path_factory.mktemp("browser") / "python-texts")
    lines = [{"step": s, "loss": 5.6 * 0.99**s + 0.4, "validation": {"docs": 5.6 * 0.991**s + 0.3}} for s in range(0, 400, 10)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return build_report(run)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return build_report(hostile_run(tmp_path_factory.mktemp("browser") / "hostile"), title=PAYLOADS[0], top=300)


def shown(browser, chart):
    """What a chart draws, as data."""
    return browser.run(
        """const along = (t) => t.orientation === "h" ? [[...t.x], t.error_x?.array] : null;
        const seen = (t) => [t.name, t.type, t.visible, [...t.y], along(t), t.fillcolor || t.line?.color || t.marker?.color];
        return JSON.stringify(document.getElementById(arguments[0]).data.map(seen));""",
        chart,
    )


def test_page_is_quiet(browser, story):
    browser.open(story)
    assert "Content-Security-Policy" in browser.driver.page_source[:600]
    assert browser.run("return document.querySelectorAll('.js-plotly-plot').length") == 5
    browser.check_quiet()


def test_canary_sings(browser, tmp_path):
    """What the other tests rely on: a payload that gets through is seen."""
    page = tmp_path / "open.html"
    page.write_text(f"<html data-ready=yes>{PAYLOADS[0]}<img src=https://example.org/x onerror='alert(1); window.__pwned = 1'>")
    browser.open(page)
    browser.wait("return window.__calls.length > 0")
    assert browser.run("return window.__pwned") == 1
    with pytest.raises(AssertionError):
        browser.check_quiet()


def test_policy_holds(browser, story):
    """Scripts, styles and requests that the page does not know are refused."""
    browser.open(story)
    browser.run(
        """const s = document.createElement("script"); s.textContent = "window.__pwned = 1"; document.body.append(s);
        const i = new Image(); i.src = "https://example.org/pixel.png"; document.body.append(i);
        document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.__pwned=1'>");"""
    )
    time.sleep(0.3)
    browser.look()
    assert browser.run("return window.__pwned") is None
    assert len(browser.run("return window.__errors")) >= 3
    assert browser.blocked and set(browser.blocked) == {"csp"}  # by the policy, before anything went out


def test_switches_change_what_is_shown(browser, story):
    browser.open(story)
    charts = ("loss-chart", "books-chart", "spread-chart", "stages-chart", "sides-chart")

    def all_of_it():
        return {c: shown(browser, c) for c in charts} | {
            i: browser.find(f"#{i}").text
            for i in ("finding", "numbers", "groups-table", "heat-table", "samples-list", "twins-list", "samples-count")
        }

    was = all_of_it()
    Select(browser.find("#set")).select_by_visible_text("docs")
    now = all_of_it()
    for part in (
        "books-chart",
        "spread-chart",
        "stages-chart",
        "sides-chart",
        "finding",
        "numbers",
        "groups-table",
        "samples-list",
        "twins-list",
    ):
        assert now[part] != was[part], part
    assert now["heat-table"] == was["heat-table"]
    for switch, value, part in [
        ("measure", "average", "stages-chart"),
        ("span", "stage", "stages-chart"),
        ("measure", "share", "stages-chart"),
        ("span", "cumulative", "stages-chart"),
        ("end", "bottom", "samples-list"),
        ("theme", "dark", "stages-chart"),
    ]:
        before = all_of_it()
        browser.choose(switch, value)
        after = all_of_it()
        assert after[part] != before[part], (switch, value)
    Select(browser.find("#column")).select_by_visible_text("owner")
    assert "python.org" in browser.find("#groups-table").text
    groups = browser.find("#groups").text
    assert "Value by owner" in groups and "Which group helps which validation set" in groups
    browser.check_quiet()


def test_samples_are_searched_and_filtered(browser, story):
    browser.open(story)
    first = len(browser.all("#samples-list .sample"))
    browser.find("#samples-more").click()
    assert len(browser.all("#samples-list .sample")) == first + 20  # at either end
    browser.choose("end", "bottom")
    group = Select(browser.find("#group"))
    group.select_by_visible_text("noise")
    assert all("noise" in s.text for s in browser.all("#samples-list .sample"))
    assert "match" in browser.find("#samples-count").text
    group.select_by_visible_text("all")
    name = browser.find("#samples-list .sample bdi").text
    browser.find("#search").send_keys(name.upper())
    assert len(browser.all("#samples-list .sample")) == 1 and "1 of the 50 lowest" in browser.find("#samples-count").text
    browser.find("#search").send_keys(" nothing like this")
    assert not browser.all("#samples-list .sample")
    browser.find("#search").clear()
    browser.find("#search").send_keys(Keys.SPACE, Keys.BACKSPACE)
    browser.choose("end", "top")
    assert all(s.text.startswith("+") for s in browser.all("#samples-list .sample"))
    browser.check_quiet()


def test_keyboard_alone_is_enough(browser, story):
    browser.open(story)
    reached = []
    for _ in range(12):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        reached.append(browser.run("const e = document.activeElement; return e.id || e.name || e.className || e.textContent"))
    assert reached[0] == "skip" and {"theme", "set", "column"} <= set(reached)
    before = shown(browser, "stages-chart")
    box = browser.find("#measure input:checked")
    browser.run("arguments[0].focus()", box)
    ActionChains(browser.driver).send_keys(Keys.ARROW_RIGHT).perform()
    assert shown(browser, "stages-chart") != before
    key = browser.find("#stages-legend .key")
    browser.run("arguments[0].focus()", key)
    ActionChains(browser.driver).send_keys(Keys.ENTER).perform()
    assert key.get_attribute("aria-pressed") == "false" and "legendonly" in shown(browser, "stages-chart")
    browser.check_quiet()


def test_theme_follows_the_system_and_the_switch(browser, story):
    for scheme in ("light", "dark"):
        browser.open(story, scheme=scheme)
        browser.check_theme(scheme)


def test_hostile_text_does_nothing(browser, hostile):
    browser.open(hostile)
    assert len(PAYLOADS) > 100
    for place in range(len(SETS)):
        Select(browser.find("#set")).select_by_index(place)
        for column in range(3):
            Select(browser.find("#column")).select_by_index(column)
            for switch in ("measure", "span", "end"):
                for box in browser.all(f"#{switch} input"):
                    browser.choose(switch, box.get_attribute("value"))
        group = Select(browser.find("#group"))
        for option in range(0, len(group.options), 9):
            group.select_by_index(option)
        group.select_by_index(0)
    for button in browser.all("#samples-more, #twins-more"):
        while button.is_displayed():
            browser.run("arguments[0].click()", button)
    browser.run("for (const b of document.querySelectorAll('.open')) b.click()")
    assert len(browser.all(".opened")) > 50 and browser.all(".opened svg title")
    for place in range(3):
        browser.run("document.querySelectorAll('.opened .go')[arguments[0]].click()", place)
        browser.run("byId('samples-back').click()")
    for element in browser.all(".key, .whole, .sort"):
        browser.run("arguments[0].click(); arguments[0].click(); arguments[0].focus()", element)
    touch = "for (const t of arguments[1]) arguments[0].dispatchEvent(new Event(t, {bubbles: true}))"
    for element in browser.all("#samples-list .text, #samples-list .chip, #samples-list bdi")[:60]:
        browser.run(touch, element, ["mouseover", "click", "focus", "pointerenter"])
    for chart in browser.all(".chart"):
        browser.run("arguments[0].scrollIntoView({block: 'center'})", chart)
        for x in range(-300, 301, 60):  # labels that follow the mouse
            ActionChains(browser.driver).move_to_element_with_offset(chart, x // 2, 0).perform()
    search = browser.find("#search")
    for payload in PAYLOADS[:6]:
        search.clear()
        search.send_keys(payload)
    alive = "svg a, svg image, img, iframe, object, embed, [onerror], [onload], [onclick]"
    assert browser.run("return document.querySelectorAll(arguments[0]).length", alive) == 0
    assert browser.run("return [...document.scripts].length") == 4
    browser.check_quiet()


def test_hostile_text_is_readable(browser, hostile):
    browser.open(hostile)
    found = browser.run("return data.shown.samples.map((s) => s.t)")
    for text in (
        "{{7*7}}",
        "<svg/onload=window.__pwned=1>",
        "⟨U+202E⟩gnp.exe⟨U+202C⟩",
        "NUL ⟨U+0000⟩ in the middle",
        "=cmd|' /C calc'!A0",
    ):
        assert text in found
    browser.find("#search").send_keys("{{7*7}}")
    assert "{{7*7}}" in [e.text for e in browser.all("#samples-list .text")]
    labels = browser.run("return [...document.querySelectorAll('#loss-legend b')].map((e) => e.textContent)")
    assert "<img src=x onerror=window.__pwned=1>" in labels
    names = browser.run("return document.getElementById('loss-chart').data.map((t) => t.name)")
    assert not any("<" in n for n in names)  # plotly sees entities only


@pytest.mark.parametrize("width", [360, 390, 768, 1200])
@pytest.mark.parametrize("which", ["story", "hostile"])
def test_page_never_scrolls_sideways(browser, which, width, request):
    browser.open(request.getfixturevalue(which), width=width, height=800)
    for value in ("average", "share"):
        browser.choose("measure", value)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    browser.run("scrollTo(500, 0)")
    assert browser.run("return scrollX") == 0


@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("which", "width"), [("story", 1200), ("story", 390), ("hostile", 1200), ("hostile", 390)])
def test_axe_finds_nothing(browser, which, scheme, width, request):
    browser.open(request.getfixturevalue(which), width=width, scheme=scheme)
    browser.run("for (const b of [...document.querySelectorAll('.open')].slice(0, 3)) b.click()")
    browser.run("document.querySelector('.explain').open = true")
    browser.run(AXE.read_text(encoding="utf-8"))
    found = browser.axe_violations()
    print(f"axe {which} {scheme} {width}: {[v[:2] for v in found]}")
    assert found == []


def test_paper(browser, story):
    browser.open(story, scheme="dark")
    pdf = base64.b64decode(browser.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert pdf.startswith(b"%PDF") and len(pdf) > 50_000
    assert browser.run("return document.documentElement.dataset.theme") is None  # as before
    browser.check_quiet()


def test_other_runs_are_quiet(browser, tmp_path):
    """Pages with parts missing: no metadata, no folds, no audits, one step, nothing at all."""
    from test_report import all_skipped, empty, simple, some_skipped, unlike_columns

    cases = {
        "empty": empty,
        "all skipped": all_skipped,
        "some skipped": some_skipped,
        "no metadata": lambda p: simple(p, metadata=False),
        "one step": lambda p: simple(p, steps=1),
        "no accounts": lambda p: simple(p, accounts=False, labels=("a", "b")),
        "columns": unlike_columns,
    }
    for name, make in cases.items():
        browser.open(build_report(make(tmp_path / name)), width=360, height=800)
        assert browser.run("return document.documentElement.scrollWidth") <= 360, name
        browser.check_quiet()


def test_pictures(browser, story, tmp_path):
    """Take the screenshots of docs/report.md (into docs/images under ``make test-browser``)."""
    folder = Path(os.environ.get("INRUN_SCREENSHOTS") or tmp_path)
    browser.open(story, height=1500)
    browser.picture(folder / "report-light.png")
    browser.open(story, height=1420, scheme="dark")
    browser.choose("measure", "average")
    browser.run("document.getElementById('groups').scrollIntoView(); document.activeElement.blur()")
    time.sleep(0.3)
    browser.picture(folder / "report-dark.png")
    browser.open(story, width=390, height=844, scale=2)
    browser.picture(folder / "report-phone.png")
    browser.open(story, height=900)
    browser.run("document.querySelectorAll('#samples-list .end:last-child .open')[0].click()")
    browser.run("document.getElementById('samples').scrollIntoView(); document.activeElement.blur()")
    browser.picture(folder / "report-samples.png")
    for name in ("light", "dark", "phone", "samples"):
        assert 10_000 < (folder / f"report-{name}.png").stat().st_size < 400_000, name
