"""What a ledger holds at one moment, and what of it is new: sums per sample and label as Arrow batches."""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from inrun.ledger import LedgerReader
from inrun.ledger.manifest import FOLDER
from inrun.ledger.saved import is_old_save
from inrun.ledger.scores import GROUPS_AT_ONCE
from inrun.ledger.tables import Tables, quoted

TABLES = ("contributions", "credits", "accounts", "samples")
#: Sums of one label and sample: f values of u uses; under whole credit also o of own parts, e squared errors, p pending uses.
SUMS = "label VARCHAR, sample_id BIGINT, f DOUBLE, u BIGINT, o DOUBLE, e DOUBLE, p BIGINT, lo BIGINT, hi BIGINT"


@dataclass
class Seen:
    """The parts of a run that counted at one moment; it can be queried like a :class:`~inrun.ledger.LedgerReader`."""

    path: Path
    about: dict[str, Any]
    end: int | None
    listed: dict[str, list[str]]
    #: Per table what tells its parts apart: a part that was replaced has another checksum.
    keys: dict[str, frozenset[tuple[str, str]]] = field(default_factory=dict)

    def files(self, table: str) -> list[str]:
        """Return the Parquet files of a table."""
        return self.listed[table]

    def complete_steps(self) -> int | None:
        """Return the first step that not every rank has written."""
        return self.end


def stamp_of(path: Path) -> tuple[Any, ...]:
    """Return what changes whenever a writer adds to a run: sizes and times of its manifests."""
    found = [path / "run.json", *sorted((path / FOLDER).glob("*"))]
    return tuple((f.name, s.st_size, s.st_mtime_ns) for f in found for s in [f.stat()])


def look(reader: LedgerReader) -> Seen:
    """Note what counts now."""
    end = reader.complete_steps()  # before the files are listed, so that they have all rows of these steps
    if is_old_save(reader.path, reader.about):
        listed = {t: reader.files(t) for t in TABLES}
        keys = {t: frozenset((f, str(Path(f).stat().st_mtime_ns)) for f in files) for t, files in listed.items()}
        return Seen(reader.path, reader.about, end, listed, keys)
    parts = {t: reader.parts(t) for t in TABLES}
    listed = {t: [str(reader.path / p.path) for p in found] for t, found in parts.items()}
    return Seen(reader.path, reader.about, end, listed, {t: frozenset((p.path, p.sha256) for p in v) for t, v in parts.items()})


@dataclass(frozen=True)
class Steps:
    """Which steps of a run to add to the sums for good, and which are still open: their sums are made anew each time."""

    #: SQL conditions on ``step``; None: no such steps.
    closed: str | None
    open: str | None
    #: The steps that are closed by now: without credits the last one, under whole credit a table.
    last: int | None
    numbers: pa.Table | None


class Unsettled(Exception):  # noqa: N818 - a state, not an error
    """A step that was settled no longer is: rows of it were written later. All must be added up afresh."""


def new_steps(tables: Tables, last: int | None, done: pa.Table | None) -> Steps:
    """Find what is new: without credits all later steps, under whole credit the steps that were settled since, whenever used.

    Args:
        tables: The run.
        last: The last step that was added up; None before the first time.
        done: Under whole credit the steps whose settled credits were added up.
    """
    if not tables.whole:
        since = "true" if last is None else f"step > {last}"
        (newest,) = tables.row(f"SELECT max(step) FROM contributions WHERE {since}")
        return Steps(None if newest is None else since, None, last if newest is None else newest, None)
    con = tables.connection
    credited = con.execute("SELECT count(*) FROM duckdb_tables() WHERE table_name = 'credited_steps'").fetchall()[0][0]
    if not credited:
        con.execute("CREATE TEMP TABLE credited_steps (step BIGINT)")
    con.from_arrow(done if done is not None else pa.table({"step": pa.array([], pa.int64())})).create_view("done_steps")
    con.execute("CREATE TEMP TABLE fresh AS SELECT step FROM credited_steps ANTI JOIN done_steps USING (step)")
    lost = con.execute("SELECT count(*) FROM done_steps ANTI JOIN credited_steps USING (step)").fetchall()[0][0]
    if lost:
        raise Unsettled
    first, count = con.execute("SELECT min(step), count(*) FROM fresh").fetchall()[0]
    closed = f"step >= {first} AND step IN (SELECT step FROM fresh)" if count else None
    still = "SELECT min(step) FROM (SELECT DISTINCT step FROM contributions) ANTI JOIN credited_steps USING (step)"
    (oldest,) = con.execute(still).fetchall()[0]
    rest = None if oldest is None else f"step >= {oldest} AND step NOT IN (SELECT step FROM credited_steps)"
    return Steps(closed, rest, None, tables.table("SELECT step FROM credited_steps"))


def sums(tables: Tables, where: str) -> Iterator[pa.RecordBatch]:
    """Add up the uses of some steps by label and sample; in parts where they are many, so that a hash table fits into memory."""
    rows = f"SELECT step, sample_id, validation, value, error, pending, NULL::DOUBLE AS own FROM uses WHERE {where}"
    if tables.whole:
        own = "step, sample_id, validation, NULL, NULL, false, contribution::DOUBLE"
        rows += f" UNION ALL SELECT {own} FROM contributions WHERE {where}"
    (count,) = tables.row(f"SELECT count(*) FROM uses WHERE {where}")
    parts = 1
    if count > GROUPS_AT_ONCE:
        (samples, labels) = tables.row(
            f"SELECT approx_count_distinct(sample_id), approx_count_distinct(validation) FROM uses WHERE {where}"
        )
        parts = max(1, math.ceil(min(count, samples * labels) / GROUPS_AT_ONCE))
    for part in range(parts):
        chosen = "true" if parts == 1 else f"hash(sample_id) % {parts} = {part}"
        added = f"""
            SELECT validation AS label, sample_id, coalesce(sum(value), 0.0) AS f, count(value) AS u, sum(own) AS o,
                   sum(error * error) AS e, coalesce(sum(pending::BIGINT), 0)::BIGINT AS p, min(step) AS lo, max(step) AS hi
            FROM ({rows}) WHERE {chosen} GROUP BY 1, 2"""
        yield from tables.relation(added).to_arrow_reader(122_880)


def samples(tables: Tables) -> Iterator[pa.RecordBatch]:
    """Give the registered samples, each once: parts that two ranks registered at once say the same thing twice."""
    (again,) = tables.row("SELECT count(*) - count(DISTINCT sample_id) FROM samples")
    columns = ", ".join(f"{quoted(c)} AS c{k}" for k, c in enumerate(metadata(tables)))
    once = " QUALIFY row_number() OVER (PARTITION BY sample_id) = 1" if again else ""
    yield from tables.relation(f"SELECT sample_id{', ' + columns if columns else ''} FROM samples{once}").to_arrow_reader(122_880)


def metadata(tables: Tables) -> list[str]:
    """Return the columns that users gave, in order."""
    return [c for c in tables.columns if c != "sample_id"]
