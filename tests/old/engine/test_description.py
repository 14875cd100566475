"""What an accountant shows of itself, and its scores and figures while windows are open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import inrun
from hostile_html import plain_text
from inrun.errors import ConfigurationError, LedgerError
from inrun.notebook import html
from inrun.old.engine.checks.coverage import Coverage, CoverageRow
from report_payloads import PAYLOADS
from tiny import batch, tiny, train_step, validation

EVIL = "<img src=x onerror=alert(1)>"


def scored(steps: int = 3, names: tuple[str, ...] = ("math", "code"), model: nn.Module | None = None, **more: Any) -> Any:
    model = model or tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accountant = inrun.Accountant(model, optimizer, {n: validation(i) for i, n in enumerate(names)}, audit_every=1, **more)
    for step in range(steps):
        train_step(accountant, model, optimizer, batch(4, step), ids=[step, 4, 5, 6])
    return accountant


def test_the_accountant_at_a_glance() -> None:
    accountant = scored()
    text = plain_text(accountant._repr_html_())
    for words in ("Accountant of GPT", "whole credit", "AdamW", "math, code", "math: the books balance", "100 % of", "linear"):
        assert words in text, words
    assert repr(accountant) == f"<Accountant of GPT: whole credit ({accountant.method}+{accountant.update}), 3 steps>"
    accountant.close()
    assert "closed" in plain_text(accountant._repr_html_()) and "closed" in repr(accountant)


def test_before_the_first_step_and_with_a_foreign_ledger() -> None:
    assert "no steps yet" in plain_text(scored(steps=0)._repr_html_())

    class Drain:
        def write(self, record: object) -> None:
            pass

    accountant = scored(ledger=Drain())
    assert "books" not in plain_text(accountant._repr_html_())
    with pytest.raises(LedgerError, match="Drain only writes"):
        accountant.plot.groups()


def test_foreign_ledgers_that_answer_are_asked_as_before() -> None:
    class Answers:
        def write(self, record: object) -> None:
            pass

        def scores(self) -> str:
            return "mine"

    accountant = scored(ledger=Answers(), credit="step")
    assert accountant.scores() == "mine"
    with pytest.raises(LedgerError, match="Answers answers scores\\(\\) alone"):
        accountant.scores(top=1)


def hostile() -> str:
    model = tiny()
    model.__class__ = type(EVIL, (type(model),), {})
    accountant = scored(names=(EVIL, "$\\href{javascript:alert(1)}{x}$"), model=model)
    return str(accountant._repr_html_() + accountant.summary()._repr_html_())


def test_hostile_names_stay_text() -> None:
    assert EVIL in plain_text(hostile())


def test_control_unescaped_names_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html.html, "escape", lambda text, quote=True: text)
    with pytest.raises(AssertionError):
        plain_text(hostile())


def test_coverage_in_a_table_and_in_a_line() -> None:
    rows = tuple(CoverageRow(p, p, p, "shared", "streaming", 5) for p in PAYLOADS)
    text = plain_text(Coverage(rows)._repr_html_())
    assert f"and {len(rows) - 60} more rows" in text
    assert Coverage(()).line() == "100 % of 0 trainable entries are scored: "
    few = Coverage((CoverageRow("a", "m", "linear", "", "streaming", 3), CoverageRow("b", "m", "none", "", "unmoved", 1)))
    assert few.line() == "75 % of 4 trainable entries are scored: linear 3, none 1"


@pytest.mark.parametrize("disk", [False, True])
def test_answers_count_open_windows(disk: bool, tmp_path: Path) -> None:
    accountant = scored(steps=4, **({"ledger": tmp_path / "run"} if disk else {}))
    accountant.ledger.register_samples([{"sample_id": i, "domain": "even" if i % 2 == 0 else "odd"} for i in range(7)])
    every = {(r["validation"], r["sample_id"]): r for r in accountant.scores().to_pylist()}
    assert all(row["pending"] for row in every.values())
    top = accountant.scores(validation="math", top=2).to_pylist()
    best = sorted((r for (name, _), r in every.items() if name == "math"), key=lambda r: -r["score"])[:2]
    assert [r["sample_id"] for r in top] == [r["sample_id"] for r in best]
    assert [r["score"] for r in top] == pytest.approx([r["score"] for r in best]) and top[0]["domain"] in ("even", "odd")
    for row in accountant.scores(by="domain").to_pylist():
        even, own = row["group"] == "even", row["validation"]
        mine = [r["score"] for (name, i), r in every.items() if name == own and (i % 2 == 0) == even]
        assert row["total"] == pytest.approx(np.sum(mine))
    chart = accountant.plot.groups(validation="math", library="matplotlib")
    drawn = sorted(bar.get_width() for bar in chart.axes[0].patches)
    totals = sorted(r["total"] for r in accountant.scores("math", by="domain").to_pylist())
    assert drawn == pytest.approx(totals)
    with pytest.raises(ConfigurationError, match="it has 'code', 'math'"):
        accountant.scores("maths")
    accountant.close()
