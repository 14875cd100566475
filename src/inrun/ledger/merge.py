"""Join ledgers of one run that was continued elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inrun.errors import LedgerError
from inrun.ledger.disk import Ledger, LedgerReader
from inrun.ledger.files import write_durably
from inrun.ledger.manifest import Part, Record


def merge(paths: Sequence[str | Path], out: str | Path) -> Path:
    """Copy the parts of several ledgers into a new one; a part that two of them share counts once.

    Raises:
        LedgerError: The ledgers belong to different runs or were scored differently, or cover the same steps twice.
    """
    if len(paths) < 2:
        raise LedgerError(f"merge needs at least two ledgers, got {len(paths)}")
    readers = [LedgerReader(p) for p in paths]
    about = _joint_about(readers)
    chosen = _choose(readers)
    with Ledger(out, flush_every="1h", about=about) as ledger:
        for reader, record in chosen:
            ledger._at_step = max(ledger._at_step, record.at_step)
            number = ledger._manifest.count
            parts = tuple(_copy(ledger, reader, part, number, record.rank) for part in record.parts)
            ledger._commit(record.kind, parts, {})
    return Path(out)


def _joint_about(readers: list[LedgerReader]) -> dict[str, Any]:
    first = readers[0]
    for other in readers[1:]:
        for key in ("run_id", "method", "update"):
            if other.about.get(key) != first.about.get(key):
                raise LedgerError(
                    f"{first.path} and {other.path} differ in {key} ({first.about.get(key)!r} and {other.about.get(key)!r}); "
                    "only ledgers of one run can be joined"
                )
    skip = ("schema", "run_id", "sign", "unit", "software")
    return {k: v for k, v in first.about.items() if k not in skip} | {"merged_from": first.about.get("run_id")}


def _choose(readers: list[LedgerReader]) -> list[tuple[LedgerReader, Record]]:
    """Return the records to copy, each content once; refuse steps that two different records cover."""
    seen: set[tuple[str, ...]] = set()
    covered: list[tuple[int, int, int, LedgerReader]] = []
    chosen = []
    for reader in readers:
        for chain in reader.chains():
            for record in chain.live():
                key = tuple(p.sha256 for p in record.parts)
                if not key or key in seen:
                    continue
                seen.add(key)
                chosen.append((reader, record))
                for part in record.parts:
                    if part.table == "accounts" and part.first_step is not None and part.last_step is not None:
                        _refuse_overlap(covered, (record.rank, part.first_step, part.last_step, reader))
                        covered.append((record.rank, part.first_step, part.last_step, reader))
    return chosen


def _refuse_overlap(covered: list[tuple[int, int, int, LedgerReader]], new: tuple[int, int, int, LedgerReader]) -> None:
    rank, first, last, reader = new
    for other_rank, a, b, other in covered:
        if other_rank == rank and first <= b and a <= last:
            low, high = max(first, a), min(last, b)
            raise LedgerError(
                f"steps {low} to {high} of rank {rank} are in {other.path} and, differently, in {reader.path}: they would count "
                "twice. Resume one of them from the checkpoint where they part, or merge only what follows"
            )


def _copy(ledger: Ledger, reader: LedgerReader, part: Part, number: int, rank: int) -> Part:
    data = (reader.path / part.path).read_bytes()
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise LedgerError(f"{reader.path / part.path} is damaged; run `inrun verify` and `inrun repair` first")
    name = f"{part.table}/r{ledger.rank}-{number:06d}.parquet"
    write_durably(ledger._files, ledger.path / name, data)
    return Part(name, part.rows, part.nbytes, part.sha256, part.first_step, part.last_step)
