"""Settled credits: a checked copy of each, their rows, and which steps have been settled. Each step settles at most once."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from inrun.errors import LedgerError
from inrun.ledger.record import SettledCredits
from inrun.ledger.schema import CREDITS


def check_ids(step: int, given: Any) -> npt.NDArray[np.int64]:
    """Return a copy of the sample ids of a step; LedgerError if they are not a row of integers that fit."""
    ids = np.array(given)  # copies: the caller may use its arrays again
    if ids.ndim != 1 or (len(ids) and (ids.dtype.kind not in "iu" or (ids.dtype == np.uint64 and ids.max() >= 2**63))):
        raise LedgerError(
            f"step {step}: sample ids are {ids.dtype} of shape {ids.shape}; they must be a row of integers below 2^63"
        )
    return ids.astype(np.int64)


def check_step(given: Any) -> int:
    """Return the number of a step; LedgerError if it is none."""
    try:
        step = operator.index(given)
    except TypeError:
        step = -1
    if not 0 <= step < 2**62:
        raise LedgerError(f"step is {given!r}; it must be an integer of at least 0")
    return step


def check_settlement(given: SettledCredits) -> SettledCredits:
    """Return a copy; LedgerError if it cannot be kept exactly."""
    step = check_step(given.step)
    ids = check_ids(step, given.sample_ids)
    if given.credits.keys() != given.errors.keys():
        raise LedgerError(f"step {step}: credits speak of {sorted(given.credits)}, their errors of {sorted(given.errors)}")
    credit = {label: _column(step, len(ids), f"credits to {label!r}", v) for label, v in given.credits.items()}
    error = {label: _column(step, len(ids), f"errors of credits to {label!r}", given.errors[label], 0.0) for label in credit}
    paid = _column(step, len(ids), "paid shares", given.paid, 0.0, 1.001)  # a sum of rounded shares may pass 1 a little
    return SettledCredits(step, ids, credit, error, paid, _rows(step, len(ids), given.rows))


def _rows(step: int, n: int, given: Any) -> npt.NDArray[np.int64] | None:
    if given is None:
        return None
    rows = np.array(given)
    fits = rows.shape == (n,) and rows.dtype.kind in "iu" and (n == 0 or (rows.min() >= 0 and rows.max() < 2**31))
    if not fits or len(np.unique(rows)) != n:
        raise LedgerError(f"step {step}: rows must be {n} different numbers of at least 0, one per sample id")
    return rows.astype(np.int64)


def _column(step: int, n: int, what: str, given: Any, low: float = -np.inf, high: float = np.inf) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        values = np.array(given, np.float32)
    if values.shape != (n,):
        raise LedgerError(f"step {step}: {what} have the shape {values.shape} for {n} sample ids")
    if not np.isfinite(values).all():
        raise LedgerError(f"step {step}: {what} are not all finite")
    if n and (values.min() < low or values.max() > high):
        raise LedgerError(f"step {step}: {what} range from {values.min()} to {values.max()}; that cannot be")
    return values


class SettledSteps:
    """The steps that were settled, kept as ranges: windows close in order, so that they are few."""

    def __init__(self, steps: Iterable[int] = ()) -> None:
        """Start with some steps."""
        self._first: list[int] = []
        self._last: list[int] = []
        for step in steps:
            self.add(step)

    def __contains__(self, step: int) -> bool:
        """Whether a step was settled."""
        place = bisect_right(self._first, step) - 1
        return place >= 0 and step <= self._last[place]

    def add(self, step: int) -> None:
        """Note that a step was settled."""
        if step in self:
            return
        place = bisect_right(self._first, step)
        joins_before = place > 0 and self._last[place - 1] == step - 1
        joins_after = place < len(self._first) and self._first[place] == step + 1
        if joins_before and joins_after:
            self._last[place - 1] = self._last.pop(place)
            del self._first[place]
        elif joins_before:
            self._last[place - 1] = step
        elif joins_after:
            self._first[place] = step
        else:
            self._first.insert(place, step)
            self._last.insert(place, step)

    def take(self, settled: Sequence[SettledCredits], before: int) -> list[SettledCredits]:
        """Check and copy settlements, and note their steps if all are in order.

        Args:
            settled: What is to be settled.
            before: The first step that is not finished yet.

        Raises:
            LedgerError: One cannot be kept, its step was settled before, or is not finished; then none is noted.
        """
        checked = [check_settlement(s) for s in settled]
        seen: set[int] = set()
        for s in checked:
            if s.step in self or s.step in seen:
                raise LedgerError(f"step {s.step} was settled already; the credit of each use is settled once")
            if s.step >= before:
                raise LedgerError(f"step {s.step} cannot be settled: it was not written yet (the next step is {before})")
            seen.add(s.step)
        for step in seen:
            self.add(step)
        return checked


def credit_table(settled: Iterable[SettledCredits]) -> pa.Table:
    """Return settled credits as rows of the credits table: settlement by settlement, label by label, row by row."""
    columns = [(s, label) for s in settled for label in s.credits]
    if not columns:
        return CREDITS.empty_table()
    labels = list(dict.fromkeys(label for _, label in columns))
    place = {label: i for i, label in enumerate(labels)}
    index = np.concatenate([np.full(len(s.sample_ids), place[label], np.int32) for s, label in columns])
    rows = [
        pa.array(np.concatenate([np.full(len(s.sample_ids), s.step, np.int64) for s, _ in columns])),
        pa.array(np.concatenate([_numbers(s) for s, _ in columns])),
        pa.array(np.concatenate([s.sample_ids for s, _ in columns])),
        pa.DictionaryArray.from_arrays(pa.array(index), pa.array(labels, pa.string())).cast(pa.string()),
        pa.array(np.concatenate([s.credits[label] for s, label in columns])),
        pa.array(np.concatenate([s.errors[label] for s, label in columns])),
        pa.array(np.concatenate([s.paid for s, _ in columns])),
    ]
    return pa.table(rows, schema=CREDITS)


def _numbers(s: SettledCredits) -> npt.NDArray[np.int32]:
    return np.arange(len(s.sample_ids), dtype=np.int32) if s.rows is None else s.rows.astype(np.int32)
