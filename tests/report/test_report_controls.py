"""Every control of the report in a real browser: the finding's links, orders of tables, CSV and copy, samples that open."""

from __future__ import annotations

import csv
import io
import time

import pytest

pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium, or make test-browser")
import test_report_browser
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from test_report import simple

from inrun.analysis import queries
from inrun.cli.ledger_tables import cell
from inrun.report import build_report
from report_payloads import PAYLOADS

pytestmark = test_report_browser.pytestmark
browser, story, hostile = test_report_browser.browser, test_report_browser.story, test_report_browser.hostile
SIZES = [(1200, "light"), (1200, "dark"), (390, "light"), (390, "dark")]


def column(browser, table, place):
    """Return a column as the table shows it."""
    script = """return [...document.querySelector(arguments[0]).tBodies[0].rows].map((r) => valueOf(r.cells[arguments[1]]))"""
    return browser.run(script, f"{table} table", place)


def press(browser, element):
    browser.run("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_finding_follows_the_switches_and_leads_on(browser, story, width, scheme):
    browser.open(story, width=width, height=844, scheme=scheme)
    seen = set()
    for name in ("docs", "code"):
        Select(browser.find("#set")).select_by_visible_text(name)
        for by in ("owner", "domain"):
            Select(browser.find("#column")).select_by_visible_text(by)
            (said,) = [e.text for e in browser.all(".finding") if e.is_displayed()]
            assert name in said and "hurt" in said
            seen.add(said)
    assert len(seen) == 4
    assert "; noise hurt it." in said and "clearly below zero: see them, drop them." in said
    cards = [e.text for e in browser.all(".story:not([hidden]) .side")]
    assert [c.split("\n")[0] for c in cards] == ["What helped", "What hurt", "How sure"] and "noise" in cards[1]
    browser.find("#search").send_keys("zzz")
    press(browser, browser.find(".story:not([hidden]) .finding .see"))
    assert browser.find("#end input[value=bottom]").is_selected() and browser.find("#search").get_attribute("value") == ""
    assert all(s.text.startswith("−") for s in browser.all("#samples-list .sample"))
    browser.wait("return Math.abs(byId('samples').getBoundingClientRect().top) < innerHeight")
    press(browser, browser.find(".story:not([hidden]) .side .see"))
    press(browser, browser.find(".story:not([hidden]) .finding a[href='#next']"))
    assert "inrun curate" in browser.find("#next").text and "-v code" in browser.find("#next").text
    press(browser, browser.find(".explain summary"))
    assert "What a score does not say" in browser.find(".explain").text
    browser.look()
    assert browser.console == [] and browser.run("return window.__errors") == []


def test_tables_sort_by_click_and_by_key(browser, story):
    browser.open(story)
    tables = {"#groups-table": 9, "#heat-table": 3, "#agreement-table": 3}
    for table, columns in tables.items():
        for place in range(columns):
            head = browser.all(f"{table} th[scope=col]")[place]
            assert head.get_attribute("aria-sort") == "none"
            button = head.find_element("css selector", "button")
            was = column(browser, table, place)
            press(browser, button)
            assert head.get_attribute("aria-sort") == ("descending" if place else "ascending")
            known = [v for v in was if v is not None]
            assert [v for v in column(browser, table, place) if v is not None] == sorted(known, reverse=place > 0)
            browser.run("arguments[0].focus()", button)
            ActionChains(browser.driver).send_keys(Keys.ENTER).perform()
            assert head.get_attribute("aria-sort") == ("ascending" if place else "descending")
            now = column(browser, table, place)
            assert [v for v in now if v is not None] == sorted(known, reverse=place == 0)
            assert None not in now or now.index(None) == len(known)  # what is not known comes last either way
            assert len(browser.all(f"{table} th[aria-sort=ascending], {table} th[aria-sort=descending]")) == 1
    order = column(browser, "#groups-table", 1)
    press(browser, browser.all("#groups-table .sort")[1])
    Select(browser.find("#set")).select_by_visible_text("docs")  # the order stays for another set
    now = column(browser, "#groups-table", 1)
    assert now == sorted(now, reverse=True) and now != order
    accounts = browser.find(".ledger:not([hidden]) table")
    press(browser, accounts.find_elements("css selector", ".sort")[1])
    rows = [r.text.split()[0] for r in accounts.find_elements("css selector", "tbody tr")]
    assert rows[-1] == "fall" and rows[0] in ("data", "momentum")  # the sum stays below
    browser.check_quiet()


def downloaded(browser, folder, button):
    """Press a button and return what it wrote, as rows."""
    before = set(folder.iterdir())
    press(browser, button)
    until = time.monotonic() + 15
    while True:
        new = [p for p in set(folder.iterdir()) - before if p.suffix == ".csv"]
        if new and new[0].stat().st_size:
            break
        assert time.monotonic() < until, "nothing was written"
        time.sleep(0.05)
    return new[0].name, list(csv.reader(io.StringIO(new[0].read_text(encoding="utf-8"))))


def test_csv_and_copy_of_every_table(browser, story, tmp_path):
    browser.open(story)
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    buttons = [b for b in browser.all(".take.csv") if b.is_displayed()]
    assert len(buttons) == 5  # groups, sets, agreement, samples, accounts
    found = dict(downloaded(browser, tmp_path, b) for b in buttons)
    assert len(found) == 5 and all(name.startswith("python-texts-") for name in found)
    groups = next(rows for name, rows in found.items() if "whole-run" in name)
    truth = {r["group"]: r for r in queries.groups(story.parent, "domain", "code").to_pylist()}
    assert groups[0][:4] == ["domain", "Total", "± error", "Share"] and len(groups) == 7
    for row in groups[1:]:
        assert float(row[1]) == pytest.approx(truth[row[0]]["total"], rel=1e-4)
    samples = next(rows for name, rows in found.items() if "samples" in name)
    assert (
        samples[0][:3] == ["end", "sample_id", "id"]
        and {r[0] for r in samples[1:]} == {"highest", "lowest"}
        and len(samples) == 101
    )
    accounts = next(rows for name, rows in found.items() if "accounts" in name)
    assert [r[0] for r in accounts] == ["Account", "data", "momentum", "decay", "residual", "fall"]
    assert sum(float(r[1]) for r in accounts[1:-1]) == pytest.approx(float(accounts[-1][1]))
    browser.run("window.__copied = []; navigator.clipboard.writeText = async (t) => { window.__copied.push(t); }")
    for button in [b for b in browser.all(".take.paste") if b.is_displayed()]:
        press(browser, button)
    browser.wait("return window.__copied.length === 5")
    browser.wait("return [...document.querySelectorAll('.takes [role=status]')].some((e) => e.textContent === 'copied')")
    texts = browser.run("return window.__copied")
    assert [line.split("\t") for line in texts[0].splitlines()] == groups
    browser.run("navigator.clipboard.writeText = () => Promise.reject(new Error('closed'))")
    browser.run("document.execCommand = (what) => { window.__was = [what, document.activeElement.value]; return true; }")
    press(browser, next(b for b in browser.all(".take.paste") if b.is_displayed()))
    browser.wait("return window.__was !== undefined")
    assert browser.run("return window.__was") == ["copy", texts[0]]
    browser.look()
    assert browser.console == [] and browser.run("return window.__errors") == []
    assert [u for u in browser.requests if not u.startswith(("file://", "blob:"))] == []


def test_hostile_tables_are_disarmed(browser, hostile, tmp_path):
    browser.open(hostile)
    for text in PAYLOADS:
        if "\ud7ff" in text or not text.strip():
            continue  # lone parts of characters do not cross the driver
        mine = browser.run("return plainCell(arguments[0])", text)
        assert mine.startswith("'") == str(cell(text)).startswith("'"), text
    assert browser.run("return csvOf([['a\"b', 'c,d', 1.5, null, '=1']])") == '"a""b","c,d",1.5,,\'=1\n'
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    for button in [b for b in browser.all(".take.csv") if b.is_displayed()]:
        name, rows = downloaded(browser, tmp_path, button)
        assert name.isascii() and "/" not in name and "<" not in name
        for row in rows:
            numbers = [c for c in row if c[:1] in "=+-@" and c]
            for text in numbers:
                float(text)  # nothing but numbers begins like a formula
    browser.look()
    assert browser.run("return window.__pwned") is None and browser.run("return window.__calls") == [] and browser.console == []


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_a_sample_opens(browser, story, width, scheme):
    browser.open(story, width=width, height=844, scheme=scheme)
    button = browser.find("#samples-list .open")
    press(browser, button)
    assert button.get_attribute("aria-expanded") == "true" and "short" not in browser.find("#samples-list .text").get_attribute(
        "class"
    )
    shown = browser.find(".opened")
    assert "Value at each use" in shown.text and "Next to it in score" in shown.text and "Nearest in score among" in shown.text
    first = browser.run("return data.shown.samples[data.shown.top[0][0]]")
    bars = browser.all(".opened svg rect")
    assert len(bars) == len(first["p"]) and sum(first["v"][0]) == pytest.approx(first["s"][0], rel=0.02)
    titles = browser.run("return [...document.querySelectorAll('.opened svg title')].map((t) => t.textContent)")
    assert [t.split(":")[0] for t in titles] == [f"step {s}" for s in first["p"]]
    assert shown.size["width"] <= width
    go = browser.find(".opened .go")
    name = go.text
    press(browser, go)
    assert browser.find("#samples-count").text == f"{name} alone" and len(browser.all("#samples-list .sample")) == 1
    assert name in browser.find("#samples-list .sample").text and browser.all(".opened")
    back = browser.find("#samples-back")
    assert browser.run("return document.activeElement === arguments[0]", back)
    ActionChains(browser.driver).send_keys(Keys.ENTER).perform()
    assert not back.is_displayed() and len(browser.all("#samples-list .sample")) == 20
    button = browser.find("#samples-list .open")
    assert button.get_attribute("aria-expanded") == "true"  # as it was left
    press(browser, button)
    assert button.get_attribute("aria-expanded") == "false"
    assert browser.run("return document.documentElement.scrollWidth") <= width
    browser.check_quiet()


def test_what_hurt_stands_beside_what_helped(browser, story):
    browser.open(story)
    left, right = browser.all("#samples-list .end")
    assert left.text.startswith("Helped most") and right.text.startswith("Hurt most")
    assert abs(left.rect["y"] - right.rect["y"]) < 2 and left.rect["x"] < right.rect["x"]
    sides = browser.run("return byId('sides-chart').data.map((t) => [t.name, [...t.x]])")
    assert all(x > 0 for x in dict(sides)["helped"]) and all(x < 0 for x in dict(sides)["hurt"])
    helped, hurt, _ = browser.all(".story:not([hidden]) .side")
    assert abs(helped.rect["y"] - hurt.rect["y"]) < 2


@pytest.mark.parametrize("which", ["story", "hostile"])
def test_groups_fit_on_a_phone(browser, which, request):
    browser.open(request.getfixturevalue(which), width=390, height=844)
    region = "const r = document.querySelector('#groups-table').parentElement; return r.scrollWidth <= r.clientWidth"
    assert browser.run(region)
    cells = browser.all("#groups-table tbody tr:first-child td")
    assert all(c.rect["x"] >= 0 and c.rect["x"] + c.rect["width"] <= 390 for c in cells)
    label = browser.run("return getComputedStyle(arguments[0], '::before').content", cells[0])
    assert label == '"Total"'
    roles = browser.run("return [...document.querySelectorAll('#groups-table [role]')].map((e) => e.getAttribute('role'))")
    assert {"table", "rowgroup", "row", "cell", "rowheader", "columnheader"} == set(roles)
    press(browser, browser.all("#groups-table .sort")[1])
    assert browser.all("#groups-table th[aria-sort=descending]")


def test_runs_without_groups_or_folds(browser, tmp_path):
    browser.open(build_report(simple(tmp_path / "bare", metadata=False)), width=390, height=844)
    assert "Without folds nothing says how sure" in browser.find(".finding").text and not browser.all("#groups")
    press(browser, browser.find("#samples-list .open"))
    assert browser.all(".opened svg rect")
    press(browser, browser.find(".finding .see"))
    browser.check_quiet()
    browser.open(build_report(simple(tmp_path / "plain")))
    assert browser.run("return byId('sides-chart').data.every((t) => t.error_x === undefined || !t.error_x.visible)")
    browser.check_quiet()
