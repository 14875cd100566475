"""How well an estimate agrees with the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inrun.errors import ConfigurationError

Numbers = Tensor | NDArray[np.float64] | Sequence[float]


@dataclass(frozen=True)
class Agreement:
    """Rank correlation, linear correlation and root mean square difference; a correlation with a constant is NaN."""

    spearman: float
    pearson: float
    rmse: float


def agreement(estimate: Numbers, truth: Numbers) -> Agreement:
    """Compare two vectors of values of the same samples.

    Args:
        estimate: ``[n]``.
        truth: ``[n]``, n ≥ 2.

    Returns:
        Spearman (average ranks for ties), Pearson, and the root mean square difference in the unit of the values.
    """
    a, b = _vector(estimate), _vector(truth)
    if a.ndim != 1 or a.shape != b.shape or len(a) < 2:
        raise ConfigurationError(f"agreement needs two vectors of the same length, at least 2; got shapes {a.shape} and {b.shape}")
    return Agreement(_pearson(_ranks(a), _ranks(b)), _pearson(a, b), float(np.sqrt(np.mean((a - b) ** 2))))


def _vector(values: Numbers) -> NDArray[np.float64]:
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def _ranks(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 1; equal numbers share the mean of theirs."""
    _, group, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: NDArray[np.float64] = last - (counts - 1) / 2
    return mean[group]


def _pearson(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0:  # asked before centring, which leaves rounding of a constant
        return float("nan")
    a, b = a - a.mean(), b - b.mean()
    # Scaled first: contributions of 1e-200 must not underflow when squared.
    a, b = a / np.abs(a).max(), b / np.abs(b).max()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))
