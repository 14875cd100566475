"""A run's tables as DuckDB sees them: the parts that count, and the validation sets they speak of.

DuckDB works with one thread, so that the order in which doubles are added, and with it every bit of a result, is the same on every
call; it holds a bounded amount of memory and goes to temporary files beyond that.
"""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from inrun.errors import ConfigurationError, LedgerError
from inrun.ledger.about import credit_of
from inrun.ledger.labels import by_set, sets_of_accounts
from inrun.ledger.record import SettledCredits
from inrun.ledger.schema import ACCOUNTS, CONTRIBUTIONS, CREDITS
from inrun.ledger.settled import check_settlement, credit_table
from inrun.ledger.uses import show_contributions, show_credits, show_settled_steps

#: What DuckDB may hold before it goes to a temporary folder on disk.
MEMORY_LIMIT = "700MB"


class Run(Protocol):
    """What must be known of a run to query it: a :class:`~inrun.ledger.LedgerReader` does."""

    path: Path
    about: dict[str, Any]

    def files(self, table: str) -> list[str]:
        """Return the Parquet files of a table that count."""
        ...

    def complete_steps(self) -> int | None:
        """Return the first step that not every rank has written; None where one process writes alone."""
        ...


def quoted(name: str) -> str:
    """Return a column name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


class Tables:
    """A run's tables in DuckDB: ``contributions``, ``credits``, ``accounts`` and, where it was registered, ``samples``.

    Questions about scores add up the view ``uses``; see :mod:`inrun.ledger.uses`.

    Attributes:
        run: Where they come from.
        connection: DuckDB's.
        columns: Those of the samples; none if none were registered.
        whole: Whether credits count: the run keeps whole credit, or has credits. Otherwise uses are contributions, as they are.
    """

    def __init__(self, run: Run, connection: Any) -> None:
        """Take an open connection; see :meth:`inrun.ledger.LedgerReader.tables`."""
        self.run, self.connection = run, connection
        #: Before the files are looked up, so that they have all rows of these steps and one end holds for all tables.
        self._end = run.complete_steps()
        self._offer("contributions", CONTRIBUTIONS)
        credited = bool(self._offer("credits", CREDITS, "credits" if self._end is None else "credits_of_ranks"))
        if self._end is not None:
            show_settled_steps(connection, "credits_of_ranks")
        self._offer("accounts", ACCOUNTS)
        self.columns = self._offer("samples", pa.schema([("sample_id", pa.int64())]))
        self._sets: dict[str, list[str]] | None = None
        self._pending = credit_of(run.about) == "whole"
        self.whole = credited or self._pending
        if credited:
            show_credits(connection, self._pending)
        else:
            show_contributions(connection, self._pending)

    def overlay(self, open_credits: Sequence[SettledCredits]) -> None:
        """Show credit so far of open windows in ``uses``, as pending, in place of the contributions of these uses."""
        if open_credits:
            show_credits(self.connection, self._pending, credit_table([check_settlement(s) for s in open_credits]))
            self.whole = True

    def take_together(self, units: pa.Table, described: pa.Table) -> None:
        """Let several samples count as one: the uses of a unit are those of its samples.

        Args:
            units: ``sample_id`` and the ``unit`` it belongs to; uses of other samples are left out.
            described: What is known of units, in the place of ``samples``: ``sample_id`` is the unit.
        """
        con = self.connection
        con.from_arrow(units).create_view("given_units", replace=True)
        con.execute("CREATE TEMP TABLE units AS SELECT sample_id, unit FROM given_units")
        rest = {"uses": "validation, value, error, pending", "contributions": "validation, contribution"}
        for view, columns in rest.items():
            rows = f"SELECT step, unit AS sample_id, {columns} FROM {view} JOIN units USING (sample_id)"  # noqa: S608 - our own names
            con.execute(f"CREATE TEMP TABLE {view}_of_units AS {rows}")
        con.execute("DROP VIEW uses; DROP VIEW contributions")
        for view in rest:
            con.execute(f"CREATE TEMP VIEW {view} AS SELECT * FROM {view}_of_units")  # noqa: S608
        con.execute("DROP VIEW samples")
        con.from_arrow(described).create_view("samples")
        self.columns = list(described.column_names)

    def _offer(self, table: str, schema: pa.Schema, view: str | None = None) -> list[str]:
        """Make a view over the files of a table, with its name or another; return its columns, none if it has no files."""
        view = view or table
        files = [glob.escape(f) for f in self.run.files(table)]
        if not files:
            self.connection.from_arrow(schema.empty_table()).create_view(view)
            return []
        # Parts of contributions and of credits are alike.
        relation = self.connection.read_parquet(files, union_by_name=table not in ("contributions", "credits"))
        if self._end is not None and "step" in schema.names:
            relation = relation.filter(f"step < {self._end}")
        if set(schema.names) <= set(relation.columns):
            relation.create_view(view)
            return list(relation.columns)
        relation.create_view(f"{table}_before")  # books of an older release lack columns: these are null
        self.connection.from_arrow(schema.empty_table()).create_view(f"{table}_now")
        every = f"SELECT * FROM {table}_before UNION ALL BY NAME SELECT * FROM {table}_now"  # noqa: S608 - our own names
        self.connection.execute(f"CREATE TEMP VIEW {table} AS {every}")
        return schema.names

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
            if self.whole:  # contributions may have been lost, and credits not
                labels += self.table("SELECT DISTINCT validation FROM credits")["validation"].to_pylist()
            self._sets = by_set(dict.fromkeys(labels))
        return self._sets

    def sets_in_accounts(self) -> dict[str, list[str]]:
        """Return the validation sets that the accounts speak of: all that a run has whose steps were all skipped."""
        scored = self.relation("SELECT validation, count(*) > count(skipped) FROM accounts GROUP BY 1").fetchall()
        return sets_of_accounts(dict(scored))

    def choose(self, validation: str | Sequence[str] | None) -> dict[str, list[str]]:
        """Return the wanted validation sets (None: all); ConfigurationError if there is no such set."""
        if validation is None:
            return self.sets()
        wanted = [validation] if isinstance(validation, str) else list(validation)
        unknown = [name for name in wanted if name not in self.sets()]
        if unknown:
            raise ConfigurationError(
                f"{str(self.run.path)!r} has no validation set {unknown[0]!r}; it has {some(list(self.sets()))}"
            )
        return {name: labels for name, labels in self.sets().items() if name in wanted}

    def check_rows(self) -> None:
        """LedgerError if there are no contributions yet."""
        if not self.sets():
            raise LedgerError(f"{str(self.run.path)!r} has no contributions yet; train some steps, or flush the ledger")

    def column(self, name: str) -> str:
        """Return a metadata column as an SQL identifier, or say what there is."""
        if not self.columns:
            raise LedgerError(
                f"{str(self.run.path)!r} has no sample metadata, so {name!r} is not known; see ledger.register_samples"
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


def _hide_progress_bar(connection: Any) -> None:
    """Turn DuckDB's own bar off where it is on: it would be drawn on standard output, into JSON and CSV.

    It is not touched where it is off: a notebook without ipywidgets raises at any change of it.
    """
    if connection.execute("SELECT current_setting('enable_progress_bar')").fetchall()[0][0]:
        connection.execute("SET enable_progress_bar = false")


@contextmanager
def connect(run: Run, memory_limit: str | None = None, kind: type[Tables] | None = None) -> Iterator[Tables]:
    """Open the tables of a run (of a ``kind`` of their own, for books that are not on disk) for queries.

    What DuckDB has against it becomes a LedgerError.
    """
    import duckdb

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
            _hide_progress_bar(connection)
            yield (kind or Tables)(run, connection)
        except duckdb.OutOfMemoryException as error:
            raise LedgerError(
                f"{str(run.path)!r}: the question needs more than {memory_limit or MEMORY_LIMIT} of memory, or more room than "
                f"there is for temporary files in {tempfile.gettempdir()!r}; ask for fewer validation sets or stages at a time"
            ) from error
        except duckdb.Error as error:
            first = (str(error).splitlines() or ["?"])[0]
            raise LedgerError(f"{str(run.path)!r} cannot be read: {first!r}. `inrun verify` names damage") from error
        finally:
            connection.close()
