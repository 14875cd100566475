"""Documents that a run's samples are pieces of: judged by the sum over their pieces, written whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa

from inrun.analysis.curated_files import with_scores
from inrun.analysis.judgement import Judgement
from inrun.errors import LedgerError


class Documents(Protocol):
    """Documents that a run's samples are pieces of: they are kept or dropped whole, with all that their files say of them."""

    #: ``sample_id`` of every piece, and the ``unit``: the number of its document.
    units: pa.Table
    #: What is known of documents, in order: ``sample_id`` is the number.
    described: pa.Table
    #: What must be the same for the numbers of pieces to mean the same ones, as metadata of their file.
    about: dict[str, str]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Read the documents again, whole, in order."""
        ...


def document_pieces(documents: Documents, verdict: Judgement) -> Iterator[list[dict[str, Any]]]:
    """Read documents again, some at a time, each with its scores in a field ``inrun`` of its own: files may have any other."""
    added = verdict.score_columns()
    for place, row in enumerate(documents.rows()):
        if place >= len(verdict.kept):
            raise LedgerError("the files of the documents have changed since the run was trained; curate from the original files")
        scores = {name: int(x[place]) if name.startswith("times_used") else _number(x[place]) for name, x in added.items()}
        yield [{**row, "inrun": {name: value for name, value in scores.items() if value is not None}}]


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def chunk_table(verdict: Judgement, documents: Documents) -> pa.Table:
    """Return which pieces the rule keeps by themselves."""
    units = dict(zip(documents.units["sample_id"].to_pylist(), documents.units["unit"].to_pylist(), strict=True))
    numbers = [units.get(int(i)) for i in verdict.ids]
    known = pa.table({"sample_id": verdict.ids, "document": pa.array(numbers, pa.int64()), "kept": verdict.kept})
    table = with_scores(known, verdict.score_columns())
    return table.replace_schema_metadata(documents.about)
