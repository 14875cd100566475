"""Groups, curves, curation and shares of a run that keeps whole credit add up the settled credit where there is one."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner

from inrun.analysis import queries
from inrun.analysis.curate import curate
from inrun.analysis.shares import shares
from inrun.cli.main import cli
from inrun.errors import ConfigurationError
from inrun.ledger import Ledger, SettledCredits, StepRecord

STEPS, WINDOW = 6, 2


def record(step: int) -> StepRecord:
    """Samples 2t and 2t + 1 lower and raise the loss by 1 at once; over the whole window it is -8 and 4, the other way round."""
    ids = np.array([2 * step, 2 * step + 1])
    losses = {"loss_before": 2.0, "loss_after": 1.0, "data": 0.75, "spread": 2.0, "residual": 0.0}
    accounts = [{"step": step, "validation": "v", "lr": 0.5, **losses}]
    return StepRecord(step, ids, {"v": np.float32([1, -1])}, accounts, (settled(step - WINDOW),) if step >= WINDOW else ())


def settled(step: int) -> SettledCredits:
    ids = np.array([2 * step, 2 * step + 1])
    return SettledCredits(step, ids, {"v": np.float32([-8, 4])}, {"v": np.float32([3, 0])}, np.float32([1, 1]))


@pytest.fixture(params=["whole", "step"])
def run(request, tmp_path) -> Ledger:
    """The same steps with and without credits; the first four of six are settled. The control is ``method="step"``."""
    with Ledger(tmp_path / "run", about={"method": request.param}) as ledger:
        ledger.register_samples([{"sample_id": i, "domain": "ab"[i % 2], "owner": "xy"[i % 2]} for i in range(2 * STEPS)])
        for step in range(STEPS):
            r = record(step)
            ledger.write(r if request.param == "whole" else StepRecord(r.step, r.sample_ids, r.contributions, r.accounts))
    return Ledger.open(tmp_path / "run")


def is_whole(run) -> bool:
    return run.about["method"] == "whole"


def test_groups(run) -> None:
    totals = {row["group"]: row["total"] for row in queries.groups(run).to_pylist()}
    assert totals == ({"a": 4 * -8 + 2, "b": 4 * 4 - 2} if is_whole(run) else {"a": 6, "b": -6})


def test_curves_over_time(run) -> None:
    rows = queries.groups(run, stages=3).to_pylist()
    assert [row["total"] for row in rows if row["group"] == "a"] == ([-16, -16, 2] if is_whole(run) else [2, 2, 2])
    upto = queries.groups(run, stages=3, cumulative=True).to_pylist()
    assert [row["total"] for row in upto if row["group"] == "a"] == ([-16, -32, -30] if is_whole(run) else [2, 4, 6])
    assert [row["uses"] for row in upto if row["group"] == "a"] == [2, 4, 6]


def test_extremes(run) -> None:
    best = queries.extremes(run, 1).to_pylist()[0]
    assert (best["sample_id"], best["score"], best["domain"]) == ((1, 4.0, "b") if is_whole(run) else (0, 1.0, "a"))


def test_curate(run, tmp_path) -> None:
    curate(run, tmp_path / "out")
    dropped = {json.loads(line)["sample_id"] for line in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()}
    assert dropped == ({0, 2, 4, 6, 9, 11} if is_whole(run) else {1, 3, 5, 7, 9, 11})
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("whole credit" in card) == is_whole(run)
    assert ("the uses of 2 steps are pending" in card) == is_whole(run)


@pytest.mark.parametrize(("error", "drops"), [(7.5, True), (8.5, False), (0.0, True)])
def test_a_score_within_its_estimate_error_is_not_negative(tmp_path, error: float, drops: bool) -> None:
    """-8 with an error of 8.5 may as well be above zero: the default rule keeps it, a rule in words need not."""
    with Ledger(tmp_path / "run", about={"method": "whole"}) as ledger:
        ledger.register_samples([{"sample_id": i} for i in range(4)])
        for step in range(2):
            ledger.write(record(step) if step == 0 else dataclasses.replace(record(step), settled=()))
        ledger.settle([dataclasses.replace(settled(0), errors={"v": np.float32([error, 0])})])
    out = curate(Ledger.open(tmp_path / "run"), tmp_path / "out")
    dropped = {json.loads(line)["sample_id"] for line in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()}
    assert dropped == ({0, 3} if drops else {3})  # 3 is pending: -1 so far, without an error
    assert "estimate_error" in out.rule
    assert curate(Ledger.open(tmp_path / "run"), tmp_path / "other", keep="score > 0").dropped == 2
    kept = curate(Ledger.open(tmp_path / "run"), tmp_path / "third", keep="estimate_error > 8").kept
    assert kept == int(error > 8)


def test_no_rule_by_an_estimate_that_there_is_not(run, tmp_path) -> None:
    if is_whole(run):
        return
    with pytest.raises(ConfigurationError, match="only whole credit"):
        curate(run, tmp_path / "out", keep="estimate_error < 1")


def test_shares(run) -> None:
    found = shares(run, 1000)
    paid = {row.group: row.cents for row in found.rows}
    assert paid == ({"x": 0, "y": 1000} if is_whole(run) else {"x": 1000, "y": 0})
    assert (found.credit, found.pending) == (("whole", 4) if is_whole(run) else ("step", 0))
    said = found.coverage()
    assert ("is credited to the samples that pushed" in said) == ("4 uses are pending" in said) == is_whole(run)
    assert ("account of momentum" in said) != is_whole(run)


def test_left_out_and_info(run) -> None:
    assert queries.left_out(run, "per_lr") == 0
    found = queries.info(run)
    assert (found.steps, found.rows, found.samples_used) == (6, 12, 12)
    assert (found.credit, found.credit_rows, found.settled, found.pending) == (
        ("whole", 8, 4, 2) if is_whole(run) else ("step", 0, 0, 0)
    )


def told(*arguments: str) -> str:
    done = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_commands_say_which_credit(run) -> None:
    path = str(run.path)
    assert ("credit     whole: 4 steps settled, 2 pending; 8 credits" in told("info", path)) == is_whole(run)
    scores = told("scores", path, "--top", "12")
    for words in ("whole credit", "pending", "± estimate"):
        assert (words in scores) == is_whole(run), words
    assert ("whole credit" in told("groups", path)) == is_whole(run)
    assert json.loads(told("scores", path, "--json"))["method"] == run.about["method"]
    assert told("scores", path, "--csv").splitlines()[0].endswith("last_step,step_score,pending,estimate_error")


def test_a_column_registered_before_answers_had_one_of_its_name(tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch, Ledger(tmp_path / "run") as ledger:
        patch.setattr("inrun.ledger.samples.RESERVED", set())
        ledger.register_samples([{"sample_id": i, "pending": "yes", "domain": "a"} for i in range(2)])
        ledger.write(record(0))
    found = queries.extremes(tmp_path / "run", 1)
    assert found.column_names.count("pending") == 1 and found["pending"].to_pylist() == [0] and found["domain"].to_pylist() == ["a"]
