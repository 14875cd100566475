"""The ledger in memory, and what it saves; folders that earlier versions saved."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from inrun.cli.main import cli
from inrun.errors import LedgerError
from inrun.ledger import Ledger, MemoryLedger, StepRecord
from inrun.ledger.merge import merge
from inrun.ledger.repair import repair
from inrun.ledger.verify import verify

LABELS = ("plain", "f#0", "f#1", "p[0]", "p[1]")


def record(step: int) -> StepRecord:
    if step == 2:
        rows = [{"step": 2, "validation": x, "skipped": "gradient or contributions are not finite"} for x in LABELS]
        return StepRecord(2, np.arange(3), {}, rows)
    values = {label: np.float32([step, j, -1]) / 3 for j, label in enumerate(LABELS)}
    figures = {"loss_before": 2.0, "loss_after": 1.5, "data": 0.25, "spread": 1.0, "residual": 0.01, "lr": 0.1, "n_samples": 3}
    return StepRecord(step, np.array([4, step, 9]), values, [{"step": step, "validation": x, **figures} for x in LABELS])


@pytest.fixture
def memory() -> MemoryLedger:
    ledger = MemoryLedger()
    for step in range(4):
        ledger.write(record(step))
    return ledger


def save_as_before(memory: MemoryLedger, folder) -> None:
    """What ``MemoryLedger.save`` wrote until it wrote ledgers."""
    for name, table in (("contributions", memory.contributions()), ("accounts", memory.accounts())):
        (folder / name).mkdir(parents=True)
        pq.write_table(table, folder / name / "part-0.parquet", write_page_checksum=True)
    about = {"schema": 1, "sign": "+", "unit": "nats", "method": "first", "steps": 4}
    (folder / "run.json").write_text(json.dumps(about, indent=2) + "\n")


def told(command: str, folder, *more: str) -> str:
    done = CliRunner().invoke(cli, [command, str(folder), *more], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


KEY = [("validation", "ascending"), ("sample_id", "ascending")]


def test_what_is_saved_is_a_ledger(memory, tmp_path) -> None:
    run = memory.save(tmp_path / "run", {"method": "first"})
    assert verify(run).good and verify(run).parts == 2
    reader = Ledger.open(run)
    assert reader.about["method"] == "first" and reader.about["run_id"]
    assert reader.accounts().equals(memory.accounts())
    assert reader.scores().equals(memory.scores().sort_by(KEY))
    order = [("validation", "ascending"), ("step", "ascending"), ("sample_id", "ascending")]
    assert reader.contributions().sort_by(order).equals(memory.contributions().sort_by(order))
    with pytest.raises(LedgerError, match="already; give a new folder"):
        memory.save(run, {})
    with Ledger.resume(run, None) as ledger:  # and can be gone on with
        ledger.write(record(0))
    assert set(Ledger.open(run).accounts()["step"].to_pylist()) == {0}


def test_nothing_is_saved_as_an_empty_ledger(tmp_path) -> None:
    run = MemoryLedger().save(tmp_path / "run", {})
    assert verify(run).good and Ledger.open(run).scores().num_rows == Ledger.open(run).accounts().num_rows == 0


def test_what_earlier_versions_saved_is_read_as_what_is_saved_now(memory, tmp_path) -> None:
    save_as_before(memory, tmp_path / "old")
    memory.save(tmp_path / "new", {"method": "first"})
    old, new = Ledger.open(tmp_path / "old"), Ledger.open(tmp_path / "new")
    assert old.scores().equals(new.scores()) and old.accounts().equals(new.accounts()) and old.samples() is None
    for command, more in (("audit", []), ("scores", []), ("scores", ["--all", "--csv"])):
        assert told(command, old.path, *more) == told(command, new.path, *more)
    told("info", old.path)
    told("report", old.path)
    assert (tmp_path / "old" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    "action",
    [verify, repair, Ledger.erase, lambda run: Ledger.resume(run, None), lambda run: merge([run, run], run.parent / "out")],
)
def test_what_earlier_versions_saved_is_only_read(memory, tmp_path, action) -> None:
    save_as_before(memory, tmp_path / "old")
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    with pytest.raises(LedgerError, match="saved from memory by an earlier inrun.*can be read.*accountant.save now writes"):
        action(tmp_path / "old")
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_a_ledger_that_lost_its_manifest_is_not_taken_for_an_old_one(memory, tmp_path) -> None:
    run = memory.save(tmp_path / "run", {})
    for file in (run / "manifest").iterdir():
        file.unlink()
    (run / "manifest").rmdir()
    with pytest.raises(LedgerError, match="lost its manifest"):
        Ledger.open(run).scores()
    assert not verify(run).good
