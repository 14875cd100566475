"""Scores of a ledger in memory, added up with numpy: the same as DuckDB gives for a saved one, by another way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from inrun.ledger.record import SettledCredits, StepRecord
from inrun.ledger.schema import SCORES


@dataclass(frozen=True)
class Credited:
    """Credits of the uses of one step, and whether their window is open."""

    credits: SettledCredits
    pending: bool


@dataclass(frozen=True)
class Uses:
    """The uses of one label, ``[rows]`` each."""

    step: npt.NDArray[np.int64]
    sample_id: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]
    #: NaN where the use has no credit.
    error: npt.NDArray[np.float64]
    pending: npt.NDArray[np.bool_]


def uses_of(label: str, records: Sequence[StepRecord], credited: Sequence[Credited], pending: bool) -> Uses:
    """Return the uses of a label: those with a credit in the order of the credits, then the others in the order written.

    Args:
        label: A validation label.
        records: The steps; a contribution counts where no credit stands in its place.
        credited: Uses with a credit.
        pending: Whether uses without one are pending.
    """
    own = [r for r in records if label in r.contributions]
    mine = [c for c in credited if label in c.credits.credits]
    ids_of = {c.credits.step: c.credits.sample_ids for c in mine}
    left = [_without(r.sample_ids, ids_of.get(r.step)) for r in own]
    ids = [c.credits.sample_ids for c in mine] + [r.sample_ids[k] for r, k in zip(own, left, strict=True)]
    steps = [c.credits.step for c in mine] + [r.step for r in own]
    values = [c.credits.credits[label] for c in mine] + [r.contributions[label][k] for r, k in zip(own, left, strict=True)]
    errors = [c.credits.errors[label] for c in mine] + [np.full(len(i), np.nan) for i in ids[len(mine) :]]
    open_ = [c.pending for c in mine] + [pending] * len(own)
    return Uses(
        _joined([np.full(len(i), step) for i, step in zip(ids, steps, strict=True)], np.int64),
        _joined(ids, np.int64),
        _joined(values, np.float64),
        _joined(errors, np.float64),
        _joined([np.full(len(i), o) for i, o in zip(ids, open_, strict=True)], np.bool_),
    )


def _without(ids: npt.NDArray[np.int64], credited: npt.NDArray[np.int64] | None) -> Any:
    """Return which rows of a step have no credit, as an index."""
    if credited is None:
        return slice(None)
    return slice(0) if np.array_equal(ids, credited) else ~np.isin(ids, credited)


def _joined(pieces: list[npt.NDArray[Any]], kind: Any) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, kind), *(piece.astype(kind) for piece in pieces)])


def sum_up(name: str, folds: list[Uses], own: list[Uses] | None) -> pa.Table:
    """Return the scores of one validation set, samples by id.

    Args:
        name: The set.
        folds: The uses of its labels: one, or its folds.
        own: The contributions of its labels, where they are not the uses.
    """
    steps, ids, pending = folds[0].step, folds[0].sample_id, folds[0].pending
    order = np.argsort(ids, kind="stable")
    unique, start, counts = np.unique(ids[order], return_index=True, return_counts=True)

    def gather(how: Any, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return how.reduceat(values[order], start) if len(ids) else values[order]

    sums = np.stack([gather(np.add, uses.value) for uses in folds])
    k, score = len(folds), sums.mean(axis=0)
    error = sums.std(axis=0, ddof=1) / k**0.5 if k > 1 else np.full(len(unique), np.nan)
    known = np.stack([gather(np.add, (~np.isnan(uses.error)).astype(np.int64)) for uses in folds]) > 0
    squares = np.stack([gather(np.add, np.nan_to_num(uses.error) ** 2) for uses in folds])
    estimate = np.sqrt(np.where(known, squares, np.nan).mean(axis=0))
    answer = {
        "sample_id": unique,
        "validation": pa.array([name] * len(unique), pa.string()),
        "score": score,
        "standard_error": pa.array(error, from_pandas=True),
        "times_used": counts.astype(np.int64),
        "first_step": gather(np.minimum, steps),
        "last_step": gather(np.maximum, steps),
        "step_score": score if own is None else np.mean([_by_sample(uses, unique) for uses in own], axis=0),
        "pending": gather(np.add, pending.astype(np.int64)),
        "estimate_error": pa.array(estimate, from_pandas=True),
    }
    return pa.table(answer, schema=SCORES)


def _by_sample(uses: Uses, unique: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    sums = np.zeros(len(unique))
    np.add.at(sums, np.searchsorted(unique, uses.sample_id), uses.value)
    return sums
