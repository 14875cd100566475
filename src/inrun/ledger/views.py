"""The books as DuckDB sees them: the parts that count as tables, and the ways to look at a contribution.

A late sample earns less by construction: the learning rate has fallen and there is less left to learn. The views take that out,
step by step and validation set by validation set, before anything is added up:

``plain``         the contribution itself; scores are sums
``per_lr``        divided by the learning rate of its step; steps without one, or with 0, are left out and counted
``standardised``  divided by the mean absolute contribution of its step
``rank``          its rank within the step, from -1 (lowest) to 1 (highest), ties share; scores are means, not sums
"""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound, column names checked and quoted

from __future__ import annotations

import glob
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from inrun.errors import ConfigurationError, LedgerError
from inrun.ledger.disk import Ledger, LedgerReader
from inrun.ledger.manifest import FOLDER
from inrun.ledger.schema import ACCOUNTS, CONTRIBUTIONS

#: What DuckDB may hold before it goes to a temporary folder on disk.
MEMORY_LIMIT = "700MB"
#: Groups that are added up, and rows that are ranked, at once: they fit into that memory.
GROUPS_AT_ONCE, ROWS_AT_ONCE = 2_500_000, 4_000_000
#: Views whose scores are means over uses; those of the others are sums.
MEANS = ("rank",)
#: Views that need all rows of a step to show one.
BY_STEP = ("rank", "standardised")
SCORED = (
    "validation VARCHAR, sample_id BIGINT, bucket BIGINT, score DOUBLE, pushes DOUBLE, standard_error DOUBLE, times_used BIGINT, "
    "first_step BIGINT, last_step BIGINT"
)

_ROWS = "SELECT step, sample_id, validation AS label, contribution::DOUBLE AS value FROM contributions"
_LR = "SELECT step, max(lr) AS lr FROM accounts WHERE lr > 0 GROUP BY step"
_SPREAD = "SELECT step, label, avg(abs(value)) AS spread FROM rows GROUP BY step, label"
_PLACE = """
SELECT step, sample_id, label, rank() OVER by_value AS low, cume_dist() OVER by_value AS upto,
       count(*) OVER (PARTITION BY step, label) AS n
FROM (SELECT step, sample_id, label, value + 0.0 AS value FROM rows)
WINDOW by_value AS (PARTITION BY step, label ORDER BY value)
"""
VIEWS = {
    "plain": "SELECT * FROM rows",
    "rank": f"""
        SELECT step, sample_id, label, CASE WHEN n > 1 THEN (low + round(upto * n) - n - 1) / (n - 1) ELSE 0.0 END AS value
        FROM ({_PLACE})""",
    "per_lr": f"SELECT step, sample_id, label, value / lr AS value FROM rows JOIN ({_LR}) USING (step)",
    "standardised": f"""
        SELECT step, sample_id, label, CASE WHEN spread > 0 THEN value / spread ELSE 0.0 END AS value
        FROM rows JOIN ({_SPREAD}) USING (step, label)""",
}


def quoted(name: str) -> str:
    """Return a column name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True)
class Ask:
    """How contributions are seen and added up."""

    view: str = "plain"
    #: SQL of a step's bucket, and how many there are.
    bucket: str = "0"
    buckets: int = 1
    #: Whether a bucket counts all earlier ones of the sample, too.
    cumulative: bool = False


class Books:
    """A run's tables in DuckDB: ``contributions``, ``accounts`` and, where it was registered, ``samples``.

    One thread: the order in which doubles are added, and with it every bit of the result, is the same on every call.
    """

    def __init__(self, reader: LedgerReader, connection: Any) -> None:
        """Take an open connection; see :func:`open_books`."""
        self.reader, self.connection = reader, connection
        self._offer("contributions", CONTRIBUTIONS)
        self._offer("accounts", ACCOUNTS)
        self.columns = self._offer("samples", pa.schema([("sample_id", pa.int64())]))
        self._sets: dict[str, list[str]] | None = None
        self._stored: set[str] = set()

    def _offer(self, table: str, schema: pa.Schema) -> list[str]:
        """Make a view over the files of a table; return its columns, none if it has no files."""
        files = [glob.escape(f) for f in files_of(self.reader, table)]
        if not files:
            self.connection.from_arrow(schema.empty_table()).create_view(table)
            return []
        relation = self.connection.read_parquet(files, union_by_name=table == "samples")
        relation.create_view(table)
        return list(relation.columns)

    def relation(self, sql: str, **values: Any) -> Any:
        """Ask; values are bound to ``$name``."""
        return self.connection.sql(sql, params={k: v for k, v in values.items() if f"${k}" in sql} or None)

    def table(self, sql: str, **values: Any) -> pa.Table:
        """Ask, and return the answer as an Arrow table."""
        return self.relation(sql, **values).to_arrow_table()

    def row(self, sql: str, **values: Any) -> tuple[Any, ...]:
        """Ask for one row."""
        return tuple(self.relation(sql, **values).fetchall()[0])

    def sets(self) -> dict[str, list[str]]:
        """Return the validation sets of the run in order of their names, each with its labels (one, or its folds)."""
        if self._sets is None:
            labels = self.table("SELECT DISTINCT validation FROM contributions")["validation"].to_pylist()
            found: dict[str, list[str]] = {}
            for label in sorted(labels, key=lambda x: (x.partition("#")[0].encode(), len(x), x)):
                found.setdefault(label.partition("#")[0], []).append(label)
            self._sets = found
        return self._sets

    def choose(self, validation: str | Sequence[str] | None) -> dict[str, list[str]]:
        """Return the wanted validation sets (None: all); ConfigurationError if there is no such set."""
        if validation is None:
            return self.sets()
        wanted = [validation] if isinstance(validation, str) else list(validation)
        unknown = [name for name in wanted if name not in self.sets()]
        if unknown:
            raise ConfigurationError(
                f"{str(self.reader.path)!r} has no validation set {unknown[0]!r}; it has {some(list(self.sets()))}"
            )
        return {name: labels for name, labels in self.sets().items() if name in wanted}

    def _seen(self, labels: list[str], view: str, bound: dict[str, Any]) -> str:
        """Return SQL for the rows of some labels as a view shows them."""
        keys = ", ".join(_bind(bound, label) for label in labels)
        rows = f"{_ROWS} WHERE validation IN ({keys})"
        if view not in BY_STEP:
            return f"WITH rows AS ({rows}) {VIEWS[view]}"
        if view not in self._stored:
            self._store(view)
        return f"SELECT * FROM seen_{view} WHERE label IN ({keys})"

    def _store(self, view: str) -> None:
        """Write what a view shows to a temporary table, a range of steps at a time: ranks need all rows of a step at once."""
        self._stored.add(view)
        self.connection.execute(f"CREATE TEMP TABLE seen_{view} (step BIGINT, sample_id BIGINT, label VARCHAR, value DOUBLE)")
        count, first, last = self.row("SELECT count(*), min(step), max(step) FROM contributions")
        pieces = min(-(-count // ROWS_AT_ONCE), last - first + 1) if count else 0
        for piece in range(pieces):
            low, high = (first + (last - first + 1) * k // pieces for k in (piece, piece + 1))
            rows = f"{_ROWS} WHERE step >= {low} AND step < {high}"
            self.connection.execute(f"INSERT INTO seen_{view} WITH rows AS ({rows}) {VIEWS[view]}")

    def score(self, sets: dict[str, list[str]], ask: Ask) -> None:
        """Make the table ``scored``: one row per validation set, sample and step bucket.

        Columns: validation, sample_id, bucket, score, pushes (the sum over uses), standard_error, times_used, first_step,
        last_step. The folds of a set become columns, added in their order, so that no bit depends on how a hash table
        gives its rows. Samples are taken a part at a time where they are many: a hash table that has to go to disk may fail.
        """
        self.connection.execute(f"CREATE TEMP TABLE scored ({SCORED})")
        single = [labels[0] for labels in sets.values() if len(labels) == 1]
        jobs: list[tuple[str | None, list[str]]] = [(None, single)] if single else []
        jobs += [(name, labels) for name, labels in sets.items() if len(labels) > 1]
        for name, labels in jobs:
            bound: dict[str, Any] = {}
            rows = self._seen(labels, ask.view, bound)
            keys = [f"${key}" for key in bound]
            parts = self._parts(len(labels) * ask.buckets, 1.0 if name is None else (1 + len(labels) / 4) / len(labels))
            for part in range(parts):
                where = "true" if parts == 1 else f"hash(sample_id) % {parts} = {part}"
                sql = f"INSERT INTO scored {_one_set(name, labels, rows, keys, bound, ask, where)}"
                self.connection.execute(sql, {k: v for k, v in bound.items() if f"${k}" in sql})

    def _parts(self, per_sample: int, weight: float) -> int:
        """Return in how many parts the samples are taken, so that the hash table of one part stays in memory."""
        (rows,) = self.row("SELECT count(*) FROM contributions")
        if rows * weight <= GROUPS_AT_ONCE:
            return 1
        (samples,) = self.row("SELECT approx_count_distinct(sample_id) FROM contributions")
        return max(1, math.ceil(min(rows, samples * per_sample) * weight / GROUPS_AT_ONCE))

    def check_rows(self) -> None:
        """LedgerError if there are no contributions yet."""
        if not self.sets():
            raise LedgerError(f"{str(self.reader.path)!r} has no contributions yet; train some steps, or flush the ledger")

    def column(self, name: str) -> str:
        """Return a metadata column as an SQL identifier, or say what there is."""
        if not self.columns:
            raise LedgerError(
                f"{str(self.reader.path)!r} has no sample metadata, so {name!r} is not known; see ledger.register_samples"
            )
        if name not in self.columns or name == "sample_id":
            raise ConfigurationError(
                f"the samples have no column {name!r}; they have {some([c for c in self.columns if c != 'sample_id'])}"
            )
        return quoted(name)


def some(names: Sequence[str], most: int = 12) -> str:
    """Return a list for a message; ``repr`` keeps control characters out of it."""
    shown = ", ".join(repr(n) for n in names[:most])
    return (shown or "none") + (f" and {len(names) - most} more" if len(names) > most else "")


def files_of(reader: LedgerReader, table: str) -> list[str]:
    """Return the files of a table: by the manifest, or of a folder written by ``accountant.save``, which has none."""
    if (reader.path / FOLDER).is_dir():
        return reader.files(table)
    if any((reader.path / table).glob("r*-*.parquet")):
        raise LedgerError(f"{str(reader.path)!r} has lost its manifest; `inrun verify` and `inrun repair` say what can be saved")
    return [str(f) for f in sorted((reader.path / table).glob("part-*.parquet"))]


def check_view(view: str) -> None:
    """ConfigurationError if there is no such view."""
    if view not in VIEWS:
        raise ConfigurationError(f"there is no view {view!r}; accepted are {', '.join(VIEWS)}")


@contextmanager
def open_books(source: LedgerReader | str | Path, memory_limit: str | None = None) -> Iterator[Books]:
    """Open a run (a reader, or a path) for queries; what DuckDB has against it becomes a LedgerError."""
    import duckdb

    reader = source if isinstance(source, LedgerReader) else Ledger.open(source)
    if isinstance(reader, Ledger) and reader._stopped is None:
        reader.flush()
    with tempfile.TemporaryDirectory(prefix="inrun-") as folder:
        config: dict[str, Any] = {
            "threads": 1,
            "memory_limit": memory_limit or MEMORY_LIMIT,
            "temp_directory": folder,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        connection = duckdb.connect(":memory:", config=config)
        try:
            connection.execute("SET enable_progress_bar = false")  # it would be drawn on standard output, into JSON and CSV
            yield Books(reader, connection)
        except duckdb.OutOfMemoryException as error:
            raise LedgerError(
                f"{str(reader.path)!r}: the question needs more than {memory_limit or MEMORY_LIMIT} of memory, or more room than "
                f"there is for temporary files in {tempfile.gettempdir()!r}; ask for fewer validation sets or stages at a time"
            ) from error
        except duckdb.Error as error:
            first = (str(error).splitlines() or ["?"])[0]
            raise LedgerError(f"{str(reader.path)!r} cannot be read: {first!r}. `inrun verify` names damage") from error
        finally:
            connection.close()


def _one_set(name: str | None, labels: list[str], rows: str, keys: list[str], bound: dict[str, Any], ask: Ask, part: str) -> str:
    """SQL for a part of the samples, of a set in folds or (``name`` None) of all sets without."""
    if name is None:
        who, folds = "split_part(label, '#', 1)", [""]
    else:
        who, folds = f"{_bind(bound, name)}::VARCHAR", [f" FILTER (label = {key})" for key in keys]
    sums = ", ".join(f"coalesce(sum(value){f}, 0.0) AS f{j}, count(*){f} AS u{j}" for j, f in enumerate(folds))
    added = f"""
        SELECT {who} AS validation, sample_id, {ask.bucket} AS bucket, {sums}, min(step) AS first_step, max(step) AS last_step
        FROM ({rows}) WHERE {part} GROUP BY 1, 2, 3"""
    return _score(_accumulate(added, len(folds)) if ask.cumulative else added, len(folds), ask.view in MEANS)


def _bind(bound: dict[str, Any], value: str) -> str:
    key = f"v{len(bound)}_"
    bound[key] = value
    return f"${key}"


def _accumulate(added: str, k: int) -> str:
    sums = ", ".join(f"sum(f{j}) OVER upto AS f{j}, sum(u{j}) OVER upto AS u{j}" for j in range(k))
    return f"""
        SELECT validation, sample_id, bucket, {sums}, min(first_step) OVER upto AS first_step, max(last_step) OVER upto AS last_step
        FROM ({added})
        WINDOW upto AS (PARTITION BY validation, sample_id ORDER BY bucket ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"""


def _score(added: str, k: int, mean: bool) -> str:
    """Mean and standard error over the folds, term by term."""
    values = [f"(f{j} / greatest(u{j}, 1))" if mean else f"f{j}" for j in range(k)]
    uses = "u0" if k == 1 else f"greatest({', '.join(f'u{j}' for j in range(k))})"
    score = f"({' + '.join(values)}) / {k}" if k > 1 else values[0]
    pushes = f"({' + '.join(f'f{j}' for j in range(k))}) / {k}" if k > 1 else "f0"
    squares = " + ".join(f"(({v}) - score) * (({v}) - score)" for v in values)
    error = f"sqrt(({squares}) / {k - 1}) / sqrt({k}::DOUBLE)" if k > 1 else "NULL::DOUBLE"
    return f"""
        SELECT validation, sample_id, bucket, score, pushes, {error} AS standard_error, times_used::BIGINT AS times_used,
               first_step, last_step
        FROM (SELECT *, {score} AS score, {pushes} AS pushes, {uses} AS times_used FROM ({added}))"""
