"""Files that are whole or absent, and locks: one way to write durably and one way to be alone, for every room.

Two kinds of lock. :func:`alone` keeps a second process out while a block runs; ``filelock`` does that job. :class:`Lock` is the
writer's: the file says who holds it, also while another process tries and fails, and a forked child does not hold it. Versions
of ``filelock`` before 3.30 empty the file of the one who holds it when they try to take it, so that this one is our own.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: the file's content alone tells
    fcntl = None  # type: ignore[assignment]

# Durable writes


class Files:
    """Real files. Nothing here is durable until ``sync`` (of the file) and ``sync_folder`` (of its name) have returned."""

    def create(self, path: Path, data: bytes) -> None:
        """Write a new file; it must not exist."""
        with open(path, "xb") as f:
            f.write(data)

    def append(self, path: Path, data: bytes) -> None:
        """Add bytes at the end; the file is made if need be."""
        with open(path, "ab") as f:
            f.write(data)

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file to ``size`` bytes."""
        os.truncate(path, size)

    def sync(self, path: Path) -> None:
        """Wait until the file's content is on disk."""
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder are on disk."""
        try:
            fd = os.open(path, os.O_RDONLY)
        except PermissionError:  # Windows does not open folders
            return
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file its final name, replacing what has it."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """Remove a file; none is fine."""
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        """Make a folder and its parents."""
        path.mkdir(parents=True, exist_ok=True)


def make_folder_durably(files: Files, path: Path) -> None:
    """Make a folder and its parents so that their names survive a power cut."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    files.make_folder(path)
    for folder in reversed(missing):
        files.sync_folder(folder.parent)


def write_durably(files: Files, path: Path, data: bytes, *, shared: bool = False) -> None:
    """Put a whole file in place: written aside, synced, renamed, the folder synced. It is there whole, or not at all.

    Args:
        files: The disk.
        path: The file; what has its name is replaced.
        data: All of its content.
        shared: Several processes may write it at once: each has a name aside of its own, and the last one wins.
    """
    aside = _aside(path, shared)
    files.remove(aside)
    try:
        files.create(aside, data)
        files.sync(aside)
        files.rename(aside, path)
    except OSError:
        if shared:  # nobody else would ever remove it
            with contextlib.suppress(OSError):
                files.remove(aside)
        raise
    files.sync_folder(path.parent)


def _aside(path: Path, shared: bool) -> Path:
    own = f".{secrets.token_hex(4)}" if shared else ""
    return path.with_name(f"{path.name}{own}.tmp")


class DurableStream:
    """A file that is written piece by piece, aside, and takes its name in :meth:`finish`; ``abandon`` leaves nothing."""

    def __init__(self, path: Path) -> None:
        """Open the file aside."""
        self.path, self._aside = path, _aside(path, shared=False)
        self.stream: IO[bytes] = self._aside.open("wb")

    def finish(self) -> None:
        """Sync what was written, give it its name, and sync the name."""
        self.stream.close()
        files = Files()
        files.sync(self._aside)
        files.rename(self._aside, self.path)
        files.sync_folder(self.path.parent)

    def abandon(self) -> None:
        """Close, and remove what was not finished."""
        with contextlib.suppress(OSError):
            self.stream.close()
        self._aside.unlink(missing_ok=True)


def put_folder(files: Files, aside: Path, final: Path) -> None:
    """Give a folder whose files are synced its final name, which must be free; it is there whole, or not at all."""
    files.sync_folder(aside)
    files.rename(aside, final)
    files.sync_folder(final.parent)


# Locks


@dataclass(frozen=True)
class Holder:
    """The process that a lock file names; None for what it does not say."""

    pid: int | None
    host: str | None

    @property
    def is_here(self) -> bool:
        """Whether it ran on this machine."""
        return self.host == platform.node()

    @property
    def is_alive(self) -> bool:
        """Whether a process of this machine has its number; one on another machine cannot be seen."""
        if not self.is_here or self.pid is None or self.pid <= 0:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            return True
        return True

    def __str__(self) -> str:
        """Return who it is."""
        return f"process {_or_unknown(self.pid)} on {_or_unknown(self.host)}"


def _or_unknown(value: object) -> object:
    return "?" if value is None else value


def holder_of(path: Path) -> Holder | None:
    """Return who holds a :class:`Lock`, or held it when it died; None if nobody does."""
    try:
        return _parse_holder(path.read_bytes())
    except OSError:
        return None


def _parse_holder(data: bytes) -> Holder | None:
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not found:
        return None
    pid, host = found.get("pid"), found.get("host")
    return Holder(pid if isinstance(pid, int) and not isinstance(pid, bool) else None, host if isinstance(host, str) else None)


class LockedError(Exception):
    """Another process has the lock.

    Attributes:
        holder: Who, as far as it is known.
        is_elsewhere: The holder is on another machine, where nobody can see from here whether it lives.
    """

    def __init__(self, path: Path, holder: Holder | None = None, is_elsewhere: bool = False) -> None:
        """Say whose it is."""
        self.holder, self.is_elsewhere = holder, is_elsewhere
        super().__init__(f"{path} is held by {holder or 'another process'}")


@contextlib.contextmanager
def alone(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock file while the block runs; it ends with the process.

    Args:
        path: The lock file; it stays, and its folder must exist.
        waiting: Called once if another process has the lock, which is then waited for; None does not wait.

    Raises:
        LockedError: Another process has the lock, and ``waiting`` is None.
        OSError: The file cannot be made or locked.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(str(path))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if waiting is None:
            raise LockedError(path) from None
        waiting()
        lock.acquire(poll_interval=0.1)
    try:
        yield
    finally:
        lock.release()


class Lock:
    """A lock file with the process and host that hold it, kept by the operating system as long as the process lives.

    Held until ``release``, or until the process ends. A forked child does not hold it.

    Attributes:
        path: The lock file.
        left_by: The process that died with the lock and did not give it back, if any.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises:
            LockedError: Another process has it.
            OSError: The file cannot be made, locked or written.
        """
        self.path = path
        self._descriptor: int | None = None
        self.left_by: Holder | None = None
        try:
            # Never through a link: taking the lock cuts the file.
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
            self.left_by = self._take(self._descriptor)
        except (OSError, LockedError):
            self._let_go()
            raise
        _held.add(self)

    def _take(self, descriptor: int) -> Holder | None:
        """Lock and sign the file; return who had signed it before."""
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(self.path, _read_holder(descriptor) or Holder(None, None)) from None
        holder = _read_holder(descriptor)
        if holder is not None and not holder.is_here:
            raise LockedError(self.path, holder, is_elsewhere=True)
        if holder is not None and fcntl is None and holder.pid != os.getpid() and holder.is_alive:
            raise LockedError(self.path, holder)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": platform.node()}).encode(), 0)
        return holder

    def __del__(self) -> None:
        """Let go when nobody can write any more; the next writer is told."""
        self._let_go()

    @property
    def held(self) -> bool:
        """Whether this process still has it."""
        return self._descriptor is not None

    def release(self) -> None:
        """Give the lock back."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # a full disk must not keep the lock
                os.ftruncate(self._descriptor, 0)  # the file stays: removing it could leave two writers with a lock each
            self._let_go()

    def _let_go(self) -> None:
        """Close the file and leave the signature, as a killed process does."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _read_holder(descriptor: int) -> Holder | None:
    return _parse_holder(os.pread(descriptor, 4096, 0))


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    """Let go of inherited locks: else a loader worker that outlives its killed parent would keep the run locked."""
    for lock in list(_held):
        lock._let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
