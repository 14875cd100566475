"""How the scores of a validation set are spread, and how alike validation sets rank samples. Reads the table ``scored``."""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from inrun.analysis.queries import CLEAR
from inrun.ledger.tables import Tables
from inrun.report.text import digits
from inrun.statistics import spearman

#: Bars of the histogram on the longer side of zero, and the share of samples that the two end bars gather on each side.
BARS, TAIL = 40, 0.005
#: Scores that rank agreement looks at; beyond, an equal share of the samples of every set.
MOST_RANKED = 6_000_000


@dataclass
class Distribution:
    """The scores of one validation set."""

    samples: int
    negative: int
    #: Below zero by more than two standard errors; None without folds.
    clear: int | None
    mean: float | None
    median: float | None
    standard_error: float | None
    #: ``edges`` of the bars, and counts per bar: ``harmful``, ``unclear`` and ``helpful`` with folds, else the first and last.
    edges: list[float | None] = field(default_factory=list)
    bars: dict[str, list[int]] = field(default_factory=dict)
    #: Samples beyond the outermost edges, which the end bars hold.
    beyond: tuple[int, int] = (0, 0)


def distribution(tables: Tables, name: str) -> Distribution:
    """Count the scores of a validation set into bars; zero is always an edge."""
    clear = f"score + {CLEAR} * standard_error < 0"
    samples, negative, judged, clearly, mean, *places, error = tables.row(
        f"""SELECT count(*), count(*) FILTER (score < 0), count(standard_error), count(*) FILTER ({clear}), avg(score),
                   quantile_disc(score, 0.5), quantile_disc(score, {TAIL}), quantile_disc(score, {1 - TAIL}), min(score),
                   max(score), quantile_disc(standard_error, 0.5)
            FROM scored WHERE validation = $name""",
        name=name,
    )
    found = Distribution(samples, negative, clearly if judged else None, digits(mean), digits(places[0]), digits(error))
    if samples:
        _count(tables, name, found, places[1], places[2], judged > 0)
    return found


def _count(tables: Tables, name: str, found: Distribution, low: float, high: float, judged: bool) -> None:
    low, high = min(low, 0.0), max(high, 0.0)
    width = max(-low, high) / BARS or 1.0
    below, above = math.ceil(-low / width - 1e-9), max(math.ceil(high / width - 1e-9), 1)
    bar = f"greatest(-{below}, least({above - 1}, floor(score / $width)))::INT"
    rows = tables.relation(
        f"""SELECT {bar} AS bar, count(*) FILTER (score + {CLEAR} * standard_error < 0),
                   count(*) FILTER (score - {CLEAR} * standard_error > 0), count(*) FILTER (score < 0), count(*),
                   count(*) FILTER (score < $low), count(*) FILTER (score > $high)
            FROM scored WHERE validation = $name GROUP BY 1 ORDER BY 1""",
        name=name,
        width=width,
        low=-below * width,
        high=above * width,
    ).fetchall()
    kinds = ("harmful", "unclear", "helpful") if judged else ("harmful", "helpful")
    found.edges = [digits(k * width) for k in range(-below, above + 1)]
    found.bars = {kind: [0] * (below + above) for kind in kinds}
    for place, bad, good, negative, count, _, _ in rows:
        split = (bad, count - bad - good, good) if judged else (negative, count - negative)
        for kind, value in zip(kinds, split, strict=True):
            found.bars[kind][place + below] = value
    found.beyond = (sum(r[5] for r in rows), sum(r[6] for r in rows))


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
