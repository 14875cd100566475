"""Which metadata columns samples are grouped and filtered by."""

# ruff: noqa: S608 - queries are put together from our own pieces; column names are checked and quoted

from __future__ import annotations

from inrun.ledger.tables import Tables, quoted

#: Columns that can be chosen.
MOST_COLUMNS = 4
#: Columns that are offered first, and those that tell samples apart instead of grouping them.
FAVOURED = ("domain", "source", "owner")
NO_GROUPS = ("sample_id", "id", "text", "preview", "document", "chunk", "tokens")
#: Values beyond which a column that nobody asked for is not offered.
FEW_VALUES = 60


def columns_to_offer(tables: Tables, by: str | None) -> list[str]:
    """Choose the columns that samples are grouped by: the one asked for, the well-known ones, then those with few values."""
    if by is not None:
        tables.column(by)  # says what there is instead
    known = [c for c in FAVOURED if c in tables.columns and _has_values(tables, c)]
    found = list(dict.fromkeys(([by] if by else []) + known))
    for column in tables.columns:
        if len(found) >= MOST_COLUMNS:
            break
        if column not in found and column not in (*NO_GROUPS, *FAVOURED):
            (values,) = tables.row(f"SELECT count(*) FROM (SELECT DISTINCT {quoted(column)} FROM samples LIMIT {FEW_VALUES + 1})")
            if 1 < values <= FEW_VALUES:
                found.append(column)
    return found[:MOST_COLUMNS]


def _has_values(tables: Tables, column: str) -> bool:
    return bool(tables.row(f"SELECT count(*) > 0 FROM (SELECT 1 FROM samples WHERE {quoted(column)} IS NOT NULL LIMIT 1)")[0])
