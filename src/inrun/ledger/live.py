"""Books that are being written, as a reader sees them: those in memory, and those with open windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from inrun.errors import LedgerError
from inrun.ledger.reader import LedgerReader
from inrun.ledger.record import SettledCredits
from inrun.ledger.tables import Tables, connect

if TYPE_CHECKING:
    from inrun.ledger.memory import MemoryLedger


def live_reader(books: Any, open_credits: Sequence[SettledCredits]) -> LedgerReader:
    """Return a reader of books that an accountant writes; LedgerError if they are not of a kind that can be asked."""
    from inrun.ledger.memory import MemoryLedger

    if isinstance(books, MemoryLedger):
        return MemoryReader(books, open_credits)
    if isinstance(books, LedgerReader):
        return LiveReader(books, open_credits)
    raise LedgerError(f"the ledger {type(books).__name__} only writes; ask the place it writes to")


class LiveReader(LedgerReader):
    """A run's ledger with the credit so far of windows that are open."""

    def __init__(self, books: LedgerReader, open_credits: Sequence[SettledCredits]) -> None:
        """Take the books and what is not settled yet."""
        self.path, self.about = books.path, books.about
        self._books, self._open = books, open_credits

    def flush_if_open(self) -> None:
        """Write what the books hold back."""
        self._books.flush_if_open()

    @contextmanager
    def tables(self, memory_limit: str | None = None) -> Iterator[Tables]:
        """Open the tables for queries in SQL, open windows counted."""
        with super().tables(memory_limit) as tables:
            tables.overlay(self._open)
            yield tables


class MemoryTables(Tables):
    """The tables of books in memory."""

    def _offer(self, table: str, schema: pa.Schema, view: str | None = None) -> list[str]:
        assert isinstance(self.run, MemoryReader)
        held = getattr(self.run.books, table)()
        self.connection.from_arrow(schema.empty_table() if held is None else held).create_view(view or table)
        return list(held.column_names) if held is not None and held.num_rows else []


class MemoryReader(LedgerReader):
    """Books in memory, for every question that is asked of books on disk."""

    def __init__(self, books: MemoryLedger, open_credits: Sequence[SettledCredits] = ()) -> None:
        """Take the books and what is not settled yet."""
        self.path, self.about = Path("the books in memory"), books.about  # the path is for messages
        self.books, self._open = books, open_credits

    def complete_steps(self) -> None:
        """Return None: one process writes alone."""

    def files(self, table: str) -> list[str]:
        """Return no files: there are none."""
        return []

    def _load(self, table: str) -> list[Any]:
        held = getattr(self.books, table)()
        return [] if held is None else [held]

    @property
    def has_samples(self) -> bool:
        """Whether samples were registered."""
        return self.books.samples() is not None

    @contextmanager
    def tables(self, memory_limit: str | None = None) -> Iterator[Tables]:
        """Open the tables for queries in SQL, open windows counted."""
        with connect(self, memory_limit, MemoryTables) as tables:
            tables.overlay(self._open)
            yield tables
