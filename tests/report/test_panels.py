"""Panels: one Python file, one script and one line each; the page shows whatever is registered."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from inrun.ledger import Ledger, StepRecord
from inrun.report import build_report, gather, page, panels
from inrun.report.panel import Panel
from inrun.report.panels import ORDER, PANELS
from report_stories import tell_story

ROOM = Path(panels.__file__).parent
SCRIPTS = ROOM.parent / "assets" / "panels"


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Panel:
    """A panel that counts validation sets, registered for the time of a test."""
    panel = Panel("counted", "How many <sets>", lambda tables, found: {"sets": len(found.sets)}, lead="One & all.", jump="Counted")
    for module in (gather, page):
        monkeypatch.setattr(module, "PANELS", (*PANELS, panel))
    read = page._asset
    monkeypatch.setattr(page, "_asset", lambda name: "panels.counted = {};\n" if name == "panels/counted.js" else read(name))
    return panel


def data_of(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL).group(1))


def test_files_and_registry_agree() -> None:
    assert {path.stem for path in ROOM.glob("*.py")} == {"__init__", *ORDER}
    assert {path.stem for path in SCRIPTS.glob("*.js")} == set(ORDER)
    assert tuple(panel.id for panel in PANELS) == ORDER
    for name in ORDER:
        assert f"panels.{name} = {{" in (SCRIPTS / f"{name}.js").read_text(encoding="utf-8")


def test_a_registered_panel_is_on_the_page(tmp_path: Path, made_up: Panel) -> None:
    text = build_report(tell_story(tmp_path / "run", steps=20, samples=60)).read_text(encoding="utf-8")
    assert '<section id="counted" aria-labelledby="counted-title">' in text
    assert "How many &lt;sets&gt;" in text and "One &amp; all." in text
    assert '<a href="#counted">Counted</a>' in text
    assert "{\npanels.counted = {};\n}\n" in text
    assert data_of(text)["panels"].keys() == {*ORDER, "counted"}
    assert data_of(text)["panels"]["counted"] == {"sets": 2}


def test_panels_with_nothing_to_show_are_left_out(tmp_path: Path) -> None:
    with Ledger(tmp_path / "plain") as ledger:  # one set, no metadata
        ledger.write(StepRecord(0, [1, 2], {"v": [0.5, -0.5]}, [{"step": 0, "validation": "v"}]))
    text = build_report(tmp_path / "plain").read_text(encoding="utf-8")
    assert "scores" in data_of(text)["panels"] and not {"groups", "agreement"} & data_of(text)["panels"].keys()
    assert 'id="groups"' not in text and 'href="#groups"' not in text
    with Ledger(tmp_path / "skipped") as ledger:
        ledger.write(StepRecord(0, [1], {}, [{"step": 0, "validation": "v", "skipped": "not finite"}]))
    unscored = data_of(build_report(tmp_path / "skipped").read_text(encoding="utf-8"))["panels"]
    assert not unscored.keys() & {panel.id for panel in PANELS if panel.needs_scores}
