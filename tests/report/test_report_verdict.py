"""What the page says of the books: the game that was scored, the verdict, and what stands out."""

from __future__ import annotations

import numpy as np
import pytest
from test_report import Page

from inrun.ledger import Ledger, StepRecord
from inrun.ledger.tables import Tables
from inrun.report import build_report
from inrun.report.gather import gather
from inrun.report.story import headlines
from report_hostile import SETS

INHERITED = 0.125


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr("inrun.report.page._plotly", lambda: "var Plotly = {};")  # 5 MB less to parse


@pytest.fixture
def with_inherited(monkeypatch):
    """Give the accounts the column ``inherited`` where books are written without it."""
    offer = Tables._offer

    def offering(self, table, schema, view=None):
        columns = offer(self, table, schema, view)
        if table == "accounts" and "inherited" not in columns:
            self.connection.execute("CREATE TABLE more AS SELECT *, $1::DOUBLE AS inherited FROM accounts", [INHERITED])
            self.connection.execute("DROP VIEW accounts; ALTER TABLE more RENAME TO accounts")
        return columns

    monkeypatch.setattr(Tables, "_offer", offering)


def run(path, *, method="step", steps=40, audited=lambda step: True, rough=(), outlier=None, name="v"):
    """Forty calm steps of eight samples each; rough ones pay fifty times as much, an outlier holds most of step 3."""
    rng = np.random.default_rng(0)
    with Ledger(path, about={"method": method}) as ledger:
        for step in range(steps):
            ids = np.arange(8) + 8 * (step % 20)
            values = rng.normal(0.002, 0.01, 8) * (50 if step in rough else 1)
            if step == 3 and outlier is not None:
                ids[0], values[0] = outlier, -3.0
            data, spread = float(values.sum()), float(np.abs(values).sum())
            row = {"step": step, "validation": name, "loss_before": 3.0, "data": data, "spread": spread, "lr": 1.0}
            row |= {"clip": 0.04 if step in rough else 1.0, "n_samples": 8}
            if audited(step):
                memory = {"inherited": INHERITED} if method == "whole" else {"momentum": 0.1}
                row |= {"decay": -0.01, "residual": 0.001 * spread, **memory}
                row["loss_after"] = 3.0 - data + 0.01 - row["residual"] - memory.get("momentum", INHERITED)
            ledger.write(StepRecord(step, ids, {name: values.astype(np.float32)}, [row]))
    return path


@pytest.mark.usefixtures("with_inherited")
def test_whole_credit_shows_inherited_and_no_momentum(tmp_path):
    page = Page(build_report(run(tmp_path / "whole", method="whole")))
    for words in (
        "scored by method whole",
        "every push belongs to a sample, and the samples' credits add up to what the model learned",
        "inherited momentum from before scoring began +5.000",
        "the parts paid to samples at these steps",
        "Credits paid",
        "The credits add up to",
        "the books balance",
    ):
        assert words in page.text, words
    for words in ("Momentum and decay", "about a tenth of a sample's push", "contributions add up", "earlier samples' pushes"):
        assert words not in page.text, words
    curve = page.data["books"][0]["curve"]
    assert set(curve) == {"step", "fall", "data", "decay", "inherited", "residual"} and page.data["credit"] == "whole"
    assert curve["inherited"][-1] == pytest.approx(40 * INHERITED)
    parts = sum(curve[part][-1] for part in ("data", "decay", "inherited", "residual"))
    assert parts == pytest.approx(curve["fall"][-1], rel=1e-3)


def test_the_step_game_shows_momentum_and_nothing_inherited(tmp_path):
    page = Page(build_report(run(tmp_path / "step")))
    for words in (
        "Momentum and decay",
        "about a tenth of a sample's push",
        "momentum earlier samples' pushes",
        "The contributions add up",
    ):
        assert words in page.text, words
    assert "inherited" not in page.text and "credits add up" not in page.text
    assert "inherited" not in page.data["books"][0]["curve"] and page.data["credit"] == "step"


def test_rough_steps_and_an_outlier_are_named(tmp_path):
    path = run(tmp_path / "rough", audited=lambda step: step in (0, 10), rough=(20, 21), outlier=159)
    found = gather(path, by=None, top=1, text=True)
    error = {h.label: h for h in headlines(found)[0]}["Method's error"]
    assert error.mood == "" and "too little to judge" in error.note
    page = Page(build_report(path))
    for words in (
        "3 of 40 scored steps hold",
        "step 20:",
        "step 21:",
        "clipped to 0.04",
        "not audited",
        "The top 3 % of steps (2) hold",
        "sample 159:",
        "of step 3",
        "too little to judge",
        "Audit more often (audit_every=1",
        "--view rank",
        "a lower learning rate",
    ):
        assert words in page.text, words
    assert "books balance" not in page.text


def test_a_calm_run_names_nothing(tmp_path):
    """The control of the test above."""
    page = Page(build_report(run(tmp_path / "calm")))
    assert "the books balance" in page.text and "books-chart" in page.raw
    for words in ("sample 1", "clipped to", "not audited", "scored steps hold", "--view rank"):
        assert words not in page.text.split("How to cite")[0].split("Single samples")[0], words
    assert "Single samples that hold" not in page.text


@pytest.mark.parametrize("name", SETS)
def test_names_stay_text_beside_the_verdict(tmp_path, name):
    page = Page(build_report(run(tmp_path / "hostile", method="<script>whole", rough=(20,), outlier=-7, name=name)))
    assert [tag for tag, _ in page.tags].count("script") == 4 and "img" not in [tag for tag, _ in page.tags]
    assert "sample -7:" in page.text and "step 20:" in page.text
    assert page.data["credit"] == "step"
