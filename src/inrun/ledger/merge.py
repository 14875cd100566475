"""Join ledgers of one run that was continued elsewhere."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from inrun.errors import LedgerError
from inrun.files import Files, put_folder
from inrun.ledger.manifest import ManifestEntry
from inrun.ledger.parts import steps_of
from inrun.ledger.reader import LedgerReader
from inrun.ledger.saved import refuse_old_save
from inrun.ledger.settled import SettledSteps
from inrun.ledger.writer import Ledger


def merge(paths: Sequence[str | Path], out: str | Path) -> Path:
    """Copy the parts of several ledgers into a new one; an entry that two of them share counts once.

    The new folder appears when all of it is there.

    Raises:
        LedgerError: The ledgers belong to different runs or were scored differently, or cover the same steps twice.
    """
    if len(paths) < 2:
        raise LedgerError(f"merge needs at least two ledgers, got {len(paths)}")
    target = Path(out)
    if os.path.lexists(target):
        raise LedgerError(f"{target} exists already; give a new folder")
    for path in paths:
        refuse_old_save(Path(path))
    readers = [LedgerReader(p) for p in paths]
    about = _joint_about(readers)
    chosen = _choose(readers)
    try:
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.absolute().parent))
        try:
            _copy_all(aside / "run", about, chosen)
            put_folder(Files(), aside / "run", target.absolute())
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise LedgerError(f"{target} could not be written: {error}") from error
    return target


def _copy_all(folder: Path, about: dict[str, Any], chosen: list[tuple[LedgerReader, ManifestEntry]]) -> None:
    with Ledger(folder, flush_every="1h", about=about) as ledger:
        settled: dict[int, SettledSteps] = {}
        ends = {reader.path: reader.complete_steps() for reader, _ in chosen}
        for reader, entry in chosen:
            ledger.adopt(entry, reader.path, ends[reader.path])
            _refuse_settled_twice(settled.setdefault(entry.rank, SettledSteps()), reader, entry)
        _refuse_conflicts(ledger.samples())


def _refuse_settled_twice(settled: SettledSteps, reader: LedgerReader, entry: ManifestEntry) -> None:
    """A step may be settled in one entry of a rank; two copies that parted may each have settled it at another moment."""
    for step in (s for part in entry.parts if part.table == "credits" for s in steps_of(reader.path, part)):
        if step in settled:
            raise LedgerError(
                f"step {step} of rank {entry.rank} was settled twice, the second time in {reader.path}: its credit would count "
                "twice. Resume one of the ledgers from the checkpoint where they part, or merge only what follows"
            )
        settled.add(step)


def _refuse_conflicts(samples: pa.Table | None) -> None:
    """Two ledgers may say the same of a sample; they may not say different things."""
    if samples is None or pc.count_distinct(samples["sample_id"]).as_py() == samples.num_rows:
        return
    seen: dict[int, dict[str, Any]] = {}
    for row in samples.to_pylist():
        if seen.setdefault(row["sample_id"], row) != row:
            raise LedgerError(
                f"the ledgers say different things of sample {row['sample_id']}; register samples before a run is copied"
            )


def _joint_about(readers: list[LedgerReader]) -> dict[str, Any]:
    first = readers[0]
    for other in readers[1:]:
        for key in ("run_id", "method", "sketch"):
            if other.about.get(key) != first.about.get(key):
                raise LedgerError(
                    f"{first.path} and {other.path} differ in {key} ({first.about.get(key)!r} and {other.about.get(key)!r}); "
                    "only ledgers of one run can be joined"
                )
    skip = ("schema", "run_id", "sign", "unit", "software")
    return {k: v for k, v in first.about.items() if k not in skip} | {"merged_from": first.about.get("run_id")}


def _choose(readers: list[LedgerReader]) -> list[tuple[LedgerReader, ManifestEntry]]:
    """Return the entries to copy, each once; refuse steps that two ledgers cover differently."""
    chosen: list[tuple[LedgerReader, ManifestEntry]] = []
    place: dict[tuple[int, int, str], int] = {}
    for reader in readers:
        before = len(chosen)
        for entry in (r for chain in reader.chains() for r in chain.live() if r.parts):
            key = (entry.rank, entry.number, entry.previous)
            same = place.get(key)
            if same is not None and set(chosen[same][1].parts) >= set(entry.parts):
                continue  # before the copies parted
            if same is not None and set(chosen[same][1].parts) < set(entry.parts):
                chosen[same] = (reader, entry)  # a repair had dropped parts from the other copy
                continue
            _refuse_overlap(chosen[:before], reader, entry)
            place[key] = len(chosen)
            chosen.append((reader, entry))
    return chosen


def _refuse_overlap(chosen: list[tuple[LedgerReader, ManifestEntry]], reader: LedgerReader, entry: ManifestEntry) -> None:
    if entry.kind != "flush":
        return
    first, last = _covers(entry)
    for other_reader, other in chosen:
        a, b = _covers(other)
        if other.kind == "flush" and other.rank == entry.rank and first <= b and a <= last:
            raise LedgerError(
                f"steps {max(first, a)} to {min(last, b)} of rank {entry.rank} are in {other_reader.path} and, differently, in "
                f"{reader.path}: they would count twice. Resume one of them from the checkpoint where they part, or merge only "
                "what follows"
            )


def _covers(entry: ManifestEntry) -> tuple[int, int]:
    """Return the first and last step that was under way while the rows of an entry were written."""
    first = int(entry.more.get("from_step", 0))
    return first, max(first, entry.at_step - 1)
