"""From what a step says to the rows of a part: checked, copied, and written with page checksums."""

from __future__ import annotations

import io
import operator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from inrun.errors import LedgerError
from inrun.ledger.record import StepRecord
from inrun.ledger.schema import CONTRIBUTIONS


def checked(
    record: StepRecord,
) -> tuple[int, npt.NDArray[np.int64], list[tuple[str, npt.NDArray[np.float32]]], list[dict[str, Any]]]:
    """Return a copy of what a record says; LedgerError if it cannot be kept exactly."""
    try:
        step = operator.index(record.step)
    except TypeError:
        step = -1
    if not 0 <= step < 2**62:
        raise LedgerError(f"step is {record.step!r}; it must be an integer of at least 0")
    ids = np.array(record.sample_ids)  # copies: the caller may use its arrays again
    if ids.ndim != 1 or (len(ids) and (ids.dtype.kind not in "iu" or (ids.dtype == np.uint64 and ids.max() >= 2**63))):
        raise LedgerError(
            f"step {step}: sample ids are {ids.dtype} of shape {ids.shape}; they must be a row of integers below 2^63"
        )
    columns = []
    for label, given in record.contributions.items():
        with np.errstate(over="ignore"):
            values = np.array(given, np.float32)
        if values.shape != ids.shape:
            raise LedgerError(f"step {step}: {len(given)} contributions to {label!r} for {len(ids)} sample ids")
        if not np.isfinite(values).all():
            raise LedgerError(f"step {step}: a contribution to {label!r} is not finite; record such a step as skipped instead")
        columns.append((label, values))
    strange = [row.get("step") for row in record.accounts if row.get("step") != step]
    if strange:
        raise LedgerError(f"step {step}: an account speaks of step {strange[0]!r}")
    return step, ids.astype(np.int64), columns, [dict(row) for row in record.accounts]


def contribution_table(rows: list[tuple[int, npt.NDArray[np.int64], str, npt.NDArray[np.float32]]]) -> pa.Table:
    """Return buffered columns (step, ids, label, values) as rows of the ledger."""
    labels = list(dict.fromkeys(label for _, _, label, _ in rows))
    place = {label: i for i, label in enumerate(labels)}
    index = np.concatenate([np.full(len(values), place[label], np.int32) for _, _, label, values in rows])
    columns = [
        pa.array(np.concatenate([np.full(len(values), step, np.int64) for step, _, _, values in rows])),
        pa.array(np.concatenate([ids for _, ids, _, _ in rows])),
        pa.DictionaryArray.from_arrays(pa.array(index), pa.array(labels, pa.string())).cast(pa.string()),
        pa.array(np.concatenate([values for _, _, _, values in rows])),
    ]
    return pa.table(columns, schema=CONTRIBUTIONS)


def to_parquet(table: pa.Table) -> bytes:
    """Write a table as Parquet with page checksums: without them bit flips pass unseen."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()
