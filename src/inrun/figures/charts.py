"""The charts of a run, from its ledger: what is asked, and how much of the answer is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from inrun.analysis import queries
from inrun.analysis.summary import PARTS, steps_by_set
from inrun.errors import ConfigurationError, LedgerError
from inrun.figures.chart import Chart, Series
from inrun.ledger import LedgerReader
from inrun.ledger.scores import Ask, Names, add_up
from inrun.ledger.tables import some
from inrun.notebook import shown
from inrun.statistics import spearman

#: What a figure holds: groups as bars and as lines, validation sets beside each other, samples as points and as steps of a curve.
MOST_BARS, MOST_LINES, MOST_SETS, MOST_POINTS, MOST_STEPS = 24, 12, 6, 5000, 600
#: Values of a group that can be drawn, and their names.
VALUES = {"total": "score, added up", "mean_per_sample": "mean score of a sample", "mean_per_use": "mean score of a use"}
SIGN = "positive: lowered the validation loss"
#: Accounts, as a figure names them.
ACCOUNTS = {"fall": "fall of the loss", "data": "data (the samples)"}


def groups_chart(reader: LedgerReader, by: str, validation: Names, value: str) -> Chart:
    """One bar per group and validation set."""
    if value not in VALUES:
        raise ConfigurationError(f"value is {value!r}; accepted are {', '.join(VALUES)}")
    table = reader.scores(validation, by=by)
    sets = list(dict.fromkeys(table["validation"].to_pylist()))
    drawn = sets[:MOST_SETS]
    by_set = _by_set_and_group(table, value)
    kinds, count = _heaviest([by_set[name] for name in drawn], MOST_BARS)
    kinds.sort(key=lambda kind: -by_set[drawn[0]].get(kind, -math.inf))
    series = [Series(_name(name), [by_set[name].get(kind, math.nan) for kind in kinds]) for name in drawn]
    note = _joined(SIGN, _cut(len(kinds), count, "groups"), _cut(len(drawn), len(sets), "validation sets"))
    title = f"Which {_name(by)} helped{f' “{_name(drawn[0])}”' if len(drawn) == 1 else ''}?"
    return Chart("bars", title, note, VALUES[value], "", series, _told_apart(kinds), colour=len(drawn) == 1)


def samples_chart(reader: LedgerReader, validation: str | None, top: int, bottom: int) -> Chart:
    """One bar per sample, the highest first."""
    name = _one_set(reader, validation)
    rows = reader.scores(name, top=top, bottom=bottom).to_pylist()
    folds = any(row["standard_error"] is not None for row in rows)
    errors = [row["standard_error" if folds else "estimate_error"] for row in rows]
    known = any(error is not None and error > 0 for error in errors)
    error = "standard error over the folds" if folds else "error of the estimate"
    note = _joined(SIGN, f"thin lines: {error}" if known else "")
    bars = Series(_name(name), [row["score"] for row in rows], [e or 0.0 for e in errors] if known else None)
    title = f"Which samples helped “{_name(name)}” most, and which hurt?"
    return Chart("bars", title, note, "score", "", [bars], [sample_label(row) for row in rows], colour=True)


def sample_label(row: dict[str, Any]) -> str:
    """Return what a sample is called: its id, and the most telling of what is registered of it."""
    more = next((row[key] for key in ("id", "preview", "text", "domain", "source") if row.get(key) not in (None, "")), None)
    return str(row["sample_id"]) if more is None else f"{row['sample_id']}: {shown(more, 36)}"


def stages_chart(reader: LedgerReader, by: str, validation: str | None, stages: int, cumulative: bool) -> Chart:
    """One line per group over stages of training."""
    name = _one_set(reader, validation)
    table = queries.groups(reader, by, name, stages, cumulative)
    totals: dict[Any, list[float]] = {}
    for kind, total in zip(table["group"].to_pylist(), table["total"].to_pylist(), strict=True):
        totals.setdefault(kind, []).append(total)
    last = sorted(set(table["last_step"].to_pylist()))
    kinds, count = _heaviest([{kind: max(map(abs, values)) for kind, values in totals.items()}], MOST_LINES)
    series = [Series(label, totals[kind]) for label, kind in zip(_told_apart(kinds), kinds, strict=True)]
    what = "added up to each stage's end" if cumulative else "of each stage by itself"
    note = _joined(f"scores for “{_name(name)}”, {what}", SIGN, _cut(len(kinds), count, "groups"))
    return Chart("lines", f"When did each {_name(by)} help?", note, "step", "score", series, places=last)


def agreement_chart(reader: LedgerReader, a: str | None, b: str | None) -> Chart:
    """One point per sample that both sets scored."""
    with reader.tables() as tables:
        tables.check_rows()
        sets = list(tables.sets())
        a = a if a is not None else next((name for name in sets if name != b), sets[0])
        b = b if b is not None else next((name for name in sets if name != a), None)
        if b is None or a == b:
            raise ConfigurationError(
                f"agreement is between two validation sets; the run has {some(sets)}, asked for were {a!r}, {b!r}"
            )
        add_up(tables, tables.choose([a, b]), Ask())
        found = tables.table(
            """SELECT sample_id, x.score AS x, y.score AS y FROM scored x JOIN scored y USING (sample_id)
               WHERE x.validation = $first AND y.validation = $second ORDER BY sample_id""",
            first=a,
            second=b,
        )
    ids, x, y = (found[name].to_numpy() for name in ("sample_id", "x", "y"))
    alike = spearman(x, y)
    every = _thinned(len(ids), MOST_POINTS)
    rank = "rank correlation is not defined" if math.isnan(alike) else f"Spearman {alike:.3f}"
    note = _joined(f"{rank} over {len(ids):,} samples", _cut(len(every), len(ids), "samples"))
    points = Series("samples", y[every].tolist())
    labels = [f"sample {i}" for i in ids[every].tolist()]
    title = f"Do “{_name(a)}” and “{_name(b)}” value the same samples?"
    return Chart(
        "points", title, note, f"score for {_name(a)}", f"score for {_name(b)}", [points], labels, places=x[every].tolist()
    )


def books_chart(reader: LedgerReader, validation: str | None) -> Chart:
    """The accounts, added up over the audited steps."""
    sets = steps_by_set(reader.accounts())
    if not sets:
        raise LedgerError(f"{str(reader.path)!r} has no steps yet; train some, or flush the ledger")
    name = next(iter(sets)) if validation is None else validation
    if name not in sets:
        raise ConfigurationError(f"{str(reader.path)!r} has no validation set {name!r}; it has {some(list(sets))}")
    steps = sets[name]
    audited = steps.audited
    if not audited.any():
        raise LedgerError(f"no step of {name!r} was audited, so there is no fall to draw; audit_every=1 measures every step")
    parts = {"fall": steps["loss_before"] - steps["loss_after"], **{key: steps[key] for key in ("data", *PARTS)}}
    every = _thinned(int(audited.sum()), MOST_STEPS)
    series = [
        Series(ACCOUNTS.get(key, key), np.nancumsum(values[audited])[every].tolist())
        for key, values in parts.items()
        if not np.isnan(values[audited]).all()
    ]
    note = f"“{_name(name)}”, over {int(audited.sum()):,} audited of {len(steps.step):,} steps; positive: the loss fell"
    places = steps.step[audited][every].tolist()
    return Chart("lines", "What made the validation loss fall?", note, "step", "loss, added up", series, places=places, wide=True)


def _one_set(reader: LedgerReader, validation: str | None) -> str:
    """Return the set that is asked for, or the first; errors name what there is."""
    with reader.tables() as tables:
        tables.check_rows()
        if validation is not None and not isinstance(validation, str):
            raise ConfigurationError(
                f"this figure is of one validation set, not of {validation!r}; there are {some(list(tables.sets()))}"
            )
        return next(iter(tables.choose(validation)))


def _by_set_and_group(table: pa.Table, value: str) -> dict[str, dict[Any, float]]:
    found: dict[str, dict[Any, float]] = {}
    for kind, name, amount in zip(*(table[c].to_pylist() for c in ("group", "validation", value)), strict=True):
        found.setdefault(name, {})[kind] = math.nan if amount is None else amount
    return found


def _heaviest(sets: list[dict[Any, float]], most: int) -> tuple[list[Any], int]:
    """Return the groups with the largest part in any set, and how many groups there are."""
    weight: dict[Any, float] = {}
    for values in sets:
        total = math.fsum(abs(v) for v in values.values() if not math.isnan(v)) or 1.0
        for kind, value in values.items():
            weight[kind] = max(weight.get(kind, 0.0), 0.0 if math.isnan(value) else abs(value) / total)
    return sorted(weight, key=lambda kind: -weight[kind])[:most], len(weight)


def _told_apart(kinds: Sequence[Any]) -> list[str]:
    """Return names to show; two that look alike once made visible are told apart."""
    labels: list[str] = []
    for kind in kinds:
        label = queries.NO_VALUE if kind is None else _name(kind)
        while label in labels:
            label += " ′"
        labels.append(label)
    return labels


def _name(text: object) -> str:
    return shown(text, 48) or "(empty)"


def _thinned(count: int, most: int) -> npt.NDArray[np.int64]:
    """Return places that are evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def _cut(drawn: int, count: int, what: str) -> str:
    return f"{drawn:,} of {count:,} {what} are drawn" if drawn < count else ""


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
