"""Settled credits in the ledger: each counts exactly once through resume, repair and merge; older books are read as before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from faulty_files import QuickFiles
from inrun.analysis import queries
from inrun.errors import LedgerError
from inrun.ledger import Ledger, MemoryLedger, SettledCredits, StepRecord, credit_of, schema
from inrun.ledger.merge import merge
from inrun.ledger.repair import repair
from inrun.ledger.verify import verify

WHOLE = {"method": "whole"}
#: As runs said it before there were four methods.
OLDER = {"method": "midpoint", "update": "realised", "credit": "whole"}
WINDOW = 3


def settled(step: int, scale: float = 10.0) -> SettledCredits:
    values = np.float32([step, 1]) * np.float32(scale)
    return SettledCredits(step, np.array([step, 100]), {"v": values}, {"v": np.float32([0.5, 0])}, np.float32([1, 1]))


def record(step: int, window: int = WINDOW) -> StepRecord:
    """Step t settles step t - window."""
    done = (settled(step - window),) if step >= window else ()
    account = {"step": step, "validation": "v", "lr": 0.1, "inherited": 0.25, "points": 2}
    return StepRecord(step, np.array([step, 100]), {"v": np.float32([step, 1])}, [account], done)


def new(path: Path, **options) -> Ledger:
    return Ledger(path, **{"flush_every": 10**6, "files": QuickFiles(), "about": WHOLE, **options})


def resume(path: Path, mark, **options) -> Ledger:
    return Ledger.resume(path, mark, **{"flush_every": 10**6, "files": QuickFiles(), **options})


def write(ledger: Ledger, first: int, last: int) -> None:
    for step in range(first, last):
        ledger.write(record(step))


def settled_steps(path: Path) -> list[int]:
    rows = Ledger.open(path).credits()
    assert rows["row"].to_pylist() == [0, 1] * (len(rows) // 2)
    return rows["step"].to_pylist()[::2]


@pytest.fixture
def run(tmp_path) -> Path:
    """Ten steps, one entry each; the last three were settled when the run was closed."""
    with new(tmp_path / "run", flush_every=1) as ledger:
        write(ledger, 0, 10)
        ledger.settle([settled(7), settled(8), settled(9)])
    return tmp_path / "run"


def test_what_is_settled_is_read(run) -> None:
    assert settled_steps(run) == list(range(10))
    assert Ledger.open(run).credits().schema.equals(schema.CREDITS)
    assert verify(run).good
    accounts = Ledger.open(run).accounts()
    assert set(accounts["inherited"].to_pylist()) == {0.25} and set(accounts["points"].to_pylist()) == {2}
    found = queries.info(run)
    assert (found.credit, found.credit_rows, found.settled, found.pending, found.rows) == ("whole", 20, 10, 0, 20)
    assert found.nbytes == sum(f.stat().st_size for f in run.rglob("*") if f.is_file() and not f.name.startswith("lock"))


def test_what_a_step_settles_is_in_its_own_flush(tmp_path) -> None:
    """A reader never sees a step without what was settled with it."""
    with new(tmp_path / "run", flush_every=1) as ledger:
        write(ledger, 0, 5)
        parts = [{p.table for p in e.parts} for c in ledger.chains() for e in c.live()]
    assert parts == [{"contributions", "accounts"}] * 3 + [{"contributions", "accounts", "credits"}] * 2


@pytest.mark.parametrize("again", ["write", "settle", "twice at once", "after a resume", "in memory"])
def test_a_second_settlement_is_refused_and_changes_nothing(tmp_path, again: str) -> None:
    ledger: Ledger | MemoryLedger = MemoryLedger(WHOLE) if again == "in memory" else new(tmp_path / "run")
    for step in range(5):
        ledger.write(record(step))
    if again == "after a resume":
        mark = ledger.mark()
        ledger.close()
        ledger = resume(tmp_path / "run", mark)
    with pytest.raises(LedgerError, match=r"step [13] was settled already; the credit of each use is settled once"):
        if again == "write":
            ledger.write(StepRecord(5, np.arange(1), {"v": np.float32([1])}, [{"step": 5, "validation": "v"}], (settled(1),)))
        elif again == "twice at once":
            ledger.settle([settled(3), settled(3)])
        else:
            ledger.settle([settled(1)])
    assert ledger.accounts()["step"].to_pylist() == list(range(5))
    ledger.settle([settled(2), settled(3)])  # the control: others can be
    assert ledger.credits()["step"].to_pylist()[::2] == [0, 1, 2, 3]


def test_a_step_that_was_not_written_cannot_be_settled(tmp_path) -> None:
    for ledger in (new(tmp_path / "run"), MemoryLedger()):
        ledger.write(record(0))
        with pytest.raises(LedgerError, match=r"step 1 cannot be settled: it was not written yet"):
            ledger.settle([settled(1)])
        ledger.write(StepRecord(1, np.array([1, 100]), {"v": np.float32([1, 1])}, [], (settled(1),)))  # its own step it may settle
        assert ledger.credits()["step"].to_pylist() == [1, 1]


def test_resume_drops_what_was_settled_after_the_mark(tmp_path) -> None:
    path = tmp_path / "run"
    with new(path, flush_every=1) as ledger:
        write(ledger, 0, 5)
        mark = ledger.mark()
        write(ledger, 5, 8)
        ledger.settle([settled(5, 99), settled(6, 99), settled(7, 99)])  # training ended here, once
    assert settled_steps(path) == list(range(8))  # the control
    with resume(path, mark) as ledger:
        assert settled_steps(path) == [0, 1]
        with pytest.raises(LedgerError, match="step 1 was settled already"):
            ledger.settle([settled(1)])
        write(ledger, 5, 8)
        ledger.settle([settled(5), settled(6), settled(7)])
    with new(tmp_path / "unbroken") as ledger:
        write(ledger, 0, 8)
        ledger.settle([settled(5), settled(6), settled(7)])
    assert Ledger.open(path).credits().equals(Ledger.open(tmp_path / "unbroken").credits())
    assert Ledger.open(path).scores().equals(Ledger.open(tmp_path / "unbroken").scores())
    assert verify(path).good


def test_what_was_settled_before_the_mark_stays_even_without_a_step(tmp_path) -> None:
    """Settled late, but before the mark: the moment of writing decides, not the step of use."""
    path = tmp_path / "run"
    with new(path) as ledger:
        write(ledger, 0, 5)
        ledger.mark()
        ledger.settle([settled(2)])
        mark = ledger.mark()
        ledger.settle([settled(3)])
    resume(path, mark).close()
    assert settled_steps(path) == [0, 1, 2]


def test_another_ranks_mark_decides_by_the_moment_too(tmp_path) -> None:
    path = tmp_path / "run"
    zero, one = new(path, world=2), new(path, rank=1, world=2)
    for ledger in (zero, one):
        write(ledger, 0, 5)
    mark = zero.mark()
    one.mark()
    one.settle([settled(2)])
    one.settle([settled(3)])
    for ledger in (zero, one):
        ledger.close()
    assert settled_steps(path) == [0, 1, 0, 1, 2, 3]  # the control
    for ledger in (resume(path, mark, world=2), resume(path, mark, rank=1, world=2)):
        ledger.close()
    assert settled_steps(path) == [0, 1, 0, 1]


def test_nothing_to_settle_is_no_flush(tmp_path) -> None:
    with new(tmp_path / "run") as ledger:
        write(ledger, 0, 3)
        ledger.mark()
        count = ledger._manifest.count
        ledger.settle([])
        ledger.flush()
        assert ledger._manifest.count == count


# Older books


def as_before(run: Path) -> None:
    """Make a ledger what an earlier release would have left: no folder for credits."""
    shutil.rmtree(run / "credits")


def test_books_without_the_folder_are_read_and_gone_on_with(tmp_path) -> None:
    path = tmp_path / "run"
    with new(path, about={"method": "first"}) as ledger:
        for step in range(4):
            ledger.write(record(step, window=99))
        mark = ledger.mark()
    scores = Ledger.open(path).scores()
    as_before(path)
    reader = Ledger.open(path)
    assert reader.credits().num_rows == 0 and reader.scores().equals(scores) and verify(path).good
    assert reader.scores()["score"].equals(reader.scores()["step_score"])
    with resume(path, mark) as ledger:
        ledger.write(record(4))
    assert (path / "credits").is_dir() and settled_steps(path) == [1] and verify(path).good


def test_accounts_from_before_have_nulls(tmp_path, monkeypatch) -> None:
    older = pa.schema([f for f in schema.ACCOUNTS if f.name not in ("inherited", "points")])
    with monkeypatch.context() as patch:
        patch.setattr("inrun.ledger.buffer.ACCOUNTS", older)
        with new(tmp_path / "run") as ledger:
            ledger.write(StepRecord(0, np.arange(1), {"v": np.float32([1])}, [{"step": 0, "validation": "v", "lr": 0.5}]))
            mark = ledger.mark()
    reader = Ledger.open(tmp_path / "run")
    assert verify(tmp_path / "run").good
    assert reader.accounts().schema.equals(schema.ACCOUNTS) and reader.accounts()["points"].null_count == 1
    with reader.tables() as tables:
        assert tables.row("SELECT lr, inherited, points FROM accounts") == (0.5, None, None)
    with resume(tmp_path / "run", mark) as ledger:  # old parts beside new ones
        ledger.write(record(1))
    assert Ledger.open(tmp_path / "run").accounts()["points"].to_pylist() == [None, 2]


# Damage, merge, erase


def test_verify_sees_a_damaged_part_and_repair_falls_back_on_contributions(run) -> None:
    before = Ledger.open(run).scores().to_pylist()
    victim = next(f for f in sorted((run / "credits").iterdir()))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    found = verify(run)
    assert [p.part for p in found.problems] == [f"credits/{victim.name}"]
    assert (found.problems[0].first_step, found.problems[0].last_step) == (0, 0)
    assert repair(run, QuickFiles()).lost == [("credits", 0, 0)]
    assert verify(run).good and settled_steps(run) == list(range(1, 10))
    after = {row["sample_id"]: row for row in Ledger.open(run).scores().to_pylist()}
    assert after[0]["score"] == 0.0 and after[0]["pending"] == 1 and after[0]["estimate_error"] is None
    assert after[100]["score"] == 9 * 10 + 1 and after[100]["pending"] == 1
    assert [row["score"] for row in before if row["sample_id"] == 100] == [100.0]


def test_lost_contributions_leave_the_credit(run) -> None:
    next(f for f in sorted((run / "contributions").iterdir())).unlink()
    assert repair(run, QuickFiles()).lost == [("contributions", 0, 0)]
    scores = {row["sample_id"]: row for row in Ledger.open(run).scores().to_pylist()}
    assert scores[100]["score"] == 100.0 and scores[100]["step_score"] == 9.0


def test_a_link_in_place_of_the_folder_is_refused(run, tmp_path) -> None:
    (run / "credits").rename(tmp_path / "elsewhere")
    (run / "credits").symlink_to(tmp_path / "elsewhere")
    assert not verify(run).good
    with pytest.raises(LedgerError, match="is a link"):
        Ledger.open(run).credits()


def test_erase_takes_the_credits_too(run) -> None:
    Ledger.erase(run)
    assert not list(run.rglob("*.parquet"))


def continued(tmp_path: Path, steps: int = 6) -> tuple[Path, Path, dict]:
    """A run, and a copy of it that parted at a mark after some steps."""
    with new(tmp_path / "here") as ledger:
        write(ledger, 0, steps)
        mark = ledger.mark()
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    return tmp_path / "here", tmp_path / "there", mark


def test_merge_joins_credits(tmp_path) -> None:
    here, there, mark = continued(tmp_path)
    with resume(there, mark) as ledger:
        write(ledger, 6, 9)
    merged = merge([here, there], tmp_path / "out")
    assert settled_steps(merged) == [0, 1, 2, 3, 4, 5] and verify(merged).good
    assert Ledger.open(merged).scores().equals(Ledger.open(there).scores())
    assert credit_of(Ledger.open(merged).about) == "whole"


def test_merge_refuses_what_both_settled(tmp_path) -> None:
    """One copy was closed, which settles the open windows; the other went on and settled them in full."""
    here, there, mark = continued(tmp_path)
    with resume(here, mark) as ledger:
        ledger.settle([settled(3, 1.0)])
    with resume(there, mark) as ledger:
        write(ledger, 6, 9)
    with pytest.raises(LedgerError, match="would count twice"):
        merge([here, there], tmp_path / "out")


def test_merge_refuses_a_step_settled_at_two_moments(tmp_path) -> None:
    here, there, mark = continued(tmp_path)
    with resume(here, mark) as ledger:
        ledger.settle([settled(3, 1.0)])
    with resume(there, mark) as ledger:
        ledger.write(StepRecord(50, np.array([1]), {"v": np.float32([1])}, [{"step": 50, "validation": "v"}]))
        ledger.mark()
        ledger.settle([settled(3)])
    with pytest.raises(LedgerError, match="step 3 of rank 0 was settled twice.*would count twice"):
        merge([here, there], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_merge_refuses_another_method(tmp_path) -> None:
    here, there, _ = continued(tmp_path)
    about = json.loads((there / "run.json").read_text())
    (there / "run.json").write_text(json.dumps({**about, "method": "step"}))
    with pytest.raises(LedgerError, match="differ in method"):
        merge([here, there], tmp_path / "out")


@pytest.mark.parametrize(
    ("about", "credit"),
    [
        ({}, "step"),
        (WHOLE, "whole"),
        ({"method": "first"}, "step"),
        (OLDER, "whole"),
        ({**OLDER, "credit": "step"}, "step"),
        ({"method": 3}, "step"),
    ],
)
def test_credit_of(about: dict, credit: str) -> None:
    assert credit_of(about) == credit
