"""How the scores of a validation set are spread. Reads the table ``scored``."""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound

from __future__ import annotations

import math
from dataclasses import dataclass, field

from inrun.analysis.queries import CLEAR
from inrun.ledger.tables import Tables
from inrun.report.text import digits

#: Bars of the histogram on the longer side of zero, and the share of samples that the two end bars gather on each side.
BARS, TAIL = 40, 0.005


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
    #: Above zero.
    positive: int = 0
    #: ``edges`` of the bars, and counts per bar: ``harmful``, ``unclear`` and ``helpful`` with folds, else the first and last.
    edges: list[float | None] = field(default_factory=list)
    bars: dict[str, list[int]] = field(default_factory=dict)
    #: Samples beyond the outermost edges, which the end bars hold.
    beyond: tuple[int, int] = (0, 0)

    @property
    def helpful(self) -> int:
        """How many are clearly above zero; without folds how many are at zero or above."""
        return sum(self.bars.get("helpful", []))


def distribution(tables: Tables, name: str) -> Distribution:
    """Count the scores of a validation set into bars; zero is always an edge."""
    clear = f"score + {CLEAR} * standard_error < 0"
    samples, negative, judged, clearly, mean, *places, positive, error = tables.row(
        f"""SELECT count(*), count(*) FILTER (score < 0), count(standard_error), count(*) FILTER ({clear}), avg(score),
                   quantile_disc(score, 0.5), quantile_disc(score, {TAIL}), quantile_disc(score, {1 - TAIL}), min(score),
                   max(score), count(*) FILTER (score > 0), quantile_disc(standard_error, 0.5)
            FROM scored WHERE validation = $name""",
        name=name,
    )
    found = Distribution(samples, negative, clearly if judged else None, digits(mean), digits(places[0]), digits(error), positive)
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
