"""Set damaged parts aside so that the rest can be read, and say exactly what is lost."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from inrun.errors import LedgerError
from inrun.ledger.disk import SCHEMA, TABLES, read_about
from inrun.ledger.files import Files, write_durably
from inrun.ledger.lock import Lock
from inrun.ledger.manifest import (
    Chain,
    ManifestWriter,
    chain_path,
    head_line,
    head_path,
    parse,
    ranks_of,
    read_chain,
)
from inrun.ledger.record import SIGN, UNIT
from inrun.ledger.verify import Verification, verify

ASIDE = "damaged"


@dataclass
class Repair:
    """What was done."""

    path: str
    moved: list[str] = field(default_factory=list)
    #: (table, first step, last step) that are lost.
    lost: list[tuple[str, int | None, int | None]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return vars(self)

    def __str__(self) -> str:
        """Return the page."""
        if not (self.moved or self.notes):
            return f"{self.path}: nothing to repair"
        lines = [f"{self.path}: {len(self.moved)} files set aside in {ASIDE}/"]
        lines += [f"  {name}" for name in self.moved]
        lines += [
            f"  lost: {table} of steps {first} to {last}" if first is not None else f"  lost: {table}"
            for table, first, last in self.lost
        ]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def repair(path: str | Path, files: Files | None = None) -> Repair:
    """Make a damaged run readable again. Nothing is deleted: damaged files are moved to ``damaged/``."""
    run, layer = Path(path), files or Files()
    done = Repair(str(run))
    before = verify(run)
    if before.good:
        return done
    layer.make_folder(run / ASIDE)
    locks = [Lock(run, rank) for rank in ranks_of(run)]
    try:
        for rank in ranks_of(run):
            _mend_chain(run, rank, layer, done)
        _mend_about(run, layer, done)
        _set_parts_aside(run, before, layer, done)
    finally:
        for lock in locks:
            lock.release()
    after = verify(run)
    if not after.good:
        raise LedgerError(f"{run} could not be repaired wholly: {after.problems[0]}. Damaged files are in {run / ASIDE}")
    return done


def _move(run: Path, name: str, files: Files, done: Repair) -> None:
    source, target = run / name, run / ASIDE / name.replace("/", "-")
    if source.exists():
        files.rename(source, target)
        files.sync_folder(source.parent)
        done.moved.append(name)


def _mend_chain(run: Path, rank: int, files: Files, done: Repair) -> None:
    """Cut the manifest behind its last whole record; parts recorded later are set aside."""
    chain = read_chain(run, rank)
    if not chain.damage:
        return
    path = chain_path(run, rank)
    data = path.read_bytes()
    if len(data) > chain.good_bytes or not chain.records:
        write_durably(files, run / ASIDE / f"manifest-r{rank}.jsonl", data)
        done.moved.append(f"manifest/r{rank}.jsonl (a copy)")
        done.notes.append(
            f"the manifest of rank {rank} is whole up to record {len(chain.records) - 1}; what was recorded later is lost"
        )
        kept = {p.path for r in chain.live() for p in r.parts}
        _tell_lost(data[chain.good_bytes :], run, rank, kept, done)
        for table in TABLES:
            for file in sorted((run / table).glob(f"r{rank}-*.parquet")):
                name = f"{table}/{file.name}"
                if name not in kept:
                    _move(run, name, files, done)
        files.truncate(path, chain.good_bytes)
        files.sync(path)
    if not chain.records:
        files.remove(head_path(run, rank))
        files.remove(path)
        return
    last = chain.records[-1]
    write_durably(files, head_path(run, rank), head_line(last.number, last.hash))
    done.notes.append(f"the head of rank {rank} was written anew")


def _tell_lost(tail: bytes, run: Path, rank: int, kept: set[str], done: Repair) -> None:
    """Find the steps of lost records: from those lines that are whole in themselves, else from the parts on disk."""
    lost: dict[str, tuple[str, int | None, int | None]] = {}
    for line in tail.splitlines(keepends=True):
        try:
            parts = parse(line).parts
        except ValueError:
            continue
        lost |= {p.path: (p.table, p.first_step, p.last_step) for p in parts}
    for table in TABLES:
        for file in sorted((run / table).glob(f"r{rank}-*.parquet")):
            name = f"{table}/{file.name}"
            if name not in kept and name not in lost:
                lost[name] = (table, *_steps_of(file))
    done.lost += list(lost.values())


def _steps_of(file: Path) -> tuple[int | None, int | None]:
    try:
        steps = pq.read_table(file, columns=["step"])["step"].to_numpy()
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return None, None
    return (int(steps.min()), int(steps.max())) if len(steps) else (None, None)


def _begins(run: Path) -> list[Chain]:
    return [c for c in (read_chain(run, rank) for rank in ranks_of(run)) if c.records]


def _mend_about(run: Path, files: Files, done: Repair) -> None:
    """Accept a readable ``run.json``, or write one with what the manifest knows."""
    chains = _begins(run)
    if not chains:
        raise LedgerError(f"{run} has no whole manifest left; nothing in it can be trusted")
    run_id = chains[0].records[0].more.get("run_id")
    path = run / "run.json"
    try:
        usable = read_about(run).get("run_id") == run_id
    except LedgerError:
        usable = False
    if not usable:
        if path.exists():
            _move(run, "run.json", files, done)
        known = {"schema": SCHEMA, "run_id": run_id, "sign": SIGN, "unit": UNIT, "method": "unknown", "update": "unknown"}
        write_durably(files, path, json.dumps(known, indent=2).encode() + b"\n")
        done.notes.append("run.json was damaged and written anew; method, update and model of the run are no longer known")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    for chain in chains:
        known_digest = [r.more["run_json"] for r in chain.records if r.kind in ("begin", "about")][-1]
        if known_digest != digest:
            ManifestWriter(run, chain.rank, files, chain).append("about", chain.records[-1].at_step, (), {"run_json": digest})
            if usable:
                done.notes.append(f"run.json was changed since the run began, and is accepted as it is (rank {chain.rank})")


def _set_parts_aside(run: Path, before: Verification, files: Files, done: Repair) -> None:
    by_rank: dict[int, list[str]] = {}
    for problem in before.problems:
        if problem.part is None or problem.rank is None:
            continue
        counted = {p.path for r in read_chain(run, problem.rank).live() for p in r.parts}
        if problem.part in counted and problem.part not in by_rank.setdefault(problem.rank, []):
            by_rank[problem.rank].append(problem.part)
            done.lost.append((problem.part.split("/", 1)[0], problem.first_step, problem.last_step))
    for rank, parts in by_rank.items():
        chain = read_chain(run, rank)
        ManifestWriter(run, rank, files, chain).append("drop", chain.records[-1].at_step, (), {"parts": parts})
        for name in parts:
            if os.path.normpath(name) == name and not name.startswith(("..", "/")):
                _move(run, name, files, done)
