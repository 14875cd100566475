"""What a sample opens to beside its text: its value at each use, and the other pieces of its document."""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound, column names quoted

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from inrun.ledger.tables import Tables, quoted
from inrun.report.text import digits, one_line, safe_json

#: Bars of a sample's chart; pieces before and after it in its document; bytes that all of this may take in the page.
MOST_USES, MOST_AROUND, MOST_BYTES = 40, 2, 130_000


def add_neighbours(tables: Tables, rows: list[dict[str, Any]], names: list[str], text: str | None) -> None:
    """Add to samples of the page, best first, until the page has no more room: ``p`` and ``v``, ``d`` and ``f``.

    ``p`` are the steps of its uses and ``v`` per validation set its values there (means over folds; several uses in one bar where
    there are many, ``m`` of them at most); ``d`` is its document and ``f`` what stands around it there, as number, scores and text.

    Args:
        tables: With the table ``scored`` and the view ``chosen``.
        rows: Samples of the page.
        names: Validation sets, in order.
        text: The column of the texts; None leaves them out.
    """
    uses, around = _uses(tables, names), _around(tables, names, text)
    size = 0
    for row in rows:
        more = uses.get(int(row["n"]), {}) | around.get(int(row["n"]), {})
        size += len(safe_json(more).encode())
        if size > MOST_BYTES:
            return
        row |= more


def _uses(tables: Tables, names: list[str]) -> dict[int, dict[str, Any]]:
    sets = {name: labels for name, labels in tables.sets().items() if name in names}
    place = {label: names.index(name) for name, labels in sets.items() for label in labels}
    rows = tables.relation(
        """SELECT sample_id, step, validation, sum(value) FROM uses
           WHERE sample_id IN (FROM chosen) AND list_contains($labels::VARCHAR[], validation) GROUP BY ALL ORDER BY ALL""",
        labels=list(place),
    ).fetchall()
    values: dict[int, dict[int, list[float | None]]] = {}
    for sample_id, step, label, value in rows:
        at = values.setdefault(sample_id, {}).setdefault(step, [None] * len(names))
        k = place[label]
        at[k] = (at[k] or 0.0) + value / len(sets[names[k]])
    return {sample_id: _thin(steps) for sample_id, steps in values.items()}


def _thin(steps: dict[int, list[float | None]]) -> dict[str, Any]:
    """Put neighbouring uses into one bar, as their mean, where there are more than fit."""
    count = min(MOST_USES, len(steps))
    edges = np.linspace(0, len(steps), count + 1).astype(int).tolist()
    every = list(steps.items())
    bars = [every[a:b] for a, b in pairwise(edges)]
    found: dict[str, Any] = {"p": [bar[-1][0] for bar in bars]}
    if len(steps) > count:
        found["m"] = max(map(len, bars))
    sets = range(len(every[0][1]))
    return found | {"v": [[_mean([at[k] for _, at in bar]) for bar in bars] for k in sets]}


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return digits(sum(known) / len(known), 3) if known else None


def _around(tables: Tables, names: list[str], text: str | None) -> dict[int, dict[str, Any]]:
    """Find the pieces before and after each chosen sample in its document, with their scores."""
    if "document" not in tables.columns:
        return {}
    order = "chunk, sample_id" if "chunk" in tables.columns else "sample_id"
    written = f"first({quoted(text)}::VARCHAR)" if text is not None else "NULL"
    kept = ", ".join(["first(document::VARCHAR) AS document", *(["first(chunk) AS chunk"] if "chunk" in tables.columns else [])])
    rows = tables.relation(
        f"""WITH named AS (SELECT DISTINCT document FROM samples WHERE sample_id IN (FROM chosen) AND document IS NOT NULL),
                 pieces AS (SELECT sample_id, {kept}, {written} AS written FROM samples
                            WHERE document IN (FROM named) GROUP BY sample_id),
                 placed AS (SELECT *, row_number() OVER (PARTITION BY document ORDER BY {order}) AS place FROM pieces)
            SELECT c.sample_id, c.document, o.sample_id, o.written, s.validation, s.score
            FROM placed c JOIN placed o ON o.document = c.document AND abs(o.place - c.place) <= {MOST_AROUND}
            LEFT JOIN scored s ON s.sample_id = o.sample_id
            WHERE c.sample_id IN (FROM chosen) ORDER BY c.sample_id, o.place, s.validation"""
    ).fetchall()
    found: dict[int, dict[str, Any]] = {}
    scores: dict[int, dict[int, list[float | None]]] = {}
    for sample_id, document, other, words, name, score in rows:
        told = found.setdefault(sample_id, {"d": one_line(document, 80), "f": []})
        beside = scores.setdefault(sample_id, {})
        if other == sample_id:
            continue
        if other not in beside:
            beside[other] = [None] * len(names)
            told["f"].append([str(other), beside[other], "" if words is None else one_line(words, 90)])
        if name in names:
            beside[other][names.index(name)] = digits(score, 4)
    return found
