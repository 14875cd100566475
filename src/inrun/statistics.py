"""Small numerics that several rooms need, each once: correlations, quadrature and a tail. NumPy alone."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


def ranks(values: npt.ArrayLike) -> Vector:
    """Return ranks from 1, ``[n]``; equal numbers share the mean of theirs."""
    _, group, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    mean: Vector = np.cumsum(counts) - (counts - 1) / 2
    return mean[group]


def pearson(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Return the linear correlation of two vectors, from -1 to 1; NaN where one is constant or has fewer than two entries."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:  # asked before centring, which leaves rounding of a constant
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    # Scaled first: contributions of 1e-200 must not underflow when squared.
    x, y = x / np.abs(x).max(), y / np.abs(y).max()
    return float(np.clip(x @ y / math.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def spearman(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Return the rank correlation of two vectors, from -1 to 1, ties shared; NaN where it is not defined."""
    return pearson(ranks(a), ranks(b))


@cache
def gauss_legendre(n: int) -> tuple[tuple[float, float], ...]:
    """Return the Gauss-Legendre rule of n points as (place on [0, 1], weight), exact for polynomials of degree 2n − 1.

    Weights sum to 1.
    """
    places, weights = np.polynomial.legendre.leggauss(n)
    return tuple((float(0.5 * (x + 1.0)), float(0.5 * w)) for x, w in zip(places, weights, strict=True))


@cache
def student_tail(t: float, freedom: int) -> float:
    """Return how often a Student variable with ``freedom`` degrees exceeds ``t`` ≥ 0: ½ − ∫₀ᵗ density, exact to about 1e-9."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = ((w * t, (1 + (x * t) ** 2 / freedom) ** (-(freedom + 1) / 2)) for x, w in gauss_legendre(24))
    return 0.5 - scale * sum(w * d for w, d in density)
