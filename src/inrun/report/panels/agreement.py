"""How alike validation sets rank samples. Reads the table ``scored``."""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from inrun.ledger.tables import Tables
from inrun.report.findings import Findings
from inrun.report.panel import Panel
from inrun.report.text import digits
from inrun.statistics import spearman

#: Scores that are looked at; beyond, an equal share of the samples of every set.
MOST_RANKED = 6_000_000


@dataclass(frozen=True)
class Agreements:
    """Rank correlations (Spearman) of all pairs of validation sets, over the samples both scored."""

    #: One row per set; None where it is not defined.
    matrix: list[list[float | None]]
    #: Every how many-th sample was looked at.
    thinned: int


def agreements(tables: Tables, names: list[str], samples: int) -> Agreements:
    """Correlate the ranks of all pairs; as :func:`inrun.analysis.queries.agreement`, without sorting a set again for each pair."""
    thinned = max(1, -(-samples * len(names) // MOST_RANKED))
    scores = [_scores_of(tables, name, thinned) for name in names]
    matrix: list[list[float | None]] = [[1.0 if i == j else None for j in range(len(names))] for i in range(len(names))]
    for (i, a), (j, b) in combinations(enumerate(scores), 2):
        matrix[i][j] = matrix[j][i] = digits(_spearman(a, b), 3)
    return Agreements(matrix, thinned)


def _scores_of(tables: Tables, name: str, thinned: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    some = "" if thinned == 1 else f"AND hash(sample_id) % {thinned} = 0"
    found = tables.table(f"SELECT sample_id, score FROM scored WHERE validation = $name {some} ORDER BY sample_id", name=name)
    return found["sample_id"].to_numpy(), found["score"].to_numpy()


def _spearman(a: tuple[npt.NDArray[Any], npt.NDArray[Any]], b: tuple[npt.NDArray[Any], npt.NDArray[Any]]) -> float | None:
    x, y = a[1], b[1]
    if not np.array_equal(a[0], b[0]):
        _, here, there = np.intersect1d(a[0], b[0], assume_unique=True, return_indices=True)
        x, y = x[here], y[there]
    found = spearman(x, y)
    return None if math.isnan(found) else found


def read(tables: Tables, found: Findings) -> dict[str, Any] | None:
    """Return the correlations of all pairs; None where there is but one validation set."""
    return asdict(agreements(tables, list(found.sets), found.samples_used)) if len(found.sets) > 1 else None


PANEL = Panel("agreement", "Do validation sets agree?", read)
