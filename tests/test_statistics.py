"""Correlations and quadrature, against SciPy and against polynomials."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from inrun.statistics import (
    binomial_quantile,
    errors_away,
    gauss_legendre,
    pearson,
    ranks,
    spearman,
    student_quantile,
    student_tail,
)


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


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 15, 63, 99, 100, 101, 1000, 10**6, 10**9])
def test_student_tail(freedom: int) -> None:
    """To many digits of its own, also where it is tiny."""
    for t in (0.01, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 1e4):
        share = stats.t.sf(t, freedom)
        assert student_tail(t, freedom) == pytest.approx(share, rel=1e-11, abs=1e-300)


def test_student_tail_in_closed_form() -> None:
    assert student_tail(0.0, 3) == 0.5 and student_tail(1.0, 1) == pytest.approx(0.25, rel=1e-14)
    for t in (1e-9, 0.1, 2.0, 30.0, 1e5, 1e12, 1e200):  # 1 / (π t) and less, where ½ − arctan(t)/π has no digit left
        assert student_tail(t, 1) == pytest.approx(math.atan(1 / t) / math.pi, rel=1e-13)
        assert student_tail(t, 2) == pytest.approx(1 / math.hypot(t, math.sqrt(2)) / (math.hypot(t, math.sqrt(2)) + t), rel=1e-13)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 30, 10**6])
def test_student_quantile(freedom: int) -> None:
    for tail in (0.5, 0.3, 0.05, 0.0228, 1e-3, 1e-6):
        assert student_quantile(tail, freedom) == pytest.approx(stats.t.isf(tail, freedom), rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 100, 3000, 10**6])
def test_binomial_quantile(n: int) -> None:
    for p in (0.0228, 0.0697, 0.148, 0.5):
        for tail in (0.05, 0.01, 1e-4):
            c = binomial_quantile(tail, n, p)
            assert stats.binom.sf(c, n, p) <= tail and (c == 0 or stats.binom.sf(c - 1, n, p) > tail)


@pytest.mark.parametrize("groups", [1, 5, 12])
def test_errors_away(groups: int) -> None:
    assert [errors_away(groups, folds) for folds in (0, 1, 2)] == [None] * 3
    for folds in (3, 4, 8):
        assert errors_away(groups, folds) == pytest.approx(stats.t.isf(0.025 / groups, folds - 1))
    assert stats.t.isf(0.025 / 5, 1) > 60  # what two folds would ask for
