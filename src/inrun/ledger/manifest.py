"""The manifest of one rank: an append-only list of records that says which parts exist.

Each record is one JSON line with the hash of the record before it. Kinds:

``begin``    the run: its id, and the hash of ``run.json``
``flush``    parts that were written (contributions and accounts of some steps)
``samples``  a part of the samples table
``resume``   the run went on from an earlier record: ``flush`` records after ``keep`` no longer count
``drop``     parts that were set aside by ``inrun repair``
``about``    ``run.json`` was mended by ``inrun repair``; its new hash

``<rank>.head`` holds number and hash of the last record that was synced. A last line that is not whole is the trace of a
crash in the middle of a commit, and does not count; if the head knows it, it is damage.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inrun.errors import LedgerError
from inrun.ledger.files import Files, write_durably

FOLDER = "manifest"


@dataclass(frozen=True)
class Part:
    """One Parquet file."""

    path: str
    rows: int
    nbytes: int
    sha256: str
    first_step: int | None = None
    last_step: int | None = None

    @property
    def table(self) -> str:
        """Return the table it belongs to: contributions, accounts or samples."""
        return self.path.split("/", 1)[0]


@dataclass(frozen=True)
class Record:
    """One line."""

    number: int
    kind: str
    rank: int
    #: Steps the writer had finished when it wrote this.
    at_step: int
    previous: str
    parts: tuple[Part, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the record as plain data, without its hash."""
        parts = [{k: v for k, v in vars(p).items() if v is not None} for p in self.parts]
        fixed = {"number": self.number, "kind": self.kind, "rank": self.rank, "at_step": self.at_step}
        return {**fixed, "previous": self.previous, "parts": parts, "more": self.more}

    @property
    def hash(self) -> str:
        """Return the hash that the next record refers to."""
        return hashlib.sha256(_canonical(self.body())).hexdigest()

    def line(self) -> bytes:
        """Return the line of the file."""
        return _canonical({**self.body(), "hash": self.hash}) + b"\n"


def _canonical(data: dict[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def parse(line: bytes) -> Record:
    """Read a line; ValueError if it is not a whole, unchanged record."""
    try:
        data = json.loads(line)
        given = data.pop("hash")
        parts = tuple(Part(**p) for p in data["parts"])
        record = Record(data["number"], data["kind"], data["rank"], data["at_step"], data["previous"], parts, data["more"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a record: {error}") from None
    if record.hash != given or record.line() != line:
        raise ValueError("its hash does not fit its content")
    return record


@dataclass
class Chain:
    """The records of one rank as they were found."""

    rank: int
    records: list[Record]
    #: Bytes of whole records; what follows is the trace of a commit that did not finish.
    good_bytes: int
    #: What is wrong, if anything.
    damage: list[str]

    @property
    def last_hash(self) -> str:
        """Return the hash the next record must refer to."""
        return self.records[-1].hash if self.records else ""

    def live(self) -> list[Record]:
        """Return the flush and samples records that count, in order."""
        found: list[Record] = []
        for record in self.records:
            if record.kind == "resume":
                found = [r for r in found if r.kind == "samples" or r.number <= record.more["keep"]]
            elif record.kind == "drop":
                gone = set(record.more["parts"])
                found = [_without(r, gone) for r in found]
            elif record.kind in ("flush", "samples"):
                found.append(record)
        return found

    def dropped(self) -> set[str]:
        """Return the paths of parts that were recorded once and no longer count."""
        ever = {p.path for r in self.records for p in r.parts}
        return ever - {p.path for r in self.live() for p in r.parts}


def _without(record: Record, gone: set[str]) -> Record:
    parts = tuple(p for p in record.parts if p.path not in gone)
    return Record(record.number, record.kind, record.rank, record.at_step, record.previous, parts, record.more)


def chain_path(run: Path, rank: int) -> Path:
    """Return the manifest file of a rank."""
    return run / FOLDER / f"r{rank}.jsonl"


def head_path(run: Path, rank: int) -> Path:
    """Return the file with the last synced record of a rank."""
    return run / FOLDER / f"r{rank}.head"


def ranks_of(run: Path) -> list[int]:
    """Return the ranks that have a manifest."""
    found = [p.stem[1:] for p in (run / FOLDER).glob("r*.jsonl")]
    return sorted(int(x) for x in found if x.isdigit())


def read_chain(run: Path, rank: int) -> Chain:
    """Read the records of a rank as far as they are whole and follow from each other."""
    data = chain_path(run, rank).read_bytes()
    records: list[Record] = []
    damage: list[str] = []
    place = 0
    for line in data.splitlines(keepends=True):
        problem = None
        try:
            record = parse(line)
            expected = (len(records), rank, records[-1].hash if records else "")
            if (record.number, record.rank, record.previous) != expected:
                problem = f"it is record {record.number} of rank {record.rank}, where record {len(records)} should follow"
        except ValueError as error:
            problem = str(error)
        if problem is not None:
            rest = len(data) - place
            if rest > len(line):
                damage.append(f"manifest of rank {rank}, record {len(records)}: {problem}")
            break
        records.append(record)
        place += len(line)
    head = _read_head(run, rank)
    if isinstance(head, str):
        damage.append(f"head of rank {rank}: {head}")
    elif head is not None:
        number, digest = head
        if number >= len(records):
            lost = f"record {number} was written and synced, but the manifest has whole records only up to {len(records) - 1}"
            damage.append(f"manifest of rank {rank}: {lost}")
        elif records[number].hash != digest:
            damage.append(f"manifest of rank {rank}: record {number} is not the one that was synced")
    elif len(records) > 1:
        damage.append(f"head of rank {rank} is missing")
    return Chain(rank, records, place, damage)


def _read_head(run: Path, rank: int) -> tuple[int, str] | str | None:
    try:
        data = head_path(run, rank).read_bytes()
        found = json.loads(data)
        number, digest = int(found["number"]), str(found["hash"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"it cannot be read ({error})"
    return (number, digest) if data == head_line(number, digest) else "it was changed"


def head_line(number: int, digest: str) -> bytes:
    """Return the content of a head file."""
    return _canonical({"number": number, "hash": digest}) + b"\n"


class ManifestWriter:
    """Appends records of one rank, durably and one at a time."""

    def __init__(self, run: Path, rank: int, files: Files, chain: Chain | None) -> None:
        """Continue ``chain``, or begin a new one."""
        self.run, self.rank, self.files = run, rank, files
        self.count = len(chain.records) if chain else 0
        self.last_hash = chain.last_hash if chain else ""
        path = chain_path(run, rank)
        if chain is not None and path.stat().st_size > chain.good_bytes:
            files.truncate(path, chain.good_bytes)
            files.sync(path)

    def append(self, kind: str, at_step: int, parts: tuple[Part, ...] = (), more: dict[str, Any] | None = None) -> Record:
        """Commit one record: its line, then the head."""
        record = Record(self.count, kind, self.rank, at_step, self.last_hash, parts, more or {})
        path = chain_path(self.run, self.rank)
        self.files.append(path, record.line())
        self.files.sync(path)
        if self.count == 0:
            self.files.sync_folder(path.parent)
        self.count, self.last_hash = self.count + 1, record.hash
        write_durably(self.files, head_path(self.run, self.rank), head_line(record.number, record.hash))
        return record


def check_relative(path: str) -> str:
    """Refuse part names that lead out of the run's folder."""
    pieces = path.split("/")
    simple = all(p not in ("", ".", "..") and all(c.isalnum() or c in "._-" for c in p) for p in pieces)
    if len(pieces) != 2 or pieces[0] not in ("contributions", "accounts", "samples") or not simple:
        raise LedgerError(f"the manifest names a part {path!r} that is not inside the run's folders")
    return path
