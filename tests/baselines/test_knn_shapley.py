"""KNN-Shapley against the definition, by enumerating all subsets."""

from __future__ import annotations

import numpy as np
import pytest

from games import shapley
from inrun.baselines import knn_shapley, run
from inrun.errors import ConfigurationError, ValidationError


def brute_force(x: np.ndarray, y: np.ndarray, points: np.ndarray, labels: np.ndarray, k: int, soft: bool) -> np.ndarray:
    total = np.zeros(len(x))
    for point, label in zip(points, labels, strict=True):
        distance = np.linalg.norm(x - point, axis=1)

        def game(s: list[int], distance=distance, label=label) -> float:
            if not len(s):
                return 1 / len(set(y.tolist())) if soft else 0.0
            nearest = sorted(s, key=lambda i: distance[i])[:k]
            return sum(y[i] == label for i in nearest) / (len(nearest) if soft else k)

        total += shapley(len(x), game)
    return total / len(points)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 5), (2, 1), (2, 5), (5, 5), (6, 5), (7, 2), (7, 1), (8, 5), (4, 9)])
def test_values_are_those_of_the_definition(n: int, k: int, soft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(n * 10 + k)
    x, y = rng.standard_normal((n, 3)) + 100, rng.integers(0, 3, n)
    sets = {name: (rng.standard_normal((m, 3)) + 100, rng.integers(0, 3, m)) for name, m in (("a", 1), ("b", 5))}
    monkeypatch.setattr(knn_shapley, "BLOCK", 2 * n)  # two points at a time, then one
    table = run("knn_shapley", np.arange(n), sets, features=x, labels=y, k=k, soft=soft)
    for name, (points, labels) in sets.items():
        found = np.array([row["score"] for row in table.to_pylist() if row["validation"] == name])
        assert found == pytest.approx(brute_force(x, y, points, labels, k, soft), abs=1e-12)


def test_the_two_games_differ() -> None:
    """The control: the values of one game are not those of the other."""
    rng = np.random.default_rng(0)
    x, y, points, labels = rng.standard_normal((7, 3)), rng.integers(0, 2, 7), rng.standard_normal((4, 3)), rng.integers(0, 2, 4)
    hard, soft = (brute_force(x, y, points, labels, 5, s) for s in (False, True))
    assert np.abs(hard - soft).max() > 0.01


def test_wrong_labels_score_low_and_strings_are_labels() -> None:
    rng = np.random.default_rng(1)
    clean = np.repeat(["cat", "dog"], 100)
    x = np.where(clean == "cat", 0.0, 3.0)[:, None] + rng.standard_normal((200, 2))
    wrong = rng.choice(200, 20, replace=False)
    y = clean.copy()
    y[wrong] = np.where(clean[wrong] == "cat", "dog", "cat")
    for soft in (False, True):
        scores = np.array(run("knn_shapley", np.arange(200), {"v": (x + 0.1, clean)}, features=x, labels=y, soft=soft)["score"])
        assert scores[wrong].max() < np.median(scores) and scores[wrong].mean() < 0


def test_of_equal_samples_the_first_is_nearer() -> None:
    table = run("knn_shapley", [5, 3], {"v": ([[0.0]], [1])}, features=[[1.0], [1.0]], labels=[1, 0], k=1)
    assert table["score"].to_pylist() == [0.0, 1.0]  # by id: 3 came second


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_twins_of_other_labels(shift: float) -> None:
    """Identical rows are equally far, wherever a matrix product rounds: the first is nearer, as with distances taken one by one."""
    rng = np.random.default_rng(0)
    for h, d in ((100, 5), (151, 37), (397, 130)):
        base, m = rng.standard_normal((h, d)) + shift, 12
        x, y = np.concatenate([base, base]), np.repeat([0, 1], h)
        points, labels = base[rng.integers(0, h, m)] + 0.1 * rng.standard_normal((m, d)), rng.integers(0, 2, m)
        found = run("knn_shapley", np.arange(2 * h), {"v": (points, labels)}, features=x, labels=y, k=1)["score"].to_numpy()
        expected = np.zeros(2 * h)
        for point, label in zip(points, labels, strict=True):
            order = np.argsort(((x - point) ** 2).sum(1), kind="stable")
            match = (y[order] == label).astype(float)
            values = np.empty(2 * h)
            values[-1] = match[-1] / (2 * h)
            for i in range(2 * h - 2, -1, -1):
                values[i] = values[i + 1] + (match[i] - match[i + 1]) / (i + 1)
            expected[order] += values / m
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_what_is_wrong_is_named() -> None:
    right = {"features": np.zeros((2, 3)), "labels": [0, 1]}
    for validation, options, error, words in (
        ((np.zeros((1, 3)), [0]), {"k": 0}, ConfigurationError, "k=0"),
        ((np.zeros((1, 3)), [0]), {"features": np.zeros((3, 3)), "labels": [0, 1, 2]}, ConfigurationError, "3 samples for 2"),
        ((np.zeros((1, 3)), [0]), {"labels": [0]}, ValidationError, r"the samples are \[2, 3\] and labels \[1\]"),
        ((np.zeros((1, 3)), [0]), {"features": np.full((2, 3), np.nan)}, ValidationError, "finite"),
        (np.zeros((1, 3)), {}, ValidationError, "'validation' is a ndarray"),
        ((np.zeros((1, 2)), [0]), {}, ValidationError, r"\[1, 2\], those of the samples \[2, 3\]"),
        ((np.zeros((0, 3)), []), {}, ValidationError, r"\[0, 3\]"),
    ):
        with pytest.raises(error, match=words):
            run("knn_shapley", [1, 2], validation, **{**right, **options})


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("values", [2, 3, 7])
def test_of_equally_distant_samples_the_first_is_nearer(values: int, soft: bool) -> None:
    """Features of few whole numbers, whose distances tie though the samples differ; a matrix product rounds them apart."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n, m, d = 6, 3, int(rng.integers(1, 4))
        x, y = rng.integers(0, values, (n, d)).astype(float), rng.integers(0, 3, n)
        points, labels = rng.integers(0, values, (m, d)).astype(float), rng.integers(0, 3, m)
        found = run("knn_shapley", np.arange(n), {"v": (points, labels)}, features=x, labels=y, k=2, soft=soft)["score"].to_numpy()
        assert found == pytest.approx(brute_force(x, y, points, labels, 2, soft), abs=1e-12), seed


def test_the_order_of_samples_decides_ties_and_nothing_else() -> None:
    """The control: with the other sample first the same tie goes the other way, and a sample that is nearer wins in any order."""
    x, labels, point = np.array([[1.0], [3.0]]), np.array([1, 0]), (np.array([[2.0]]), [1])
    for order, accuracy in (([0, 1], 1.0), ([1, 0], 0.0)):
        values = run("knn_shapley", [0, 1], {"v": point}, features=x[order], labels=labels[order], k=1)["score"].to_pylist()
        assert sum(values) == accuracy
    # Near points far from the middle, whose distances are less than what the squares of the coordinates are rounded by.
    far = np.array([[1e6], [1e6 + 1e-3], [-1e6]])
    for order in ([0, 1, 2], [1, 0, 2]):
        labels = np.array([0, 1, 0])[order]
        values = run("knn_shapley", order, {"v": (far[1:2] + 1e-4, [1])}, features=far[order], labels=labels, k=1)["score"]
        assert values.to_pylist() == [0, 1, 0]
