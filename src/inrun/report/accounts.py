"""The accounts in the report: what the accounts say per validation set, as totals and as curves of bounded length."""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from inrun.analysis.outliers import large_samples
from inrun.analysis.steps import FIGURES, LargeTensor, Steps, largest_tensors
from inrun.analysis.summary import PARTS as ALL_PARTS
from inrun.analysis.summary import SetSummary, summarise_set
from inrun.ledger.tables import Tables
from inrun.report.text import digits

#: Points of a curve, whatever the length of the run.
MOST_POINTS = 300
PARTS = ("data", *ALL_PARTS)
_LABELS = pa.schema([("label", pa.string()), ("name", pa.string())])
_AUDITED = "loss_before IS NOT NULL AND loss_after IS NOT NULL"


@dataclass
class SetAccounts:
    """The accounts of one validation set; all in the unit of the loss, positive = the loss fell."""

    name: str
    #: What they are worth, in words and figures.
    judged: SetSummary
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
    #: ``step`` and ``loss``; ``audited`` with ``step``, ``fall`` and the parts, added up from the first audited step on.
    curve: dict[str, list[Any]] = field(default_factory=dict)
    audited_curve: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def covered(self) -> float | None:
        """The share of the fall that the data account covers; None where the loss did not fall."""
        data = self.totals.get("data")
        return data / self.fall if data is not None and self.fall is not None and self.fall > 0 else None


def read_accounts(tables: Tables, names: list[str], method: str) -> list[SetAccounts]:
    """Add up the accounts of the validation sets, in the order of ``names``."""
    labels = [(label, name) for name, labels in tables.sets_in_accounts().items() for label in labels]
    known = pa.table({"label": [label for label, _ in labels], "name": [name for _, name in labels]}, schema=_LABELS)
    tables.connection.from_arrow(known).create_view("labels")
    tables.connection.execute(_by_step(tables))
    samples = large_samples(tables.connection, {name: labels for name, labels in tables.sets().items() if name in names})
    return [_one_set(tables, summarise_set(n, _steps(tables, n), method, samples.get(n), _tensors(tables, n))) for n in names]


def _by_step(tables: Tables) -> str:
    """SQL that averages the folds of every set and step; a figure that one of them lacks, or old books, is missing."""
    booked = tables.relation("SELECT * FROM accounts LIMIT 0").columns
    known = {c: f"CASE WHEN isfinite({c}) THEN {c} END" if c in booked else "NULL::DOUBLE" for c in FIGURES}
    finite = ", ".join(f"{how} AS {c}" for c, how in known.items())
    averaged = ", ".join(f"CASE WHEN count({c}) = count(*) THEN avg({c}) END AS {c}" for c in known)
    return f"""
        CREATE TEMP TABLE booked AS
        SELECT name, step, min(skipped) AS skipped, {averaged}
        FROM (SELECT step, validation, skipped, {finite} FROM accounts) JOIN labels ON label = validation
        GROUP BY 1, 2 ORDER BY 1, 2"""


def _steps(tables: Tables, name: str) -> Steps:
    """Return the steps of a set as columns."""
    asked = f"SELECT step, skipped IS NULL AS scored, {', '.join(FIGURES)} FROM booked WHERE name = $name ORDER BY step"
    found = tables.table(asked, name=name)
    columns = {c: found[c].to_numpy() for c in found.column_names}
    return Steps.of(columns.pop("step"), columns.pop("scored"), columns)


def _tensors(tables: Tables, name: str) -> list[LargeTensor]:
    """Return the tensors with the largest parts of Σ|c| for a set."""
    if not {"tensors", "tensor_shares"} <= set(tables.relation("SELECT * FROM accounts LIMIT 0").columns):
        return []
    asked = "SELECT spread, tensors, tensor_shares FROM accounts JOIN labels ON label = validation WHERE name = $name"
    return largest_tensors(tables.relation(f"{asked} AND tensors IS NOT NULL ORDER BY step, validation", name=name).fetchall())


def _one_set(tables: Tables, judged: SetSummary) -> SetAccounts:
    name = judged.validation
    totals = {part: getattr(judged, part) if judged.audited else None for part in PARTS}
    ends = _ends(tables, name)
    return SetAccounts(
        name=name,
        steps=judged.steps,
        skipped=judged.skipped,
        audited=judged.audited,
        loss_first=ends[0][1] if ends else None,
        loss_last=ends[1][1] if ends else None,
        loss_steps=(ends[0][0], ends[1][0]) if ends else (0, 0),
        fall=judged.fall if judged.audited else None,
        totals=totals,
        judged=judged,
        curve=_loss_curve(tables, name),
        audited_curve=_audited_curve(tables, name, [p for p in PARTS if totals[p] is not None]) if judged.audited else {},
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
