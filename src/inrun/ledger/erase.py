"""Remove a ledger from a folder, and nothing else in it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from inrun.errors import LedgerError
from inrun.files import Files
from inrun.ledger.about import NAME
from inrun.ledger.lock import lock_rank, locked_ranks
from inrun.ledger.manifest import FOLDER, TABLES, refuse_links
from inrun.ledger.saved import refuse_old_save


def erase(run: Path) -> None:
    """Remove parts, manifests and ``run.json``; see :meth:`inrun.Ledger.erase`."""
    files = Files()
    refuse_links(run)
    refuse_old_save(run)
    with contextlib.ExitStack() as stack:
        for rank in locked_ranks(run):
            stack.callback(lock_rank(run, rank).release)
        try:
            for folder in (run / name for name in (FOLDER, *TABLES)):
                for file in folder.glob("r[0-9]*"):
                    files.remove(file)
                if folder.is_dir():
                    files.sync_folder(folder)
            files.remove(run / NAME)
        except OSError as error:
            raise LedgerError(f"the ledger in {run} cannot be removed: {error}") from error
