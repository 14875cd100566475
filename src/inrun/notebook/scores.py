"""Scores in a notebook. They stay Arrow tables, which have no picture: a mark in their schema tells ours, and IPython draws those.

Nothing happens outside IPython, and tables of others look as they did.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from inrun.notebook.html import block, lines, table
from inrun.notebook.shell import shell

#: The key of the mark in a schema's metadata, and what it may say.
KEY = b"inrun"
KINDS = {"scores": "Scores", "groups": "Scores by group"}
SIGN = "Positive: lowered the validation loss; the unit is that of the loss."
#: Rows that are drawn at either end.
ENDS = 8
#: Columns that are drawn; more are counted.
MOST_COLUMNS = 16
#: Columns whose numbers have a sign.
SIGNED = ("score", "step_score", "total", "mean_per_sample", "mean_per_use")
#: Shells that draw our tables.
_told: weakref.WeakSet[Any] = weakref.WeakSet()


def marked(found: Any, kind: str) -> Any:
    """Return an Arrow table with our mark and, inside IPython, see to it that such tables are drawn.

    Args:
        found: An Arrow table; its columns are not touched.
        kind: One of :data:`KINDS`.
    """
    assert kind in KINDS
    _tell_shell(type(found))
    return found.replace_schema_metadata({**(found.schema.metadata or {}), KEY: kind.encode()})


def _tell_shell(kind: type) -> None:
    here = shell()
    if here is None or here in _told:
        return
    _told.add(here)  # once: who sets a formatter of their own afterwards keeps it
    formatter = here.display_formatter.formatters["text/html"]
    before = formatter.for_type(kind)
    formatter.for_type(kind, lambda found: _drawn(found, before))


def _drawn(found: Any, before: Callable[[Any], str | None] | None) -> str | None:
    """Return the HTML of a table of ours; of others what they had before, if anything."""
    if KEY in (found.schema.metadata or {}):
        return scores_html(found)
    own = before or getattr(type(found), "_repr_html_", None)
    return None if own is None else own(found)


def scores_html(found: Any) -> str:
    """Return an Arrow table of scores as HTML: both ends of it, whatever its length."""
    kind = KINDS.get((found.schema.metadata or {}).get(KEY, b"").decode("utf-8", "replace"), "Scores")
    names = found.column_names[:MOST_COLUMNS]
    count, part = found.num_rows, found.select(range(len(names)))
    pieces = [part] if count <= 2 * ENDS + 1 else [part.slice(0, ENDS), part.slice(count - ENDS)]
    rows: list[Any] = []
    for place, piece in enumerate(pieces):
        rows += [None] if place else []
        # Column by column: a hand-made table may have two of one name, which rows as dicts would lose.
        rows += zip(*(column.to_pylist() for column in piece.columns), strict=True)
    said = [f"{count:,} rows" + (f", of which {ENDS} at either end are shown" if len(pieces) > 1 else "")]
    if len(names) < found.num_columns:
        said[0] += f"; {found.num_columns - len(names)} more columns"
    return block(kind, table(names, rows, SIGNED), lines([f"{said[0]}. {SIGN}"]))
