"""Questions to the tables, answered by DuckDB from the Parquet parts. Needs no torch; never loads all rows.

Every function takes a :class:`~inrun.ledger.LedgerReader` or the path of a run, and the same question twice gives the same bits.
``validation`` is a name, several, or None for all sets; ``view`` is one of :data:`inrun.ledger.scores.VIEWS`.
"""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound, column names checked and quoted

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from inrun.errors import ConfigurationError
from inrun.ledger import LedgerReader, Skip, credit_of
from inrun.ledger import scores as sums
from inrun.ledger.answers import CLEAR as CLEAR  # known by this place
from inrun.ledger.answers import META, check_count, end_table, group_columns, group_table, measures
from inrun.ledger.manifest import FOLDER, TABLES
from inrun.ledger.reader import reader_of
from inrun.ledger.scores import VIEWS, Ask, Names, add_up, check_view
from inrun.ledger.tables import Tables
from inrun.statistics import spearman

__all__ = ["VIEWS", "Agreement", "Info", "agreement", "extremes", "groups", "info", "left_out", "score_batches", "scores"]

#: How the group of samples is called that have no value in a column, or no metadata at all.
NO_VALUE = "(no value)"
Source = LedgerReader | str | Path


def scores(source: Source, validation: Names = None, view: str = "plain") -> pa.Table:
    """Return one row per sample and validation set; see :meth:`inrun.ledger.LedgerReader.scores`."""
    return reader_of(source).scores(validation, view)


def score_batches(source: Source, validation: Names = None, view: str = "plain") -> Iterator[pa.RecordBatch]:
    """Give the rows of :func:`scores` piece by piece, for runs with more samples than memory."""
    with reader_of(source).tables() as tables:
        yield from sums.score_batches(tables, validation, view)


def left_out(source: Source, view: str, validation: Names = None) -> int:
    """Return the number of rows of ``uses`` that a view cannot show: those of steps without a learning rate, for ``per_lr``."""
    check_view(view)
    if view != "per_lr":
        return 0
    with reader_of(source).tables() as tables:
        labels = [label for labels in tables.choose(validation).values() for label in labels]
        known = "SELECT step FROM accounts WHERE lr > 0"
        count = f"SELECT count(*) FROM uses WHERE step NOT IN ({known}) AND list_contains($labels::VARCHAR[], validation)"
        return int(tables.row(count, labels=labels)[0])


def groups(
    source: Source,
    by: str = "domain",
    validation: Names = None,
    stages: int | None = None,
    cumulative: bool = False,
    view: str = "plain",
) -> pa.Table:
    """Add up scores by a metadata column, over the run or over ``stages`` equal ranges of steps.

    Columns: ``group`` (null: samples without metadata, or without a value), ``validation``, with stages ``stage``, ``first_step``,
    ``last_step``; then ``total`` (sum of the scores), ``mean_per_sample``, ``mean_per_use``, ``samples`` (those that were used),
    ``uses``, ``negative_share`` (of the samples) and ``clear_share`` (negative by more than 2 standard errors; null without folds).

    Args:
        source: A reader, or the path of a run.
        by: A column of the samples table.
        validation: Sets to look at.
        stages: Number of step ranges; never more than there are steps.
        cumulative: A stage counts everything up to its end.
        view: How uses are seen.
    """
    check_view(view)
    if stages is not None and (isinstance(stages, bool) or not isinstance(stages, int) or stages < 1):
        raise ConfigurationError(f"stages is {stages!r}; it must be an integer of at least 1")
    if cumulative and stages is None:
        raise ConfigurationError("cumulative needs stages: without them a total is of the whole run already")
    with reader_of(source).tables() as tables:
        if stages is None:
            return group_table(tables, by, validation, view)
        column = tables.column(by)
        tables.check_rows()
        return _over_stages(tables, tables.choose(validation), column, stages, cumulative, view)


def _over_stages(tables: Tables, sets: dict[str, list[str]], column: str, stages: int, cumulative: bool, view: str) -> pa.Table:
    first, last = tables.row("SELECT min(step), max(step) FROM uses")
    span = last - first + 1
    stages = min(stages, span)
    bucket = f"((step - {first})::HUGEINT * {stages} // {span})::BIGINT"
    add_up(tables, sets, Ask(view, bucket, stages, cumulative))
    edges = [first + -(-b * span // stages) for b in range(stages + 1)]
    ranges = pa.table({"bucket": range(stages), "first_step": edges[:-1], "last_step": [e - 1 for e in edges[1:]]})
    tables.connection.from_arrow(ranges).create_view("ranges")
    added = _running() if cumulative else measures()
    grid = "SELECT * FROM (SELECT DISTINCT kind, validation FROM added), ranges"
    start = "(SELECT min(first_step) FROM ranges)" if cumulative else "first_step"
    sql = f"""
        WITH meta AS ({META.format(column=column)}), added AS MATERIALIZED ({added}), grid AS ({grid}),
             whole AS (SELECT grid.*, added.* EXCLUDE (kind, validation, bucket) FROM grid LEFT JOIN added
                       ON grid.kind IS NOT DISTINCT FROM added.kind AND grid.validation = added.validation
                          AND grid.bucket = added.bucket),
             filled AS ({_carried() if cumulative else "SELECT * FROM whole"})
        SELECT {group_columns("bucket AS stage", f"{start} AS first_step", "last_step")}
        FROM filled ORDER BY validation, kind NULLS LAST, bucket"""
    return tables.table(sql)


#: What is known of a group, and carried from stage to stage.
_CARRIED = ("total", "pushes", "samples", "uses", "negative", "judged", "clear")


def _running() -> str:
    """SQL that adds up, by group, set and bucket, how sample rows change: a sample speaks up only where it was used."""
    was = "OVER (PARTITION BY validation, sample_id ORDER BY bucket)"
    clear = f"coalesce((score + {CLEAR} * standard_error < 0)::INT, 0)"
    return f"""
        SELECT kind, validation, bucket, sum(score - coalesce(score0, 0.0)) AS total,
               sum(pushes - coalesce(pushes0, 0.0)) AS pushes,
               count(*) FILTER (score0 IS NULL) AS samples, sum(times_used - coalesce(uses0, 0)) AS uses,
               sum((score < 0)::INT - coalesce((score0 < 0)::INT, 0)) AS negative,
               count(standard_error) FILTER (score0 IS NULL) AS judged, sum(clear - coalesce(clear0, 0)) AS clear
        FROM (SELECT *, lag(score) {was} AS score0, lag(pushes) {was} AS pushes0, lag(times_used) {was} AS uses0,
                     {clear} AS clear, lag({clear}) {was} AS clear0 FROM scored)
        LEFT JOIN meta USING (sample_id) GROUP BY 1, 2, 3"""


def _carried() -> str:
    upto = "OVER (PARTITION BY kind, validation ORDER BY bucket ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
    sums = ", ".join(f"sum(coalesce({name}, 0)) {upto} AS {name}" for name in _CARRIED)
    return f"SELECT kind, validation, bucket, first_step, last_step, {sums} FROM whole"


def extremes(source: Source, n: int, validation: Names = None, largest: bool = True, view: str = "plain") -> pa.Table:
    """Return the ``n`` highest (or lowest) scores of every validation set, with all metadata columns of the samples.

    Ties go to the smaller sample id. Rows are ordered by validation set, then from the extreme inwards.
    """
    check_view(view)
    check_count("n", n)
    with reader_of(source).tables() as tables:
        return end_table(tables, validation, view, n if largest else None, None if largest else n)


@dataclass(frozen=True)
class Agreement:
    """How alike two validation sets rank the samples that both scored."""

    first: str
    second: str
    samples: int
    #: Rank correlation with ties shared; None where it is not defined (fewer than two samples, or all scores equal).
    spearman: float | None


def agreement(source: Source, first: str, second: str, view: str = "plain") -> Agreement:
    """Return the Spearman rank correlation of two validation sets over their common samples."""
    check_view(view)
    with reader_of(source).tables() as tables:
        add_up(tables, tables.choose([first, second]), Ask(view))
        common = tables.table(
            """SELECT a.score AS x, b.score AS y FROM scored a JOIN scored b USING (sample_id)
               WHERE a.validation = $first AND b.validation = $second ORDER BY sample_id""",
            first=first,
            second=second,
        )
        value = spearman(common["x"].to_numpy(), common["y"].to_numpy())
        return Agreement(first, second, common.num_rows, None if math.isnan(value) else value)


@dataclass(frozen=True)
class Info:
    """A run at a glance."""

    path: str
    about: dict[str, Any]
    #: Steps in the accounts or with uses of samples; how many of them scored nothing, by reason.
    steps: int
    first_step: int | None
    last_step: int | None
    skipped: dict[str, int]
    rows: int
    nbytes: int
    validation: dict[str, int]
    samples_used: int
    samples_registered: int
    used_without_metadata: int
    columns: list[str]
    lr_low: float | None
    lr_high: float | None
    #: What scores add up, "whole" or "step"; rows of credits, steps that were settled, and steps with uses that are pending.
    credit: str
    credit_rows: int
    settled: int
    pending: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dict(vars(self))


def info(source: Source) -> Info:
    """Count what a run holds; also works on one that holds nothing yet."""
    with reader_of(source).tables() as tables:
        steps = "SELECT step FROM uses UNION SELECT step FROM accounts"
        count, first, last = tables.row(f"SELECT count(*), min(step), max(step) FROM ({steps})")
        reasons = "SELECT skipped, count(DISTINCT step) FROM accounts WHERE skipped IS NOT NULL GROUP BY 1 ORDER BY 2 DESC, 1"
        used, unknown = tables.row(
            "SELECT count(*), count(*) FILTER (sample_id NOT IN (SELECT sample_id FROM samples)) "
            "FROM (SELECT DISTINCT sample_id FROM uses)"
        )
        low, high = tables.row("SELECT min(lr), max(lr) FROM accounts")
        return Info(
            path=str(tables.run.path),
            about=tables.run.about,
            steps=count,
            first_step=first,
            last_step=last,
            skipped=_by_reason(tables.relation(reasons).fetchall()),
            rows=tables.row("SELECT count(*) FROM contributions")[0],
            nbytes=_size(tables.run.path),
            validation={name: len(labels) for name, labels in tables.sets().items()},
            samples_used=used,
            samples_registered=tables.row("SELECT count(DISTINCT sample_id) FROM samples")[0],
            used_without_metadata=unknown,
            columns=[c for c in tables.columns if c != "sample_id"],
            lr_low=low,
            lr_high=high,
            credit=credit_of(tables.run.about),
            credit_rows=tables.row("SELECT count(*) FROM credits")[0],
            settled=tables.row("SELECT count(DISTINCT step) FROM credits")[0],
            pending=tables.row("SELECT count(DISTINCT step) FROM uses WHERE pending")[0] if tables.whole else 0,
        )


def _by_reason(counted: list[tuple[str, int]]) -> dict[str, int]:
    """Add up steps by why they were skipped, whatever the details; most steps first."""
    found: dict[str, int] = {}
    for text, count in counted:
        reason = Skip.parse(text)
        stated = text if reason is None else reason.text()
        found[stated] = found.get(stated, 0) + count
    return dict(sorted(found.items(), key=lambda entry: (-entry[1], entry[0])))


def _size(run: Path) -> int:
    """Add up the files of the ledger; one that goes while we look, since training writes, does not count."""
    total = 0
    for file in [run / "run.json", *(f for name in (FOLDER, *TABLES) for f in (run / name).glob("*"))]:
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total
