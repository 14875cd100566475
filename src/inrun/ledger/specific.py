"""The view ``specific``: what a use did for one validation set beyond what it did for the others.

Much of what a sample is worth, it is worth to everybody: early in a run any text teaches a language model its most frequent words.
So the scores of two validation sets move together, and the best samples of one are much the same as those of another. Here the part
of a value that the values of the same use for the *other* sets predict is taken off:

    y'_d = y_d − Σ_{j∉d} b_dj y_j,        b_d = argmin_b  mean (ȳ_d − Σ_j b_j y_j)² + λ Σ_j r_j² b_j²

with j over the labels of the other sets (each of their folds by itself), ȳ_d the mean over the folds of set d, r_j the root mean
square of label j over all uses of the run, and λ = 1: ridge regression on values of unit size. Shapley values are linear in the
validation loss, so y'_d is the value of the same use for the loss ℓ_d − Σ_j b_dj ℓ_j: still exact, in the same unit, of a question
that is more particular. A run with one validation set has nothing to take off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
#: λ: as much as the mean square of a label.
RIDGE = 1.0


@dataclass(frozen=True)
class Rows:
    """Rows of uses, one per use and label, ``[rows]`` each; ``label`` counts the labels of the run."""

    step: Whole
    sample_id: Whole
    label: Whole
    value: Floats

    def matrix(self, labels: int) -> tuple[Floats, npt.NDArray[np.intp]]:
        """Return the values as ``[uses, labels]``, 0 where a label has none, and the use that each row belongs to.

        A sample that is twice in a step has one use there, with the sum of both.
        """
        order = np.lexsort((self.sample_id, self.step))
        step, ids = self.step[order], self.sample_id[order]
        begins = np.ones(len(order), bool)
        begins[1:] = (step[1:] != step[:-1]) | (ids[1:] != ids[:-1])
        use = np.empty(len(order), np.intp)
        use[order] = np.cumsum(begins) - 1
        flat = np.bincount(use * labels + self.label, self.value, int(begins.sum()) * labels).astype(np.float64)
        return flat.reshape(-1, labels), use


def moments(values: Floats) -> Floats:
    """Return Σ y yᵀ over uses, ``[labels, labels]``, of ``[uses, labels]``; uses that are not finite say nothing of the others."""
    known = values[np.isfinite(values).all(1)]
    return known.T @ known


def common_part(moment: Floats, sets: Sequence[Sequence[int]], ridge: float = RIDGE) -> Floats:
    """Return b, ``[labels, sets]``: how much of every label is taken off a set; 0 for its own labels and for those that are all 0.

    Args:
        moment: Σ y yᵀ over the uses of the run, ``[labels, labels]``; its scale does not matter.
        sets: The labels of every set.
        ridge: λ, in mean squares of a label.
    """
    size = np.sqrt(np.diag(moment))
    alive = size > 0
    unit = moment / np.where(alive, size, 1.0) / np.where(alive, size, 1.0)[:, None]
    found = np.zeros((len(moment), len(sets)))
    for d, labels in enumerate(sets):
        own = np.asarray(labels, np.intp)
        others = np.setdiff1d(np.flatnonzero(alive), own)
        mean = unit[np.ix_(others, own)] @ size[own] / len(own)
        found[others, d] = np.linalg.solve(unit[np.ix_(others, others)] + ridge * np.eye(len(others)), mean) / size[others]
    return found


def specific(rows: Rows, sets: Sequence[Sequence[int]], common: Floats) -> Floats:
    """Return the values of rows without what is common to other sets, ``[rows]``.

    Args:
        rows: Whole steps.
        sets: The labels of every set.
        common: From :func:`common_part`.
    """
    labels = len(common)
    values, use = rows.matrix(labels)
    of = np.zeros(labels, np.int64)
    for d, own in enumerate(sets):
        of[list(own)] = d
    taken = (values @ common)[use, of[rows.label]]
    # A sample that is twice in a step shares what is taken off its use between the two rows.
    place = use * labels + rows.label
    return rows.value - taken / np.bincount(place, minlength=len(values) * labels)[place]
