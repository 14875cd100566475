"""Small numerics that several rooms need, each once: correlations, quadrature, tails. NumPy alone."""

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
    """Return how often a Student variable with ν = ``freedom`` degrees exceeds ``t`` ≥ 0: ½ I(ν/(ν + t²); ν/2, ½).

    To a relative error of about 1e-12, however small it is.
    """
    r = t / math.sqrt(freedom)
    log_x = -math.log1p(r * r) if r < 1e8 else -2 * math.log(r)
    return 0.5 * _beta_share(math.exp(log_x), (r / math.hypot(1, r)) ** 2, log_x, freedom / 2, 0.5)


@cache
def student_quantile(tail: float, freedom: int) -> float:
    """Return the t that a Student variable exceeds with probability ``tail``, 0 < tail ≤ ½; by bisection, to rounding."""
    low, high = 0.0, 1.0
    while student_tail(high, freedom) > tail:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if student_tail(middle, freedom) > tail else (low, middle)
    return high


#: How often some group of a column may be called clear though none did anything; folds from which on that can be said.
FALSE_GROUPS, ENOUGH_FOLDS = 0.05, 3


def errors_away(groups: int, folds: int) -> float | None:
    """Return how many standard errors over folds one of some groups must be away from zero to be clear of it.

    Errors of a few folds are rough themselves, and the best of many groups is far out by chance: Student's quantile with
    folds − 1 degrees, such that of groups that did nothing some is farther away, on either side, in one run of twenty at most.
    None with fewer than three folds: with two it is dozens of errors (64 for five groups), which says nothing of most groups.
    """
    return None if folds < ENOUGH_FOLDS else student_quantile(FALSE_GROUPS / 2 / max(groups, 1), folds - 1)


@cache
def binomial_quantile(tail: float, n: int, p: float) -> int:
    """Return the smallest c with P(X > c) ≤ ``tail``, X of n independent events of probability p, 0 < p < 1.

    P(X > c) = I(p; c + 1, n − c).
    """
    low, high = -1, n
    while high - low > 1:
        middle = (low + high) // 2
        above = _beta_share(p, 1 - p, math.log(p), middle + 1, n - middle)
        low, high = (middle, high) if above > tail else (low, middle)
    return high


def _beta_share(x: float, y: float, log_x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I(x; a, b), y = 1 − x, by its continued fraction."""
    if y == 0:
        return 1.0
    front = math.exp(a * log_x + b * math.log(y) - _log_beta(a, b))
    if x * (a + b + 2) < a + 1:
        return front / _beta_fraction(x, y, a, b)
    return 1 - front / _beta_fraction(y, x, b, a)


def _beta_fraction(x: float, y: float, a: float, b: float) -> float:
    """Return β₀ + α₁/(β₁ + α₂/(β₂ + …)) of Didonato and Morris (1992), by Lentz's method; √max(a, b) terms or so.

    The textbook's fraction, of which this is every second term, loses log₁₀ a digits where a is large and x near 1.
    """
    tiny, rise = 1e-300, a + 1 - (a + b) * x if x < y else (a + b) * y - b + 1
    found = c = a * rise / (a + 1) or tiny
    d = 0.0
    for n in range(1, 100_000):
        alpha = (a + n - 1) * (a + b + n - 1) * n * (b - n) * (x / (a + 2 * n - 1)) ** 2
        beta = n + n * (b - n) * x / (a + 2 * n - 1) + (a + n) * (rise + n * (1 + y)) / (a + 2 * n + 1)
        d, c = 1 / ((beta + alpha * d) or tiny), (beta + alpha / c) or tiny
        found *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return found


def _log_beta(a: float, b: float) -> float:
    """Return ln B(a, b); where one is large, without the difference of two large logarithms."""
    small, large = min(a, b), max(a, b)
    if large < 50:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    rest = _stirling(large) - _stirling(small + large)
    return math.lgamma(small) - (large - 0.5) * math.log1p(small / large) - small * math.log(small + large) + small + rest


def _stirling(z: float) -> float:
    """Return ln Γ(z) − (z − ½) ln z + z − ½ ln 2π for z ≥ 50."""
    return (1 / 12 - (1 / 360 - 1 / (1260 * z * z)) / (z * z)) / z
