"""The ledger on disk: a folder of Parquet parts and a manifest that says which of them count.

::

    run.json                     schema version, run id, sign, unit, method, update, model, software
    manifest/r0.jsonl, r0.head   the entries of rank 0 (see ``manifest``)
    contributions/r0-000007.parquet
    credits/r0-000007.parquet    of runs that keep whole credit
    accounts/r0-000007.parquet
    samples/r0-000001.parquet

A part is written aside, synced, renamed, its folder synced, and only then entered; a part without an entry does not exist.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from inrun.errors import LedgerError
from inrun.files import Files, Lock, make_folder_durably, write_durably
from inrun.ledger.about import NAME, describe_run, software
from inrun.ledger.buffer import Buffer, CheckedStep
from inrun.ledger.erase import erase
from inrun.ledger.lock import lock_rank
from inrun.ledger.manifest import (
    FOLDER,
    TABLES,
    Chain,
    ManifestEntry,
    ManifestWriter,
    Part,
    chain_path,
    name_of_part,
    read_inside,
    refuse_links,
    survey,
)
from inrun.ledger.marks import check_mark, resume_chain
from inrun.ledger.parts import complete_rows, parse_part, steps_of, to_parquet
from inrun.ledger.ranks import LOCK_PATIENCE, check_ranks, cut_others, wait_for_begin, wait_for_resume
from inrun.ledger.reader import LedgerReader
from inrun.ledger.record import SettledCredits, StepRecord
from inrun.ledger.samples import SeenIds, as_samples_table
from inrun.ledger.saved import refuse_old_save
from inrun.ledger.settled import SettledSteps


class Ledger(LedgerReader):
    """Writes a run's ledger to a folder, so that nothing is lost or counted twice whenever the process dies.

    Args:
        path: A folder that holds no run yet. ``Ledger.resume`` goes on with one, ``Ledger.open`` reads one.
        rank: This process among those that write side by side.
        world: How many there are. A step counts once all of them have flushed it. Accounts, the same on all, are rank 0's.
        flush_every: Rows (an integer) or time (text such as "30s" or "5min") after which a part is written.
        about: What ``run.json`` says beside schema, sign and unit.
    """

    _lock: Lock | None

    def __init__(
        self,
        path: str | Path,
        *,
        rank: int = 0,
        world: int = 1,
        flush_every: int | str = "60s",
        about: dict[str, Any] | None = None,
        files: Files | None = None,
    ) -> None:
        """Start a new run; see the class."""
        self._configure(Path(path), rank, world, flush_every, files)
        with self._opening():
            self._wait_or_make_folders()
            self._lock = lock_rank(self.path, self.rank)
            self._begin_run(about or {})
            super().__init__(path)
            self._begin_chain()

    def _configure(self, run: Path, rank: int, world: int, flush_every: int | str, files: Files | None) -> None:
        self._buffer = Buffer(flush_every)
        check_ranks(rank, world)
        self.path, self.rank, self.world, self._files = run, rank, world, files or Files()
        self._stopped: str | None = None
        self._lock = None
        self._at_step, self._last_account = 0, -1
        self._settled = SettledSteps()
        #: Up to which step the manifest says that all is written.
        self._stated = 0
        #: The step of the last mark: what is written later comes after it, even if it speaks of earlier steps.
        self._marked = -1
        #: The first step under way since the last flush.
        self._from_step: int | None = None

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        """Give the lock back if opening fails, and say it in our words."""
        try:
            yield
        except BaseException as error:
            if self._lock is not None:
                self._lock.release()
            self._stopped = self._stopped or "it could not be opened"
            if isinstance(error, OSError):
                raise LedgerError(f"{self.path} cannot be opened for writing: {error}") from error
            raise

    def _begin_chain(self) -> None:
        """Write the first entry of this rank."""
        if chain_path(self.path, self.rank).exists():
            raise LedgerError(f"{self.path} has entries of rank {self.rank} already; go on with Ledger.resume(path, mark)")
        if not isinstance(self.about.get("run_id"), str):
            raise LedgerError(f"{self.path} has no run id; it was not begun by inrun.Ledger, and cannot be written to")
        self._manifest = ManifestWriter(self.path, self.rank, self._files, None)
        digest = hashlib.sha256((self.path / NAME).read_bytes()).hexdigest()
        more = {"run_id": self.about["run_id"], "run_json": digest, "software": software()}
        self._commit("begin", (), more | ({"world": self.world} if self.world > 1 else {}))

    def _continue_chain(self, chain: Chain, step: int) -> None:
        """Go on after the last entry of this rank, at a step."""
        self._manifest = ManifestWriter(self.path, self.rank, self._files, chain)
        parts = [p for e in chain.live() if e.kind == "flush" for p in e.parts]
        self._at_step = self._marked = self._stated = step
        self._last_account = max((p.last_step for p in parts if p.table == "accounts" and p.last_step is not None), default=-1)
        if self.rank > 0:  # rank 0 has the accounts
            self._last_account = step - 1
        self._settled = SettledSteps(s for p in parts if p.table == "credits" for s in steps_of(self.path, p))
        self._remove_leftovers()

    def _wait_or_make_folders(self) -> None:
        """Make the folders (rank 0), or wait for rank 0 to have made the run."""
        if self.rank > 0:
            wait_for_begin(self.path, self.rank, self.world)
        self._refuse_run()
        refuse_links(self.path)
        chains, damage = survey(self.path)
        if self.rank == 0 and (damage or any(c.entries or c.damage for c in chains)):
            raise LedgerError(
                f"{self.path} has parts of a run but no run.json. `inrun verify` says more, `inrun repair` saves the rest"
            )
        for folder in (self.path, self.path / FOLDER, *(self.path / t for t in TABLES)):
            make_folder_durably(self._files, folder)

    def _refuse_run(self) -> None:
        if self.rank == 0 and (self.path / NAME).exists():
            raise LedgerError(
                f"{self.path} holds a run already; Ledger.resume(path, mark) goes on with it, Ledger.open(path) reads it"
            )

    def _begin_run(self, about: dict[str, Any]) -> None:
        """Write ``run.json`` (rank 0)."""
        if self.rank > 0:
            return
        self._refuse_run()  # another process may have had the lock a moment ago
        write_durably(self._files, self.path / NAME, describe_run(about))

    @classmethod
    def open(cls, path: str | Path) -> LedgerReader:
        """Read a run, also while training writes to it."""
        return LedgerReader(path)

    @classmethod
    def resume(
        cls,
        path: str | Path,
        mark: dict[str, Any] | None,
        *,
        rank: int = 0,
        world: int = 1,
        flush_every: int | str = "60s",
        files: Files | None = None,
    ) -> Ledger:
        """Go on with a run from a mark that was saved with the model; what was written after it no longer counts.

        Args:
            path: The run's folder.
            mark: What ``mark()`` returned, from any rank; None starts over in that folder.
            rank: This process.
            world: How many processes go on, whatever their number was before. Rank 0 opens the books for all; the others wait.
            flush_every: As for a new ledger.
            files: For tests.
        """
        ledger = cls.__new__(cls)
        ledger._configure(Path(path), rank, world, flush_every, files)
        with ledger._opening():
            LedgerReader.__init__(ledger, path)
            refuse_links(ledger.path)
            refuse_old_save(ledger.path)
            ledger.chains()  # damage is named before anything is touched
            step = check_mark(ledger.path, ledger.about, mark)
            for folder in (FOLDER, *TABLES):  # a power cut may have left run.json alone
                make_folder_durably(ledger._files, ledger.path / folder)
            if rank == 0:
                ledger._lock = lock_rank(ledger.path, 0)
                cut_others(ledger.path, world, mark, ledger._files)
            else:
                with contextlib.suppress(LedgerError):  # only here can be seen that a process of this machine is gone
                    lock_rank(ledger.path, rank).release()
                wait_for_resume(ledger.path, rank, world, mark, step)
                ledger._lock = lock_rank(ledger.path, rank, LOCK_PATIENCE)
            chain = None
            if chain_path(ledger.path, rank).exists():
                chain = resume_chain(ledger.path, rank, mark, ledger._files, world)
            if chain is None:
                ledger._at_step = ledger._marked = ledger._stated = step
                ledger._begin_chain()  # a new rank, or one that died before its first entry
            else:
                ledger._continue_chain(chain, step)
        return ledger

    @classmethod
    def erase(cls, path: str | Path) -> None:
        """Remove the ledger from a folder, and nothing else: its parts, manifests and ``run.json``. None there is fine.

        Raises:
            LedgerError: A process is writing to it, or its files cannot be removed.
        """
        erase(Path(path))

    # Writing

    def _check_writable(self) -> None:
        if self._stopped is not None:
            raise LedgerError(f"{self.path} takes no more writes: {self._stopped}")
        if self._lock is None or not self._lock.held:
            raise LedgerError(f"{self.path} takes no writes from this process: it was forked from the writer")

    def write(self, record: StepRecord) -> None:
        """Take one step, and the credits that were settled when it was finished. It is on disk after the next flush."""
        self._check_writable()
        taken = CheckedStep(record)
        step, before = taken.step, max(self._at_step, taken.step + 1)
        if taken.accounts and step <= self._last_account:
            raise LedgerError(f"step {step} was written already (the last one is {self._last_account}); each step counts once")
        self._buffer.settle(self._settled.take(record.settled, before))
        if taken.accounts:
            self._last_account = step
        if self.rank > 0:
            taken.accounts = []
        self._buffer.add(taken)
        if self._from_step is None:  # late rows belong to the moment they are written in
            self._from_step = max(step, self._at_step)
        self._at_step = before
        if self._buffer.is_due:
            self.flush()

    def settle(self, settled: Sequence[SettledCredits]) -> None:
        """Take credits that are settled without a step, as when a run is closed. They are on disk after the next flush.

        LedgerError if a step was settled already, or is not written yet; then none of them is taken.
        """
        self._check_writable()
        self._buffer.settle(self._settled.take(settled, self._at_step))
        if self._from_step is None and not self._buffer.is_empty:
            self._from_step = self._at_step
        if self._buffer.is_due:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered as parts and enter them in the manifest; returns when they are safely on disk."""
        self._check_writable()
        if self._buffer.is_empty and (self.world == 1 or self._at_step == self._stated):
            self._buffer.clear()
            return
        try:
            tables = self._buffer.tables()
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            self._stopped = f"rows do not fit the columns of the ledger ({error})"
            raise LedgerError(f"{self.path}: {self._stopped}; they were not written") from error
        parts = tuple(self._write_part(name, table) for name, table in tables.items())
        self._commit("flush", parts, {"from_step": self._from_step, "marked": self._marked})
        self._buffer.clear()
        self._from_step, self._stated = None, self._at_step

    def _write_part(self, kind: str, table: pa.Table) -> Part:
        name, data = name_of_part(kind, self.rank, self._manifest.count), to_parquet(table)
        self._guarded(lambda: write_durably(self._files, self.path / name, data))
        steps = table["step"].to_numpy() if "step" in table.column_names and table.num_rows else None
        first, last = (None, None) if steps is None else (int(steps.min()), int(steps.max()))
        return Part(name, table.num_rows, len(data), hashlib.sha256(data).hexdigest(), first, last)

    def _commit(self, kind: str, parts: tuple[Part, ...], more: dict[str, Any]) -> None:
        self._guarded(lambda: self._manifest.append(kind, self._at_step, parts, more))

    def _guarded(self, action: Callable[[], object]) -> None:
        """Run file operations; after a failure nothing may be written any more, since what is on disk is in doubt."""
        try:
            action()
        except OSError as error:
            self._stopped = f"writing failed ({error}); what was committed is safe, the rest since the last flush is in doubt"
            raise LedgerError(
                f"{self.path}: {self._stopped}. Free space or mend the disk, then Ledger.resume from a checkpoint"
            ) from error

    def adopt(self, entry: ManifestEntry, run: Path, end: int | None = None) -> None:
        """Take over an entry of another ledger with its parts, byte by byte.

        Args:
            entry: What to take; it counts here as the next entry.
            run: The folder of the ledger that it is from.
            end: The first step that is not complete there; rows from there on are left out. None takes all.

        Raises:
            LedgerError: A part is not what was entered.
        """
        self._check_writable()
        self._at_step = max(self._at_step, entry.at_step)
        parts = tuple(
            self._adopt_part(p, run, end) for p in entry.parts if end is None or p.first_step is None or p.first_step < end
        )
        self._commit(entry.kind, parts, entry.more)

    def _adopt_part(self, part: Part, run: Path, end: int | None) -> Part:
        data = read_inside(run, run / part.path)
        if hashlib.sha256(data).hexdigest() != part.sha256:
            raise LedgerError(f"{run / part.path} is damaged; run `inrun verify` and `inrun repair` first")
        if end is not None and part.last_step is not None and part.last_step >= end:
            return self._write_part(part.table, complete_rows(parse_part(data), end))
        name = name_of_part(part.table, self.rank, self._manifest.count)
        self._guarded(lambda: write_durably(self._files, self.path / name, data))
        return Part(name, part.rows, part.nbytes, part.sha256, part.first_step, part.last_step)

    def mark(self) -> dict[str, Any]:
        """Flush, and return the position to save with the model's checkpoint (plain data).

        Where several ranks write, all of them call it after the same step; then the mark of any of them is a mark for all. Save the
        checkpoint when every rank's call has returned.
        """
        self.flush()
        last = self._manifest.count - 1
        self._marked = self._at_step
        return {
            "run_id": self.about["run_id"],
            "rank": self.rank,
            "record": last,
            "hash": self._manifest.last_hash,
            "step": self._at_step,
            **({"world": self.world} if self.world > 1 else {}),
        }

    def register_samples(self, data: Any, *, text_preview: int = 400) -> int:
        """Add sample metadata: a column ``sample_id`` (integers) and any others; returns the number of rows.

        Args:
            data: An Arrow table, a pandas or polars frame, a ``datasets.Dataset``, or an iterable of dicts.
            text_preview: Texts are cut to so many characters (0 keeps them whole).
        """
        self._check_writable()
        table = as_samples_table(data, self.samples(), text_preview)
        self._commit("samples", (self._write_part("samples", table),), {})
        return table.num_rows

    def register_sample_pieces(self, pieces: Iterable[pa.Table], *, text_preview: int = 400) -> int:
        """Add sample metadata piece by piece, where all of it would not fit into memory; returns the number of rows.

        Every piece counts once it is written. Nothing may have been registered before, and ids that are texts (``id``) are not
        taken: telling whether one occurs twice needs all of them at once.

        Args:
            pieces: Arrow tables as :meth:`register_samples` takes them, each with ``sample_id``.
            text_preview: As for :meth:`register_samples`.
        """
        self._check_writable()
        if self.files("samples"):
            raise LedgerError(f"{self.path} has registered samples already; add further ones with register_samples")
        seen = SeenIds()
        for piece in pieces:
            table = as_samples_table(piece, None, text_preview)
            if "id" in table.column_names:
                raise LedgerError("samples with ids that are texts cannot be registered piece by piece; use register_samples")
            seen.add(table["sample_id"].to_numpy())
            self._commit("samples", (self._write_part("samples", table),), {})
        return seen.count

    def _remove_leftovers(self) -> None:
        """Remove parts of this rank that no entry counts: unfinished commits, and what a resume dropped."""
        counted = {p.path for c in self.chains() for e in c.live() for p in e.parts}
        for table in TABLES:
            for file in (self.path / table).glob(f"r{self.rank}-*"):
                if f"{table}/{file.name}" not in counted:
                    self._files.remove(file)
            self._files.sync_folder(self.path / table)  # else a power cut could bring back a name that an entry has since

    def flush_if_open(self) -> None:
        """Flush, unless the ledger is closed or belongs to another process: what is read is what was written."""
        if self._stopped is None and self._lock is not None and self._lock.held:
            self.flush()

    def close(self) -> None:
        """Flush and give the lock back. Reading goes on to work."""
        try:
            self.flush_if_open()
        finally:
            self._stopped = self._stopped or "the ledger is closed"
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Ledger:
        """Return the ledger."""
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Close; after an exception, too, what was written counts."""
        self.close()
