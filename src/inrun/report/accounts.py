"""The accounts in the report: what the accounts say per validation set, as totals and as curves of bounded length."""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from inrun.analysis.summary import verdict
from inrun.ledger.tables import Tables
from inrun.report.text import digits

#: Points of a curve, whatever the length of the run.
MOST_POINTS = 300
PARTS = ("data", "optimizer", "momentum", "decay", "residual")
_AVERAGED = ("loss_before", "loss_after", "spread", *PARTS)
#: Folds of a set are averaged; a figure that one of them lacks is missing.
_BY_STEP = f"""
CREATE TEMP TABLE booked AS
SELECT name, step, min(skipped) AS skipped,
       {", ".join(f"CASE WHEN count({c}) = count(*) THEN avg({c}) END AS {c}" for c in _AVERAGED)}
FROM (SELECT * REPLACE ({", ".join(f"CASE WHEN isfinite({c}) THEN {c} END AS {c}" for c in _AVERAGED)}) FROM accounts)
JOIN labels ON label = validation
GROUP BY 1, 2 ORDER BY 1, 2
"""
_LABELS = pa.schema([("label", pa.string()), ("name", pa.string())])
_AUDITED = "loss_before IS NOT NULL AND loss_after IS NOT NULL"


@dataclass
class SetAccounts:
    """The accounts of one validation set; all in the unit of the loss, positive = the loss fell."""

    name: str
    steps: int = 0
    skipped: int = 0
    audited: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    #: The steps at which these two were measured: not every step need measure its loss.
    loss_steps: tuple[int, int] = (0, 0)
    #: Over the audited steps.
    fall: float | None = None
    totals: dict[str, float | None] = field(default_factory=dict)
    #: Σ|residual| / Σ|c_n| over the audited steps that measured it.
    relative_residual: float | None = None
    verdict: str = ""
    #: ``step`` and ``loss``; ``audited`` with ``step``, ``fall`` and the parts, added up from the first audited step on.
    curve: dict[str, list[Any]] = field(default_factory=dict)
    audited_curve: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def covered(self) -> float | None:
        """The share of the fall that the data account covers; None where the loss did not fall."""
        data = self.totals.get("data")
        return data / self.fall if data is not None and self.fall is not None and self.fall > 0 else None


def read_accounts(tables: Tables, names: list[str], method: str, update: str) -> list[SetAccounts]:
    """Add up the accounts of the validation sets, in the order of ``names``."""
    labels = [(label, name) for name, labels in tables.sets_in_accounts().items() for label in labels]
    known = pa.table({"label": [label for label, _ in labels], "name": [name for _, name in labels]}, schema=_LABELS)
    tables.connection.from_arrow(known).create_view("labels")
    tables.connection.execute(_BY_STEP)
    return [_one_set(tables, name, method, update) for name in names]


def _one_set(tables: Tables, name: str, method: str, update: str) -> SetAccounts:
    sums = ", ".join(f"CASE WHEN count({p}) = count(*) THEN sum({p}) END" for p in PARTS)
    measured = "abs(residual)) FILTER (residual IS NOT NULL)"
    audited, fall, *rest = tables.row(
        f"SELECT count(*), sum(loss_before - loss_after), sum({measured}, sum(spread) FILTER (residual IS NOT NULL), {sums} "
        f"FROM booked WHERE name = $name AND {_AUDITED}",
        name=name,
    )
    off, spread, *totals = rest
    steps, skipped = tables.row("SELECT count(*), count(skipped) FROM booked WHERE name = $name", name=name)
    ends = _ends(tables, name)
    relative = off / spread if off is not None and spread else None
    found = dict(zip(PARTS, totals, strict=True))
    whole = [part for part in PARTS if found[part] is not None]
    return SetAccounts(
        name=name,
        steps=steps,
        skipped=skipped,
        audited=audited,
        loss_first=ends[0][1] if ends else None,
        loss_last=ends[1][1] if ends else None,
        loss_steps=(ends[0][0], ends[1][0]) if ends else (0, 0),
        fall=fall,
        totals=found,
        relative_residual=relative,
        verdict=verdict(relative, method, update, audited, steps - skipped),
        curve=_loss_curve(tables, name),
        audited_curve=_audited_curve(tables, name, whole) if audited else {},
    )


def _ends(tables: Tables, name: str) -> list[tuple[int, float]]:
    """Return the first validation loss known and the last (after its step, where that was measured), each with its step."""
    known = "FROM booked WHERE name = $name AND loss_before IS NOT NULL ORDER BY step"
    first = tables.relation(f"SELECT step, loss_before {known} LIMIT 1", name=name).fetchall()
    last = tables.relation(f"SELECT step, coalesce(loss_after, loss_before) {known} DESC LIMIT 1", name=name).fetchall()
    return [*first, *last]


def _bucket(rows: str) -> str:
    """SQL of rows with their place among at most MOST_POINTS; each row has its own where there are few."""
    place = f"(row_number() OVER (ORDER BY step) - 1) * least({MOST_POINTS}, count(*) OVER ()) // count(*) OVER ()"
    return f"({place})::INT AS bucket, {rows}"


def _loss_curve(tables: Tables, name: str) -> dict[str, list[Any]]:
    rows = f"SELECT {_bucket('step, loss_before')} FROM booked WHERE name = $name AND loss_before IS NOT NULL"
    found = tables.relation(
        f"SELECT last(step ORDER BY step), avg(loss_before) FROM ({rows}) GROUP BY bucket ORDER BY bucket", name=name
    ).fetchall()
    return {"step": [row[0] for row in found], "loss": [digits(row[1]) for row in found]}


def _audited_curve(tables: Tables, name: str, parts: list[str]) -> dict[str, list[Any]]:
    """Add the accounts that every audited step has up from step to step, and keep the last of every bucket."""
    columns = ["fall", *parts]
    running = "".join(f", sum({p}) OVER upto AS {p}" for p in parts)
    rows = f"""
        SELECT {_bucket(", ".join(["step", *columns]))} FROM (
            SELECT step, sum(loss_before - loss_after) OVER upto AS fall{running} FROM booked WHERE name = $name AND {_AUDITED}
            WINDOW upto AS (ORDER BY step ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW))"""
    chosen = ", ".join(f"last({c} ORDER BY step)" for c in ("step", *columns))
    found = tables.relation(f"SELECT {chosen} FROM ({rows}) GROUP BY bucket ORDER BY bucket", name=name).fetchall()
    curve: dict[str, list[Any]] = {"step": [row[0] for row in found]}
    return curve | {part: [digits(row[place]) for row in found] for place, part in enumerate(columns, start=1)}
