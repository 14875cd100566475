"""Scores: contributions as a view shows them, added up per sample and validation set.

A late sample earns less by construction: the learning rate has fallen and there is less left to learn. The views take that out,
step by step and validation set by validation set, before anything is added up:

``plain``         the contribution itself; scores are sums
``per_lr``        divided by the learning rate of its step; steps without one, or with 0, are left out and counted
``standardised``  divided by the mean absolute contribution of its step
``rank``          its rank within the step, from -1 (lowest) to 1 (highest), ties share; scores are means, not sums
"""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from inrun.errors import ConfigurationError
from inrun.ledger.schema import SCORES
from inrun.ledger.tables import Tables

#: Validation sets that are asked for: one, several, or None for all.
Names = str | Sequence[str] | None
#: Groups that are added up, and rows that are ranked, at once: they fit into that memory.
GROUPS_AT_ONCE, ROWS_AT_ONCE = 2_500_000, 4_000_000
#: Views whose scores are means over uses; those of the others are sums.
MEANS = ("rank",)
#: Views that need all rows of a step to show one.
BY_STEP = ("rank", "standardised")
SCORED = (
    "validation VARCHAR, sample_id BIGINT, bucket BIGINT, score DOUBLE, pushes DOUBLE, standard_error DOUBLE, times_used BIGINT, "
    "first_step BIGINT, last_step BIGINT"
)

_ROWS = "SELECT step, sample_id, validation AS label, contribution::DOUBLE AS value FROM contributions"
_LR = "SELECT step, max(lr) AS lr FROM accounts WHERE lr > 0 GROUP BY step"
_SPREAD = "SELECT step, label, avg(abs(value)) AS spread FROM rows GROUP BY step, label"
_PLACE = """
SELECT step, sample_id, label, rank() OVER by_value AS low, cume_dist() OVER by_value AS upto,
       count(*) OVER (PARTITION BY step, label) AS n
FROM (SELECT step, sample_id, label, value + 0.0 AS value FROM rows)
WINDOW by_value AS (PARTITION BY step, label ORDER BY value)
"""
VIEWS = {
    "plain": "SELECT * FROM rows",
    "rank": f"""
        SELECT step, sample_id, label, CASE WHEN n > 1 THEN (low + round(upto * n) - n - 1) / (n - 1) ELSE 0.0 END AS value
        FROM ({_PLACE})""",
    "per_lr": f"SELECT step, sample_id, label, value / lr AS value FROM rows JOIN ({_LR}) USING (step)",
    "standardised": f"""
        SELECT step, sample_id, label, CASE WHEN spread > 0 THEN value / spread ELSE 0.0 END AS value
        FROM rows JOIN ({_SPREAD}) USING (step, label)""",
}


@dataclass(frozen=True)
class Ask:
    """How contributions are seen and added up."""

    view: str = "plain"
    #: SQL of a step's bucket, and how many there are.
    bucket: str = "0"
    buckets: int = 1
    #: Whether a bucket counts all earlier ones of the sample, too.
    cumulative: bool = False


def check_view(view: str) -> None:
    """ConfigurationError if there is no such view."""
    if view not in VIEWS:
        raise ConfigurationError(f"there is no view {view!r}; accepted are {', '.join(VIEWS)}")


def score_table(tables: Tables, validation: Names = None, view: str = "plain") -> pa.Table:
    """Return the scores; see :meth:`inrun.ledger.LedgerReader.scores`."""
    check_view(view)
    chosen = tables.choose(validation)
    return _ordered(tables, chosen, view).to_arrow_table().cast(SCORES) if chosen else SCORES.empty_table()


def score_batches(tables: Tables, validation: Names = None, view: str = "plain") -> Iterator[pa.RecordBatch]:
    """Give the rows of :func:`score_table` piece by piece, for runs with more samples than memory."""
    check_view(view)
    chosen = tables.choose(validation)
    if chosen:
        yield from _ordered(tables, chosen, view).to_arrow_reader(65536)


def _ordered(tables: Tables, sets: dict[str, list[str]], view: str) -> Any:
    add_up(tables, sets, Ask(view))
    return tables.relation(f"SELECT {', '.join(SCORES.names)} FROM scored ORDER BY validation, sample_id")


def add_up(tables: Tables, sets: dict[str, list[str]], ask: Ask) -> None:
    """Make the table ``scored``: one row per validation set, sample and step bucket. Once per connection.

    Columns: validation, sample_id, bucket, score, pushes (the sum over uses), standard_error, times_used, first_step,
    last_step. The folds of a set become columns, added in their order, so that no bit depends on how a hash table
    gives its rows. Samples are taken a part at a time where they are many: a hash table that has to go to disk may fail.
    """
    tables.connection.execute(f"CREATE TEMP TABLE scored ({SCORED})")
    if ask.view in BY_STEP:
        _store(tables, ask.view)
    single = {labels[0]: name for name, labels in sets.items() if len(labels) == 1}
    jobs: list[tuple[str | None, list[str]]] = [(None, list(single))] if single else []
    jobs += [(name, labels) for name, labels in sets.items() if len(labels) > 1]
    for name, labels in jobs:
        bound: dict[str, Any] = {}
        keys = [_bind(bound, label) for label in labels]
        rows = _seen(keys, ask.view)
        if name is None:
            who, folds = _names(single, bound), [""]
        else:
            who, folds = f"{_bind(bound, name)}::VARCHAR", [f" FILTER (label = {key})" for key in keys]
        parts = _parts(tables, len(labels) * ask.buckets, 1.0 if name is None else (1 + len(labels) / 4) / len(labels))
        for part in range(parts):
            where = "true" if parts == 1 else f"hash(sample_id) % {parts} = {part}"
            sql = f"INSERT INTO scored {_scores_sql(who, folds, rows, ask, where)}"
            tables.connection.execute(sql, {k: v for k, v in bound.items() if f"${k}" in sql})


def _names(single: dict[str, str], bound: dict[str, Any]) -> str:
    """SQL of a label's validation set, for sets with one label each; they differ only for a set of one fold."""
    cases = [f"WHEN {_bind(bound, label)} THEN {_bind(bound, name)}" for label, name in single.items() if label != name]
    return f"CASE label {' '.join(cases)} ELSE label END" if cases else "label"


def _seen(keys: list[str], view: str) -> str:
    """SQL of the rows of some labels as a view shows them."""
    chosen = ", ".join(keys)
    if view in BY_STEP:
        return f"SELECT * FROM seen_{view} WHERE label IN ({chosen})"
    return f"WITH rows AS ({_ROWS} WHERE validation IN ({chosen})) {VIEWS[view]}"


def _store(tables: Tables, view: str) -> None:
    """Write what a view shows to a temporary table, a range of steps at a time: ranks need all rows of a step at once."""
    tables.connection.execute(f"CREATE TEMP TABLE seen_{view} (step BIGINT, sample_id BIGINT, label VARCHAR, value DOUBLE)")
    count, first, last = tables.row("SELECT count(*), min(step), max(step) FROM contributions")
    pieces = min(-(-count // ROWS_AT_ONCE), last - first + 1) if count else 0
    for piece in range(pieces):
        low, high = (first + (last - first + 1) * k // pieces for k in (piece, piece + 1))
        rows = f"{_ROWS} WHERE step >= {low} AND step < {high}"
        tables.connection.execute(f"INSERT INTO seen_{view} WITH rows AS ({rows}) {VIEWS[view]}")


def _parts(tables: Tables, per_sample: int, weight: float) -> int:
    """Return in how many parts the samples are taken, so that the hash table of one part stays in memory."""
    (rows,) = tables.row("SELECT count(*) FROM contributions")
    if rows * weight <= GROUPS_AT_ONCE:
        return 1
    (samples,) = tables.row("SELECT approx_count_distinct(sample_id) FROM contributions")
    return max(1, math.ceil(min(rows, samples * per_sample) * weight / GROUPS_AT_ONCE))


def _scores_sql(who: str, folds: list[str], rows: str, ask: Ask, part: str) -> str:
    """SQL for a part of the samples: of one set in folds, or of all sets without."""
    sums = ", ".join(f"coalesce(sum(value){f}, 0.0) AS f{j}, count(*){f} AS u{j}" for j, f in enumerate(folds))
    added = f"""
        SELECT {who} AS validation, sample_id, {ask.bucket} AS bucket, {sums}, min(step) AS first_step, max(step) AS last_step
        FROM ({rows}) WHERE {part} GROUP BY 1, 2, 3"""
    return _score(_accumulate(added, len(folds)) if ask.cumulative else added, len(folds), ask.view in MEANS)


def _bind(bound: dict[str, Any], value: str) -> str:
    key = f"v{len(bound)}_"
    bound[key] = value
    return f"${key}"


def _accumulate(added: str, k: int) -> str:
    sums = ", ".join(f"sum(f{j}) OVER upto AS f{j}, sum(u{j}) OVER upto AS u{j}" for j in range(k))
    return f"""
        SELECT validation, sample_id, bucket, {sums}, min(first_step) OVER upto AS first_step, max(last_step) OVER upto AS last_step
        FROM ({added})
        WINDOW upto AS (PARTITION BY validation, sample_id ORDER BY bucket ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"""


def _score(added: str, k: int, mean: bool) -> str:
    """Mean and standard error over the folds, term by term."""
    values = [f"(f{j} / greatest(u{j}, 1))" if mean else f"f{j}" for j in range(k)]
    uses = "u0" if k == 1 else f"greatest({', '.join(f'u{j}' for j in range(k))})"
    score = f"({' + '.join(values)}) / {k}" if k > 1 else values[0]
    pushes = f"({' + '.join(f'f{j}' for j in range(k))}) / {k}" if k > 1 else "f0"
    squares = " + ".join(f"(({v}) - score) * (({v}) - score)" for v in values)
    error = f"sqrt(({squares}) / {k - 1}) / sqrt({k}::DOUBLE)" if k > 1 else "NULL::DOUBLE"
    return f"""
        SELECT validation, sample_id, bucket, score, pushes, {error} AS standard_error, times_used::BIGINT AS times_used,
               first_step, last_step
        FROM (SELECT *, {score} AS score, {pushes} AS pushes, {uses} AS times_used FROM ({added}))"""
