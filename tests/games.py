"""Games whose values are known, as utilities: the number that "training" on some positions gives, without training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import comb
from pathlib import Path

import numpy as np

Game = Callable[[Sequence[int]], float]


def shapley(n: int, game: Game) -> np.ndarray:
    """Shapley values by their definition: φᵢ = Σ over S without i of [V(S ∪ i) − V(S)] / (n C(n − 1, |S|))."""
    values = np.zeros(n)
    for i in range(n):
        others = [j for j in range(n) if j != i]
        for size in range(n):
            for s in combinations(others, size):
                values[i] += (game(sorted((*s, i))) - game(s)) / (n * comb(n - 1, size))
    return values


class Additive:
    """V(S) = base + Σ of weights over S, for the set ``a``; for ``b`` the weights are the other way round. Calls can be logged."""

    def __init__(self, weights: Sequence[float], base: float = 0.0, log: Path | None = None, stop_after: int | None = None) -> None:
        self.weights, self.base, self.log, self.stop_after = np.asarray(weights, float), base, log, stop_after

    def __call__(self, positions: np.ndarray, seed: int) -> dict[str, float]:
        assert positions.dtype == np.int64 and (np.diff(positions) > 0).all()
        if self.stop_after is not None and self.calls() >= self.stop_after:
            raise KeyboardInterrupt
        if self.log is not None:
            with self.log.open("a") as f:  # one line per call, also from other processes
                f.write(f"{seed} {positions.tolist()}\n")
        return {"a": self.base + self.weights[positions].sum(), "b": self.base + self.weights[::-1][positions].sum()}

    def calls(self) -> int:
        assert self.log is not None
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def only(game: Game) -> Callable[[np.ndarray, int], dict[str, float]]:
    """A game as a utility of one set."""
    return lambda positions, seed: {"validation": float(game(positions.tolist()))}


def gloves(left: set[int]) -> Game:
    """Pairs of a left and a right glove; the others are right ones."""
    return lambda s: float(min(sum(i in left for i in s), sum(i not in left for i in s)))


def majority(n: int) -> Game:
    return lambda s: float(len(s) > n / 2)
