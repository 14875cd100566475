"""The ledger on disk: a folder of Parquet parts and a manifest that says which of them count.

::

    run.json                     schema version, run id, sign, unit, method, update, model, software
    manifest/r0.jsonl, r0.head   the records of rank 0 (see ``manifest``)
    contributions/r0-000007.parquet
    accounts/r0-000007.parquet
    samples/r0-000001.parquet

A part is written aside, synced, renamed, its folder synced, and only then recorded; a part without a record does not exist.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from inrun.errors import LedgerError
from inrun.ledger.files import Files, make_folder_durably, write_durably
from inrun.ledger.lock import Lock
from inrun.ledger.manifest import (
    FOLDER,
    TABLES,
    Chain,
    ManifestWriter,
    Part,
    chain_path,
    check_relative,
    name_of_part,
    ranks_of,
    read_inside,
    refuse_links,
    survey,
)
from inrun.ledger.marks import check_mark, resume_chain
from inrun.ledger.record import SIGN, UNIT, StepRecord
from inrun.ledger.rows import checked, contribution_table, to_parquet
from inrun.ledger.schema import ACCOUNTS, CONTRIBUTIONS

log = logging.getLogger("inrun")
#: The version of the layout; a reader refuses newer ones.
SCHEMA = 1
#: How often a reader looks again when a writer resumed under it: all but the last time False.
TRIES = (*[False] * 20, True)
#: Rows that are held in memory at most, whatever ``flush_every`` says.
MOST_ROWS = 1_000_000
#: Bytes of a part from which reading it in several threads pays.
THREADS_FROM = 1 << 20


def read_about(run: Path) -> dict[str, Any]:
    """Read ``run.json``; LedgerError if there is no run, or it was written by a newer version."""
    path = run / "run.json"
    if not path.is_file():
        raise LedgerError(f"{run} holds no run: there is no run.json. A run is a folder written by inrun.Ledger or inrun train")
    try:
        about = json.loads(read_inside(run, path))
        version = about["schema"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LedgerError(f"{path} is damaged ({type(error).__name__}: {error}); inrun verify {run} says more") from None
    if not isinstance(version, int) or version > SCHEMA:
        raise LedgerError(f"{run} was written with ledger schema {version!r}; this inrun reads up to {SCHEMA}: install a newer one")
    return dict(about)


class LedgerReader:
    """A run's books, read-only. Made by :meth:`Ledger.open`; safe to use while training writes."""

    def __init__(self, path: str | Path) -> None:
        """Open a run."""
        self.path = Path(path)
        self.about = read_about(self.path)

    def chains(self) -> list[Chain]:
        """Read the manifests of all ranks; LedgerError if one is damaged."""
        found, damage = survey(self.path)
        damage = [d for chain in found for d in chain.damage] + damage
        if damage:
            raise LedgerError(f"{self.path} is damaged: {damage[0]}. `inrun verify` names all of it, `inrun repair` saves the rest")
        return found

    def parts(self, table: str) -> list[Part]:
        """Return the parts of a table that count, in the order they were written, rank by rank."""
        for last in TRIES:
            found = self._recorded(table)
            for part in found:
                state = _state(self.path, part)
                if state is not None:
                    break
            else:
                return found
            if last or self._recorded(table) == found:  # else a writer has just resumed from an older mark
                break
        raise LedgerError(f"{self.path / part.path} {state}. `inrun verify` names all damage, `inrun repair` saves the rest")

    def _recorded(self, table: str) -> list[Part]:
        return [p for c in self.chains() for r in c.live() for p in r.parts if p.table == table]

    def files(self, table: str) -> list[str]:
        """Return the paths of the Parquet files of a table that count."""
        return [str(self.path / p.path) for p in self.parts(table)]

    def _read(self, table: str, schema: pa.Schema) -> pa.Table:
        tables = self._load(table)
        return pa.concat_tables(tables) if tables else schema.empty_table()

    def _load(self, table: str) -> list[pa.Table]:
        for last in TRIES:
            files = self.files(table)
            try:
                return [_read_part(table, file) for file in files]
            except (OSError, ValueError, pa.ArrowException) as error:
                if last or self.files(table) == files:  # else a writer has just resumed from an older mark
                    raise LedgerError(f"{self.path} cannot be read: {error}. `inrun verify` names the damage") from error
        raise AssertionError

    def contributions(self) -> pa.Table:
        """Return every contribution, in the order written. Loads all of it: for large runs use the queries."""
        return self._read("contributions", CONTRIBUTIONS)

    def accounts(self) -> pa.Table:
        """Return the accounts: one row per step and validation set (or point, or fold)."""
        return self._read("accounts", ACCOUNTS)

    def samples(self) -> pa.Table | None:
        """Return the samples table, or None if none was registered."""
        tables = self._load("samples")
        return pa.concat_tables(tables, promote_options="default") if tables else None

    def scores(self, **options: Any) -> pa.Table:
        """Return one row per sample and validation set; see :func:`inrun.ledger.queries.scores` for the options."""
        from inrun.ledger.queries import scores

        return scores(self, **options)


class Ledger(LedgerReader):
    """Writes a run's books to a folder, so that nothing is lost or counted twice whenever the process dies.

    Args:
        path: A folder that holds no run yet. ``Ledger.resume`` goes on with one, ``Ledger.open`` reads one.
        rank: This process among those that write side by side.
        flush_every: Rows (an integer) or time (text such as "30s" or "5min") after which a part is written.
        about: What ``run.json`` says beside schema, sign and unit.
    """

    _lock: Lock | None

    def __init__(
        self,
        path: str | Path,
        *,
        rank: int = 0,
        flush_every: int | str = "60s",
        about: dict[str, Any] | None = None,
        files: Files | None = None,
    ) -> None:
        """Start a new run; see the class."""
        self._configure(Path(path), rank, flush_every, files)
        with self._opening():
            self._wait_or_make_folders()
            self._lock = Lock(self.path, self.rank)
            self._begin_run(about or {})
            super().__init__(path)
            self._begin_books()

    def _configure(self, run: Path, rank: int, flush_every: int | str, files: Files | None) -> None:
        self._rows, self._seconds = parse_flush(flush_every)
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise LedgerError(f"rank is {rank!r}; it must be an integer of at least 0")
        self.path, self.rank, self._files = run, rank, files or Files()
        self._stopped: str | None = None
        self._lock = None
        self._at_step, self._last_account = 0, -1
        #: The step of the last mark: what is written later comes after it, even if it speaks of earlier steps.
        self._marked = -1
        self._clear_buffers()

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

    def _begin_books(self) -> None:
        """Write the first record of this rank."""
        if chain_path(self.path, self.rank).exists():
            raise LedgerError(f"{self.path} has records of rank {self.rank} already; go on with Ledger.resume(path, mark)")
        if not isinstance(self.about.get("run_id"), str):
            raise LedgerError(f"{self.path} has no run id; it was not begun by inrun.Ledger, and cannot be written to")
        self._manifest = ManifestWriter(self.path, self.rank, self._files, None)
        digest = hashlib.sha256((self.path / "run.json").read_bytes()).hexdigest()
        self._commit("begin", (), {"run_id": self.about["run_id"], "run_json": digest, "software": software()})

    def _continue_books(self, chain: Chain, step: int) -> None:
        """Go on after the last record of this rank, at a step."""
        self._manifest = ManifestWriter(self.path, self.rank, self._files, chain)
        live = [r for r in chain.live() if r.kind == "flush"]
        self._at_step = self._marked = step
        steps = [p.last_step for r in live for p in r.parts if p.table == "accounts" and p.last_step is not None]
        self._last_account = max(steps, default=-1)
        self._remove_leftovers()

    def _wait_or_make_folders(self) -> None:
        """Make the folders (rank 0), or wait for rank 0 to have made the run."""
        if self.rank > 0:
            _wait_for(self.path / "run.json")
        self._refuse_run()
        refuse_links(self.path)
        chains, damage = survey(self.path)
        if self.rank == 0 and (damage or any(c.records or c.damage for c in chains)):
            raise LedgerError(
                f"{self.path} has parts of a run but no run.json. `inrun verify` says more, `inrun repair` saves the rest"
            )
        for folder in (self.path, self.path / FOLDER, *(self.path / t for t in TABLES)):
            make_folder_durably(self._files, folder)

    def _refuse_run(self) -> None:
        if self.rank == 0 and (self.path / "run.json").exists():
            raise LedgerError(
                f"{self.path} holds a run already; Ledger.resume(path, mark) goes on with it, Ledger.open(path) reads it"
            )

    def _begin_run(self, about: dict[str, Any]) -> None:
        """Write ``run.json`` (rank 0)."""
        if self.rank > 0:
            return
        self._refuse_run()  # another process may have had the lock a moment ago
        described = {**about, "schema": SCHEMA, "run_id": secrets.token_hex(8), "sign": SIGN, "unit": UNIT, "software": software()}
        try:
            text = json.dumps(described, indent=2)
        except (TypeError, ValueError, RecursionError) as error:
            raise LedgerError(
                f"about cannot be written as JSON ({error}); accepted are plain dicts, lists, texts and numbers"
            ) from None
        write_durably(self._files, self.path / "run.json", text.encode() + b"\n")

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
        world_size: int = 1,
        flush_every: int | str = "60s",
        files: Files | None = None,
    ) -> Ledger:
        """Go on with a run from a mark that was saved with the model; what was written after it no longer counts.

        Args:
            path: The run's folder.
            mark: What ``mark()`` returned, from any rank; None starts over in that folder.
            rank: This process.
            world_size: How many processes go on; rank 0 closes the books of ranks that are no more.
            flush_every: As for a new ledger.
            files: For tests.
        """
        ledger = cls.__new__(cls)
        ledger._configure(Path(path), rank, flush_every, files)
        with ledger._opening():
            LedgerReader.__init__(ledger, path)
            refuse_links(ledger.path)
            ledger.chains()  # damage is named before anything is touched
            step = check_mark(ledger.path, ledger.about, mark)
            for folder in (FOLDER, *TABLES):  # a power cut may have left run.json alone
                make_folder_durably(ledger._files, ledger.path / folder)
            ledger._lock = Lock(ledger.path, rank)
            gone = [r for r in ranks_of(ledger.path) if r >= world_size and r != rank] if rank == 0 else []
            for other in gone:
                lock = Lock(ledger.path, other)
                try:
                    resume_chain(ledger.path, other, mark, ledger._files)
                finally:
                    lock.release()
            chain = resume_chain(ledger.path, rank, mark, ledger._files) if chain_path(ledger.path, rank).exists() else None
            if chain is None:
                ledger._at_step = ledger._marked = step
                ledger._begin_books()  # a new rank, or one that died before its first record
            else:
                ledger._continue_books(chain, step)
        return ledger

    # Writing

    def _clear_buffers(self) -> None:
        self._order: list[tuple[int, npt.NDArray[np.int64], str, npt.NDArray[np.float32]]] = []
        self._account_rows: list[dict[str, Any]] = []
        self._pending_rows = 0
        self._from_step: int | None = None
        self._since = time.monotonic()

    def _check_writable(self) -> None:
        if self._stopped is not None:
            raise LedgerError(f"{self.path} takes no more writes: {self._stopped}")
        if self._lock is None or not self._lock.held:
            raise LedgerError(f"{self.path} takes no writes from this process: it was forked from the writer")

    def write(self, record: StepRecord) -> None:
        """Take one step. It is on disk after the next flush."""
        self._check_writable()
        step, ids, columns, accounts = checked(record)
        if accounts and step <= self._last_account:
            raise LedgerError(f"step {step} was written already (the last one is {self._last_account}); each step counts once")
        self._order += [(step, ids, label, values) for label, values in columns]
        self._account_rows += accounts
        self._pending_rows += sum(len(values) for _, values in columns)
        if accounts:
            self._last_account = step
        if self._from_step is None:  # late rows belong to the moment they are written in
            self._from_step = max(step, self._at_step)
        self._at_step = max(self._at_step, step + 1)
        due = self._rows is not None and self._pending_rows >= self._rows
        late = self._seconds is not None and time.monotonic() - self._since >= self._seconds
        if due or late or self._pending_rows >= MOST_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered as parts and record them; returns when they are safely on disk."""
        self._check_writable()
        if not self._order and not self._account_rows:
            self._since = time.monotonic()
            return
        try:
            tables = {"contributions": contribution_table(self._order)} if self._order else {}
            if self._account_rows:
                tables["accounts"] = pa.Table.from_pylist(self._account_rows, schema=ACCOUNTS)
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            self._stopped = f"rows do not fit the columns of the books ({error})"
            raise LedgerError(f"{self.path}: {self._stopped}; they were not written") from error
        number = self._manifest.count
        parts = tuple(self._write_part(name_of_part(name, self.rank, number), table) for name, table in tables.items())
        self._commit("flush", parts, {"from_step": self._from_step, "marked": self._marked})
        self._clear_buffers()

    def _write_part(self, name: str, table: pa.Table) -> Part:
        data = to_parquet(table)
        self._guarded(lambda: write_durably(self._files, self.path / name, data))
        steps = table["step"].to_numpy() if "step" in table.column_names and table.num_rows else None
        first, last = (None, None) if steps is None else (int(steps.min()), int(steps.max()))
        return Part(name, table.num_rows, len(data), hashlib.sha256(data).hexdigest(), first, last)

    def _commit(self, kind: str, parts: tuple[Part, ...], more: dict[str, Any]) -> None:
        self._guarded(lambda: self._manifest.append(kind, self._at_step, parts, more))

    def _guarded(self, action: Any) -> None:
        """Run file operations; after a failure nothing may be written any more, since what is on disk is in doubt."""
        try:
            action()
        except OSError as error:
            self._stopped = f"writing failed ({error}); what was recorded before is safe, the rest since the last flush is in doubt"
            raise LedgerError(
                f"{self.path}: {self._stopped}. Free space or mend the disk, then Ledger.resume from a checkpoint"
            ) from error

    def mark(self) -> dict[str, Any]:
        """Flush, and return the position to save with the model's checkpoint (plain data)."""
        self.flush()
        last = self._manifest.count - 1
        self._marked = self._at_step
        return {
            "run_id": self.about["run_id"],
            "rank": self.rank,
            "record": last,
            "hash": self._manifest.last_hash,
            "step": self._at_step,
        }

    def register_samples(self, data: Any, *, text_preview: int = 400) -> int:
        """Add sample metadata: a column ``sample_id`` (integers) and any others; returns the number of rows.

        Args:
            data: An Arrow table, a pandas or polars frame, a ``datasets.Dataset``, or an iterable of dicts.
            text_preview: Texts are cut to so many characters (0 keeps them whole).
        """
        from inrun.ledger.samples import as_samples_table

        self._check_writable()
        known = self.samples()
        table = as_samples_table(data, known, text_preview)
        number = self._manifest.count
        part = self._write_part(name_of_part("samples", self.rank, number), table)
        self._commit("samples", (part,), {})
        return table.num_rows

    def register_sample_pieces(self, pieces: Iterable[pa.Table], *, text_preview: int = 400) -> int:
        """Add sample metadata piece by piece, where all of it would not fit into memory; returns the number of rows.

        Every piece counts once it is written. Nothing may have been registered before, and ids that are texts (``id``) are not
        taken: telling whether one occurs twice needs all of them at once.

        Args:
            pieces: Arrow tables as :meth:`register_samples` takes them, each with ``sample_id``.
            text_preview: As for :meth:`register_samples`.
        """
        from inrun.ledger.samples import as_samples_table

        self._check_writable()
        if self.files("samples"):
            raise LedgerError(f"{self.path} has registered samples already; add further ones with register_samples")
        seen: list[npt.NDArray[np.int64]] = []
        for piece in pieces:
            table = as_samples_table(piece, None, text_preview)
            if "id" in table.column_names:
                raise LedgerError("samples with ids that are texts cannot be registered piece by piece; use register_samples")
            ids = np.sort(table["sample_id"].to_numpy())
            twice = [x for other in seen if _overlap(ids, other) for x in np.intersect1d(ids, other, assume_unique=True)[:1]]
            if twice:
                raise LedgerError(f"sample_id {twice[0]} occurs more than once among the samples; each sample counts once")
            # Pieces in order, the usual case, grow one array: then nothing is compared but ends.
            if seen and len(ids) and len(seen[-1]) and seen[-1][-1] < ids[0]:
                seen[-1] = np.concatenate([seen[-1], ids])
            else:
                seen.append(ids)
            part = self._write_part(name_of_part("samples", self.rank, self._manifest.count), table)
            self._commit("samples", (part,), {})
        return sum(len(ids) for ids in seen)

    def _remove_leftovers(self) -> None:
        """Remove parts of this rank that no record counts: unfinished commits, and what a resume dropped."""
        counted = {p.path for c in self.chains() for r in c.live() for p in r.parts}
        for table in TABLES:
            for file in (self.path / table).glob(f"r{self.rank}-*"):
                if f"{table}/{file.name}" not in counted:
                    self._files.remove(file)
            self._files.sync_folder(self.path / table)  # else a power cut could bring back a name that a record has since

    def _read(self, table: str, schema: pa.Schema) -> pa.Table:
        self._flush_if_open()
        return super()._read(table, schema)

    def scores(self, **options: Any) -> pa.Table:
        """Flush, and return one row per sample and validation set."""
        self._flush_if_open()
        return super().scores(**options)

    def _flush_if_open(self) -> None:
        if self._stopped is None and self._lock is not None and self._lock.held:
            self.flush()

    def close(self) -> None:
        """Flush and give the lock back. Reading goes on to work."""
        try:
            self._flush_if_open()
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


def _overlap(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> bool:
    """Whether the ranges of two sorted arrays meet."""
    return bool(len(a) and len(b) and a[0] <= b[-1] and b[0] <= a[-1])


def _state(run: Path, part: Part) -> str | None:
    """Say what is wrong with the file of a part at first sight."""
    file = run / check_relative(part.path)
    if file.is_symlink() or file.parent.is_symlink():
        return "is a link; the parts of a run must be inside of it"
    size = file.stat().st_size if file.is_file() else None
    if size == part.nbytes:
        return None
    return "is missing" if size is None else f"has {size} bytes instead of {part.nbytes}"


def _read_part(table: str, file: str) -> pa.Table:
    schema = {"contributions": CONTRIBUTIONS, "accounts": ACCOUNTS}.get(table)
    with pq.ParquetFile(file, page_checksum_verification=True) as opened:
        found = opened.read(use_threads=os.path.getsize(file) > THREADS_FROM)
    return found if schema is None else found.cast(schema)


def parse_flush(given: int | str) -> tuple[int | None, float | None]:
    """Return rows or seconds."""
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given, None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|min|h)\s*", str(given))
    if not found or isinstance(given, bool):
        raise LedgerError(f'flush_every is {given!r}; accepted are rows as an integer, or a time such as "30s" or "5min"')
    return None, float(found.group(1)) * {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}[found.group(2)]


def software() -> dict[str, str]:
    """Return versions that matter for reading the numbers later; torch only if it is loaded."""
    import sys
    from importlib.metadata import version

    found = {"inrun": version("inrun"), "python": platform.python_version(), "numpy": np.__version__, "pyarrow": pa.__version__}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
    return found


def _wait_for(path: Path, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            raise LedgerError(f"{path} did not appear within {seconds:.0f} s; rank 0 makes it")
        time.sleep(0.05)
