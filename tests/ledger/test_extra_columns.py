"""Norms and cosines beside contributions: only in parts of steps that told them, null elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from inrun.errors import LedgerError
from inrun.ledger import Ledger, MemoryLedger, StepRecord
from inrun.ledger.schema import CONTRIBUTIONS
from inrun.ledger.verify import verify

IDS = np.array([3, 5], np.int64)


def record(step: int, told: bool, cosine: bool = True) -> StepRecord:
    values = {"a": np.array([0.5, -1.0], np.float32), "b#0": np.array([2.0, 3.0], np.float32)}
    cosines = {"a": np.array([0.25, -0.5], np.float32), "b#0": np.array([1.0, 0.0], np.float32)}
    norms = np.array([step + 1.0, 4.0], np.float32)
    return StepRecord(step, IDS, values, [], (), norms if told else None, cosines if told and cosine else {})


COSINES = {(3, "a"): 0.25, (5, "a"): -0.5, (3, "b#0"): 1.0, (5, "b#0"): 0.0}


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("order", [(False, True, False), (False, True), (True, False)])
def test_steps_that_tell_and_steps_that_do_not(tmp_path: Path, apart: bool, order: tuple[bool, ...]) -> None:
    """In parts of their own, or in one; the parts that have nothing to tell are as they were before there were such columns."""
    memory = MemoryLedger()
    with Ledger(tmp_path / "run") as ledger:
        for step, told in enumerate(order):
            ledger.write(record(step, told))
            memory.write(record(step, told))
            if apart:
                ledger.flush()
    reader = Ledger.open(tmp_path / "run")
    for table in (reader.contributions(), memory.contributions()):
        found = sorted(tuple(r[k] for k in ("step", "sample_id", "validation", "norm", "cosine")) for r in table.to_pylist())
        assert [row[:3] for row in found] == [(s, i, v) for s in range(len(order)) for i in (3, 5) for v in ("a", "b#0")]
        for step, i, label, norm, cosine in found:
            expected = (step + 1.0 if i == 3 else 4.0, COSINES[i, label])
            assert (norm, cosine) == (expected if order[step] else (None, None))
    if apart:
        schemas = [pq.read_schema(file) for file in reader.files("contributions")]
        assert [schema.equals(CONTRIBUTIONS) for schema in schemas] == [not told for told in order]
    with reader.tables() as tables:
        assert tables.row("SELECT count(norm), sum(cosine) FROM contributions") == (4 * sum(order), pytest.approx(0.75))
        assert tables.row("SELECT count(*) FROM contributions") == (4 * len(order),)
    assert reader.scores().num_rows == 4
    assert verify(tmp_path / "run").good


def test_norms_alone(tmp_path: Path) -> None:
    with Ledger(tmp_path / "run") as ledger:
        ledger.write(record(0, True, cosine=False))
    assert Ledger.open(tmp_path / "run").contributions().column_names == [*CONTRIBUTIONS.names, "norm"]
    assert verify(tmp_path / "run").good


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    with Ledger(tmp_path / "run") as ledger:
        for norms in (np.array([1.0], np.float32), np.array([1.0, np.inf], np.float32)):
            with pytest.raises(LedgerError, match="norm"):
                ledger.write(StepRecord(0, IDS, {"a": np.zeros(2, np.float32)}, [], (), norms))
