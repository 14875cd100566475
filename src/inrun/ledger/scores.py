"""Scores: uses as a view shows them, added up per sample and validation set.

The value of a use is its settled credit, or its contribution (see ``uses``). A late sample earns less by construction: the learning
rate has fallen and there is less left to learn. The views take that out, step by step and validation set by validation set, before
anything is added up:

``plain``         the value itself; scores are sums
``per_lr``        divided by the learning rate of its step; steps without one, or with 0, are left out and counted
``standardised``  divided by the mean absolute value of its step
``rank``          its rank within the step, from -1 (lowest) to 1 (highest), ties share; scores are means, not sums

One view looks across validation sets instead:

``specific``      less what its values for the other sets predict of it; see :mod:`inrun.ledger.specific`
"""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from inrun.errors import ConfigurationError
from inrun.ledger.schema import SCORES
from inrun.ledger.specific import Rows, common_part, moments, specific
from inrun.ledger.tables import Tables

#: Validation sets that are asked for: one, several, or None for all.
Names = str | Sequence[str] | None
#: Groups that are added up, and rows that are ranked, at once: they fit into that memory.
GROUPS_AT_ONCE, ROWS_AT_ONCE = 2_500_000, 4_000_000
#: Views whose scores are means over uses; those of the others are sums.
MEANS = ("rank",)
#: Views that need all rows of a step to show one.
BY_STEP = ("rank", "standardised", "specific")
SCORED = (
    "validation VARCHAR, sample_id BIGINT, bucket BIGINT, score DOUBLE, pushes DOUBLE, standard_error DOUBLE, times_used BIGINT, "
    "first_step BIGINT, last_step BIGINT, step_score DOUBLE, pending BIGINT, estimate_error DOUBLE"
)

#: Rows to be seen and added up. The step's own part is added up beside the uses only where it is not the same: with whole credit.
_ROWS = {
    "uses": "SELECT step, sample_id, validation AS label, value, error, pending FROM uses",
    "own": "SELECT step, sample_id, validation AS label, contribution::DOUBLE AS value, NULL::DOUBLE AS error, false AS pending "
    "FROM contributions",
}
_LR = "SELECT step, max(lr) AS lr FROM accounts WHERE lr > 0 GROUP BY step"
#: Standardised values are brought to multiples of 2⁻³⁶, their errors, which are squared, of 2⁻²², and absolute values of a step to
#: 2⁻⁵² of its largest: sums of such numbers are exact (of values to 2¹⁷, of squares to 2⁹), so that no bit depends on the order
#: in which threads and hash tables give rows.
_GRID, _ROUGH, _FINE = 2.0**36, 2.0**22, 2.0**52
_MOST = "SELECT step, label, max(abs(value)) AS most FROM rows GROUP BY step, label"
_PARTS = f"""
SELECT step, label, most, try_cast(round(abs(value) / most * {_FINE}) AS BIGINT) AS part
FROM rows JOIN ({_MOST}) USING (step, label)
"""
_SPREAD = f"""
SELECT step, label,
       CASE WHEN most > 0 AND isfinite(most) THEN most * (sum(part)::DOUBLE / ({_FINE} * count(*))) ELSE most END AS spread
FROM ({_PARTS}) GROUP BY step, label, most
"""
_PLACE = """
SELECT step, sample_id, label, pending, rank() OVER by_value AS low, cume_dist() OVER by_value AS upto,
       count(*) OVER (PARTITION BY step, label) AS n
FROM (SELECT step, sample_id, label, pending, value + 0.0 AS value FROM rows)
WINDOW by_value AS (PARTITION BY step, label ORDER BY value)
"""
VIEWS = {
    "plain": "SELECT * FROM rows",
    "rank": f"""
        SELECT step, sample_id, label, CASE WHEN n > 1 THEN (low + round(upto * n) - n - 1) / (n - 1) ELSE 0.0 END AS value,
               NULL::DOUBLE AS error, pending
        FROM ({_PLACE})""",
    "per_lr": f"""
        SELECT step, sample_id, label, value / lr AS value, error / lr AS error, pending FROM rows JOIN ({_LR}) USING (step)""",
    "standardised": f"""
        SELECT step, sample_id, label, CASE WHEN spread > 0 THEN round(value / spread * {_GRID}) / {_GRID} ELSE 0.0 END AS value,
               CASE WHEN spread > 0 THEN round(error / spread * {_ROUGH}) / {_ROUGH} END AS error, pending
        FROM rows JOIN ({_SPREAD}) USING (step, label)""",
    # What is common to several sets is known when all of the run has been seen; see _store.
    "specific": "SELECT step, sample_id, label, value, NULL::DOUBLE AS error, pending FROM specific_rows",
}


@dataclass(frozen=True)
class Ask:
    """How uses are seen and added up."""

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
    last_step, step_score, pending, estimate_error. The folds of a set become columns, added in their order, so that no bit
    depends on how a hash table gives its rows. Samples are taken a part at a time where they are many: a hash table that has to go
    to disk may fail.
    """
    tables.connection.execute(f"CREATE TEMP TABLE scored ({SCORED})")
    sources = tuple(_ROWS) if tables.whole else ("uses",)
    if ask.view in BY_STEP:
        for source in sources:
            _store(tables, ask.view, source)
    single = {labels[0]: name for name, labels in sets.items() if len(labels) == 1}
    jobs: list[tuple[str | None, list[str]]] = [(None, list(single))] if single else []
    jobs += [(name, labels) for name, labels in sets.items() if len(labels) > 1]
    for name, labels in jobs:
        bound: dict[str, Any] = {}
        keys = [_bind(bound, label) for label in labels]
        rows = _beside(*(_seen(keys, ask.view, source) for source in sources))
        if name is None:
            who, folds = _names(single, bound), [""]
        else:
            who, folds = f"{_bind(bound, name)}::VARCHAR", [f" FILTER (label = {key})" for key in keys]
        weight = 1.0 if name is None else (1 + len(labels) / 4) / len(labels)
        parts = _parts(tables, len(labels) * ask.buckets, weight * len(sources))
        for part in range(parts):
            where = "true" if parts == 1 else f"hash(sample_id) % {parts} = {part}"
            sql = f"INSERT INTO scored {_scores_sql(who, folds, rows, ask, where, tables.whole)}"
            tables.connection.execute(sql, {k: v for k, v in bound.items() if f"${k}" in sql})


def _names(single: dict[str, str], bound: dict[str, Any]) -> str:
    """SQL of a label's validation set, for sets with one label each; they differ only for a set of one fold."""
    cases = [f"WHEN {_bind(bound, label)} THEN {_bind(bound, name)}" for label, name in single.items() if label != name]
    return f"CASE label {' '.join(cases)} ELSE label END" if cases else "label"


def _seen(keys: list[str], view: str, source: str) -> str:
    """SQL of the rows of some labels as a view shows them."""
    chosen = ", ".join(keys)
    if view in BY_STEP:
        return f"SELECT * FROM seen_{source} WHERE label IN ({chosen})"
    return f"WITH rows AS ({_ROWS[source]} WHERE validation IN ({chosen})) {VIEWS[view]}"


def _beside(uses: str, own: str | None = None) -> str:
    """SQL of the uses, with a step's own part beside them as further rows that have ``own`` and no ``value``."""
    if own is None:
        return uses
    return f"""
        SELECT step, sample_id, label, value, error, pending, NULL::DOUBLE AS own FROM ({uses}) UNION ALL
        SELECT step, sample_id, label, NULL, NULL, false, value FROM ({own})"""


def _store(tables: Tables, view: str, source: str) -> None:
    """Write what a view shows to a temporary table, a range of steps at a time: ranks need all rows of a step at once."""
    kept = {"step": "BIGINT", "sample_id": "BIGINT", "label": "VARCHAR", "value": "DOUBLE"}
    kept |= {"error": "DOUBLE", "pending": "BOOLEAN"} if tables.whole else {}
    columns = ", ".join(f"{name} {kind}" for name, kind in kept.items())
    tables.connection.execute(f"CREATE TEMP TABLE seen_{source} ({columns})")
    # Arrays of rows, beside what DuckDB holds, take four times the room.
    pieces = _pieces(tables, source, ROWS_AT_ONCE // 4 if view == "specific" else ROWS_AT_ONCE)
    for rows in _specific_rows(tables, pieces) if view == "specific" else pieces:
        seen = f"SELECT {', '.join(kept)} FROM (WITH rows AS ({rows}) {VIEWS[view]})"
        tables.connection.execute(f"INSERT INTO seen_{source} {seen}")


def _pieces(tables: Tables, source: str, most: int) -> list[str]:
    """SQL of the rows of a run, a range of whole steps at a time, of about so many rows."""
    count, first, last = tables.row(f"SELECT count(*), min(step), max(step) FROM ({_ROWS[source]})")
    pieces = min(-(-count // most), last - first + 1) if count else 0
    ends = [first + (last - first + 1) * k // pieces for k in range(pieces + 1)] if pieces else []
    return [f"{_ROWS[source]} WHERE step >= {low} AND step < {high}" for low, high in pairwise(ends)]


def _specific_rows(tables: Tables, pieces: list[str]) -> Iterator[str]:
    """Make ``specific_rows`` of one piece after the other, and yield its rows; all pieces are read once before."""
    sets = list(tables.choose(None).values())
    labels = sorted({label for own in sets for label in own})
    at = {label: j for j, label in enumerate(labels)}
    places = [[at[label] for label in own] for own in sets]
    moment = np.zeros((len(labels), len(labels)))
    for piece in pieces:
        moment += moments(_read_rows(tables, piece, at)[1].matrix(len(labels))[0])
    common = common_part(moment, places)
    for piece in pieces:
        table, rows = _read_rows(tables, piece, at)
        shown = table.set_column(table.column_names.index("value"), "value", pa.array(specific(rows, places, common)))
        tables.connection.from_arrow(shown).create_view("specific_rows", replace=True)
        yield piece


def _read_rows(tables: Tables, piece: str, at: dict[str, int]) -> tuple[pa.Table, Rows]:
    """Return rows in an order of their own, so that no bit depends on how they were written, as a table and as arrays."""
    table = tables.table(f"{piece} ORDER BY step, sample_id, validation, value")
    names = table["label"].combine_chunks().dictionary_encode()
    label = np.array([at[name] for name in names.dictionary.to_pylist()], np.int64)[names.indices.to_numpy()]
    step, ids, value = (table[name].to_numpy() for name in ("step", "sample_id", "value"))
    return table, Rows(step, ids, label, value)


def _parts(tables: Tables, per_sample: int, weight: float) -> int:
    """Return in how many parts the samples are taken, so that the hash table of one part stays in memory."""
    (rows,) = tables.row("SELECT count(*) FROM uses")
    if rows * weight <= GROUPS_AT_ONCE:
        return 1
    (samples,) = tables.row("SELECT approx_count_distinct(sample_id) FROM uses")
    return max(1, math.ceil(min(rows, samples * per_sample) * weight / GROUPS_AT_ONCE))


def _scores_sql(who: str, folds: list[str], rows: str, ask: Ask, part: str, whole: bool) -> str:
    """SQL for a part of the samples: of one set in folds, or of all sets without."""
    sums = {name: sql for j, fold in enumerate(folds) for name, sql in _sums(str(j), fold, whole).items()}
    columns = ", ".join(f"{sql} AS {name}" for name, sql in sums.items())
    added = f"""
        SELECT {who} AS validation, sample_id, {ask.bucket} AS bucket, {columns},
               min(step) AS first_step, max(step) AS last_step
        FROM ({rows}) WHERE {part} GROUP BY 1, 2, 3"""
    added = _accumulate(added, list(sums)) if ask.cumulative else added
    return _score(added, len(folds), ask.view in MEANS, whole)


def _sums(j: str, fold: str, whole: bool) -> dict[str, str]:
    """What is added up of fold j: f values of u uses; with whole credit also o of n own parts, e squared errors, p pending uses."""
    if not whole:
        return {f"f{j}": f"coalesce(sum(value){fold}, 0.0)", f"u{j}": f"count(*){fold}"}
    return {
        f"f{j}": f"coalesce(sum(value){fold}, 0.0)",
        f"u{j}": f"count(value){fold}",
        f"o{j}": f"coalesce(sum(own){fold}, 0.0)",
        f"n{j}": f"count(own){fold}",
        f"e{j}": f"sum(error * error){fold}",
        f"p{j}": f"coalesce(sum(pending::BIGINT){fold}, 0)",
    }


def _bind(bound: dict[str, Any], value: str) -> str:
    key = f"v{len(bound)}_"
    bound[key] = value
    return f"${key}"


def _accumulate(added: str, names: list[str]) -> str:
    sums = ", ".join(f"sum({name}) OVER upto AS {name}" for name in names)
    return f"""
        SELECT validation, sample_id, bucket, {sums}, min(first_step) OVER upto AS first_step, max(last_step) OVER upto AS last_step
        FROM ({added})
        WINDOW upto AS (PARTITION BY validation, sample_id ORDER BY bucket ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"""


def _score(added: str, k: int, mean: bool, whole: bool) -> str:
    """Mean and standard error over the folds, term by term."""
    values = [f"(f{j} / greatest(u{j}, 1))" if mean else f"f{j}" for j in range(k)]
    own = [f"(o{j} / greatest(n{j}, 1))" if mean else f"o{j}" for j in range(k)]
    squares = " + ".join(f"(({v}) - score) * (({v}) - score)" for v in values)
    error = f"sqrt(({squares}) / {k - 1}) / sqrt({k}::DOUBLE)" if k > 1 else "NULL::DOUBLE"
    # The folds share one estimate of a sample's push: a mean over them is no more exact than one. So the root of the mean square.
    estimate = f"sqrt({_mean([f'e{j}' for j in range(k)])})"
    more = (_mean(own), _most("p", k), estimate) if whole else ("score", "0", "NULL::DOUBLE")
    return f"""
        SELECT validation, sample_id, bucket, score, pushes, {error} AS standard_error, times_used::BIGINT AS times_used,
               first_step, last_step, {more[0]} AS step_score, ({more[1]})::BIGINT AS pending, {more[2]} AS estimate_error
        FROM (SELECT *, {_mean(values)} AS score, {_mean([f"f{j}" for j in range(k)])} AS pushes, {_most("u", k)} AS times_used
              FROM ({added}))"""


def _mean(terms: list[str]) -> str:
    return f"({' + '.join(terms)}) / {len(terms)}" if len(terms) > 1 else terms[0]


def _most(letter: str, k: int) -> str:
    return f"{letter}0" if k == 1 else f"greatest({', '.join(f'{letter}{j}' for j in range(k))})"
