"""Answers that are drawn: two sets against each other, runs against each other, groups over stages, losses."""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound, column names looked up

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inrun.analysis.queries import NO_VALUE
from inrun.errors import ConfigurationError
from inrun.explorer.ask import column, question, set_place
from inrun.explorer.pages import whole
from inrun.explorer.plain import plain
from inrun.explorer.snapshot import Snapshot, View
from inrun.ledger.tables import Tables, connect, quoted
from inrun.report.text import one_line

#: Cells along either side of a scatter, and the share of points beyond either end of an axis that its outer cells take in.
CELLS, OUTSIDE = 48, 0.002
#: Points of a curve, groups that are told apart, samples on which runs differ most.
MOST_POINTS, MOST_GROUPS, MOST_MOVED = 300, 15, 20


def scatter(snapshot: Snapshot, asked: Mapping[str, str], marks: Mapping[int, str]) -> dict[str, Any]:
    """Return how the scores of the matching samples lie for two sets: counts per cell, and how far the sets agree."""
    with snapshot.store.moment(snapshot) as (con, (view,)):
        return {"version": view.version, **_scatter(con, snapshot, view, asked, marks)}


def _scatter(con: Any, snapshot: Snapshot, view: View, asked: Mapping[str, str], marks: Mapping[int, str]) -> dict[str, Any]:
    x, y = (set_place(view, asked.get(axis)) for axis in ("x", "y"))
    found = question(view, x, asked, marks)
    points = f"""SELECT score_{x} AS x, score_{y} AS y FROM {snapshot.schema}.items
                 {found.where}{" AND" if found.clauses else " WHERE"} isfinite(score_{x}) AND isfinite(score_{y})"""
    return _cells(con, points, found.values)


def _cells(con: Any, points: str, values: dict[str, Any]) -> dict[str, Any]:
    """Bin points (x, y) on a grid that holds all but the outermost few, and zero."""
    con.execute(f"CREATE OR REPLACE TEMP TABLE points AS {points}", values or None)
    ends = ", ".join(f"quantile_cont({a}, [{OUTSIDE}, {1 - OUTSIDE}])" for a in "xy")
    signs = ", ".join(f"count(*) FILTER ({a} AND {b})" for a in ("x >= 0", "x < 0") for b in ("y >= 0", "y < 0"))
    count, line, xs, ys, *quarters = con.execute(f"SELECT count(*), corr(x, y), {ends}, {signs} FROM points").fetchall()[0]
    answer: dict[str, Any] = {"samples": count, "correlation": plain(line), "quarters": quarters, "cells": [], "size": CELLS}
    if count:
        axes = []
        for low, high in (xs, ys):
            low, high = min(low, 0.0), max(high, 0.0)
            axes.append((low, high if high > low else low + 1e-12))
        binned = ", ".join(f"least(greatest(floor(({a} - $low{a}) / $step{a}), 0), {CELLS - 1})::INTEGER AS {a}{a}" for a in "xy")
        bound = {f"low{a}": axis[0] for a, axis in zip("xy", axes, strict=True)}
        bound |= {f"step{a}": (axis[1] - axis[0]) / CELLS for a, axis in zip("xy", axes, strict=True)}
        sql = f"SELECT xx, yy, count(*) FROM (SELECT {binned} FROM points) GROUP BY 1, 2 ORDER BY 1, 2"
        answer |= {"x": axes[0], "y": axes[1], "cells": [list(r) for r in con.execute(sql, bound).fetchall()]}
        answer["rank_correlation"] = plain(_rank_correlation(con)) if count <= 200_000 else None
    return answer


def _rank_correlation(con: Any) -> float | None:
    """Spearman's, ties sharing their mean rank."""
    ranks = ", ".join(f"rank() OVER (ORDER BY {a}) + (count(*) OVER (PARTITION BY {a}) - 1) / 2.0 AS r{a}" for a in "xy")
    value: float | None = con.execute(f"SELECT corr(rx, ry) FROM (SELECT {ranks} FROM points)").fetchall()[0][0]
    return value


def compare(first: Snapshot, second: Snapshot, asked: Mapping[str, str]) -> dict[str, Any]:
    """Set the scores of one run against those of another, sample by sample; tell on which they differ most.

    Samples are the same if their ids are, or, with ``key``, if they have the same text in a column that both runs have: scores of
    the same text are added up. Ids of `inrun train` are numbers of pieces, which are others where a document more or less comes
    before. So without a ``key`` documents are compared where both runs have them and an id means different ones. ``others`` says
    how many of the ids that both have do so (None where nothing tells).
    """
    with first.store.moment(first, second) as (con, (a, b)):
        found = _compare(con, first, second, a, b, asked)
    return {"versions": [a.version, b.version], "keys": shared_columns(a, b), **found}


def _compare(con: Any, first: Snapshot, second: Snapshot, a: View, b: View, asked: Mapping[str, str]) -> dict[str, Any]:
    x, y = set_place(a, asked.get("x")), set_place(b, asked.get("y"))
    known = shared_columns(a, b)
    others = _others(con, first, second, a, b, known)
    key = asked.get("key") or ("c:document" if others and "document" in known else "id")
    here, there = column(a, key, None).sql, column(b, key, None).sql
    if key != "id" and not key.startswith("c:"):
        raise ConfigurationError("runs are matched by id, or by a column of the samples")
    one = f"SELECT {here}::VARCHAR AS key, min(sample_id) AS id, sum(score_{x}) AS x FROM {first.schema}.items GROUP BY 1"
    two = f"SELECT {there}::VARCHAR AS key, min(sample_id) AS other, sum(score_{y}) AS y FROM {second.schema}.items GROUP BY 1"
    both = f"SELECT * FROM ({one}) JOIN ({two}) USING (key) WHERE isfinite(x) AND isfinite(y)"
    answer = _cells(con, f"SELECT x, y FROM ({both})", {})
    # Scores of two runs have different scales: differences are told in standard deviations of each.
    moved = f"""
        SELECT id, other, key, x, y, x / nullif(stddev_pop(x) OVER (), 0) - y / nullif(stddev_pop(y) OVER (), 0) AS gap
        FROM ({both}) QUALIFY gap IS NOT NULL ORDER BY abs(gap) DESC, id LIMIT {MOST_MOVED}"""
    rows = con.execute(moved).fetchall()
    names = ("id", "other", "key", "x", "y", "gap")
    listed = [dict(zip(names, (str(r[0]), str(r[1]), one_line(r[2], 80), *map(plain, r[3:])), strict=True)) for r in rows]
    return {"key": key, "others": others, "moved": listed, **answer}


def _others(con: Any, first: Snapshot, second: Snapshot, a: View, b: View, known: list[str]) -> int | None:
    """Count the ids that both runs have and that mean different samples: of other documents or, where none is known, texts."""
    names = [(c.name, d.name) for c in (a.text_column,) for d in (b.text_column,) if c is not None and d is not None]
    if "document" in known:
        names = [("document", "document")]
    if not names:
        return None
    here, there = (column(view, f"c:{name}", None).sql for view, name in zip((a, b), names[0], strict=True))
    sql = f"""
        SELECT count(*) FROM (SELECT sample_id, {here} AS one FROM {first.schema}.items)
        JOIN (SELECT sample_id, {there} AS two FROM {second.schema}.items) USING (sample_id) WHERE one <> two"""
    return int(con.execute(sql).fetchall()[0][0])


def shared_columns(first: View, second: View) -> list[str]:
    """Return the columns of texts that two runs have in common."""
    there = {c.name for c in second.columns if c.kind == "VARCHAR"}
    return [c.name for c in first.columns if c.kind == "VARCHAR" and c.name in there and c is not first.text_column]


def curves(snapshot: Snapshot) -> dict[str, Any]:
    """Return the validation loss over steps of every set, at most some hundred points each."""
    view = snapshot.view
    sql = f"""
        SELECT first(step ORDER BY step), first(loss ORDER BY step) FROM (
            SELECT step, loss, row_number() OVER (ORDER BY step) - 1 AS n, count(*) OVER () AS every FROM (
                SELECT step, avg(loss_before) AS loss FROM accounts
                WHERE list_contains($labels::VARCHAR[], validation) AND isfinite(loss_before) GROUP BY step))
        GROUP BY n * {MOST_POINTS} // greatest(every, {MOST_POINTS}) ORDER BY 1"""
    with connect(snapshot.seen) as tables:
        rows = [tables.relation(sql, labels=list(labels)).fetchall() for labels in view.labels]
    lines = [
        {"set": one_line(name, 60), "points": [[s, plain(v)] for s, v in row]} for name, row in zip(view.sets, rows, strict=True)
    ]
    return {"version": view.version, "curves": lines}


def groups(snapshot: Snapshot, asked: Mapping[str, str]) -> dict[str, Any]:
    """Add up what the groups of a column gave one set over equal ranges of steps: the largest groups, and the others as one."""
    view = snapshot.view
    place = set_place(view, asked.get("set"))
    stages = whole(asked, "stages", 20, 1, 60)
    by = asked.get("by", "")
    if not by.startswith("c:"):
        raise ConfigurationError("groups are by a column of the samples")
    column(view, by, None)  # says if there is none
    with connect(snapshot.seen) as tables:
        found = _stages(tables, quoted(by[2:]), list(view.labels[place]), stages)
    return {"version": view.version, "by": one_line(by[2:], 60), "set": one_line(view.sets[place], 60), **found}


def _stages(tables: Tables, name: str, labels: list[str], stages: int) -> dict[str, Any]:
    first, last = tables.row(
        "SELECT min(step), max(step) FROM uses WHERE list_contains($labels::VARCHAR[], validation)", labels=labels
    )
    if first is None:
        return {"groups": [], "edges": []}
    span = last - first + 1
    stages = min(stages, span)
    con = tables.connection
    # One row per sample: the group's number, by size; what is beyond the largest is the last one, what has no value -1.
    con.execute(f"CREATE TEMP TABLE of_sample AS SELECT sample_id, first({name}::VARCHAR) AS kind FROM samples GROUP BY 1")
    con.execute(
        "CREATE TEMP TABLE kinds AS SELECT *, row_number() OVER (ORDER BY samples DESC, kind) - 1 AS number "
        "FROM (SELECT kind, count(*) AS samples FROM of_sample WHERE kind IS NOT NULL GROUP BY 1)"
    )
    con.execute(
        f"CREATE TEMP TABLE numbered AS SELECT sample_id, least(number, {MOST_GROUPS})::INTEGER AS g "
        "FROM of_sample JOIN kinds USING (kind)"
    )
    sql = f"""
        SELECT coalesce(g, -1) AS g, ((step - {first}) * {stages} // {span})::INTEGER AS stage, sum(value) / $k, count(*) // $k,
               count(DISTINCT sample_id)
        FROM uses LEFT JOIN numbered USING (sample_id) WHERE list_contains($labels::VARCHAR[], validation)
        GROUP BY 1, 2 ORDER BY 1, 2"""
    rows = tables.relation(sql, k=len(labels), labels=labels).fetchall()
    kinds = con.execute(f"SELECT number, kind, samples FROM kinds WHERE number < {MOST_GROUPS} ORDER BY 1").fetchall()
    (rest, rest_samples) = con.execute(f"SELECT count(*), sum(samples) FROM kinds WHERE number >= {MOST_GROUPS}").fetchall()[0]
    known: dict[int, tuple[str, str | None, int | None]] = {n: (one_line(kind, 60), kind, count) for n, kind, count in kinds}
    if rest:
        known[MOST_GROUPS] = (f"{rest:,} other groups", None, int(rest_samples))
    if any(r[0] == -1 for r in rows):
        known[-1] = (NO_VALUE, None, None)
    found: list[dict[str, Any]] = []
    for number, (shown, value, count) in known.items():
        totals, uses = [0.0] * stages, [0] * stages
        for g, stage, total, n, _ in rows:
            if g == number:
                totals[stage], uses[stage] = plain(total), n
        found.append({"name": shown, "value": value, "samples": count, "totals": totals, "uses": uses})
    found.sort(key=lambda g: (g["value"] is None, -sum(t or 0.0 for t in g["totals"])))
    return {"groups": found, "edges": [first + -(-k * span // stages) for k in range(stages)] + [last + 1]}
