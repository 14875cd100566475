"""Reading a run: which parts count, and what they add up to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from inrun.errors import LedgerError
from inrun.ledger.about import read_about
from inrun.ledger.answers import answer
from inrun.ledger.manifest import FOLDER, TABLES, Chain, Part, survey
from inrun.ledger.parts import complete_rows, flaw_of, read_part
from inrun.ledger.ranks import complete_steps
from inrun.ledger.record import SettledCredits
from inrun.ledger.saved import is_old_save, old_files
from inrun.ledger.schema import ACCOUNTS, CONTRIBUTIONS, CREDITS
from inrun.ledger.scores import Names
from inrun.ledger.tables import Tables, connect

if TYPE_CHECKING:
    from inrun.figures import Plots

#: How often a reader looks again when a writer resumed under it: all but the last time False.
TRIES = (*[False] * 20, True)


class LedgerReader:
    """A run's ledger, read-only. Made by :meth:`Ledger.open`; safe to use while training writes.

    Attributes:
        path: The run's folder.
        about: What ``run.json`` says.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a run."""
        self.path = Path(path)
        self.about = read_about(self.path)

    @staticmethod
    def exists(path: str | Path) -> bool:
        """Whether a folder holds a ledger."""
        return (Path(path) / "run.json").exists()

    @staticmethod
    def holds_steps(path: str | Path) -> bool:
        """Whether a folder holds contributions of any step, whether they still count or not."""
        return any((Path(path) / "contributions").glob("*"))

    @property
    def has_samples(self) -> bool:
        """Whether a samples table was registered."""
        return bool(self.files("samples"))

    def chains(self) -> list[Chain]:
        """Read the manifests of all ranks; LedgerError if one is damaged."""
        found, damage = survey(self.path)
        damage = [d for chain in found for d in chain.damage] + damage
        if damage:
            raise LedgerError(f"{self.path} is damaged: {damage[0]}. `inrun verify` names all of it, `inrun repair` saves the rest")
        return found

    def complete_steps(self) -> int | None:
        """Return how many steps all ranks have written: rows of later ones do not count yet. None where one process writes alone.

        Tables and scores leave such rows out; whoever reads the :meth:`files` must do so too.
        """
        if is_old_save(self.path, self.about):
            return None
        self._check_manifest(*TABLES)
        return complete_steps(self.chains())

    def _check_manifest(self, *tables: str) -> None:
        if not (self.path / FOLDER).is_dir() and any(file for table in tables for file in (self.path / table).glob("r*-*.parquet")):
            raise LedgerError(f"{str(self.path)!r} has lost its manifest; `inrun verify` and `inrun repair` say what can be saved")

    def parts(self, table: str) -> list[Part]:
        """Return the parts of a table that count, in the order they were written, rank by rank.

        Where several ranks write, a part may end with steps that are not complete yet; see :meth:`complete_steps`.
        """
        for last in TRIES:
            found = self._counted(table)
            for part in found:
                flaw = flaw_of(self.path, part)
                if flaw is not None:
                    break
            else:
                return found
            if last or self._counted(table) == found:  # else a writer has just resumed from an older mark
                break
        raise LedgerError(f"{self.path / part.path} {flaw}. `inrun verify` names all damage, `inrun repair` saves the rest")

    def _counted(self, table: str) -> list[Part]:
        chains = self.chains()
        end = complete_steps(chains)
        found = [p for c in chains for e in c.live() for p in e.parts if p.table == table]
        return [p for p in found if end is None or p.first_step is None or p.first_step < end]

    def files(self, table: str) -> list[str]:
        """Return the paths of the Parquet files of a table that count."""
        if is_old_save(self.path, self.about):
            return old_files(self.path, table)
        self._check_manifest(table)
        return [str(self.path / p.path) for p in self.parts(table)]

    def _read(self, table: str, schema: pa.Schema) -> pa.Table:
        self.flush_if_open()
        tables = self._load(table)
        return pa.concat_tables(tables, promote_options="default") if tables else schema.empty_table()

    def _load(self, table: str) -> list[pa.Table]:
        for last in TRIES:
            end = self.complete_steps()
            files = self.files(table)
            try:
                return [complete_rows(read_part(table, file), end) for file in files]
            except (OSError, ValueError, pa.ArrowException) as error:
                if last or self.files(table) == files:  # else a writer has just resumed from an older mark
                    raise LedgerError(f"{self.path} cannot be read: {error}. `inrun verify` names the damage") from error
        raise AssertionError

    def flush_if_open(self) -> None:
        """Write what this object holds back, before it is read: nothing, for a reader."""

    def contributions(self) -> pa.Table:
        """Return every contribution, in the order written. Loads all of it: for large runs use :meth:`tables`."""
        return self._read("contributions", CONTRIBUTIONS)

    def credits(self) -> pa.Table:
        """Return every settled credit, in the order settled; empty but for `method="whole"`. Loads all of it."""
        return self._read("credits", CREDITS)

    def accounts(self) -> pa.Table:
        """Return the accounts: one row per step and validation label (a set, one of its points, or one of its folds)."""
        return self._read("accounts", ACCOUNTS)

    def samples(self) -> pa.Table | None:
        """Return the samples table, or None if none was registered."""
        tables = self._load("samples")
        return pa.concat_tables(tables, promote_options="default") if tables else None

    def scores(
        self,
        validation: Names = None,
        view: str = "plain",
        *,
        top: int | None = None,
        bottom: int | None = None,
        by: str | None = None,
        open_credits: Sequence[SettledCredits] = (),
    ) -> pa.Table:
        """Return one row per sample and validation set, ordered by validation set, then sample; the same bits on every call.

        ``score`` is the sum over uses, in double precision, of the settled credit, or of the contribution where none is settled (of
        a set in folds the mean of the folds' sums, with its standard error; in the view ``rank`` the mean over uses).
        ``step_score`` adds up contributions alone, ``pending`` counts the uses whose window is open, ``estimate_error`` is the
        error of the credits' estimates. Positive = the sample lowered the validation loss.

        Args:
            validation: A set, several, or None for all.
            view: How a use is seen: one of :data:`inrun.ledger.scores.VIEWS`.
            top: Only the so many highest scores of every set, with what is registered of these samples; the highest first.
            bottom: Only the so many lowest, the lowest first. With ``top`` both ends, from the highest down, no sample twice.
            by: A column of the registered samples: one row per ``group`` and set, with the figures of ``inrun groups``; ``top`` and
                ``bottom`` then choose groups, by ``total``.
            open_credits: Credit so far of windows that are open. It takes the place of the contributions and counts as pending;
                where a use is settled, the settled credit stands.
        """
        with self.tables() as tables:
            tables.overlay(open_credits)
            return answer(tables, validation, view, top=top, bottom=bottom, by=by)

    @property
    def plot(self) -> Plots:
        """Return the figures: ``plot.groups()``, ``.samples()``, ``.over_time()``, ``.agreement(a, b)``, ``.books()``."""
        from inrun.figures import Plots

        return Plots(lambda: self)

    @contextmanager
    def tables(self, memory_limit: str | None = None) -> Iterator[Tables]:
        """Open the tables for queries in SQL; what DuckDB has against them becomes a LedgerError."""
        self.flush_if_open()
        with connect(self, memory_limit) as tables:
            yield tables


def reader_of(source: LedgerReader | str | Path) -> LedgerReader:
    """Return a reader of a run, given as one or as its path."""
    return source if isinstance(source, LedgerReader) else LedgerReader(source)
