"""What a corpus is, by content: the sha256 of every file, remembered so that gigabytes are not read again at each start."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inrun.corpus.sources import SourceFile
from inrun.errors import DataError
from inrun.files import Files, write_durably

#: Nanoseconds a file must have rested before its hash is remembered: a later change within one tick of its clock would not show.
REST = 3_000_000_000
NAME = "hashes.json"


@dataclass(frozen=True)
class Content:
    """What a file held, and the state in which it was read."""

    sha256: str
    size: int
    state: tuple[int, ...]


def state_of(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is written to or replaced."""
    found = os.stat(path)
    return (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


def contents(files: Sequence[SourceFile], cache: Path) -> list[Content]:
    """Return the content of every file, hashing only what has changed since ``cache`` saw it."""
    known = _load(cache / NAME)
    found: list[Content] = []
    fresh: dict[str, list[object]] = {}
    for file in files:
        key = os.fsencode(file.path).decode("utf-8", "backslashreplace")
        content = _content(file.path, known.get(key))
        found.append(content)
        if time.time_ns() - max(content.state[1], content.state[2]) > REST:
            fresh[key] = [*content.state, content.sha256]
    if any(known.get(key) != value for key, value in fresh.items()):
        _save(cache / NAME, {**known, **fresh})
    return found


def _content(path: Path, known: list[object] | None) -> Content:
    try:
        state = state_of(path)
        if known is not None and known[:-1] == list(state) and isinstance(known[-1], str):
            return Content(known[-1], state[0], state)
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if state_of(path) != state:
            raise DataError(f"{path} is being written to; wait until it is whole")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}; make it readable, or leave it out") from error
    return Content(digest, state[0], state)


def _load(path: Path) -> dict[str, list[object]]:
    """Read what is remembered; a damaged memory is no memory."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, list)} if isinstance(found, dict) else {}


def _save(path: Path, known: dict[str, list[object]]) -> None:
    """Put the memory in place whole; of two processes the later one wins, and the other hashes again some day."""
    write_durably(Files(), path, json.dumps(known).encode(), shared=True)
