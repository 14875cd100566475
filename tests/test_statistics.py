"""Correlations and quadrature, against SciPy and against polynomials."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from inrun.statistics import gauss_legendre, pearson, ranks, spearman, student_tail


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=40))
def test_correlations_against_scipy(pairs) -> None:
    a, b = np.array(pairs, float).T
    assert ranks(a).tolist() == stats.rankdata(a).tolist()
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        assert math.isnan(spearman(a, b)) and math.isnan(pearson(a, b))
    else:
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)
        assert pearson(a, b) == pytest.approx(stats.pearsonr(a, b).statistic, abs=1e-12)


def test_correlations_at_the_edges() -> None:
    assert ranks([3.0, 1.0, 3.0]).tolist() == [2.5, 1.0, 2.5] and ranks([0.0, -0.0]).tolist() == [1.5, 1.5]
    assert pearson([1.0, 2.0, 4.0], [-1.0, -2.0, -4.0]) == -1.0
    assert pearson([1e-200, 2e-200], [3e200, 4e200]) == 1.0
    assert math.isnan(spearman([], [])) and math.isnan(spearman([1.0], [2.0]))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 16])
def test_gauss_legendre_is_exact_for_polynomials(n: int) -> None:
    rule = gauss_legendre(n)
    assert len(rule) == n and sum(w for _, w in rule) == pytest.approx(1.0, abs=1e-14)
    for power in range(2 * n):
        assert sum(w * s**power for s, w in rule) == pytest.approx(1 / (power + 1), abs=1e-14)
    assert sum(w * s ** (2 * n) for s, w in rule) != pytest.approx(1 / (2 * n + 1), rel=1e-12) or n > 5


@pytest.mark.parametrize(
    ("t", "freedom", "share"), [(0.0, 3, 0.5), (1.0, 1, 0.25), (2.0, 3, 0.0696629843), (2.0, 10**6, 0.0227502)]
)
def test_student_tail(t, freedom, share):
    assert student_tail(t, freedom) == pytest.approx(share, abs=2e-7)
