"""Uses of samples as DuckDB sees them: the view ``uses``, which every question adds up.

One row per use and validation label, with the columns step, sample_id, validation, value, error and pending. A use that was settled
has its credit, with the standard error of its estimate. Any other has its contribution, without an error, and is pending if the run
keeps whole credit: its window is open, or training ended before it was settled.
"""

# ruff: noqa: S608 - queries are put together from our own pieces

from __future__ import annotations

from typing import Any

import pyarrow as pa

_CONTRIBUTIONS = (
    "SELECT step, sample_id, validation, contribution::DOUBLE AS value, NULL::DOUBLE AS error, {pending} AS pending "
    "FROM contributions"
)
_CREDITS = "SELECT step, sample_id, validation, credit::DOUBLE AS value, error::DOUBLE AS error, {pending} AS pending FROM {table}"
_KEY = "step, sample_id, validation"
#: Steps of which every use has a row in ``known``.
_WHOLE_STEPS = """
SELECT step FROM (SELECT step, count(*) AS credited FROM ({known}) GROUP BY step)
LEFT JOIN (SELECT step, count(*) AS used FROM contributions GROUP BY step) USING (step)
WHERE credited >= coalesce(used, 0)"""


def show_contributions(connection: Any, pending: bool) -> None:
    """Make the view of a run without credits."""
    connection.execute(f"CREATE OR REPLACE TEMP VIEW uses AS {_CONTRIBUTIONS.format(pending=pending)}")


def show_credits(connection: Any, pending: bool, given: pa.Table | None = None) -> None:
    """Make the view of a run with credits: a credit stands in the place of the contribution of its use.

    Args:
        connection: DuckDB's, with ``contributions`` and ``credits``.
        pending: Whether uses without a credit are pending.
        given: Rows as in ``credits`` of windows that are open; those that are settled already are left out.
    """
    rows = [_CREDITS.format(pending="false", table="credits")]
    known = f"SELECT {_KEY} FROM credits"
    if given is not None:
        connection.from_arrow(given).create_view("given_credits", replace=True)
        connection.execute(
            f"CREATE OR REPLACE TEMP TABLE open_credits AS SELECT {_KEY}, credit, error FROM given_credits "
            "ANTI JOIN credits USING (step, sample_id, validation)"
        )
        rows.append(_CREDITS.format(pending="true", table="open_credits"))
        known += f" UNION ALL SELECT {_KEY} FROM open_credits"
    _note_credited(connection, known)
    others = f"{_CONTRIBUTIONS.format(pending=pending)} WHERE step NOT IN (SELECT step FROM credited_steps)"
    if connection.execute("SELECT count(*) FROM credited_uses").fetchone()[0]:
        same = " AND ".join(f"u.{name} = contributions.{name}" for name in _KEY.split(", "))
        others += f" AND NOT EXISTS (SELECT 1 FROM credited_uses u WHERE {same})"
    connection.execute(f"CREATE OR REPLACE TEMP VIEW uses AS {' UNION ALL '.join([*rows, others])}")


def show_settled_steps(connection: Any, written: str) -> None:
    """Make the view ``credits`` over a table of credits of several ranks, without those of steps that not every rank has settled.

    Until then all uses of such a step have their contributions: a sample may be used on several ranks in one step, and nothing
    would tell whose contribution a credit stands for.
    """
    connection.execute(f"CREATE TEMP TABLE settled_steps AS {_WHOLE_STEPS.format(known=f'SELECT step FROM {written}')}")
    connection.execute(f"CREATE TEMP VIEW credits AS SELECT * FROM {written} WHERE step IN (SELECT step FROM settled_steps)")


def _note_credited(connection: Any, known: str) -> None:
    """Note the steps of which every use has a credit and, use by use, what is known of other steps.

    There are such others where the open credits of one rank are given, or books were written by hand.
    """
    connection.execute(f"CREATE OR REPLACE TEMP TABLE credited_steps AS {_WHOLE_STEPS.format(known=known)}")
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE credited_uses AS SELECT * FROM ({known}) WHERE step NOT IN (SELECT step FROM credited_steps)"
    )
