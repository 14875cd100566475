"""One writer per rank: a lock file with process and host, held by the operating system as long as the process lives."""

from __future__ import annotations

import json
import logging
import os
import socket
from pathlib import Path

from inrun.errors import LedgerError

log = logging.getLogger("inrun")

try:
    import fcntl
except ImportError:  # Windows: the file's content alone tells
    fcntl = None  # type: ignore[assignment]


class Lock:
    """Held until ``release``, or until the process ends."""

    def __init__(self, run: Path, rank: int) -> None:
        """Take the lock of a rank, or raise LedgerError naming who has it."""
        self.path = run / f"lock-r{rank}"
        mine = {"pid": os.getpid(), "host": socket.gethostname()}
        self.fd: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        holder = self._holder()
        try:
            if fcntl is not None:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.fd)
            self.fd = None
            raise LedgerError(f"{run} is being written by {_title(holder)}; one writer per rank and run") from None
        if holder and holder.get("host") != mine["host"]:
            os.close(self.fd)
            self.fd = None
            raise LedgerError(
                f"{run} has the lock of {_title(holder)}, on another machine. If that writer is dead, remove {self.path} and "
                "try again"
            )
        if holder and fcntl is None and holder.get("pid") != mine["pid"] and _alive(holder.get("pid")):
            os.close(self.fd)
            self.fd = None
            raise LedgerError(f"{run} is being written by {_title(holder)}; one writer per rank and run")
        if holder:
            log.warning("inrun: %s was left locked by %s, which is gone; taking over", run, _title(holder))
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, json.dumps(mine).encode(), 0)

    def _holder(self) -> dict[str, object]:
        assert self.fd is not None
        try:
            found = json.loads(os.pread(self.fd, 4096, 0) or b"{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def release(self) -> None:
        """Give the lock back."""
        if self.fd is not None:
            os.ftruncate(self.fd, 0)  # the file stays: removing it could leave two writers with a lock each
            os.close(self.fd)
            self.fd = None


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
