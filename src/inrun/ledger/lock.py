"""One writer per rank: a lock file with process and host, held by the operating system as long as the process lives."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import weakref
from pathlib import Path

from inrun.errors import LedgerError

log = logging.getLogger("inrun")

try:
    import fcntl
except ImportError:  # Windows: the file's content alone tells
    fcntl = None  # type: ignore[assignment]


class Lock:
    """Held until ``release``, or until the process ends. A forked child does not hold it."""

    def __init__(self, run: Path, rank: int) -> None:
        """Take the lock of a rank, or raise LedgerError naming who has it."""
        self.path = run / f"lock-r{rank}"
        self.fd: int | None = None
        try:
            # Never through a link: taking the lock cuts the file.
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
            self._take(run)
        except OSError as error:
            self._close()
            raise LedgerError(
                f"{self.path} cannot be taken ({error}); a writer must be able to write and lock files there"
            ) from error
        except LedgerError:
            self._close()
            raise
        _held.add(self)

    def _take(self, run: Path) -> None:
        assert self.fd is not None
        mine = {"pid": os.getpid(), "host": platform.node()}
        try:
            if fcntl is not None:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LedgerError(f"{run} is being written by {_title(self._holder())}; one writer per rank and run") from None
        holder = self._holder()
        if holder and holder.get("host") != mine["host"]:
            raise LedgerError(
                f"{run} has the lock of {_title(holder)}, on another machine. If that writer is dead, remove {self.path} and "
                "try again"
            )
        if holder and fcntl is None and holder.get("pid") != mine["pid"] and _alive(holder.get("pid")):
            raise LedgerError(f"{run} is being written by {_title(holder)}; one writer per rank and run")
        if holder:
            log.warning("inrun: %s was left locked by %s, which is gone; taking over", run, _title(holder))
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, json.dumps(mine).encode(), 0)

    def _holder(self) -> dict[str, object]:
        assert self.fd is not None
        try:
            found = json.loads(os.pread(self.fd, 4096, 0) or b"{}")
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def __del__(self) -> None:
        """Let go when nobody can write any more; the next writer is told."""
        self._close()

    @property
    def held(self) -> bool:
        """Whether this process still has it."""
        return self.fd is not None

    def release(self) -> None:
        """Give the lock back."""
        if self.fd is not None:
            with contextlib.suppress(OSError):  # a full disk must not keep the lock
                os.ftruncate(self.fd, 0)  # the file stays: removing it could leave two writers with a lock each
            self._close()


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    """Let go of inherited locks: else a loader worker that outlives its killed parent would keep the run locked."""
    for lock in list(_held):
        lock._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _alive(pid: object) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _title(holder: dict[str, object]) -> str:
    return f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
