"""Split the registered samples into those to keep and those to drop, by their scores, and say how it was done."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from inrun.analysis.curation_rules import CurationRule, Judged, Mask, Values, column_values, make_rule
from inrun.analysis.marked import Marked, keep_all
from inrun.analysis.queries import CLEAR, Info, Source, info
from inrun.errors import ConfigurationError, LedgerError
from inrun.files import DurableStream
from inrun.ledger.reader import reader_of
from inrun.ledger.scores import Names, score_table
from inrun.ledger.tables import Tables, some

FORMATS = ("jsonl", "parquet")
#: Tells whoever reads the folder which of its files are kept (see ``corpus/sources.py``).
MARK = "curation.json"
#: How several validation sets become one verdict.
COMBINE = {
    "mean": "the rule is applied to the mean of the sets' scores",
    "any": "a sample is dropped if the rule drops it for any of the sets",
    "all": "a sample is dropped only if the rule drops it for all of the sets",
}


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


@dataclass
class Curation:
    """What was written."""

    out: str
    rule: str
    kept: int
    dropped: int
    #: Samples that were registered and never used: they have no score.
    unused: int
    #: Samples that have a score and no metadata: they are in neither file.
    without_metadata: int
    #: Whether those without a score are among the dropped.
    unused_dropped: bool
    #: Per value of the column ``by``: how many have a score, and how many of those were dropped.
    by: str | None
    groups: dict[str | None, tuple[int, int]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    #: What was kept or dropped: "samples", or the "documents" that they are pieces of.
    unit: str = "samples"

    @property
    def scored(self) -> int:
        """Return how many of them have a score."""
        return self.kept + self.dropped - self.unused

    def share(self) -> str:
        """Say how much was dropped, of what there was a score to judge by."""
        every, judged = self.kept + self.dropped, f"of the {self.scored:,} {self.unit} with a score"
        dropped = self.dropped - (self.unused if self.unused_dropped else 0)
        share = dropped / self.scored if self.scored else 0.0
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
    _check(combine, fmt, z, sum([keep is not None, top_fraction is not None, bool(quota)]))
    if documents is not None and fmt != "jsonl":
        raise ConfigurationError(f"documents are written as jsonl, not as {fmt}: their files may have any columns")
    reader = reader_of(source)
    _check_out(Path(out), reader.path, force)
    marked = None if marks is None else Marked.read(Path(marks), reader.about.get("run_id"))

    def judge(together: Documents | None) -> Judgement:
        with reader.tables() as tables:
            if together is not None:
                tables.take_together(together.units, together.described)
            units = None if together is None else together.units
            return _judge(tables, keep, top_fraction, quota, validation, combine, view, z, drop_unused, by, marked, units)

    found, verdict = info(reader), judge(documents)
    result = Curation(
        out=str(out),
        rule=verdict.words,
        kept=int(verdict.kept.sum()),
        dropped=int((~verdict.kept).sum()),
        unused=int((~verdict.used).sum()),
        without_metadata=found.used_without_metadata,
        unused_dropped=drop_unused,
        by=verdict.by,
        groups=_count(verdict.kinds, verdict.kept, verdict.used) if verdict.kinds is not None else {},
        unit="samples" if documents is None else "documents",
    )
    card = _card(result, found, fmt).encode()
    if documents is None:
        pieces = _pieces(reader.files("samples"), verdict.copies)
        added = _score_columns(verdict.chosen, verdict.sets, verdict.judged)
        rows = (_with_scores(piece, {k: v[here] for k, v in added.items()}) for piece, here in _placed(pieces))
        result.files = _write(Path(out), fmt, rows, verdict.kept, card, None)
    else:
        chunks = _chunk_table(judge(None), documents)
        result.files = _write(Path(out), fmt, _document_pieces(documents, verdict), verdict.kept, card, chunks)
    return result


@dataclass(frozen=True)
class Judgement:
    """What is kept, and why: arrays have one entry per sample (or document), in order."""

    ids: npt.NDArray[np.int64]
    #: Rows of the samples' table that are copies of earlier ones; None: none is.
    copies: Mask | None
    kept: Mask
    #: Scores by validation set, and those that were judged (of several sets perhaps their mean).
    sets: dict[str, Judged]
    judged: dict[str, Judged]
    chosen: list[str]
    words: str
    by: str | None
    kinds: npt.NDArray[Any] | None

    @property
    def used(self) -> Mask:
        """Which have a score."""
        return _any([s.used for s in self.sets.values()])


def _judge(
    tables: Tables,
    keep: str | None,
    top_fraction: float | None,
    quota: Sequence[str],
    validation: Names,
    combine: str,
    view: str,
    z: float,
    drop_unused: bool,
    by: str | None,
    marked: Marked | None,
    units: pa.Table | None,
) -> Judgement:
    if not tables.columns:
        raise LedgerError(
            f"{str(tables.run.path)!r} has no sample metadata, so there is nothing to write; see ledger.register_samples"
        )
    tables.check_rows()
    chosen = list(tables.choose(validation))
    ids, copies = _registered(tables)
    kinds = column_values(tables, by or "domain") if by or "domain" in tables.columns else None
    rule = make_rule(tables, keep, top_fraction, quota, z)
    if marked is not None and keep is None and top_fraction is None and not quota:
        rule = CurationRule("nothing is dropped for its score", keep_all)
    tables.choose(rule.names)
    # One question: all sets as they are at one moment.
    names = list(dict.fromkeys([*chosen, *rule.names]))
    table = score_table(tables, names, view)
    sets = {name: _align(table.filter(pc.equal(table["validation"], name)), ids) for name in names}
    judged = {name: sets[name] for name in chosen}
    if combine == "mean" and len(chosen) > 1:
        judged = {"mean": _mean([sets[name] for name in chosen])}
    kept, words = _verdict(rule, judged, sets, combine, drop_unused), _in_words(rule, chosen, combine, view)
    if marked is not None:
        kept, more = marked.apply(kept, ids, units)
        words = f"{words}; {more}"
    return Judgement(
        ids=ids,
        copies=copies,
        kept=kept,
        sets=sets,
        judged=judged,
        chosen=chosen,
        words=words,
        by=(by or "domain") if kinds is not None else None,
        kinds=kinds,
    )


def _check(combine: str, fmt: str, z: float, rules: int) -> None:
    if combine not in COMBINE:
        raise ConfigurationError(f"combine is {combine!r}; accepted are {', '.join(COMBINE)}")
    if fmt not in FORMATS:
        raise ConfigurationError(f"the format is {fmt!r}; accepted are {', '.join(FORMATS)}")
    if not (math.isfinite(z) and z >= 0):
        raise ConfigurationError(f"z is {z!r}; it must be a number of at least 0")
    if rules > 1:
        raise ConfigurationError("keep, top fraction and quota are different rules; give one of them")


# Scores, aligned with the samples


def _registered(tables: Tables) -> tuple[npt.NDArray[np.int64], Mask | None]:
    """Return the ids in order of registration, and which rows are copies of earlier ones (None: none is)."""
    ids = tables.table("SELECT sample_id FROM samples")["sample_id"].to_numpy()
    first = np.zeros(len(ids), bool)
    first[np.unique(ids, return_index=True)[1]] = True
    return (ids, None) if first.all() else (ids[first], ~first)


def _align(table: pa.Table, ids: npt.NDArray[np.int64]) -> Judged:
    scored = table["sample_id"].to_numpy()
    place = np.searchsorted(scored, ids)
    hit = place < len(scored)
    hit[hit] = scored[place[hit]] == ids[hit]

    def spread(column: str, missing: float) -> Values:
        values = np.full(len(ids), missing)
        values[hit] = table[column].to_numpy()[place[hit]]
        return values

    return Judged(
        score=spread("score", np.nan),
        standard_error=spread("standard_error", np.nan),
        times_used=spread("times_used", 0.0),
        estimate_error=spread("estimate_error", np.nan),
    )


def _mean(sets: list[Judged]) -> Judged:
    """Average over sets; the errors of different sets are taken as independent. A score needs all of the sets."""
    k = len(sets)
    score = sum((s.score for s in sets[1:]), sets[0].score) / k
    error = np.sqrt(sum((s.standard_error**2 for s in sets[1:]), sets[0].standard_error ** 2)) / k
    uses = np.where(np.isfinite(score), np.max([s.times_used for s in sets], axis=0), 0.0)
    # The sets share one estimate of a sample's push: a mean over them is no more exact than one.
    estimate = np.sqrt(sum((s.estimate_error**2 for s in sets[1:]), sets[0].estimate_error ** 2) / k)
    return Judged(score, error, uses, estimate)


def _any(masks: list[Mask]) -> Mask:
    return np.logical_or.reduce(masks)


def _verdict(rule: CurationRule, judged: dict[str, Judged], sets: dict[str, Judged], combine: str, drop_unused: bool) -> Mask:
    """Return which samples are kept. A set that did not use a sample has no say on it."""
    drops = [~rule.keep(j, sets) & j.used for j in judged.values()]
    says = [j.used for j in judged.values()]
    used = _any(says)
    if combine == "all":
        dropped = np.logical_and.reduce([d | ~s for d, s in zip(drops, says, strict=True)]) & used
    else:
        dropped = _any(drops)
    return ~(dropped | (~used & drop_unused))


def _in_words(rule: CurationRule, chosen: list[str], combine: str, view: str) -> str:
    words = f"{rule.words}; view {view!r}; judged by {some(chosen)}"
    return f"{words}; {COMBINE[combine]}" if len(chosen) > 1 else words


def _count(kinds: npt.NDArray[Any], kept: Mask, used: Mask) -> dict[str | None, tuple[int, int]]:
    """Count by kind what has a score, and what of that is dropped."""
    found: dict[str | None, list[int]] = {}
    for kind, keep in zip(kinds[used].tolist(), kept[used].tolist(), strict=True):
        entry = found.setdefault(kind, [0, 0])
        entry[0] += 1
        entry[1] += not keep
    return {kind: (n, d) for kind, (n, d) in sorted(found.items(), key=lambda e: (e[0] is None, e[0] or ""))}


# Files


def _check_out(out: Path, run: Path, force: bool) -> None:
    """Refuse a folder that holds something, and the run itself."""
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"{str(out)!r} is a file; give a folder")
    if out.resolve() == run.resolve() or run.resolve() in out.resolve().parents:
        raise ConfigurationError(f"{str(out)!r} is the run, or inside of it; give another folder")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise ConfigurationError(f"{str(out)!r} is not empty; give a new folder, or --force to replace an earlier curation in it")


def _score_columns(chosen: list[str], sets: dict[str, Judged], judged: dict[str, Judged]) -> dict[str, Values]:
    """Name the score columns: ``score`` of the set or of the mean, and ``score.NAME`` where there are several sets."""
    found: dict[str, Values] = {}
    if len(judged) == 1:
        (only,) = judged.values()
        found |= {"score": only.score, "standard_error": only.standard_error, "times_used": only.times_used}
    if len(chosen) > 1:
        for name in chosen:
            found |= {f"score.{name}": sets[name].score, f"standard_error.{name}": sets[name].standard_error}
            found[f"times_used.{name}"] = sets[name].times_used
    return found


def _pieces(files: list[str], copies: Mask | None) -> Iterator[pa.Table]:
    """Read the samples again, piece by piece, in order of registration and with the same columns in every piece."""
    schema = pa.unify_schemas([pq.read_schema(f) for f in files], promote_options="default").remove_metadata()
    at = 0
    for file in files:
        with pq.ParquetFile(file, page_checksum_verification=True) as part:
            for batch in part.iter_batches(batch_size=4096):
                table = pa.concat_tables([schema.empty_table(), pa.Table.from_batches([batch])], promote_options="default")
                if copies is not None:
                    table = table.filter(pa.array(~copies[at : at + len(batch)]))
                at += len(batch)
                yield table.select(schema.names)


def _placed(pieces: Iterable[pa.Table]) -> Iterator[tuple[pa.Table, slice]]:
    """Give pieces with the places of their rows."""
    at = 0
    for piece in pieces:
        yield piece, slice(at, at + piece.num_rows)
        at += piece.num_rows


def _document_pieces(documents: Documents, verdict: Judgement) -> Iterator[list[dict[str, Any]]]:
    """Read documents again, some at a time, each with its scores in a field ``inrun`` of its own: files may have any other."""
    added = _score_columns(verdict.chosen, verdict.sets, verdict.judged)
    for place, row in enumerate(documents.rows()):
        if place >= len(verdict.kept):
            raise LedgerError("the files of the documents have changed since the run was trained; curate from the original files")
        scores = {name: int(x[place]) if name.startswith("times_used") else _number(x[place]) for name, x in added.items()}
        yield [{**row, "inrun": {name: value for name, value in scores.items() if value is not None}}]


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _chunk_table(verdict: Judgement, documents: Documents) -> pa.Table:
    """Return which pieces the rule keeps by themselves."""
    units = dict(zip(documents.units["sample_id"].to_pylist(), documents.units["unit"].to_pylist(), strict=True))
    numbers = [units.get(int(i)) for i in verdict.ids]
    known = pa.table({"sample_id": verdict.ids, "document": pa.array(numbers, pa.int64()), "kept": verdict.kept})
    table = _with_scores(known, _score_columns(verdict.chosen, verdict.sets, verdict.judged))
    return table.replace_schema_metadata(documents.about)


def _write(
    out: Path, fmt: str, pieces: Iterable[pa.Table | list[dict[str, Any]]], kept: Mask, card: bytes, chunks: pa.Table | None
) -> list[str]:
    """Write the files of a curation; an earlier one goes only when the new one is whole."""
    writers: list[_Writer] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = [f"kept.{fmt}", f"dropped.{fmt}"]
        writers = [_Writer(out / name, fmt) for name in names] + [_Writer(out / name, "text") for name in ("README.md", MARK)]
        at = 0
        for piece in pieces:
            here = kept[at : at + len(piece)]
            at += len(piece)
            for writer, wanted in zip(writers[:2], (here, ~here), strict=True):
                if isinstance(piece, list):
                    writer.write_rows([row for row, want in zip(piece, wanted, strict=True) if want])
                else:
                    writer.write(piece.filter(pa.array(wanted)))
        if at != len(kept):
            raise LedgerError("samples were registered, or files changed, while the curation was written; run it again")
        writers[2].stream.write(card)
        writers[3].stream.write((json.dumps({"written_by": "inrun curate", "kept": names[0], "dropped": names[1]}) + "\n").encode())
        if chunks is not None:
            writers.append(_Writer(out / "chunks.parquet", "parquet"))
            writers[-1].write(chunks)
        for writer in writers:
            writer.finish()
        stale = [f"{part}.{other}" for part in ("kept", "dropped") for other in FORMATS if other != fmt]
        for name in [*stale, *(["chunks.parquet"] if chunks is None else [])]:
            (out / name).unlink(missing_ok=True)
    except (OSError, pa.ArrowException) as error:
        raise LedgerError(f"{str(out)!r} cannot be written: {error}") from error
    finally:
        for writer in writers:
            writer.abandon()
    return [writer.path.name for writer in writers if writer.path.name != MARK]


def _with_scores(piece: pa.Table, added: dict[str, Values]) -> pa.Table:
    for name, values in added.items():
        if name.startswith("times_used"):
            column = pa.array(values.astype(np.int64))
        else:
            column = pa.array(values, pa.float64(), from_pandas=True)
        piece = piece.append_column(name, column)
    return piece


class _Writer(DurableStream):
    """Writes rows in a format to a file that is whole or absent."""

    def __init__(self, path: Path, fmt: str) -> None:
        super().__init__(path)
        self.fmt = fmt
        self.parquet: pq.ParquetWriter | None = None

    def write(self, table: pa.Table) -> None:
        """Add rows."""
        if self.fmt == "jsonl":
            self.write_rows(table.to_pylist())
            return
        if self.parquet is None:
            self.parquet = pq.ParquetWriter(self.stream, table.schema, compression="zstd", write_page_checksum=True)
        if table.num_rows:
            self.parquet.write_table(table)

    def write_rows(self, rows: list[dict[str, Any]]) -> None:
        """Add rows as lines of JSON."""
        self.stream.write("".join(_line(row) for row in rows).encode())

    def finish(self) -> None:
        """Give the file its name."""
        if self.parquet is not None:
            self.parquet.close()
        super().finish()

    def abandon(self) -> None:
        """Close and remove what was not finished."""
        with contextlib.suppress(OSError, ValueError, pa.ArrowException):
            if self.parquet is not None:
                self.parquet.close()
        super().abandon()


#: Characters that JSON allows raw, and terminals and line splitters take for something else.
_RISKY = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def _line(row: dict[str, Any]) -> str:
    text = json.dumps({k: _plain(v) for k, v in row.items()}, ensure_ascii=False, allow_nan=False)
    return _RISKY.sub(lambda c: f"\\u{ord(c.group()):04x}", text) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, datetime.date):
        return value.isoformat()
    return str(value) if isinstance(value, decimal.Decimal) else value


# The card


def _shown(value: Any) -> str:
    """Return untrusted text for a table of the card: one line, nothing that Markdown or HTML would act on."""
    if value is None:
        return "(no metadata)"
    text = "".join("·" if unicodedata.category(c)[0] in "CZ" and c != " " else c for c in str(value)[:80])
    return re.sub(r"([\\`*_{}\[\]()#+!|~-])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _card(c: Curation, found: Info, fmt: str) -> str:
    about = found.about
    splits = [(name, n) for name, n in (("kept", c.kept), ("dropped", c.dropped)) if n]
    front = "".join(f"  - split: {name}\n    path: {name}.{fmt}\n" for name, _ in splits)
    front = f"---\nconfigs:\n- config_name: default\n  data_files:\n{front}---\n\n"
    lines = [
        "# A curated training set\n",
        f"{c.share()}.\n",
        f"- Rule: {_shown_words(c.rule)}",
        f"- Scored by inrun (In-Run Data Shapley) with method {_shown(about.get('method', '?'))}, update "
        f"{_shown(about.get('update', '?'))}, model {_shown(about.get('model', 'not named'))}; "
        f"run {_shown(about.get('run_id', '?'))}",
        *_credit_line(found),
        f"- Sign and unit: {_shown(about.get('sign', '?'))}; {_shown(about.get('unit', '?'))}",
        f"- Steps covered: {found.first_step} to {found.last_step} ({found.steps:,} steps, {found.rows:,} contributions, "
        f"{sum(found.skipped.values()):,} steps not scored)",
        f"- {c.unused:,} {c.unit} were never used in training and have no score: they are "
        f"{'dropped' if c.unused_dropped else 'kept'}",
    ]
    if c.without_metadata:
        lines.append(f"- {c.without_metadata:,} samples were used and have no metadata: they are in neither file")
    lines.append(
        "\nA score is what the sample did to the validation loss in this one run; a negative score without a standard error"
    )
    if c.unit == "documents":
        lines.append("may be noise. A document's score is the sum over its pieces. Kept and dropped files hold all documents of")
        lines.append("the original files, each once, whole and in order, those of validation sets among the kept.")
    else:
        lines.append("may be noise. Kept and dropped files hold all registered samples, each once, in the order of registration.")
    if c.groups:
        lines += [
            f"\n## Dropped by {_shown(c.by)}\n",
            f"| value | {c.unit} with a score | dropped | share |",
            "|---|---:|---:|---:|",
        ]
        lines += [f"| {_shown(g)} | {n:,} | {d:,} | {d / n:.1%} |" for g, (n, d) in list(c.groups.items())[:200]]
        if len(c.groups) > 200:
            lines.append(f"\nand {len(c.groups) - 200:,} more values")
    return front + "\n".join(lines) + "\n"


def _credit_line(found: Info) -> list[str]:
    """Say that scores are whole credit; the step game needs no line."""
    if found.credit != "whole":
        return []
    still = f"; the uses of {found.pending:,} steps are pending and count with the part of their own step" if found.pending else ""
    return [f"- Scores are whole credit: what each use earned over all later steps, through the optimizer's momentum{still}"]


def _shown_words(text: str) -> str:
    return "".join("·" if unicodedata.category(c)[0] == "C" else c for c in text).replace("<", "&lt;").replace("|", "\\|")
