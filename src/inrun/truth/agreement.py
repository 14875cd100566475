"""How well an estimate agrees with the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inrun.errors import ConfigurationError
from inrun.statistics import pearson, spearman

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
    return Agreement(spearman(a, b), pearson(a, b), float(np.sqrt(np.mean((a - b) ** 2))))


def _vector(values: Numbers) -> NDArray[np.float64]:
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)
