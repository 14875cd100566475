"""``data_shapley``: what does a sample add to those that came before it, over random orders and training runs?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inrun.baselines.registry import Ids, register
from inrun.baselines.retraining import PERMUTATIONS, Checked, Retraining, Tell, Utility, Vector, derived_seed, digest
from inrun.errors import ConfigurationError


@register("data_shapley", "retraining-based Shapley value by truncated Monte Carlo over permutations", unit="utility")
def data_shapley(
    sample_ids: Ids,
    validation: Mapping[str, Any],
    *,
    utility: Utility,
    permutations: int = 100,
    tolerance: float = 0.01,
    patience: int = 1,
    seed: int = 0,
    jobs: int = 1,
    cells: Path | None = None,
    tell: Tell | None = None,
) -> dict[str, Vector]:
    """Walk through random permutations (Ghorbani & Zou 2019, algorithm 1).

    With V the utility and π a permutation, score of π(j) = mean over π of vⱼ − vⱼ₋₁, vⱼ = V({π(1) … π(j)}), v₀ = V(∅). Once v is
    within ``tolerance`` of V(all), the rest of the permutation adds 0 and is not trained. Every validation set is cut by itself:
    its scores do not depend on the others. Without a cut, scores sum to the mean of V(all) − V(∅).

    Args:
        sample_ids: The samples, ``[n]``.
        validation: Its names are those of the utility's numbers.
        utility: ``(positions [m], seed) -> number per validation set``. One seed serves a whole permutation, V(all) included, so
            that differences are those of the samples; another permutation has another.
        permutations: How many; each costs up to n + 1 training runs, the empty one included.
        tolerance: In the unit of the utility; 0 cuts nothing, for V(all) is reached by training on all.
        patience: How many v in a row must be within tolerance. 1 is the paper's; with a noisy utility more are safer.
        seed: Of permutations and training runs; the k-th permutation does not depend on their number.
        jobs: Processes.
        cells: Folder where finished permutations are kept.
        tell: Hears of progress.
    """
    if permutations < 1 or patience < 1 or not tolerance >= 0:
        raise ConfigurationError(
            f"data_shapley got permutations={permutations}, patience={patience} and tolerance={tolerance}; "
            "the first two must be at least 1, the last at least 0"
        )
    n = len(sample_ids)
    tasks = [
        Permutation(
            np.random.default_rng([seed, PERMUTATIONS, k]).permutation(n),
            derived_seed(seed, PERMUTATIONS, k),
            float(tolerance),
            int(patience),
        )
        for k in range(permutations)
    ]
    paths = Retraining(sample_ids, validation, utility, jobs, cells, tell).evaluate("data_shapley: permutations", tasks)
    scores = {name: np.zeros(n) for name in validation}
    for task, path in zip(tasks, paths, strict=True):
        for name, total in scores.items():
            marginals = np.diff(path[name])
            total[task.order[: len(marginals)]] += marginals
    return {name: total / permutations for name, total in scores.items()}


@dataclass(frozen=True, eq=False)
class Permutation:
    """The utilities v₀, v₁ … along one permutation, for each validation set up to where it is cut."""

    order: Ids
    seed: int
    tolerance: float
    patience: int

    @property
    def key(self) -> dict[str, Any]:
        """All that the walk depends on."""
        return {"permutation": digest(self.order), "seed": self.seed, "tolerance": self.tolerance, "patience": self.patience}

    def __call__(self, utility: Checked) -> dict[str, Any]:
        """Return the lists of utilities by validation set."""
        n = len(self.order)
        whole, empty = utility(self.order, self.seed), utility(self.order[:0], self.seed)
        paths = {name: [value] for name, value in empty.items()}
        for j in range(1, n + 1):
            uncut = [name for name, path in paths.items() if not self._is_cut(path, whole[name])]
            if not uncut:
                break
            now = whole if j == n else utility(self.order[:j], self.seed)
            for name in uncut:
                paths[name].append(now[name])
        return paths

    def _is_cut(self, path: list[float], whole: float) -> bool:
        last = path[-self.patience :]
        return len(last) == self.patience and all(abs(whole - v) < self.tolerance for v in last)
