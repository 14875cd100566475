"""The manifest of one rank: an append-only list of entries that says which parts exist.

Each entry is one JSON line with the hash of the entry before it. Kinds:

``begin``    the run: its id, the hash of ``run.json`` and, where there are several, how many ranks write (``world``)
``flush``    parts that were written (contributions and accounts of some steps, and credits that were settled)
``samples``  a part of the samples table
``resume``   the run went on from an earlier entry: ``flush`` entries after ``keep`` no longer count; ``world`` as above
``drop``     parts that were set aside by ``inrun repair``, and ranks ``without`` which steps count since their books are lost
``about``    ``run.json`` was mended by ``inrun repair``; its new hash
``gap``      stands where ``inrun repair`` found a damaged entry, so that later ones (and marks) keep number and hash

``<rank>.head`` holds number and hash of the last entry that was synced, and is up to date before the next one is begun. So
what follows the entry that the head knows may be the trace of a crash in the middle of a commit, and does not count;
anything else that is not whole is damage.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from inrun.errors import LedgerError
from inrun.files import Files, write_durably

FOLDER = "manifest"
TABLES = ("contributions", "credits", "accounts", "samples")
KINDS = ("begin", "flush", "samples", "resume", "drop", "about", "gap")


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
        """Return the table it belongs to, one of ``TABLES``."""
        return self.path.split("/", 1)[0]


@dataclass(frozen=True)
class ManifestEntry:
    """One line of a manifest."""

    number: int
    kind: str
    rank: int
    #: Steps the writer had finished when it wrote this.
    at_step: int
    previous: str
    parts: tuple[Part, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the entry as plain data, without its hash."""
        parts = [{k: v for k, v in vars(p).items() if v is not None} for p in self.parts]
        fixed = {"number": self.number, "kind": self.kind, "rank": self.rank, "at_step": self.at_step}
        return {**fixed, "previous": self.previous, "parts": parts, "more": self.more}

    @cached_property
    def _bytes(self) -> bytes:
        return _canonical(self.body())

    @cached_property
    def hash(self) -> str:
        """Return the hash of its content."""
        return hashlib.sha256(self._bytes).hexdigest()

    @property
    def link(self) -> str:
        """Return the hash that the next entry, the head and marks refer to."""
        return str(self.more.get("stands_for", self.hash))

    def line(self) -> bytes:
        """Return the line of the file."""
        place = self._bytes.index(b',"kind":')  # keys are sorted: the hash comes after at_step
        return b'%s,"hash":"%s"%s\n' % (self._bytes[:place], self.hash.encode(), self._bytes[place:])


def _canonical(data: dict[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def parse_entry(line: bytes) -> ManifestEntry:
    """Read a line; ValueError if it is not a whole, unchanged entry."""
    try:
        data = json.loads(line)
        given = data.pop("hash")
        parts = tuple(Part(**p) for p in data["parts"])
        entry = ManifestEntry(data["number"], data["kind"], data["rank"], data["at_step"], data["previous"], parts, data["more"])
        whole = entry.hash == given and entry.line() == line
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not an entry ({type(error).__name__})") from None
    if not whole:
        raise ValueError("its hash does not fit its content")
    if not _well_formed(entry):
        raise ValueError("it does not say what an entry must say")
    return entry


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _well_formed(entry: ManifestEntry) -> bool:
    """Whether all fields have their types: an entry may be whole and yet not be ours."""
    more = entry.more
    counts = all(_is_count(x) for x in (entry.number, entry.rank, entry.at_step))
    parts = all(
        isinstance(p.path, str)
        and isinstance(p.sha256, str)
        and _is_count(p.rows)
        and _is_count(p.nbytes)
        and all(x is None or (isinstance(x, int) and not isinstance(x, bool)) for x in (p.first_step, p.last_step))
        for p in entry.parts
    )
    if not (counts and parts and entry.kind in KINDS and isinstance(entry.previous, str) and isinstance(more, dict)):
        return False
    named = more.get("parts", [])
    return (
        (entry.kind != "resume" or _is_count(more.get("keep")))
        and (entry.kind != "drop" or (isinstance(named, list) and all(isinstance(x, str) for x in named)))
        and (entry.kind not in ("begin", "about") or isinstance(more.get("run_json"), str))
        and isinstance(more.get("stands_for", ""), str)
        and _is_count(more.get("world", 1))
        and more.get("world", 1) > 0
        and isinstance(more.get("without", []), list)
        and all(_is_count(rank) for rank in more.get("without", []))
    )


@dataclass
class Chain:
    """The entries of one rank as they were found."""

    rank: int
    entries: list[ManifestEntry]
    #: Bytes of whole entries; what follows is the trace of a commit that did not finish.
    good_bytes: int
    #: What is wrong, if anything.
    damage: list[str]
    #: Number of the entry the head knows, if there is a head that can be read.
    head: int | None = None

    @property
    def last_hash(self) -> str:
        """Return the hash the next entry must refer to."""
        return self.entries[-1].link if self.entries else ""

    def live(self) -> list[ManifestEntry]:
        """Return the flush and samples entries that count, in order."""
        found: list[ManifestEntry] = []
        for entry in self.entries:
            if entry.kind == "resume":
                found = [r for r in found if r.kind == "samples" or r.number <= entry.more["keep"]]
            elif entry.kind == "drop":
                gone = set(entry.more["parts"])
                found = [_without(r, gone) for r in found]
            elif entry.kind in ("flush", "samples"):
                found.append(entry)
        return found

    def dropped(self) -> set[str]:
        """Return the paths of parts that were entered once and no longer count."""
        ever = {p.path for r in self.entries for p in r.parts}
        return ever - {p.path for r in self.live() for p in r.parts}


def _without(entry: ManifestEntry, gone: set[str]) -> ManifestEntry:
    parts = tuple(p for p in entry.parts if p.path not in gone)
    return ManifestEntry(entry.number, entry.kind, entry.rank, entry.at_step, entry.previous, parts, entry.more)


def chain_path(run: Path, rank: int) -> Path:
    """Return the manifest file of a rank."""
    return run / FOLDER / f"r{rank}.jsonl"


def head_path(run: Path, rank: int) -> Path:
    """Return the file with the last synced entry of a rank."""
    return run / FOLDER / f"r{rank}.head"


def ranks_of(run: Path) -> list[int]:
    """Return the ranks that have a manifest."""
    return sorted(_ranks_named(run, "jsonl"))


def _ranks_named(run: Path, ending: str) -> set[int]:
    found = (re.fullmatch(rf"r(0|[1-9][0-9]*)\.{ending}", p.name) for p in (run / FOLDER).glob(f"r*.{ending}"))
    return {int(m[1]) for m in found if m}


def read_chain(run: Path, rank: int) -> Chain:
    """Read the entries of a rank as far as they are whole and follow from each other; a writer may be at work."""
    for _ in range(20):
        head = read_head(run, rank)  # before the entries: a writer moves it after them
        chain = _read_entries(run, rank, head)
        if not chain.damage or read_head(run, rank) == head:
            break
    return chain


def _read_entries(run: Path, rank: int, head: tuple[int, str] | str | None) -> Chain:
    known = head[0] if isinstance(head, tuple) else None
    try:
        data = read_inside(run, chain_path(run, rank))
    except OSError as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        return Chain(rank, [], 0, [f"manifest of rank {rank} {why}"], known)
    entries: list[ManifestEntry] = []
    damage: list[str] = []
    place = 0
    for line in lines_of(data):
        try:
            entry = parse_entry(line)
        except ValueError as error:
            unfinished = len(entries) == 0 if head is None else known == len(entries) - 1
            if not unfinished:
                damage.append(f"manifest of rank {rank}, entry {len(entries)}: {error}")
            break
        if (entry.number, entry.rank, entry.previous) != (len(entries), rank, entries[-1].link if entries else ""):
            problem = f"it is entry {entry.number} of rank {entry.rank}, where entry {len(entries)} should follow"
            damage.append(f"manifest of rank {rank}, entry {len(entries)}: {problem}")
            break
        entries.append(entry)
        place += len(line)
    if isinstance(head, str):
        damage.append(f"head of rank {rank}: {head}")
    elif head is None and len(entries) > 1:
        damage.append(f"head of rank {rank} is missing")
    elif head is not None and head[0] >= len(entries):
        lost = f"entry {known} was written and synced, but the manifest has whole entries only up to {len(entries) - 1}"
        damage.append(f"manifest of rank {rank}: {lost}")
    elif head is not None and entries[head[0]].link != head[1]:
        damage.append(f"manifest of rank {rank}: entry {known} is not the one that was synced")
    return Chain(rank, entries, place, damage, known)


def lines_of(data: bytes) -> Iterator[bytes]:
    """Cut at line feeds, and nowhere else."""
    place = 0
    while place < len(data):
        end = data.find(b"\n", place) + 1 or len(data)
        yield data[place:end]
        place = end


def read_head(run: Path, rank: int) -> tuple[int, str] | str | None:
    """Return number and hash of the last synced entry; None if there is no head, a text if it is damaged."""
    try:
        data = read_inside(run, head_path(run, rank))
        found = json.loads(data)
        number, digest = int(found["number"]), str(found["hash"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        return f"it cannot be read ({error})"
    return (number, digest) if number >= 0 and data == head_line(number, digest) else "it was changed"


def read_inside(run: Path, file: Path) -> bytes:
    """Read a file of a run; OSError if it, or its folder, is a link: nothing outside of the run is part of it."""
    if file.is_symlink() or (file.parent != run and file.parent.is_symlink()):
        raise OSError("it is a link")
    return file.read_bytes()


def refuse_links(run: Path) -> None:
    """Raise LedgerError if a folder of the run is a link: what is removed or set aside in it would be elsewhere."""
    for name in (FOLDER, *TABLES, "damaged"):
        if (run / name).is_symlink():
            raise LedgerError(f"{run / name} is a link; the folders of a run must be inside of it")


def part_names(run: Path) -> list[str]:
    """Return all Parquet files in the folders of the tables, entered or not."""
    return [f"{t}/{f.name}" for t in TABLES if not (run / t).is_symlink() for f in sorted((run / t).glob("*.parquet"))]


def name_of_part(table: str, rank: int, number: int) -> str:
    """Return the name of the part that entry ``number`` of a rank will count."""
    return f"{table}/r{rank}-{number:06d}.parquet"


def place_of_part(name: str) -> tuple[int, int] | None:
    """Return rank and number of the entry of a part, by its name."""
    found = re.fullmatch(r"[a-z]+/r(0|[1-9][0-9]*)-([0-9]{6,})\.parquet", name)
    return (int(found[1]), int(found[2])) if found else None


def survey(run: Path) -> tuple[list[Chain], list[str]]:
    """Read the manifests of all ranks; return them, and what shows that another one is missing."""
    names = part_names(run)  # before the entries: a rank begins its manifest before its first part
    heads = _ranks_named(run, "head")
    chains = [read_chain(run, rank) for rank in ranks_of(run)]
    places = [place_of_part(name) for name in names]
    begun = {c.rank for c in chains if c.entries or c.damage}
    missing = sorted((heads | {p[0] for p in places if p is not None}) - begun)
    damage = [f"manifest of rank {rank} is missing, and there are files of that rank" for rank in missing]
    if not chains and not missing and names:
        damage.append("there is no manifest, but there are parts")
    return chains, damage


def head_line(number: int, digest: str) -> bytes:
    """Return the content of a head file."""
    return _canonical({"number": number, "hash": digest}) + b"\n"


class ManifestWriter:
    """Appends entries of one rank, durably and one at a time."""

    def __init__(self, run: Path, rank: int, files: Files, chain: Chain | None) -> None:
        """Continue ``chain``, or begin a new one."""
        self.run, self.rank, self.files = run, rank, files
        self.count = len(chain.entries) if chain else 0
        self.last_hash = chain.last_hash if chain else ""
        path = chain_path(run, rank)
        if chain is None:
            return
        if path.stat().st_size > chain.good_bytes:
            files.truncate(path, chain.good_bytes)
        files.sync(path)  # the last entries may be those of a process that was killed before its sync
        if chain.entries and chain.head != chain.entries[-1].number:
            write_durably(files, head_path(run, rank), head_line(chain.entries[-1].number, chain.last_hash))

    def append(self, kind: str, at_step: int, parts: tuple[Part, ...] = (), more: dict[str, Any] | None = None) -> ManifestEntry:
        """Commit one entry: its line, then the head."""
        entry = ManifestEntry(self.count, kind, self.rank, at_step, self.last_hash, parts, more or {})
        path = chain_path(self.run, self.rank)
        self.files.append(path, entry.line())
        self.files.sync(path)
        if self.count == 0:
            self.files.sync_folder(path.parent)
        self.count, self.last_hash = self.count + 1, entry.hash
        write_durably(self.files, head_path(self.run, self.rank), head_line(entry.number, entry.hash))
        return entry


def check_relative(path: str) -> str:
    """Refuse part names that lead out of the run's folder."""
    pieces = path.split("/")
    simple = all(p not in ("", ".", "..") and all(c.isalnum() or c in "._-" for c in p) for p in pieces)
    if len(pieces) != 2 or pieces[0] not in TABLES or not simple or len(path) > 200:
        raise LedgerError(f"the manifest names a part {path!r} that is not inside the run's folders")
    return path
