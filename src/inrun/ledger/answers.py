"""Answers from the table ``scored``: both ends of the scores, and sums by a metadata column."""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound, column names checked and quoted

from __future__ import annotations

import pyarrow as pa

from inrun.errors import ConfigurationError
from inrun.ledger.schema import SCORES
from inrun.ledger.scores import Ask, Names, add_up, check_view, score_table
from inrun.ledger.tables import Tables, quoted
from inrun.notebook import marked

#: A score this many standard errors below zero is clear of its error.
CLEAR = 2.0
#: First of equal ids: parts that two ranks registered at once say the same thing twice.
META = "SELECT sample_id, first({column}) AS kind FROM samples GROUP BY sample_id"


def answer(
    tables: Tables,
    validation: Names = None,
    view: str = "plain",
    *,
    top: int | None = None,
    bottom: int | None = None,
    by: str | None = None,
) -> pa.Table:
    """Answer what :meth:`inrun.ledger.LedgerReader.scores` is asked; once per connection."""
    for name, count in (("top", top), ("bottom", bottom)):
        if count is not None:
            check_count(name, count)
    check_view(view)
    if by is not None:
        return marked(group_table(tables, by, validation, view, top, bottom), "groups")
    if top is None and bottom is None:
        return marked(score_table(tables, validation, view), "scores")
    return marked(end_table(tables, validation, view, top, bottom), "scores")


def check_count(name: str, count: object) -> None:
    """ConfigurationError unless a number of rows is one."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigurationError(f"{name} is {count!r}; it must be an integer of at least 1")


def end_table(tables: Tables, validation: Names, view: str, top: int | None, bottom: int | None) -> pa.Table:
    """Return the highest and lowest scores of every validation set, with all metadata columns of the samples.

    Ties go to the smaller sample id. Rows are ordered by validation set, then from the highest score down; of the lowest alone,
    from the lowest up. A sample that is among both is there once.
    """
    tables.check_rows()
    add_up(tables, tables.choose(validation), Ask(view))
    # Columns that were registered before answers had one of that name are left out.
    names = [c for c in tables.columns if c.lower() not in SCORES.names]
    more = "".join(f", first({quoted(c)}) AS {quoted(c)}" for c in names)
    shown = "".join(f", meta.{quoted(c)}" for c in names)
    places, chosen, order = _ends("score", "sample_id", top, bottom)
    return tables.table(
        f"""
        WITH placed AS (SELECT *, {places} FROM scored),
             best AS MATERIALIZED (SELECT * FROM placed WHERE {chosen}),
             meta AS (SELECT sample_id{more} FROM samples WHERE sample_id IN (SELECT sample_id FROM best) GROUP BY sample_id)
        SELECT {", ".join(f"best.{c}" for c in SCORES.names)}{shown}
        FROM best LEFT JOIN meta ON best.sample_id = meta.sample_id ORDER BY best.validation, best.{order}"""
    )


def group_table(
    tables: Tables, by: str, validation: Names = None, view: str = "plain", top: int | None = None, bottom: int | None = None
) -> pa.Table:
    """Add up scores by a metadata column; see :func:`inrun.analysis.queries.groups` for the columns.

    ``top`` and ``bottom`` choose groups by their totals, ordered as :func:`end_table` does.
    """
    column = tables.column(by)
    tables.check_rows()
    add_up(tables, tables.choose(validation), Ask(view))
    places, chosen, order = _ends("total", "kind NULLS LAST", top, bottom)
    return tables.table(
        f"""
        WITH meta AS ({META.format(column=column)}), added AS ({measures()}), placed AS (SELECT *, {places} FROM added)
        SELECT {group_columns()} FROM placed WHERE {chosen} ORDER BY validation, {order}"""
    )


def _ends(value: str, tie: str, top: int | None, bottom: int | None) -> tuple[str, str, str]:
    """SQL of the places in a set, of the rows that are wanted (all of them where no end is), and of the column that orders them."""
    places, chosen = [], []
    for name, count, order in (("high", top, f"{value} DESC"), ("low", bottom, value)):
        if count is not None or (name == "high" and bottom is None):
            places.append(f"row_number() OVER (PARTITION BY validation ORDER BY {order}, {tie}) AS {name}")
        if count is not None:
            chosen.append(f"{name} <= {count}")
    return ", ".join(places), " OR ".join(chosen) or "true", "low" if top is None and bottom is not None else "high"


def measures() -> str:
    """SQL that adds up sample rows by group, set and bucket."""
    clear = f"score + {CLEAR} * standard_error < 0"
    return f"""
        SELECT kind, validation, bucket, sum(score) AS total, sum(pushes) AS pushes, count(*) AS samples, sum(times_used) AS uses,
               count(*) FILTER (score < 0) AS negative, count(standard_error) AS judged, count(*) FILTER ({clear}) AS clear
        FROM scored LEFT JOIN meta USING (sample_id) GROUP BY 1, 2, 3"""


def group_columns(*more: str) -> str:
    """SQL of the columns of an answer by group."""
    return ", ".join(
        [
            'kind AS "group"',
            "validation",
            *more,
            "coalesce(total, 0.0) AS total",
            "total / nullif(samples, 0) AS mean_per_sample",
            "pushes / nullif(uses, 0) AS mean_per_use",
            "coalesce(samples, 0)::BIGINT AS samples",
            "coalesce(uses, 0)::BIGINT AS uses",
            "negative / nullif(samples, 0) AS negative_share",
            "clear / nullif(judged, 0) AS clear_share",
        ]
    )
