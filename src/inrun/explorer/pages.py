"""Answers about samples: a page of them, one of them, the values of a column."""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound, column names looked up

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from inrun.errors import ConfigurationError
from inrun.explorer.ask import column, question, set_place
from inrun.explorer.plain import plain
from inrun.explorer.snapshot import Column, Snapshot, View
from inrun.explorer.sums import MEASURES
from inrun.ledger.tables import connect
from inrun.report.text import one_line

#: Samples of a page, characters of a text in it, uses of one sample, values of a column, samples that are marked at once.
MOST_ROWS, MOST_TEXT, MOST_USES, MOST_VALUES, MOST_IDS = 200, 400, 2000, 60, 1_000_000


def page(snapshot: Snapshot, asked: Mapping[str, str], marks: Mapping[int, str]) -> dict[str, Any]:
    """Return one page of the samples that match, sorted, and how many match in all."""
    with snapshot.store.moment(snapshot) as (con, (view,)):
        return {"version": view.version, **_page(con, snapshot, view, asked, marks)}


def _page(con: Any, snapshot: Snapshot, view: View, asked: Mapping[str, str], marks: Mapping[int, str]) -> dict[str, Any]:
    place = set_place(view, asked.get("set")) if view.sets else None
    found = question(view, place, asked, marks)
    limit, offset = whole(asked, "limit", 50, 1, MOST_ROWS), whole(asked, "offset", 0, 0, 10**12)
    key = column(view, asked.get("sort") or ("id" if place is None else "s:score"), place).sql
    down = " DESC" if asked.get("order", "down") == "down" else ""
    items = f"{snapshot.schema}.items"
    order = f"k{down} NULLS LAST, sample_id"
    sql = f"SELECT place, {key} AS k, sample_id FROM {items}{found.where}"
    if found.clauses:  # the texts are looked through once, for the count and for the page
        sql = f"WITH hit AS MATERIALIZED ({sql}) SELECT place, (SELECT count(*) FROM hit) FROM hit"
    else:
        sql = f"SELECT place, {view.samples} FROM ({sql})"
    rows = con.execute(f"{sql} ORDER BY {order} LIMIT {limit} OFFSET {offset}", found.values or None).fetchall()
    total = rows[0][1] if rows else _count(con, items, found) if offset else 0
    shown = _rows(con, snapshot, view, place, [r[0] for r in rows], marks)
    return {"total": total, "offset": offset, "rows": shown}


def _count(con: Any, items: str, found: Any) -> int:
    return int(con.execute(f"SELECT count(*) FROM {items}{found.where}", found.values or None).fetchall()[0][0])


def _rows(con: Any, snapshot: Snapshot, view: View, place: int | None, places: list[int], marks: Mapping[int, str]) -> list[Any]:
    if not places:
        return []
    measures = [] if place is None else [f"{name}_{place}" for name in MEASURES]
    text = view.text_column
    short = [c for c in view.columns if c is not text]
    names = [*measures, *(c.here for c in short), *([f"left({text.here}, {MOST_TEXT + 1})"] if text else [])]
    listed = ", ".join(str(int(p)) for p in places)
    sql = f"SELECT place, sample_id{''.join(', ' + n for n in names)} FROM {snapshot.schema}.items WHERE place IN ({listed})"
    by_place = {row[0]: row[1:] for row in con.execute(sql).fetchall()}
    shown = []
    for number in places:
        sample, *rest = by_place[number]
        entry: dict[str, Any] = {"id": str(sample), "mark": marks.get(sample)}
        entry |= {name: plain(value) for name, value in zip(MEASURES if measures else (), rest, strict=False)}
        rest = rest[len(measures) :]
        entry["more"] = [plain(value, 200) for value in rest[: len(short)]]
        if text:
            entry["text"] = plain(rest[-1], MOST_TEXT)
        shown.append(entry)
    return shown


def whole(asked: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    """Read an integer of a request; ConfigurationError if it is none, or out of its bounds."""
    text = asked.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and low <= int(text) <= high):
        raise ConfigurationError(f"{name} is not a number from {low} to {high}")
    return int(text)


def shown_columns(view: View) -> list[Column]:
    """Return the columns of ``more``, in order."""
    return [c for c in view.columns if c is not view.text_column]


def matching(snapshot: Snapshot, asked: Mapping[str, str], marks: Mapping[int, str]) -> list[int]:
    """Return the ids of all samples that match; ConfigurationError if they are too many to be marked."""
    with snapshot.store.moment(snapshot) as (con, (view,)):
        found = question(view, set_place(view, asked.get("set")) if view.sets else None, asked, marks)
        sql = f"SELECT sample_id FROM {snapshot.schema}.items{found.where} ORDER BY sample_id LIMIT {MOST_IDS + 1}"
        ids = [r[0] for r in con.execute(sql, found.values or None).fetchall()]
    if len(ids) > MOST_IDS:
        raise ConfigurationError(f"more than {MOST_IDS:,} samples match; narrow the search")
    return ids


def known_ids(snapshot: Snapshot, ids: Iterable[int]) -> list[int]:
    """Return which of some ids the run has."""
    sql = f"SELECT sample_id FROM {snapshot.schema}.items WHERE sample_id IN (SELECT unnest($ids::BIGINT[]))"
    return [r[0] for r in snapshot.store.cursor().execute(sql, {"ids": list(ids)}).fetchall()]


def values(snapshot: Snapshot, asked: Mapping[str, str]) -> dict[str, Any]:
    """Return the most frequent values of a metadata column, each as it is (for a filter) and as it is shown."""
    with snapshot.store.moment(snapshot) as (con, (view,)):
        name = column(view, asked.get("column", ""), None)
        rows = con.execute(_values_sql(snapshot, name.sql)).fetchall()
    listed = [{"value": str(v)[:10_000], "shown": one_line(v, 60), "samples": n} for v, n in rows[:MOST_VALUES]]
    return {"values": listed, "more": len(rows) > MOST_VALUES, "kind": name.kind}


def _values_sql(snapshot: Snapshot, name: str) -> str:
    return f"""SELECT {name} AS v, count(*) FROM {snapshot.schema}.items WHERE v IS NOT NULL
              GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {MOST_VALUES + 1}"""


def sample(snapshot: Snapshot, number: int, marks: Mapping[int, str]) -> dict[str, Any]:
    """Return all that is known of one sample: metadata, the whole text, its scores for every set, its value at each use."""
    with snapshot.store.moment(snapshot) as (con, (view,)):
        found = con.execute(f"SELECT * FROM {snapshot.schema}.items WHERE sample_id = $n LIMIT 1", {"n": number})
        names, rows = [d[0] for d in found.description], found.fetchall()
    if not rows:
        raise ConfigurationError("there is no such sample")
    of = dict(zip(names, rows[0], strict=True))
    text = view.text_column
    more = [{"name": one_line(c.name, 60), "value": plain(of[c.here], 2000)} for c in view.columns if c is not text]
    scores = [{"set": one_line(name, 60), **{m: plain(of.get(f"{m}_{k}")) for m in MEASURES}} for k, name in enumerate(view.sets)]
    uses, cut = _uses(snapshot, view, number)
    answer = {"id": str(number), "mark": marks.get(number), "more": more, "scores": scores, "uses": uses, "uses_cut": cut}
    return answer | ({"text": plain(of[text.here], 100_000)} if text else {})


def _uses(snapshot: Snapshot, view: View, number: int) -> tuple[list[list[Any]], bool]:
    """Return [set, step, value, uses, pending] for every set and step that used a sample, from the ledger itself."""
    places = {label: (k, len(group)) for k, group in enumerate(view.labels) for label in group}
    sql = f"""SELECT validation, step, sum(value), count(*), bool_or(pending) FROM uses WHERE sample_id = $n
              GROUP BY 1, 2 ORDER BY 2 LIMIT {MOST_USES * max(len(places), 1)}"""
    added: dict[tuple[int, int], list[Any]] = {}
    with connect(snapshot.seen) as tables:
        for label, step, value, uses, pending in tables.relation(sql, n=number).fetchall():
            if label in places:
                place, folds = places[label]
                entry = added.setdefault((place, step), [0.0, 0, False])
                entry[0] += value / folds
                entry[1], entry[2] = max(entry[1], uses), entry[2] or pending
    rows = [[k, step, plain(v), n, p] for (k, step), (v, n, p) in sorted(added.items())]
    cut = len({step for _, step, *_ in rows}) > MOST_USES
    return rows[: MOST_USES * max(len(view.sets), 1)], cut
