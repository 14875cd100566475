"""Set damaged parts aside so that the rest can be read, and say exactly what is lost."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from inrun.errors import LedgerError
from inrun.files import Files, make_folder_durably, write_durably
from inrun.ledger.about import SCHEMA, read_about
from inrun.ledger.lock import lock_rank
from inrun.ledger.manifest import (
    FOLDER,
    Chain,
    ManifestEntry,
    ManifestWriter,
    chain_path,
    check_relative,
    head_line,
    head_path,
    lines_of,
    parse_entry,
    part_names,
    place_of_part,
    ranks_of,
    read_chain,
    read_head,
    read_inside,
    refuse_links,
    survey,
)
from inrun.ledger.ranks import lost_ranks, session_of
from inrun.ledger.record import SIGN, UNIT
from inrun.ledger.verify import Problem, verify

ASIDE = "damaged"
#: A part numbered higher than this is not ours.
MOST_ENTRIES = 10_000_000


@dataclass
class Repair:
    """What was done."""

    path: str
    moved: list[str] = field(default_factory=list)
    #: (table, first step, last step) that are lost; None for samples, and where entry and part are both damaged.
    lost: list[tuple[str, int | None, int | None]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return vars(self)

    def __str__(self) -> str:
        """Return the page."""
        if not (self.moved or self.notes or self.lost):
            return f"{self.path}: nothing to repair"
        lines = [f"{self.path}: {len(self.moved)} files set aside in {ASIDE}/"]
        lines += [f"  {name}" for name in self.moved]
        lines += [f"  lost: {_title(*part)}" for part in self.lost]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def _title(table: str, first: int | None, last: int | None) -> str:
    if first is not None:
        return f"{table} of steps {first} to {last}"
    return table if table == "samples" else f"{table} of unknown steps (both the entry and the part are damaged)"


def repair(path: str | Path, files: Files | None = None) -> Repair:
    """Make a damaged run readable again. Nothing is deleted: damaged files are moved to ``damaged/``."""
    run, layer = Path(path), files or Files()
    done = Repair(str(run))
    if verify(run).good:
        return done
    refuse_links(run)
    try:
        with contextlib.ExitStack() as stack:
            for rank in _ranks(run):
                stack.callback(lock_rank(run, rank).release)
            _mend(run, layer, done)
    except OSError as error:
        raise LedgerError(f"{run} could not be repaired: {error}. What was set aside is in {run / ASIDE}; try again") from error
    after = verify(run)
    if not after.good:
        raise LedgerError(f"{run} could not be repaired wholly: {after.problems[0]}. Damaged files are in {run / ASIDE}")
    return done


def _mend(run: Path, files: Files, done: Repair) -> None:
    for folder in (ASIDE, FOLDER):
        make_folder_durably(files, run / folder)
    ranks = _ranks(run)
    before = survey(run)[0]
    damaged = {chain.rank for chain in before if chain.damage} | set(ranks) - {chain.rank for chain in before}
    for rank in ranks:
        _mend_chain(run, rank, files, done)
    run_id = _run_id(run)
    for rank in ranks:
        if _set_foreign_aside(run, rank, run_id, files, done):
            damaged.add(rank)
        _set_uncounted_aside(run, rank, files, done)
    for name in part_names(run) if not ranks else []:
        done.lost.append((name.split("/", 1)[0], *_steps_of(run / name)))
        _move(run, name, files, done)
    _mend_about(run, run_id, files, done)
    _set_parts_aside(run, files, done)
    _go_without(run, damaged, files, done)


def _ranks(run: Path) -> list[int]:
    """Return the ranks that have a manifest, a head or parts."""
    heads = {p.with_suffix(".jsonl").name for p in (run / FOLDER).glob("r*.head")}
    by_head = {int(n[1:-6]) for n in heads if n[1:-6].isascii() and n[1:-6].isdigit()}
    places = [place_of_part(name) for name in part_names(run)]
    return sorted({*ranks_of(run), *by_head, *(p[0] for p in places if p is not None)})


def _move(run: Path, name: str, files: Files, done: Repair) -> None:
    source = run / name
    if os.path.lexists(source):
        files.rename(source, _free(run, name))
        files.sync_folder(source.parent)
        files.sync_folder(run / ASIDE)
        done.moved.append(name)


def _free(run: Path, name: str) -> Path:
    """Return a name in ``damaged/`` that nothing has yet."""
    plain = name.replace("/", "-")
    for count in range(1_000_000):
        target = run / ASIDE / (plain if count == 0 else f"{plain}.{count}")
        if not os.path.lexists(target):
            return target
    raise LedgerError(f"{run / ASIDE} is full")


def _mend_chain(run: Path, rank: int, files: Files, done: Repair) -> None:
    """Write the manifest anew from the entries that are whole; what a lost one counted is set aside."""
    chain = read_chain(run, rank)
    if not chain.damage and (chain.entries or not chain_path(run, rank).exists()):
        return
    path, head = chain_path(run, rank), head_path(run, rank)
    try:
        data = read_inside(run, path)
        write_durably(files, _free(run, f"manifest/r{rank}.jsonl"), data)
        done.moved.append(f"manifest/r{rank}.jsonl (a copy)")
    except OSError:
        data = b""
        _move(run, f"manifest/r{rank}.jsonl", files, done)
    synced = read_head(run, rank)
    places = [place_of_part(name) for name in part_names(run)]
    most = max([p[1] for p in places if p is not None and p[0] == rank and p[1] < MOST_ENTRIES], default=0)
    last = synced if isinstance(synced, tuple) else None
    known = salvage(data, rank, last, most)
    entries = _close_gaps(run, rank, known, last)
    lost = sorted(set(range(max(known, default=-1) + 1)) - {r.number for r in entries if r.kind != "gap"})
    if lost:
        done.notes.append(f"entries {_ranges(lost)} of the manifest of rank {rank} are lost")
    if not entries:
        done.notes.append(f"the manifest of rank {rank} is lost; nothing of that rank can be trusted")
        _move(run, f"manifest/r{rank}.head", files, done)
        files.remove(path)
        files.sync_folder(path.parent)
    else:
        write_durably(files, path, b"".join(r.line() for r in entries))
        write_durably(files, head, head_line(entries[-1].number, entries[-1].link))
    kept = {p.path for r in entries for p in r.parts}
    told = {p.path: p for r in known.values() if r is not None for p in r.parts}
    gone = Chain(rank, [r for r in known.values() if r is not None], 0, []).live()
    missing = [p for r in gone for p in r.parts if p.path not in kept and not (run / p.path).exists()]
    done.lost += [(p.table, p.first_step, p.last_step) for p in missing]
    for name in part_names(run):
        place = place_of_part(name)
        if place is not None and place[0] == rank and name not in kept:
            part = told.get(name)
            # Only where the head vouches for the last entry is the next number the trace of a crash; else it may be a loss.
            crash = last is not None and last[0] <= max(known, default=-1) and place[1] == max(known, default=-1) + 1
            if not crash:
                steps = _steps_of(run / name) if part is None else (part.first_step, part.last_step)
                done.lost.append((name.split("/", 1)[0], *steps))
            _move(run, name, files, done)


def salvage(data: bytes, rank: int, head: tuple[int, str] | None, most: int) -> dict[int, ManifestEntry | None]:
    """Return the entries that are whole in themselves, by number; None where one must have been. ``most`` bounds the number."""
    options: dict[int, list[ManifestEntry]] = {}
    lines = list(lines_of(data))
    most = max(most, len(lines))
    for line in lines:
        with contextlib.suppress(ValueError):
            entry = parse_entry(line)
            if entry.rank == rank and entry.number <= most:
                options.setdefault(entry.number, []).append(entry)
    found: dict[int, ManifestEntry | None] = {}
    expected: str | None = None
    top = max([*options, -1 if head is None else min(head[0], most)])
    for number in range(top, -1, -1):  # each entry vouches for the one before it
        if expected is None and head is not None and number == head[0]:
            expected = head[1]
        fitting = [r for r in options.get(number, []) if expected is None or r.link == expected]
        found[number] = fitting[0] if fitting else None
        expected = fitting[0].previous if fitting else None
    return dict(sorted(found.items()))


def _close_gaps(run: Path, rank: int, known: dict[int, ManifestEntry | None], head: tuple[int, str] | None) -> list[ManifestEntry]:
    """Return a chain of the known entries; where one is lost, an entry that stands for it, or the end.

    Only a lost ``flush`` or ``samples`` entry, known by the files it counted, can be stood in for. Another one may have been a
    resume: going on without it would count steps twice.
    """
    names = part_names(run)
    made: list[ManifestEntry] = []
    for number, entry in known.items():
        after = known.get(number + 1)
        link = made[-1].link if made else ""
        if entry is not None and entry.previous == link:
            made.append(entry)
            continue
        said = after.previous if after is not None else head[1] if head is not None and head[0] == number else None
        more = {} if said is None else {"stands_for": said}
        if number == 0:
            begin = _begin_anew(run, after)
            if begin is None:
                return []
            made.append(ManifestEntry(0, "begin", rank, 0, "", (), {**begin, **more}))
        elif any(place_of_part(name) == (rank, number) for name in names):
            made.append(ManifestEntry(number, "gap", rank, made[-1].at_step, link, (), more))
        else:
            return made
    return made


def _begin_anew(run: Path, after: ManifestEntry | None) -> dict[str, Any] | None:
    """Return what the first entry says: by ``run.json``, by another rank, or with a new id if the next entry is whole."""
    try:
        about = read_about(run)
        digest = hashlib.sha256((run / "run.json").read_bytes()).hexdigest()
        found = {"run_id": about.get("run_id"), "run_json": digest, "software": about.get("software")}
    except LedgerError:
        others = [c.entries[0].more.get("run_id") for c in _begun(run)]
        if not others and after is None:
            return None
        found = {"run_id": others[0] if others else f"unknown-{str(after and after.previous)[:8]}", "run_json": ""}
    world = session_of(_begun(run)).world
    return found | ({"world": world} if world > 1 else {})


def _ranges(numbers: list[int]) -> str:
    """Return ``3, 5-7`` for 3, 5, 6, 7."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _steps_of(file: Path) -> tuple[int | None, int | None]:
    try:
        if file.is_symlink():
            return None, None
        steps = pq.read_table(file, columns=["step"], page_checksum_verification=True)["step"].to_numpy()
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return None, None
    return (int(steps.min()), int(steps.max())) if len(steps) else (None, None)


def _begun(run: Path) -> list[Chain]:
    return [c for c in (read_chain(run, rank) for rank in ranks_of(run)) if c.entries]


def _run_id(run: Path) -> str | None:
    """Return the id of the run: what ``run.json`` says if a manifest agrees, else what the first manifest says."""
    ids = [c.entries[0].more.get("run_id") for c in _begun(run)]
    try:
        said = read_about(run).get("run_id")
    except LedgerError:
        said = None
    return said if said in ids or not ids else ids[0]


def _set_foreign_aside(run: Path, rank: int, run_id: str | None, files: Files, done: Repair) -> bool:
    chain = read_chain(run, rank) if chain_path(run, rank).exists() else None
    if chain is None or not chain.entries or chain.entries[0].more.get("run_id") == run_id:
        return False
    done.notes.append(f"the books of rank {rank} belong to run {chain.entries[0].more.get('run_id')}")
    done.lost += [(p.table, p.first_step, p.last_step) for r in chain.live() for p in r.parts]
    for ending in ("head", "jsonl"):
        _move(run, f"manifest/r{rank}.{ending}", files, done)
    return True


def _go_without(run: Path, damaged: set[int], files: Files, done: Repair) -> None:
    """Let steps count that would wait for ever for ranks whose books are lost."""
    chains = _begun(run)
    lost = lost_ranks(chains, damaged)
    if lost:
        first = chains[0]
        ManifestWriter(run, first.rank, files, first).append("drop", first.entries[-1].at_step, (), {"parts": [], "without": lost})
        done.notes.append(f"steps count without what rank {', '.join(map(str, lost))} wrote last")


def _set_uncounted_aside(run: Path, rank: int, files: Files, done: Repair) -> None:
    """Set aside what no entry counts, so that no later entry can be taken for its own."""
    chain = read_chain(run, rank) if chain_path(run, rank).exists() else Chain(rank, [], 0, [])
    ever = {p.path: p.sha256 for r in chain.entries for p in r.parts}
    places = {name: place_of_part(name) for name in part_names(run)}
    strays = {name: place[1] for name, place in places.items() if place is not None and place[0] == rank and name not in ever}
    # The next number may be the trace of a crash; a higher one shows that entries are gone.
    short = not chain.entries or max(strays.values(), default=0) > len(chain.entries)
    for name, number in strays.items():
        if short and number >= len(chain.entries) and not _is_copy(run / name, set(ever.values())):
            done.lost.append((name.split("/", 1)[0], *_steps_of(run / name)))
        _move(run, name, files, done)


def _is_copy(file: Path, known: set[str]) -> bool:
    return file.is_file() and not file.is_symlink() and hashlib.sha256(file.read_bytes()).hexdigest() in known


def _mend_about(run: Path, run_id: str | None, files: Files, done: Repair) -> None:
    """Accept a readable ``run.json``, or write one with what the manifest knows."""
    path = run / "run.json"
    try:
        usable = read_about(run).get("run_id") == run_id
    except LedgerError:
        usable = False
    if run_id is None:
        raise LedgerError(f"{run} has neither run.json nor a whole manifest left; nothing in it can be trusted")
    if not usable:
        _move(run, "run.json", files, done)
        known = {"schema": SCHEMA, "run_id": run_id, "sign": SIGN, "unit": UNIT, "method": "unknown"}
        write_durably(files, path, json.dumps(known, indent=2).encode() + b"\n")
        done.notes.append("run.json was damaged and written anew; method, update and model of the run are no longer known")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    for chain in _begun(run):
        known_digest = [r.more["run_json"] for r in chain.entries if r.kind in ("begin", "about")][-1]
        if known_digest != digest:
            ManifestWriter(run, chain.rank, files, chain).append("about", chain.entries[-1].at_step, (), {"run_json": digest})
            if usable:
                done.notes.append(f"run.json was changed since the run began, and is accepted as it is (rank {chain.rank})")


def _set_parts_aside(run: Path, files: Files, done: Repair) -> None:
    """Drop damaged parts by entry, then move them."""
    by_rank: dict[int, dict[str, Problem]] = {}
    for problem in verify(run).problems:
        if problem.part is not None and problem.rank is not None:
            by_rank.setdefault(problem.rank, {}).setdefault(problem.part, problem)
    for rank, parts in by_rank.items():
        chain = read_chain(run, rank)
        ManifestWriter(run, rank, files, chain).append("drop", chain.entries[-1].at_step, (), {"parts": sorted(parts)})
        for name, problem in parts.items():
            done.lost.append((name.split("/", 1)[0], problem.first_step, problem.last_step))
            with contextlib.suppress(LedgerError):  # a name that leads out of the run is dropped, and not touched
                _move(run, check_relative(name), files, done)
