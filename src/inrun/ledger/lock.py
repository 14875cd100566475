"""One writer per rank: the lock files of a run, and who holds them."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

from inrun.errors import LedgerError
from inrun.files import Holder, Lock, LockedError, holder_of

log = logging.getLogger("inrun")


def lock_path(run: Path, rank: int) -> Path:
    """Return the lock file of a rank."""
    return run / f"lock-r{rank}"


def lock_rank(run: Path, rank: int, patience: float = 0.0) -> Lock:
    """Take the lock of a rank, trying for ``patience`` seconds; LedgerError naming who has it."""
    until = time.monotonic() + patience
    while True:
        try:
            return _lock_rank(run, rank)
        except LedgerError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.05)


def _lock_rank(run: Path, rank: int) -> Lock:
    path = lock_path(run, rank)
    try:
        lock = Lock(path)
    except LockedError as error:
        if error.is_elsewhere:
            raise LedgerError(
                f"{run} has the lock of {error.holder}, on another machine. If that writer is dead, remove {path} and try again"
            ) from None
        raise LedgerError(f"{run} is being written by {error.holder}; one writer per rank and run") from None
    except OSError as error:
        raise LedgerError(f"{path} cannot be taken ({error}); a writer must be able to write and lock files there") from error
    if lock.left_by is not None:
        log.warning("inrun: %s was left locked by %s, which is gone; taking over", run, lock.left_by)
    return lock


def locked_ranks(run: Path) -> list[int]:
    """Return the ranks that have a lock file, held or not."""
    found = (re.fullmatch(r"lock-r(0|[1-9][0-9]*)", path.name) for path in run.glob("lock-r*"))
    return sorted(int(m[1]) for m in found if m)


def holders(run: Path) -> list[Holder]:
    """Return the processes that the lock files of a run name: its writers, and those that died without closing it."""
    named = [holder_of(lock_path(run, rank)) for rank in locked_ranks(run)]
    return [holder for holder in named if holder is not None]
