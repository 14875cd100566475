"""What waits to be flushed: steps, checked and copied, until they become the rows of a part."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from inrun.errors import LedgerError
from inrun.ledger.record import SettledCredits, StepRecord
from inrun.ledger.schema import ACCOUNTS, CONTRIBUTIONS
from inrun.ledger.settled import check_ids, check_step, credit_table

#: Rows that are held in memory at most, whatever ``flush_every`` says.
MOST_ROWS = 1_000_000

Floats = npt.NDArray[np.float32]
#: Step, sample ids, validation label, contributions.
Column = tuple[int, npt.NDArray[np.int64], str, Floats]


class Buffer:
    """Steps that were taken and are not on disk yet.

    Args:
        flush_every: Rows (an integer) or time (text such as "30s" or "5min") after which a flush is due.
    """

    def __init__(self, flush_every: int | str) -> None:
        """Start empty."""
        self._most, self._seconds = parse_flush(flush_every)
        self.clear()

    def clear(self) -> None:
        """Forget what was written, and start to count anew."""
        self._columns: list[Column] = []
        self._accounts: list[dict[str, Any]] = []
        self._settled: list[SettledCredits] = []
        self._count = 0
        self._since = time.monotonic()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._columns and not self._accounts and not self._settled

    @property
    def is_due(self) -> bool:
        """Whether it is time to flush."""
        full = self._most is not None and self._count >= self._most
        late = self._seconds is not None and time.monotonic() - self._since >= self._seconds
        return full or late or self._count >= MOST_ROWS

    def add(self, step: CheckedStep) -> None:
        """Hold one more step."""
        self._columns += [(step.step, step.sample_ids, label, values) for label, values in step.columns]
        self._accounts += step.accounts
        self._count += sum(len(values) for _, values in step.columns)

    def settle(self, settled: list[SettledCredits]) -> None:
        """Hold settled credits, too."""
        self._settled += [s for s in settled if len(s.sample_ids) and s.credits]
        self._count += sum(len(s.sample_ids) * len(s.credits) for s in settled)

    def tables(self) -> dict[str, pa.Table]:
        """Return what waits, by table; ValueError, TypeError, OverflowError or ArrowException if it does not fit the columns."""
        found = {"contributions": contribution_table(self._columns)} if self._columns else {}
        if self._settled:
            found["credits"] = credit_table(self._settled)
        if self._accounts:
            found["accounts"] = pa.Table.from_pylist(self._accounts, schema=ACCOUNTS)
        return found


class CheckedStep:
    """A copy of what a record says; LedgerError if it cannot be kept exactly."""

    def __init__(self, record: StepRecord) -> None:
        """Check and copy."""
        self.step = check_step(record.step)
        self.sample_ids = check_ids(self.step, record.sample_ids)
        self.columns = [(label, self._column(label, given)) for label, given in record.contributions.items()]
        strange = [row.get("step") for row in record.accounts if row.get("step") != self.step]
        if strange:
            raise LedgerError(f"step {self.step}: an account speaks of step {strange[0]!r}")
        self.accounts = [dict(row) for row in record.accounts]

    def _column(self, label: str, given: Any) -> npt.NDArray[np.float32]:
        with np.errstate(over="ignore"):
            values = np.array(given, np.float32)
        if values.shape != self.sample_ids.shape:
            raise LedgerError(f"step {self.step}: {len(given)} contributions to {label!r} for {len(self.sample_ids)} sample ids")
        if not np.isfinite(values).all():
            raise LedgerError(f"step {self.step}: a contribution to {label!r} is not finite; record such a step as skipped instead")
        return values


def contribution_table(columns: list[Column]) -> pa.Table:
    """Return columns as rows of the contributions table, in that order."""
    labels = list(dict.fromkeys(label for _, _, label, _ in columns))
    place = {label: i for i, label in enumerate(labels)}
    index = np.concatenate([np.full(len(values), place[label], np.int32) for _, _, label, values in columns])
    rows = [
        pa.array(np.concatenate([np.full(len(values), step, np.int64) for step, _, _, values in columns])),
        pa.array(np.concatenate([ids for _, ids, _, _ in columns])),
        pa.DictionaryArray.from_arrays(pa.array(index), pa.array(labels, pa.string())).cast(pa.string()),
        pa.array(np.concatenate([values for _, _, _, values in columns])),
    ]
    return pa.table(rows, schema=CONTRIBUTIONS)


def parse_flush(given: int | str) -> tuple[int | None, float | None]:
    """Return rows or seconds."""
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given, None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|min|h)\s*", str(given))
    if not found or isinstance(given, bool):
        raise LedgerError(f'flush_every is {given!r}; accepted are rows as an integer, or a time such as "30s" or "5min"')
    return None, float(found.group(1)) * {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}[found.group(2)]
