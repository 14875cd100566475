"""A ledger that lives as long as the process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from inrun.errors import LedgerError
from inrun.ledger.record import SIGN, UNIT, StepRecord
from inrun.ledger.schema import ACCOUNTS, CONTRIBUTIONS, SCORES


class MemoryLedger:
    """Keeps all records of a run in memory and adds them up on demand."""

    def __init__(self) -> None:
        """Start empty."""
        self._steps: dict[str, list[npt.NDArray[np.int64]]] = {}
        self._ids: dict[str, list[npt.NDArray[np.int64]]] = {}
        self._values: dict[str, list[npt.NDArray[np.float32]]] = {}
        self._accounts: list[dict[str, Any]] = []

    def write(self, record: StepRecord) -> None:
        """Add one step."""
        for label, values in record.contributions.items():
            self._steps.setdefault(label, []).append(np.full(len(values), record.step, np.int64))
            self._ids.setdefault(label, []).append(record.sample_ids)
            self._values.setdefault(label, []).append(values)
        self._accounts.extend(record.accounts)

    def contributions(self) -> pa.Table:
        """Return every contribution: step, sample_id, validation, contribution."""
        labels = list(self._values)
        columns: dict[str, pa.Array] = {
            "step": pa.array(_join([a for x in labels for a in self._steps[x]], np.int64)),
            "sample_id": pa.array(_join([a for x in labels for a in self._ids[x]], np.int64)),
            "validation": pa.array([x for x in labels for a in self._values[x] for _ in range(len(a))], pa.string()),
            "contribution": pa.array(_join([a for x in labels for a in self._values[x]], np.float32)),
        }
        return pa.table(columns, schema=CONTRIBUTIONS)

    def accounts(self) -> pa.Table:
        """Return the accounts, one row per step and validation set (or point, or fold)."""
        return pa.Table.from_pylist(self._accounts, schema=ACCOUNTS)

    def scores(self) -> pa.Table:
        """Return one row per sample and validation set, ordered by both.

        ``score`` is the sum of contributions; of a set in folds it is their mean, and ``standard_error`` tells its error.
        """
        folds: dict[str, list[str]] = {}
        for label in self._values:
            folds.setdefault(label.partition("#")[0], []).append(label)
        parts = [self._sum_up(name, labels) for name, labels in folds.items()]
        return pa.concat_tables(parts) if parts else SCORES.empty_table()

    def _sum_up(self, name: str, labels: list[str]) -> pa.Table:
        ids, steps = _join(self._ids[labels[0]]), _join(self._steps[labels[0]])
        order = np.argsort(ids, kind="stable")
        unique, start, counts = np.unique(ids[order], return_index=True, return_counts=True)

        def gather(how: Any, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return how.reduceat(values[order], start) if len(ids) else values[order]

        sums = np.stack([gather(np.add, _join(self._values[x]).astype(np.float64)) for x in labels])
        k = len(labels)
        error = sums.std(axis=0, ddof=1) / k**0.5 if k > 1 else np.full(len(unique), np.nan)
        columns = {
            "sample_id": unique,
            "validation": pa.array([name] * len(unique), pa.string()),
            "score": sums.mean(axis=0),
            "standard_error": pa.array(error, from_pandas=True),
            "times_used": counts.astype(np.int64),
            "first_step": gather(np.minimum, steps),
            "last_step": gather(np.maximum, steps),
        }
        return pa.table(columns, schema=SCORES)

    def save(self, folder: str | Path, about: dict[str, Any]) -> Path:
        """Write what is held so far as Parquet, with ``about`` in ``run.json``; refuses a folder that has a run already."""
        path = Path(folder)
        if (path / "run.json").exists():
            raise LedgerError(f"{path} holds a run already; give a new folder")
        for name, table in (("contributions", self.contributions()), ("accounts", self.accounts())):
            (path / name).mkdir(parents=True, exist_ok=True)
            pq.write_table(table, path / name / "part-0.parquet", write_page_checksum=True)
        described = {"schema": 1, "sign": SIGN, "unit": UNIT, **about}
        (path / "run.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        return path


def _join(arrays: list[Any], dtype: Any = None) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
