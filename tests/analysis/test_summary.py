"""The accounts of a run added up: what is said about the residual, and what points and folds mean."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from inrun.analysis import queries, summarise
from inrun.analysis.summary import MOST_PAGES
from inrun.cli.main import cli
from inrun.ledger import Ledger, StepRecord
from inrun.ledger.schema import ACCOUNTS
from inrun.report.gather import gather


def test_summary_adds_up_and_leaves_gaps_open() -> None:
    row = dict.fromkeys(ACCOUNTS.names)
    rows = [
        row | {"step": 0, "validation": "a", "loss_before": 3.0, "loss_after": 2.5, "data": 0.2, "spread": 0.4,
               "momentum": 0.2, "decay": 0.05, "residual": 0.05},
        row | {"step": 1, "validation": "a", "loss_before": 2.5, "data": 0.3, "spread": 0.3},
        row | {"step": 2, "validation": "a", "skipped": "gradient is not finite"},
        row | {"step": 0, "validation": "b#0", "loss_before": 1.0, "loss_after": 0.9, "data": 0.1, "spread": 0.1, "residual": 0.0},
        row | {"step": 0, "validation": "b#1", "loss_before": 2.0, "loss_after": 1.7, "data": 0.3, "spread": 0.3, "residual": 0.0},
    ]  # fmt: skip
    a, b = summarise(pa.Table.from_pylist(rows, schema=ACCOUNTS), "step").sets
    assert (a.steps, a.audited, a.skipped) == (3, 1, 1)
    assert (a.fall, a.data, a.momentum, a.decay, a.residual) == pytest.approx((0.5, 0.2, 0.2, 0.05, 0.05))
    assert a.relative_residual == pytest.approx(0.125)
    assert b.data == pytest.approx(0.2)
    assert b.fall == pytest.approx(0.2)
    assert b.momentum is None


def account(label: str, step: int = 0, **figures: float) -> dict:
    return {**dict.fromkeys(ACCOUNTS.names), "step": step, "validation": label, "lr": 0.1, "n_samples": 2, **figures}


def books(path) -> Ledger:
    """Two steps of a set, of a set in three folds, and of one with two points whose residuals cancel."""
    with Ledger(path, about={"method": "first"}) as ledger:
        for step in range(2):
            values = {"plain": [1, -1], "f#0": [1, 2], "f#1": [3, 2], "f#2": [2, 2], "p[0]": [4, 0], "p[1]": [0, 1]}
            figures = {
                "plain": {"data": 0.0, "spread": 2.0, "residual": 0.1},
                # Folds have the spread of their mean, as the engine writes it.
                "f#0": {"data": 3.0, "spread": 4.0, "residual": 0.3},
                "f#1": {"data": 5.0, "spread": 4.0, "residual": -0.3},
                "f#2": {"data": 4.0, "spread": 4.0, "residual": 0.4},
                "p[0]": {"data": 4.0, "spread": 4.0, "residual": 1.0},
                "p[1]": {"data": 1.0, "spread": 1.0, "residual": -1.0},
            }
            rows = [account(label, step, loss_before=9.0, loss_after=8.0, **more) for label, more in figures.items()]
            contributions = {label: np.float32(v) for label, v in values.items()}
            ledger.write(StepRecord(step, np.array([10, 11]), contributions, rows))
    return Ledger.open(path)


def test_points_are_sets_and_folds_are_parts_of_one_in_audit_scores_and_report(tmp_path) -> None:
    reader = books(tmp_path / "run")
    names = ["f", "p[0]", "p[1]", "plain"]
    scores = reader.scores()
    audited = {s.validation: s for s in summarise(reader.accounts(), "first").sets}
    page = gather(reader, by=None, top=3, text=True)
    assert scores["validation"].unique().to_pylist() == sorted(audited) == list(page.sets) == names
    assert list(queries.info(reader).validation.items()) == [("f", 3), ("p[0]", 1), ("p[1]", 1), ("plain", 1)]
    # The residuals of two points do not cancel, and each is held against its own size: 1 / 4 and 1 / 1.
    assert audited["p[0]"].relative_residual == pytest.approx(0.25)
    assert audited["p[1]"].relative_residual == pytest.approx(1.0)
    # The folds' do: (0.3 - 0.3 + 0.4) / 3 against the size of their mean.
    assert audited["f"].relative_residual == pytest.approx(0.4 / 3 / 4)
    assert [a.judged.relative_residual for a in page.accounts] == pytest.approx([audited[n].relative_residual for n in names])
    # The data account is the sum of the scores, with the standard error of the folds' totals 6, 10 and 8.
    for name, part in audited.items():
        assert part.data == pytest.approx(sum(r["score"] for r in scores.to_pylist() if r["validation"] == name))
    assert audited["f"].data_error == pytest.approx(2 / 3**0.5) and audited["p[0]"].data_error is None
    assert "± 1.2 over the folds" in str(summarise(reader.accounts(), "first"))
    told = json.loads(CliRunner().invoke(cli, ["audit", str(tmp_path / "run"), "--json"]).output)
    assert sorted(s["validation"] for s in told["validation_sets"]) == names


def test_a_step_skipped_before_its_points_were_known_counts_for_each(tmp_path) -> None:
    values = {"p[0]": np.float32([1]), "p[1]": np.float32([2])}
    with Ledger(tmp_path / "run") as ledger:
        skipped = account("p", 0) | {"skipped": "gradient is not finite and the optimizer did not step"}
        ledger.write(StepRecord(0, np.arange(1), {}, [skipped]))
        ledger.write(StepRecord(1, np.arange(1), values, [account("p[0]", 1, data=1.0), account("p[1]", 1, data=2.0)]))
    found = summarise(Ledger.open(tmp_path / "run").accounts(), "").sets
    assert [(s.validation, s.steps, s.skipped) for s in found] == [("p[0]", 2, 1), ("p[1]", 2, 1)]
    page = gather(tmp_path / "run", by=None, top=1, text=True)
    assert [(a.name, a.steps, a.skipped) for a in page.accounts] == [("p[0]", 2, 1), ("p[1]", 2, 1)]


def test_a_set_of_one_fold_has_the_name_of_the_set(tmp_path) -> None:
    with Ledger(tmp_path / "run") as ledger:
        values = {"f#0": np.float32([1, 2]), "g": np.float32([3, 4])}
        ledger.write(StepRecord(0, np.arange(2), values, [account("f#0", data=3.0), account("g", data=7.0)]))
    for view in ("plain", "rank"):
        table = queries.scores(tmp_path / "run", view=view)
        assert table["validation"].to_pylist() == ["f", "f", "g", "g"] and table["standard_error"].null_count == 4
    assert [s.validation for s in summarise(Ledger.open(tmp_path / "run").accounts(), "").sets] == ["f", "g"]


def test_a_page_for_thousands_of_points_stays_short() -> None:
    rows = pa.Table.from_pylist([account(f"p[{j}]") for j in range(1000)], schema=ACCOUNTS)
    summary = summarise(rows, "first")
    assert len(summary.as_dict()["validation_sets"]) == 1000
    assert f"and {1000 - MOST_PAGES} more validation sets" in str(summary)


def test_skipped_steps_are_counted_by_reason_whatever_the_details(tmp_path) -> None:
    texts = ["validation loss is not finite: [nan]", "validation loss is not finite: [inf, 1.0]", "something else: 3"]
    with Ledger(tmp_path / "run") as ledger:
        for step, text in enumerate(texts):
            ledger.write(StepRecord(step, np.arange(2), {}, [account("v", step) | {"skipped": text}]))
    assert queries.info(tmp_path / "run").skipped == {"validation loss is not finite": 2, "something else: 3": 1}
