"""Value by a metadata column: over the run for the tables, and over stages of training for the charts. Reads ``scored``."""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound, column names checked and quoted

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import stdev
from typing import Any

from inrun.analysis.queries import CLEAR, NO_VALUE
from inrun.ledger.tables import Tables, quoted
from inrun.report.findings import Findings
from inrun.report.panel import Panel
from inrun.report.text import digits, one_line
from inrun.statistics import errors_away

#: Stages of training; groups that get a colour; groups with a row in the tables.
STAGES, MOST_COLOURS, MOST_ROWS = 20, 16, 24
OTHER = "other"


@dataclass
class Grouping:
    """The samples by one column. Lists per set are in the order of the sets, lists per group in that of ``names``."""

    column: str
    #: Groups with a row of their own, most weighty first; ``colours`` of them have a colour, the rest is drawn as "other".
    names: list[str] = field(default_factory=list)
    colours: int = 0
    #: Groups beyond those, gathered in the last name.
    gathered: int = 0
    #: Per set and group: total, samples, uses, negative, clear and error, that of the total over the folds (None without).
    whole: list[list[dict[str, Any]]] = field(default_factory=list)
    #: Per set: standard errors that a total must be away from zero to be clear of it, as in the finding; None without three folds.
    away: list[float | None] = field(default_factory=list)
    #: Per set: how many folds it has.
    folds: list[int] = field(default_factory=list)
    #: Per set and coloured group (and "other"): ``total``, ``uses`` and ``new`` (samples used first) per stage.
    stages: list[list[dict[str, list[Any]]]] = field(default_factory=list)


@dataclass(frozen=True)
class Stages:
    """Equal ranges of steps."""

    first: list[int]
    last: list[int]

    def sql(self, step: str) -> str:
        """Return the SQL of a step's stage."""
        low, count = self.first[0], len(self.first)
        span = self.last[-1] - low + 1
        return f"(({step} - {low})::HUGEINT * {count} // {span})::INT"


def stages_of(first: int, last: int, count: int = STAGES) -> Stages:
    """Cut a range of steps into equal stages, never more than there are steps; as ``inrun groups --stages`` does."""
    span = last - first + 1
    count = min(count, span)
    edges = [first + -(-b * span // count) for b in range(count + 1)]
    return Stages(edges[:-1], [edge - 1 for edge in edges[1:]])


def group_by(tables: Tables, column: str, sets: dict[str, list[str]], stages: Stages) -> Grouping:
    """Add up scores by a column. The heaviest groups keep their names; the others are gathered, so that the answer is bounded."""
    connection = tables.connection
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE kinds AS SELECT sample_id, first({quoted(column)}::VARCHAR) AS kind FROM samples GROUP BY 1"
    )
    weighed = """
        WITH added AS (SELECT kind, validation, abs(sum(score)) AS weight, count(*) AS samples
                       FROM scored LEFT JOIN kinds USING (sample_id) GROUP BY ALL),
             parts AS (SELECT *, weight / nullif(sum(weight) OVER (PARTITION BY validation), 0) AS part FROM added)
        SELECT kind, coalesce(max(part), 0) AS part FROM parts GROUP BY kind"""
    place = "(row_number() OVER (ORDER BY part DESC, kind NULLS LAST) - 1)::INT AS place"
    connection.execute(f"CREATE OR REPLACE TEMP TABLE weighed AS SELECT *, {place} FROM ({weighed})")
    (count,) = tables.row("SELECT count(*) FROM weighed")
    rows = count if count <= MOST_ROWS else MOST_ROWS - 1
    colours = count if count <= MOST_COLOURS else MOST_COLOURS - 1
    names = [row[0] for row in tables.relation(f"SELECT kind FROM weighed WHERE place < {rows} ORDER BY place").fetchall()]
    connection.execute(
        f"""CREATE OR REPLACE TEMP TABLE placed AS SELECT s.sample_id, least(w.place, {rows})::INT AS row
            FROM (SELECT DISTINCT sample_id FROM scored) s LEFT JOIN kinds k USING (sample_id)
            JOIN weighed w ON w.kind IS NOT DISTINCT FROM k.kind"""
    )
    found = Grouping(column, _labels(names), colours, gathered=count - rows)
    if found.gathered:
        found.names.append(f"{found.gathered:,} other groups")
    found.whole = _whole(tables, list(sets), len(found.names))
    added = _added(tables, sets, stages)
    for name, row, error in _errors(added, sets):
        found.whole[list(sets).index(name)][row]["error"] = error
    named = [sum(r["samples"] > 0 for r in rows[: len(rows) - bool(found.gathered)]) for rows in found.whole]
    found.folds = [len(labels) for labels in sets.values()]
    found.away = [errors_away(n, k) for n, k in zip(named, found.folds, strict=True)]
    found.stages = _staged(tables, sets, stages, added, colours, colours + (count > colours))
    return found


def _labels(kinds: list[str | None]) -> list[str]:
    """Return names to show; two that look alike once made visible are told apart."""
    labels: list[str] = []
    for kind in kinds:
        label = NO_VALUE if kind is None else one_line(kind, 80)
        while label in labels:
            label += " ′"
        labels.append(label)
    return labels


def _whole(tables: Tables, names: list[str], rows: int) -> list[list[dict[str, Any]]]:
    answer = tables.relation(
        f"""SELECT validation, row, sum(score), count(*), sum(times_used), count(*) FILTER (score < 0), count(standard_error),
                   count(*) FILTER (score + {CLEAR} * standard_error < 0)
            FROM scored JOIN placed USING (sample_id) GROUP BY 1, 2"""
    ).fetchall()
    empty: dict[str, Any] = {"total": 0.0, "samples": 0, "uses": 0, "negative": 0, "clear": None, "error": None}
    found = {name: [dict(empty) for _ in range(rows)] for name in names}
    for name, row, total, samples, uses, negative, judged, clear in answer:
        found[name][row] = {
            "total": digits(total),
            "samples": samples,
            "uses": int(uses),
            "negative": negative,
            "clear": clear if judged else None,
            "error": None,
        }
    return [found[name] for name in names]


#: Sum and number of the uses of a label, a row and a stage.
_Added = dict[tuple[str, int, int], tuple[float, int]]


def _added(tables: Tables, sets: dict[str, list[str]], stages: Stages) -> _Added:
    """Add up uses once for all that is asked of them: no table of samples and stages is needed."""
    rows = tables.relation(
        f"""SELECT validation, row, {stages.sql("step")}, sum(value), count(*)
            FROM uses JOIN placed USING (sample_id)
            WHERE list_contains($labels::VARCHAR[], validation) GROUP BY 1, 2, 3 ORDER BY 1, 2, 3""",
        labels=[label for labels in sets.values() for label in labels],
    ).fetchall()
    return {(label, row, stage): (total, count) for label, row, stage, total, count in rows}


def _errors(added: _Added, sets: dict[str, list[str]]) -> Iterator[tuple[str, int, float | None]]:
    """Give the standard error of every total of a set in folds: how far the folds' own totals are apart, over √folds."""
    totals: dict[tuple[int, str], float] = {}
    for (label, row, _), (total, _) in added.items():
        totals[row, label] = totals.get((row, label), 0.0) + total
    for name, labels in sets.items():
        for row in sorted({row for row, label in totals if label in labels} if len(labels) > 1 else ()):
            yield name, row, digits(stdev(totals.get((row, label), 0.0) for label in labels) / math.sqrt(len(labels)), 3)


def _staged(
    tables: Tables, sets: dict[str, list[str]], stages: Stages, added: _Added, colours: int, groups: int
) -> list[list[dict[str, list[Any]]]]:
    """Totals are sums over uses, the mean over folds."""
    folds = {name: len(labels) for name, labels in sets.items()}
    name_of = {label: name for name, labels in sets.items() for label in labels}
    count = len(stages.first)

    def empty() -> dict[str, list[Any]]:
        return {key: [0] * count for key in ("total", "uses", "new")}

    found = {name: [empty() for _ in range(groups)] for name in sets}
    group = f"least(row, {colours})::INT"
    sums: dict[tuple[str, int, int], tuple[float, int]] = {}
    for (label, row, stage), (total, rows) in added.items():
        key = (name_of[label], min(row, colours), stage)
        before = sums.get(key, (0.0, 0))
        sums[key] = (before[0] + total, before[1] + rows)
    for (name, place, stage), (total, rows) in sums.items():
        found[name][place]["total"][stage] = digits(total / folds[name])
        found[name][place]["uses"][stage] = round(rows / folds[name])
    first_used = f"""
        SELECT validation, {group}, {stages.sql("first_step")}, count(*)
        FROM scored JOIN placed USING (sample_id) GROUP BY 1, 2, 3"""
    for name, place, stage, samples in tables.relation(first_used).fetchall():
        found[name][place]["new"][stage] = samples
    return [found[name] for name in sets]


def read(tables: Tables, found: Findings) -> dict[str, Any] | None:
    """Return the stages, and one grouping for each column that can be chosen; None without metadata to group by."""
    if not found.columns:
        return None
    sets = {name: labels for name, labels in tables.sets().items() if name in found.sets}
    first, last = tables.row("SELECT min(step), max(step) FROM contributions")
    stages = stages_of(first, last)
    groupings = [group_by(tables, column, sets, stages) for column in found.columns]
    shown = [{**asdict(g), "column": one_line(g.column, 60)} for g in groupings]
    return {"stages": asdict(stages), "groupings": shown}


PANEL = Panel("groups", lambda found: f"Value by {one_line(found.columns[0], 60)}", read, jump="Groups")
