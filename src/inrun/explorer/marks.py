"""Marks that people set on samples: in memory, and in a file of theirs if they name one. Never in the ledger."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from inrun.analysis.marked import MARKS, read_marks
from inrun.errors import ConfigurationError
from inrun.files import Files, write_durably


class MarkBook:
    """The marks of several runs.

    Attributes:
        path: The file that has them, too; None keeps them in memory only.
    """

    def __init__(self, runs: Sequence[tuple[str, Path]], path: Path | None = None) -> None:
        """Open the book; marks that the file has of these runs are taken up.

        Args:
            runs: Id and folder of every run.
            path: A file outside of these folders.
        """
        self.path, self._ids = path, [run_id for run_id, _ in runs]
        self._marks: list[dict[int, str]] = [{} for _ in runs]
        #: Lines of the file that speak of other runs: they stay.
        self._others: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        if path is None:
            return
        for _, folder in runs:
            if folder.resolve() in path.resolve().parents:
                raise ConfigurationError(f"{str(path)!r} is inside a run, which is only read; give another file")
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigurationError(f"{str(path)!r} cannot be a file of marks: give a file in a folder that exists")
        if path.exists():
            for line in read_marks(path):
                if line.get("run_id") in self._ids:
                    self._marks[self._ids.index(line["run_id"])][line["sample_id"]] = line["mark"]
                else:
                    self._others.append(line)

    def of(self, run: int) -> dict[int, str]:
        """Return a copy of a run's marks: sample id to mark."""
        with self._lock:
            return dict(self._marks[run])

    def set(self, run: int, ids: Iterable[int], mark: str | None) -> int:
        """Set a mark on samples, or take it off (None); return how many are marked now."""
        if mark is not None and mark not in MARKS:
            raise ConfigurationError(f"there is no such mark; accepted are {', '.join(MARKS)}")
        with self._lock:
            book = self._marks[run]
            for number in ids:
                if mark is None:
                    book.pop(number, None)
                else:
                    book[number] = mark
            self._write()
            return len(book)

    def lines(self, run: int) -> str:
        """Return a run's marks as a file that `inrun curate --marks` takes."""
        return _lines(self._ids[run], self.of(run))

    def _write(self) -> None:
        if self.path is None:
            return
        kept = "".join(json.dumps(line) + "\n" for line in self._others)
        text = kept + "".join(_lines(run_id, marks) for run_id, marks in zip(self._ids, self._marks, strict=True))
        write_durably(Files(), self.path, text.encode())


def _lines(run_id: str, marks: dict[int, str]) -> str:
    rows = ({"run_id": run_id, "sample_id": n, "mark": mark} for n, mark in sorted(marks.items()))
    return "".join(json.dumps(row) + "\n" for row in rows)
