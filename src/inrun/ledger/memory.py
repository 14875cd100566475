"""A ledger that lives as long as the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from inrun.errors import LedgerError
from inrun.ledger.labels import set_of
from inrun.ledger.record import StepRecord
from inrun.ledger.schema import ACCOUNTS, CONTRIBUTIONS, SCORES
from inrun.ledger.writer import Ledger


class MemoryLedger:
    """Keeps all records of a run in memory and adds them up on demand."""

    def __init__(self) -> None:
        """Start empty."""
        self._records: list[StepRecord] = []

    def write(self, record: StepRecord) -> None:
        """Add one step."""
        self._records.append(record)

    def _column(self, label: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return steps, sample ids and contributions of a label, in the order written."""
        found = [(r.step, r.sample_ids, r.contributions[label]) for r in self._records if label in r.contributions]
        steps = [np.full(len(values), step, np.int64) for step, _, values in found]
        return np.concatenate(steps), np.concatenate([ids for _, ids, _ in found]), np.concatenate([v for _, _, v in found])

    def _labels(self) -> list[str]:
        return list(dict.fromkeys(label for record in self._records for label in record.contributions))

    def contributions(self) -> pa.Table:
        """Return every contribution: step, sample_id, validation, contribution; label by label, in the order written."""
        parts = []
        for label in self._labels():
            steps, ids, values = self._column(label)
            names = pa.DictionaryArray.from_arrays(np.zeros(len(ids), np.int32), pa.array([label])).cast(pa.string())
            parts.append(pa.table([pa.array(steps), pa.array(ids), names, pa.array(values)], schema=CONTRIBUTIONS))
        return pa.concat_tables(parts).combine_chunks() if parts else CONTRIBUTIONS.empty_table()

    def accounts(self) -> pa.Table:
        """Return the accounts: one row per step and validation label (a set, one of its points, or one of its folds)."""
        return pa.Table.from_pylist([row for record in self._records for row in record.accounts], schema=ACCOUNTS)

    def scores(self) -> pa.Table:
        """Return one row per sample and validation set; sets in the order they were first written, samples by id.

        ``score`` is the sum of contributions; of a set in folds it is their mean, and ``standard_error`` tells its error.
        """
        sets: dict[str, list[str]] = {}
        for label in self._labels():
            sets.setdefault(set_of(label), []).append(label)
        parts = [self._sum_up(name, labels) for name, labels in sets.items()]
        return pa.concat_tables(parts) if parts else SCORES.empty_table()

    def _sum_up(self, name: str, labels: list[str]) -> pa.Table:
        columns = [self._column(label) for label in labels]
        steps, ids, _ = columns[0]
        order = np.argsort(ids, kind="stable")
        unique, start, counts = np.unique(ids[order], return_index=True, return_counts=True)

        def gather(how: Any, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return how.reduceat(values[order], start) if len(ids) else values[order]

        sums = np.stack([gather(np.add, values.astype(np.float64)) for _, _, values in columns])
        k = len(labels)
        error = sums.std(axis=0, ddof=1) / k**0.5 if k > 1 else np.full(len(unique), np.nan)
        answer = {
            "sample_id": unique,
            "validation": pa.array([name] * len(unique), pa.string()),
            "score": sums.mean(axis=0),
            "standard_error": pa.array(error, from_pandas=True),
            "times_used": counts.astype(np.int64),
            "first_step": gather(np.minimum, steps),
            "last_step": gather(np.maximum, steps),
        }
        return pa.table(answer, schema=SCORES)

    def save(self, folder: str | Path, about: dict[str, Any]) -> Path:
        """Write what is held so far as a ledger, with ``about`` in ``run.json``; refuses a folder that has a run already."""
        path = Path(folder)
        if (path / "run.json").exists():
            raise LedgerError(f"{path} holds a run already; give a new folder")
        with Ledger(path, flush_every="1h", about=about) as ledger:
            for record in self._records:
                ledger.write(record)
        return path
