"""Files of marks: what people decided about samples, one JSON object per line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from inrun.analysis.curation_rules import Judged, Mask
from inrun.errors import ConfigurationError

#: What a mark says. Only "drop" and "keep" change what a curation writes.
MARKS = ("drop", "keep", "look")


def read_marks(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of marks; ConfigurationError names the line that is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{str(path)!r} cannot be read as a file of marks: {error}") from None
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        good = isinstance(row, dict) and type(row.get("sample_id")) is int and row.get("mark") in MARKS
        if not (good and -(2**63) <= row["sample_id"] < 2**63 and isinstance(row.get("run_id", ""), str)):
            raise ConfigurationError(
                f"{str(path)!r}, line {number} is no mark; accepted is for example "
                f'{{"sample_id": 17, "mark": "drop"}} with one of {", ".join(MARKS)}'
            )
        found.append(row)
    return found


@dataclass(frozen=True)
class Marked:
    """The marks that a curation goes by: they stand above its rule."""

    name: str
    drop: npt.NDArray[np.int64]
    keep: npt.NDArray[np.int64]

    @classmethod
    def read(cls, path: Path, run_id: str | None) -> Marked:
        """Read the marks of a run; the last line of a sample counts, and lines without a ``run_id`` are of any run."""
        rows = read_marks(path)
        own = [row for row in rows if row.get("run_id") in (None, run_id)]
        if rows and not own:
            raise ConfigurationError(f"{str(path)!r} has marks of other runs only, none of run {run_id!r}")
        last = {row["sample_id"]: row["mark"] for row in own}
        drop, keep = (np.array(sorted(n for n, m in last.items() if m == mark), np.int64) for mark in ("drop", "keep"))
        return cls(path.name, drop, keep)

    def apply(self, kept: Mask, ids: npt.NDArray[np.int64], units: pa.Table | None) -> tuple[Mask, str]:
        """Return what is kept by rule and marks, and that in words.

        Args:
            kept: What the rule keeps.
            ids: The samples, or the documents, that it speaks of.
            units: Which document a sample is a piece of; None where ``ids`` are samples.
        """
        drop, keep = (self._places(marked, ids, units) for marked in (self.drop, self.keep))
        words = f"dropped is what is marked 'drop' ({len(self.drop):,} marks), kept what is marked 'keep' ({len(self.keep):,})"
        if units is not None:
            words += ", a document if a piece of it is, where 'drop' outweighs 'keep'"
        known = ids if units is None else units["sample_id"].to_numpy()
        unknown = int((~np.isin(np.concatenate([self.drop, self.keep]), known)).sum())
        if unknown:
            words += f"; {unknown:,} marked samples have no metadata and are in neither file"
        return (kept | keep) & ~drop, words

    @staticmethod
    def _places(marked: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], units: pa.Table | None) -> Mask:
        if units is not None:
            marked = units["unit"].to_numpy()[np.isin(units["sample_id"].to_numpy(), marked)]
        return np.isin(ids, marked)


def keep_all(judged: Judged, _: dict[str, Judged]) -> Mask:
    """Keep everything: the rule where marks alone decide."""
    return np.ones(len(judged.score), bool)
