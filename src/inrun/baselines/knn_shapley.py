"""``knn_shapley``: the exact Shapley value of a sample for a nearest-neighbour classifier on given features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from inrun.baselines.registry import Ids, register
from inrun.errors import ConfigurationError, ValidationError

Matrix = npt.NDArray[np.float64]
#: Distances that are in memory together: 32 MB in float64, and a few arrays like it.
BLOCK = 4_000_000


@register("knn_shapley", "exact Shapley value for the accuracy of a K-nearest-neighbour classifier", unit="accuracy")
def knn_shapley(
    sample_ids: Ids,
    validation: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]],
    *,
    features: npt.ArrayLike,
    labels: npt.ArrayLike,
    k: int = 5,
    soft: bool = False,
) -> dict[str, npt.NDArray[np.float64]]:
    """Take the exact recursion over samples sorted by distance, all validation points of a block at once.

    For one validation point, let mᵢ = 1 if the i-th nearest of n samples has its label, else 0. The game of Jia et al. (2019) is
    V(S) = (1/K) Σ of m over the min(K, |S|) nearest of S, and its values are

        φₙ = mₙ min(K, n) / (K n),        φᵢ = φᵢ₊₁ + (mᵢ − mᵢ₊₁) min(K, i) / (K i).

    With ``soft``, that of Wang & Jia's note (2023): V(S) divides by min(K, |S|), V(∅) = 1/C for C classes, and, H the harmonic
    numbers, m̄ the mean of m₁ … mₙ₋₁ and L = min(K, n − 1),

        φₙ = [mₙ − 1/C + (mₙ − m̄)(H(min(K, n)) − 1)] / n,
        φᵢ = φᵢ₊₁ + (mᵢ − mᵢ₊₁) [(H(L) − 1)/(n − 1) + min(L, i)/(L i)].

    A score is the mean over the points of a validation set; scores sum to V(all) − V(∅). Distances are Euclidean, in float64;
    of samples that are equally far the one that comes first in ``sample_ids`` counts as nearer.

    Args:
        sample_ids: The samples, ``[n]``.
        validation: (features ``[m, d]``, labels ``[m]``) by name.
        features: Of the samples, ``[n, d]``.
        labels: Of the samples, ``[n]``, of any type that can be compared.
        k: K, the number of neighbours.
        soft: Take the soft-label game.
    """
    if k < 1:
        raise ConfigurationError(f"knn_shapley got k={k}; it must be at least 1")
    a, a_labels = _checked("the samples", features, labels)
    if len(a) != len(sample_ids):
        raise ConfigurationError(f"knn_shapley got features of {len(a)} samples for {len(sample_ids)} sample_ids")
    scores = {}
    for name, given in validation.items():
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise ValidationError(
                f"knn_shapley: validation {name!r} is a {type(given).__name__}; it must be (features [m, d], labels [m])"
            )
        b, b_labels = _checked(f"validation {name!r}", *given)
        if b.shape[1] != a.shape[1] or not len(b):
            raise ValidationError(
                f"knn_shapley: features of validation {name!r} are {list(b.shape)}, those of the samples {list(a.shape)}"
            )
        scores[name] = _mean_values(a, a_labels, b, b_labels, k, soft)
    return scores


def _checked(whose: str, features: Any, labels: Any) -> tuple[Matrix, npt.NDArray[Any]]:
    x, y = np.asarray(features, np.float64), np.asarray(labels)
    if x.ndim != 2 or y.shape != x.shape[:1] or not np.isfinite(x).all():
        raise ValidationError(
            f"knn_shapley: features of {whose} are {list(x.shape)} and labels {list(y.shape)}; they must be finite numbers [n, d] "
            "and labels [n]"
        )
    return x, y


def _mean_values(
    a: Matrix, a_labels: npt.NDArray[Any], b: Matrix, b_labels: npt.NDArray[Any], k: int, soft: bool
) -> npt.NDArray[np.float64]:
    """Return the mean of values over validation points, ``[n]``."""
    classes = len(np.unique(a_labels))
    total = np.zeros(len(a))
    for rows, order in _nearest(a, b):
        match = (a_labels[order] == b_labels[rows, None]).astype(np.float64)
        values = np.empty_like(match)
        np.put_along_axis(values, order, _soft(match, k, classes) if soft else _hard(match, k), 1)
        total += values.sum(0)
    return total / len(b)


def _nearest(a: Matrix, b: Matrix) -> Iterator[tuple[slice, Ids]]:
    """Yield blocks of validation points, and the samples by their distance from each, ``[block, n]``."""
    centre = a.mean(0)  # the difference of two large squares would lose what tells samples apart
    # Each distinct row once: a matrix product rounds by where a row stands, and twins would come in any order. (−0 is 0.)
    distinct, place = np.unique(a + 0.0, axis=0, return_inverse=True)
    near_a, near_b = distinct - centre, b - centre
    squares = (near_a * near_a).sum(1)
    # How far the product below may be off, generously: rounding of a sum of d products, and of the centred numbers.
    slack = 4 * (a.shape[1] + 4) * np.finfo(np.float64).eps * (squares.max() + (near_b * near_b).sum(1))
    size = max(BLOCK // len(place), 1)
    for start in range(0, len(b), size):
        rows = slice(start, start + size)
        # The square of the validation point itself is the same for all samples.
        distances = (squares - 2 * (near_b[rows] @ near_a.T))[:, place]
        order = np.argsort(distances, axis=1, kind="stable")
        for i, ranked in enumerate(np.take_along_axis(distances, order, 1)):
            _settle(a, b[start + i], order[i], ranked, slack[start + i])
        yield rows, order


def _settle(a: Matrix, point: npt.NDArray[np.float64], order: Ids, ranked: npt.NDArray[np.float64], slack: float) -> None:
    """Put samples whose distances ``ranked`` lie within rounding into the order of Σ (a − b)² as it is, in place."""
    close = np.diff(ranked) <= slack
    if not close.any():
        return
    run = np.concatenate([[0], np.cumsum(~close)])  # samples of one run cannot be told apart by the product
    mine = np.flatnonzero(np.concatenate([[False], close]) | np.concatenate([close, [False]]))
    samples = order[mine]
    exact = np.concatenate([((a[part] - point) ** 2).sum(1) for part in np.array_split(samples, -(-len(samples) // 1024))])
    order[mine] = samples[np.lexsort((samples, exact, run[mine]))]


def _hard(match: Matrix, k: int) -> Matrix:
    """Return values by rank, ``[m, n]``, in the game that divides by K."""
    n = match.shape[1]
    i = np.arange(1, n)
    return _from_the_last(match, np.minimum(k, i) / (k * i), match[:, -1] * min(k, n) / (k * n))


def _soft(match: Matrix, k: int, classes: int) -> Matrix:
    """Return values by rank, ``[m, n]``, in the game that divides by the number of neighbours there are."""
    n = match.shape[1]
    last = (match[:, -1] - 1 / classes) / n
    if n == 1:
        return last[:, None]
    i, few = np.arange(1, n), min(k, n - 1)
    last += (match[:, -1] - match[:, :-1].mean(1)) * (_harmonic(min(k, n)) - 1) / n
    return _from_the_last(match, (_harmonic(few) - 1) / (n - 1) + np.minimum(few, i) / (few * i), last)


def _from_the_last(match: Matrix, weights: npt.NDArray[np.float64], last: npt.NDArray[np.float64]) -> Matrix:
    """Return φᵢ = φₙ + Σ over j ≥ i of (mⱼ − mⱼ₊₁) weightsⱼ, for matches ``[m, n]``, weights ``[n − 1]`` and φₙ ``[m]``."""
    steps = np.concatenate([(match[:, :-1] - match[:, 1:]) * weights, last[:, None]], 1)
    return np.cumsum(steps[:, ::-1], 1)[:, ::-1]


def _harmonic(n: int) -> float:
    return float((1 / np.arange(1, n + 1)).sum())
