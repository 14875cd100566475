"""Split the registered samples into those to keep and those to drop, by their scores, and say how it was done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inrun.analysis.curated_documents import Documents, chunk_table, document_pieces
from inrun.analysis.curated_files import FORMATS, check_out, pieces_of, placed, with_scores, write_curation
from inrun.analysis.curation_card import card_of
from inrun.analysis.judgement import Choice, Judgement, judge
from inrun.analysis.marked import Marked
from inrun.analysis.queries import CLEAR, Source, info
from inrun.errors import ConfigurationError
from inrun.ledger.reader import reader_of
from inrun.ledger.scores import Names


@dataclass
class Curation:
    """What was written."""

    out: str
    rule: str
    kept: int
    dropped: int
    #: Samples, or documents that were there to train on, that were never used: they have no score.
    unused: int
    #: How many of those with a score were dropped.
    scored_dropped: int
    #: Samples that have a score and no metadata: they are in neither file.
    without_metadata: int
    #: How many of those without a score were dropped.
    unused_dropped: int
    #: Per value of the column ``by``: how many have a score, and how many of those were dropped.
    by: str | None
    groups: dict[str | None, tuple[int, int]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    #: What was kept or dropped: "samples", or the "documents" that they are pieces of.
    unit: str = "samples"
    #: Documents that were not there to train on, as those of validation sets: nothing could have used them.
    withheld: int = 0
    #: Steps with uses that credit is still coming in for.
    pending: int = 0

    @property
    def scored(self) -> int:
        """Return how many of them have a score."""
        return self.kept + self.dropped - self.unused - self.withheld

    def share(self) -> str:
        """Say how much was dropped, of what there was a score to judge by."""
        every, judged = self.kept + self.dropped, f"of the {self.scored:,} {self.unit} with a score"
        share = self.scored_dropped / self.scored if self.scored else 0.0
        return f"{self.kept:,} of {every:,} {self.unit} are kept, {self.dropped:,} dropped; {judged}, {share:.1%} are dropped"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        rows = [{"group": g, "samples": n, "dropped": d} for g, (n, d) in self.groups.items()]
        return {**vars(self), "scored": self.scored, "groups": rows}


def curate(
    source: Source,
    out: str | Path,
    *,
    keep: str | None = None,
    top_fraction: float | None = None,
    quota: Sequence[str] = (),
    validation: Names = None,
    combine: str = "mean",
    view: str = "plain",
    z: float = CLEAR,
    drop_unused: bool = False,
    by: str | None = None,
    fmt: str = "jsonl",
    force: bool = False,
    documents: Documents | None = None,
    marks: str | Path | None = None,
) -> Curation:
    """Write ``kept`` and ``dropped`` samples and a card into a folder: all registered samples, each once, in order.

    With ``documents`` these are judged, each by the sum over its pieces, and written whole; ``chunks.parquet`` tells which pieces
    the same rule would keep by themselves. `inrun train` reads the kept ones of such a folder, and nothing else of it.

    Args:
        source: A reader, or the path of a run.
        out: A new or empty folder.
        keep: A rule such as ``"score > 0 and times_used >= 2"``; see :func:`inrun.analysis.curation_rules.parse_rule`.
        top_fraction: Keep this share of the scored samples, those with the highest scores.
        quota: ``COLUMN=FRACTION`` keeps that share of every value of a column, ``COLUMN:VALUE=FRACTION`` of one value.
        validation: The sets to judge by (default: all).
        combine: How several sets become one verdict: see ``COMBINE``.
        view: How uses are seen.
        z: The default rule drops what is negative by more than ``z`` standard errors (without folds: what is negative), and by more
            than its ``estimate_error`` where whole credit was estimated.
        drop_unused: Drop samples that were never used; they are kept otherwise, as nothing speaks against them.
        by: The column of which the card tells shares (default: ``domain`` if there is one).
        fmt: "jsonl" or "parquet".
        force: Replace the files of an earlier curation in ``out``.
        documents: The documents that samples are pieces of; None writes samples as they were registered.
        marks: A file of marks, as the explorer exports it: what is marked "drop" is dropped, and what is marked "keep" kept,
            whatever the rule says. Without a rule the marks alone decide.
    """
    choice = Choice(keep, top_fraction, quota, validation, combine, view, z, drop_unused, by)
    if fmt not in FORMATS:
        raise ConfigurationError(f"the format is {fmt!r}; accepted are {', '.join(FORMATS)}")
    if documents is not None and fmt != "jsonl":
        raise ConfigurationError(f"documents are written as jsonl, not as {fmt}: their files may have any columns")
    reader = reader_of(source)
    check_out(Path(out), reader.path, force)
    marked = None if marks is None else Marked.read(Path(marks), reader.about.get("run_id"))

    with reader.tables() as tables:
        verdict = pieces = judge(tables, choice, marked)
    if documents is not None:
        with reader.tables() as tables:
            tables.take_together(documents.units, documents.described)
            verdict = judge(tables, choice, marked, documents.units, pieces.ids)
        _check_left(verdict)
    found = info(reader)
    result = Curation(
        out=str(out),
        rule=verdict.words,
        kept=int(verdict.kept.sum()),
        dropped=int((~verdict.kept).sum()),
        unused=int((~verdict.used & verdict.trained).sum()),
        scored_dropped=int((~verdict.kept & verdict.used).sum()),
        without_metadata=found.used_without_metadata,
        unused_dropped=int((~verdict.kept & ~verdict.used & verdict.trained).sum()),
        by=verdict.by,
        groups=verdict.groups(),
        unit="samples" if documents is None else "documents",
        withheld=int((~verdict.trained).sum()),
        pending=found.pending,
    )
    card = card_of(result, found, fmt).encode()
    if documents is None:
        registered = pieces_of(reader.files("samples"), verdict.copies)
        added = verdict.score_columns()
        rows = (with_scores(piece, {k: v[here] for k, v in added.items()}) for piece, here in placed(registered))
        result.files = write_curation(Path(out), fmt, rows, verdict.kept, card, None)
    else:
        chunks = chunk_table(pieces, documents)
        result.files = write_curation(Path(out), fmt, document_pieces(documents, verdict), verdict.kept, card, chunks)
    return result


def _check_left(verdict: Judgement) -> None:
    """Refuse to keep nothing but what was withheld: without a document of a split "train" all others would be trained on."""
    if verdict.trained.any() and not (verdict.kept & verdict.trained).any():
        raise ConfigurationError(
            f"the rule drops all {int(verdict.trained.sum()):,} documents that were there to train on ({verdict.words}): what "
            "is left is held out for validation, and must not become training data. Give another rule; --unit samples writes any"
        )
