"""Samples to look at: the highest and lowest scores, and samples with the same text side by side. Reads ``scored``."""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound, column names checked and quoted

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import pyarrow as pa

from inrun.ledger.tables import Tables, quoted
from inrun.report.neighbours import add_neighbours
from inrun.report.text import digits, one_line, safe_json, visible

#: Characters of a text; bytes that all samples may take in the page; sets of duplicates, and members that are shown of each.
MOST_TEXT, MOST_BYTES, MOST_TWINS, MOST_MEMBERS = 600, 380_000, 20, 8
#: Texts shorter than this are alike by chance; runs with more samples are not searched for duplicates.
SHORTEST, MOST_SEARCHED = 12, 5_000_000


@dataclass
class Shown:
    """Samples with a place in the page. Lists hold their positions in ``samples``."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    #: Per validation set, from the extreme inwards.
    top: list[list[int]] = field(default_factory=list)
    bottom: list[list[int]] = field(default_factory=list)
    #: Members of one text; ``count`` may be larger than what is shown.
    twins: list[dict[str, Any]] = field(default_factory=list)
    #: How many texts occur more than once, and how many samples have one; None where nobody looked.
    twin_texts: int | None = None
    twin_samples: int = 0
    #: Wanted, and left out because the page would grow too large.
    left_out: int = 0


def samples_to_show(tables: Tables, names: list[str], columns: list[str], top: int, text: bool, samples: int) -> Shown:
    """Choose samples, and fetch what is known about them.

    Args:
        tables: With the table ``scored``.
        names: Validation sets, in order.
        columns: Metadata columns whose values are shown and can be filtered by.
        top: Samples at either end of every set.
        text: Whether texts go into the page.
        samples: Samples of the run.
    """
    wanted = {"top": _extremes(tables, names, top, "DESC"), "bottom": _extremes(tables, names, top, "ASC")}
    written = next((c for c in ("text", "preview") if c in tables.columns), None)
    twins: list[tuple[int, list[int]]] = []
    found = Shown()
    if written is not None and samples <= MOST_SEARCHED:
        found.twin_texts, found.twin_samples, twins = _twins(tables, written)
    # From the extremes inwards, set by set in turn, so that a page that is full has the best of every set.
    lists = [ids for pair in zip(*wanted.values(), strict=True) for ids in pair]
    order = [ids[k] for k in range(top) for ids in lists if k < len(ids)]
    order = list(dict.fromkeys([i for ids in twins for i in ids[1]] + order))
    rows = _rows(tables, order, names, columns, written if text else None)
    places: dict[int, int] = {}
    size = 0
    for sample_id in order:
        size += len(safe_json(rows[sample_id]).encode())
        if size > MOST_BYTES:
            break
        places[sample_id] = len(found.samples)
        found.samples.append(rows[sample_id])
    found.left_out = len(order) - len(places)
    # Samples at the ends come before those that are here as copies only.
    ends = [places[i] for i in dict.fromkeys(i for ids in zip_longest(*lists) for i in ids) if i in places]
    add_neighbours(tables, [found.samples[k] for k in ends], names, written if text else None)
    found.top, found.bottom = ([[places[i] for i in ids if i in places] for ids in wanted[end]] for end in ("top", "bottom"))
    members = [(count, [places[i] for i in ids if i in places]) for count, ids in twins]
    found.twins = [{"count": count, "members": ids} for count, ids in members if len(ids) > 1]
    return found


def _extremes(tables: Tables, names: list[str], n: int, order: str) -> list[list[int]]:
    asked = f"SELECT sample_id FROM scored WHERE validation = $name ORDER BY score {order}, sample_id LIMIT {n}"
    return [[row[0] for row in tables.relation(asked, name=name).fetchall()] for name in names]


def _twins(tables: Tables, column: str) -> tuple[int, int, list[tuple[int, list[int]]]]:
    """Find used samples whose texts differ in nothing but case and white space, most copies first."""
    normal = f"lower(translate({quoted(column)}, ' ' || chr(9) || chr(10) || chr(11) || chr(12) || chr(13) || chr(160), ''))"
    tables.connection.execute(
        f"""CREATE OR REPLACE TEMP TABLE digests AS
            SELECT sample_id, first(digest) AS digest
            FROM (SELECT sample_id, md5_number({normal}) AS digest FROM samples WHERE length({quoted(column)}) >= {SHORTEST})
            WHERE sample_id IN (SELECT sample_id FROM scored) GROUP BY sample_id"""
    )
    tables.connection.execute(
        """CREATE OR REPLACE TEMP TABLE alike AS
           SELECT digest, count(*) AS copies, min(sample_id) AS lowest FROM digests GROUP BY digest HAVING count(*) > 1"""
    )
    texts, samples = tables.row("SELECT count(*), coalesce(sum(copies), 0)::BIGINT FROM alike")
    rows = tables.relation(
        f"""WITH best AS (SELECT * FROM alike ORDER BY copies DESC, lowest LIMIT {MOST_TWINS})
            SELECT lowest, any_value(copies), (list(sample_id ORDER BY sample_id))[1:{MOST_MEMBERS}]
            FROM digests JOIN best USING (digest) GROUP BY lowest ORDER BY 2 DESC, 1"""
    ).fetchall()
    return texts, samples, [(copies, list(ids)) for _, copies, ids in rows]


def _rows(tables: Tables, ids: list[int], names: list[str], columns: list[str], text: str | None) -> dict[int, dict[str, Any]]:
    """Return what the page says of the samples: short keys, since they are repeated."""
    found: dict[int, dict[str, Any]] = {i: {"n": str(i), "s": [None] * len(names), "e": [None] * len(names)} for i in ids}
    place = {name: k for k, name in enumerate(names)}
    tables.connection.from_arrow(pa.table({"sample_id": pa.array(ids, pa.int64())})).create_view("chosen", replace=True)
    asked = """SELECT sample_id, validation, score, standard_error, times_used, first_step, last_step FROM scored
               WHERE sample_id IN (SELECT sample_id FROM chosen) ORDER BY sample_id, validation"""
    for sample_id, name, score, error, uses, first, last in tables.relation(asked).fetchall():
        row = found[sample_id]
        row["s"][place[name]], row["e"][place[name]] = digits(score), digits(error, 3)
        row["u"], row["w"] = uses, [first, last]
    shown = [*columns, *(c for c in ("id", text) if c is not None and c in tables.columns)]
    if not shown:
        return found
    values = "".join(f", first({quoted(c)}::VARCHAR)" for c in shown)
    asked = f"SELECT sample_id{values} FROM samples WHERE sample_id IN (FROM chosen) GROUP BY sample_id ORDER BY 1"
    for sample_id, *told in tables.relation(asked).fetchall():
        row, known = found[sample_id], dict(zip(shown, told, strict=True))
        row["g"] = [None if known[c] is None else one_line(known[c], 80) for c in columns]
        if known.get("id") is not None:
            row["i"] = one_line(known["id"], 80)
        if text is not None and known[text] is not None:
            row["t"] = visible(known[text], MOST_TEXT)
    return found
