"""The few file operations the ledger stands on. Tests put a faulty disk in their place."""

from __future__ import annotations

import os
from pathlib import Path


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


def write_durably(files: Files, path: Path, data: bytes) -> None:
    """Put a whole file in place: written aside, synced, renamed, the folder synced. It is there whole, or not at all."""
    aside = path.with_name(path.name + ".tmp")
    files.remove(aside)
    files.create(aside, data)
    files.sync(aside)
    files.rename(aside, path)
    files.sync_folder(path.parent)
