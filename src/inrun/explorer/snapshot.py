"""A run added up in a DuckDB file of our own, kept up to date while training writes: what every answer is read from.

Rows of steps that are closed are added up once; when new parts appear, only their steps are read. Under whole credit a step is
closed once all its uses are settled. The sums of the others, a window's worth, are made anew each time. If parts went (a run was
resumed from an older mark), the snapshot starts afresh.
"""

# ruff: noqa: S608 - queries are put together from our own pieces; names of columns never reach them: they are c0, c1, ...

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from inrun.errors import InrunError, LedgerError
from inrun.explorer import reading
from inrun.explorer.reading import SUMS
from inrun.explorer.sums import score_columns, wide_scores
from inrun.ledger import LedgerReader
from inrun.ledger.tables import Tables, connect

log = logging.getLogger(__name__)
#: What DuckDB may hold of all runs together, beyond what a page asks for it goes to the file.
MEMORY_LIMIT = "1GB"
#: Validation sets that are shown; a run scored point by point may have thousands.
MOST_SETS = 32
#: Columns that a search looks into, if there are any of them.
SEARCHED = ("id", "text", "preview", "title", "document")


class Store(AbstractContextManager["Store"]):
    """The DuckDB file, in a temporary folder that goes with it."""

    def __init__(self, memory_limit: str = MEMORY_LIMIT, threads: int | None = None) -> None:
        """Make an empty one."""
        #: Held while what a run holds is replaced, in the file and in its `view`, and while a request begins to look.
        self.swap = threading.Lock()
        self.folder = Path(tempfile.mkdtemp(prefix="inrun-explorer-"))
        config: dict[str, Any] = {
            "threads": threads or min(os.cpu_count() or 1, 4),
            "memory_limit": memory_limit,
            "temp_directory": str(self.folder / "spill"),
            "preserve_insertion_order": True,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        self._connection: Any = duckdb.connect(str(self.folder / "snapshot.duckdb"), config=config)
        # No question may reach another file, nor change these settings, whatever it asks.
        self._connection.execute("SET enable_external_access = false; SET lock_configuration = true")

    def cursor(self) -> Any:
        """Return a connection for one thread; what it begins sees one moment of all runs."""
        return self._connection.cursor()

    @contextmanager
    def moment(self, *snapshots: Snapshot) -> Iterator[tuple[Any, list[View]]]:
        """Give a connection that sees one moment of all runs, with what these runs hold at that moment."""
        with self.swap:
            con, views = self.cursor(), [s.view for s in snapshots]
            con.execute("BEGIN")
            for snapshot in snapshots:  # a transaction begins with its first look
                con.execute(f"SELECT 1 FROM {snapshot.schema}.items LIMIT 0")
        try:
            yield con, views
        finally:
            con.close()

    def close(self) -> None:
        """Remove everything."""
        self._connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        """Remove everything."""
        self.close()


@dataclass(frozen=True)
class Column:
    """A metadata column of the samples: what users call it, what it is called here, and its DuckDB type."""

    name: str
    here: str
    kind: str


@dataclass(frozen=True)
class View:
    """What a snapshot holds at one moment. Replaced as a whole, so that one request never sees two moments."""

    version: int = 0
    sets: tuple[str, ...] = ()
    #: The labels of each set: one, or its folds.
    labels: tuple[tuple[str, ...], ...] = ()
    hidden_sets: int = 0
    columns: tuple[Column, ...] = ()
    samples: int = 0
    scored: int = 0
    steps: int = 0
    last_step: int | None = None
    whole: bool = False
    #: Seconds of this machine's clock when new parts were last read.
    read_at: float = 0.0

    @property
    def text_column(self) -> Column | None:
        """Return the column that has the texts."""
        known = {c.name: c for c in self.columns}
        return known.get("text") or known.get("preview")


class Snapshot:
    """One run in the store.

    Attributes:
        reader: The ledger.
        schema: Where its tables are in the store: ``items`` has a row per sample, registered or used.
        view: What is there now.
        error: Why the last look at the ledger failed; None if it did not.
    """

    def __init__(self, store: Store, reader: LedgerReader, place: int) -> None:
        """Make the tables, empty; :meth:`refresh` fills them."""
        self.store, self.reader, self.schema = store, reader, f"r{place}"
        self.view = View()
        self.error: str | None = None
        self._stamp: tuple[Any, ...] | None = None
        self._seen: reading.Seen | None = None
        self._last: int | None = None
        self._done: pa.Table | None = None
        self._lock = threading.Lock()
        con = store.cursor()
        con.execute(f"CREATE SCHEMA {self.schema}; CREATE TABLE {self.schema}.items (place BIGINT, sample_id BIGINT, hay VARCHAR)")

    @property
    def seen(self) -> reading.Seen:
        """Return the parts of the ledger that were read last."""
        if self._seen is None:
            raise LedgerError(f"{str(self.reader.path)!r} could not be read yet: {self.error}")
        return self._seen

    def refresh(self) -> bool:
        """Take in what was written since the last time; say whether anything was. Trouble is kept in ``error``."""
        with self._lock:
            try:
                stamp = reading.stamp_of(self.reader.path)
                if stamp == self._stamp:
                    return False
                self._take_in(reading.look(self.reader))
                self._stamp, self.error = stamp, None
                return True
            except (InrunError, OSError, duckdb.Error, pa.ArrowException) as error:
                # A writer that resumes takes parts away while we look: the next look sees what it left.
                self.error = str(error)
                log.debug("%s: %s", self.reader.path, error)
                return False

    def _take_in(self, seen: reading.Seen) -> None:
        before = self._seen
        afresh = before is None or any(before.keys[t] - seen.keys[t] for t in ("contributions", "credits"))
        described = before is None or before.keys["samples"] != seen.keys["samples"]
        try:
            self._try_taking_in(seen, afresh, described)
        except reading.Unsettled:
            self._try_taking_in(seen, True, described)

    def _try_taking_in(self, seen: reading.Seen, afresh: bool, described: bool) -> None:
        con = self.store.cursor()
        try:
            with connect(seen) as tables:
                afresh = afresh or tables.whole != self.view.whole
                con.execute("BEGIN")
                view, last, done = self._fill(con, tables, afresh, described)
                with self.store.swap:
                    con.execute("COMMIT")
                    self.view, self._seen, self._last, self._done = view, seen, last, done
        finally:
            con.close()  # what was not committed is rolled back

    def _fill(self, con: Any, tables: Tables, afresh: bool, described: bool) -> tuple[View, int | None, pa.Table | None]:
        s = self.schema
        if afresh:
            con.execute(f"CREATE OR REPLACE TABLE {s}.sums ({SUMS}); CREATE OR REPLACE TABLE {s}.open_sums ({SUMS})")
        sets = dict(list(tables.sets().items())[:MOST_SETS])
        steps = reading.new_steps(tables, None if afresh else self._last, None if afresh else self._done)
        con.execute("CREATE OR REPLACE TEMP TABLE touched (sample_id BIGINT)")
        if not afresh:
            con.execute(f"INSERT INTO touched SELECT DISTINCT sample_id FROM {s}.open_sums")  # what was pending may be settled now
        con.execute(f"DELETE FROM {s}.open_sums")
        for table, where in (("sums", steps.closed), ("open_sums", steps.open)):
            if where is not None:
                self._add(con, table, tables, where, note=not afresh)
        named = tuple(tuple(labels) for labels in sets.values())
        labels = [(label, place, len(group)) for place, group in enumerate(named) for label in group]
        con.execute(f"CREATE OR REPLACE TABLE {s}.labels (label VARCHAR, place INTEGER, k INTEGER)")
        if labels:
            con.executemany(f"INSERT INTO {s}.labels VALUES (?, ?, ?)", labels)
        columns = self.view.columns
        if afresh or described or tuple(sets) != self.view.sets or named != self.view.labels:
            columns = self._build(con, tables, named)
        else:
            self._update(con, named, tables.whole)
        counted = f"SELECT count(*), count(*) FILTER ({_any_score(len(sets))}) FROM {s}.items"
        samples, scored = con.execute(counted).fetchall()[0]
        (last,) = con.execute(f"SELECT max(hi) FROM (SELECT hi FROM {s}.sums UNION ALL SELECT hi FROM {s}.open_sums)").fetchall()[0]
        (counted_steps,) = tables.row("SELECT count(DISTINCT step) FROM accounts")
        view = View(
            version=self.view.version + 1,
            sets=tuple(sets),
            labels=named,
            hidden_sets=len(tables.sets()) - len(sets),
            columns=columns,
            samples=samples,
            scored=scored,
            steps=counted_steps,
            last_step=last,
            whole=tables.whole,
            read_at=time.time(),
        )
        return view, steps.last, steps.numbers

    def _add(self, con: Any, table: str, tables: Tables, where: str, note: bool) -> None:
        """Append sums of some steps, and note whose they are, unless all are read anyway."""
        for batch in reading.sums(tables, where):
            con.register("batch", pa.Table.from_batches([batch]))
            con.execute(f"INSERT INTO {self.schema}.{table} SELECT label, sample_id, f, u, o, e, p, lo, hi FROM batch")
            if note:
                con.execute("INSERT INTO touched SELECT DISTINCT sample_id FROM batch")
            con.unregister("batch")

    def _build(self, con: Any, tables: Tables, sets: tuple[tuple[str, ...], ...]) -> tuple[Column, ...]:
        """Make ``items`` anew, from all sums and the registered samples."""
        s, names = self.schema, reading.metadata(tables)
        schema, batches = _with_schema(reading.samples(tables), tables)
        like = con.from_arrow(schema.empty_table())
        kinds = dict(zip(like.columns, map(str, like.types), strict=True))
        con.register("given_samples", pa.RecordBatchReader.from_batches(schema, batches))
        columns = tuple(Column(name, f"c{k}", kinds[f"c{k}"]) for k, name in enumerate(names))
        texts = [c.here for c in columns if c.kind == "VARCHAR"]
        searched = [c.here for c in columns if c.name in SEARCHED and c.kind == "VARCHAR"] or texts
        hay = f"lower(concat_ws(chr(31), sample_id::VARCHAR{''.join(f', g.{c}' for c in searched)}))"
        mine = "".join(f", g.{c.here}" for c in columns)
        scores = "".join(f", w.{c}" for c in score_columns(len(sets)))
        con.execute(
            f"""CREATE OR REPLACE TABLE {s}.items AS
                SELECT row_number() OVER () AS place, sample_id, {hay} AS hay{mine}{scores}
                FROM given_samples g FULL JOIN ({wide_scores(s, [list(x) for x in sets], tables.whole)}) w USING (sample_id)"""
        )
        con.unregister("given_samples")
        return columns

    def _update(self, con: Any, sets: tuple[tuple[str, ...], ...], whole: bool) -> None:
        """Set the scores of the samples that were touched; those seen for the first time get a row."""
        s, names = self.schema, score_columns(len(sets))
        if not names:
            return
        wide = wide_scores(s, [list(x) for x in sets], whole, "touched")
        con.execute(f"CREATE OR REPLACE TEMP TABLE changed AS {wide}")
        con.execute(
            f"UPDATE {s}.items SET {', '.join(f'{c} = changed.{c}' for c in names)} FROM changed "
            "WHERE items.sample_id = changed.sample_id"
        )
        con.execute(
            f"""INSERT INTO {s}.items (place, sample_id, hay, {", ".join(names)})
                SELECT (SELECT coalesce(max(place), 0) FROM {s}.items) + row_number() OVER (), sample_id, sample_id::VARCHAR,
                       {", ".join(names)} FROM changed ANTI JOIN {s}.items USING (sample_id)"""
        )


def _any_score(sets: int) -> str:
    return " OR ".join(f"times_used_{k} > 0" for k in range(sets)) or "false"


def _with_schema(batches: Any, tables: Tables) -> tuple[pa.Schema, Any]:
    """Return batches with their schema, which must be known before the first of them."""
    columns = reading.metadata(tables)
    types = {f.name: f.type for f in tables.table("SELECT * FROM samples LIMIT 0").schema}
    schema = pa.schema([("sample_id", pa.int64()), *((f"c{k}", types[c]) for k, c in enumerate(columns))])
    return schema, (batch.cast(schema) for batch in batches)
