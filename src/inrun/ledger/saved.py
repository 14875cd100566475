"""Folders that ``accountant.save`` wrote before it wrote ledgers: ``run.json`` and one part per table, without a manifest.

They can be read, and nothing else: there is no checksum to verify, nothing to repair, and no mark to go on from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inrun.errors import LedgerError
from inrun.ledger.about import read_about
from inrun.ledger.manifest import FOLDER, TABLES

PART = "part-0.parquet"


def is_old_save(run: Path, about: dict[str, Any]) -> bool:
    """Whether a folder is such a one: it has neither run id nor manifest, and no part of a ledger."""
    if "run_id" in about or (run / FOLDER).exists():
        return False
    parts = [file for table in TABLES for file in (run / table).glob("r*-*")]
    return not parts and (run / "accounts" / PART).is_file()


def old_files(run: Path, table: str) -> list[str]:
    """Return the files of a table of such a folder."""
    file = run / table / PART
    return [str(file)] if file.is_file() else []


def refuse_old_save(run: Path) -> None:
    """LedgerError if a folder is such a one, for whom needs a manifest."""
    try:
        about = read_about(run)
    except LedgerError:  # not even that; others say so
        return
    if is_old_save(run, about):
        raise LedgerError(
            f"{run} was saved from memory by an earlier inrun, without a manifest: it can be read (inrun scores, audit, report), "
            "but not verified, repaired, merged, erased or written to. accountant.save now writes a whole ledger"
        )
