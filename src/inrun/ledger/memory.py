"""A ledger that lives as long as the process."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from inrun.ledger.record import StepRecord


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
        return pa.table(columns)

    def accounts(self) -> pa.Table:
        """Return the accounts, one row per step and validation set."""
        return pa.Table.from_pylist(self._accounts)

    def scores(self) -> pa.Table:
        """Return one row per sample and validation set, ordered by both; ``score`` is the sum of contributions."""
        parts = [_sum_up(x, _join(self._ids[x]), _join(self._steps[x]), _join(self._values[x])) for x in self._values]
        schema = pa.schema(
            [
                ("sample_id", pa.int64()),
                ("validation", pa.string()),
                ("score", pa.float64()),
                ("times_used", pa.int64()),
                ("first_step", pa.int64()),
                ("last_step", pa.int64()),
            ]
        )
        return pa.concat_tables([p.cast(schema) for p in parts]) if parts else schema.empty_table()


def _join(arrays: list[Any], dtype: Any = None) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _sum_up(label: str, ids: npt.NDArray[Any], steps: npt.NDArray[Any], values: npt.NDArray[Any]) -> pa.Table:
    order = np.argsort(ids, kind="stable")
    ids, steps, values = ids[order], steps[order], values[order].astype(np.float64)
    unique, start, counts = np.unique(ids, return_index=True, return_counts=True)
    return pa.table(
        {
            "sample_id": unique,
            "validation": pa.array([label] * len(unique), pa.string()),
            "score": np.add.reduceat(values, start) if len(ids) else values,
            "times_used": counts.astype(np.int64),
            "first_step": np.minimum.reduceat(steps, start) if len(ids) else steps,
            "last_step": np.maximum.reduceat(steps, start) if len(ids) else steps,
        }
    )
