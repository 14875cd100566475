"""Split the registered samples into those to keep and those to drop, by their scores, and say how it was done."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from inrun.analysis.curation_rules import CurationRule, Judged, Mask, Values, column_values, make_rule
from inrun.analysis.queries import CLEAR, Info, Source, info, scores
from inrun.errors import ConfigurationError, LedgerError
from inrun.files import DurableStream
from inrun.ledger.reader import reader_of
from inrun.ledger.scores import Names
from inrun.ledger.tables import Tables, some

FORMATS = ("jsonl", "parquet")
#: How several validation sets become one verdict.
COMBINE = {
    "mean": "the rule is applied to the mean of the sets' scores",
    "any": "a sample is dropped if the rule drops it for any of the sets",
    "all": "a sample is dropped only if the rule drops it for all of the sets",
}


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
    #: Per value of the column ``by``: samples and how many of them were dropped.
    by: str | None
    groups: dict[str | None, tuple[int, int]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        rows = [{"group": g, "samples": n, "dropped": d} for g, (n, d) in self.groups.items()]
        return {**vars(self), "groups": rows}


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
) -> Curation:
    """Write ``kept`` and ``dropped`` samples and a card into a folder: all registered samples, each once, in order.

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
    """
    _check(combine, fmt, z, sum([keep is not None, top_fraction is not None, bool(quota)]))
    reader = reader_of(source)
    with reader.tables() as tables:
        if not tables.columns:
            raise LedgerError(
                f"{str(tables.run.path)!r} has no sample metadata, so there is nothing to write; see ledger.register_samples"
            )
        tables.check_rows()
        chosen = list(tables.choose(validation))
        ids, copies = _registered(tables)
        kinds = column_values(tables, by or "domain") if by or "domain" in tables.columns else None
        rule = make_rule(tables, keep, top_fraction, quota, z)
        tables.choose(rule.names)
        _check_out(Path(out), tables.run.path, force)
        files = reader.files("samples")
    sets = _judge(reader, ids, tuple(dict.fromkeys([*chosen, *rule.names])), view)
    judged = {name: sets[name] for name in chosen}
    if combine == "mean" and len(chosen) > 1:
        judged = {"mean": _mean([sets[name] for name in chosen])}
    kept = _verdict(rule, judged, sets, combine, drop_unused)
    found = info(reader)
    result = Curation(
        out=str(out),
        rule=_in_words(rule, chosen, combine, view),
        kept=int(kept.sum()),
        dropped=int((~kept).sum()),
        unused=int((~_any([s.used for s in sets.values()])).sum()),
        without_metadata=found.used_without_metadata,
        by=(by or "domain") if kinds is not None else None,
        groups=_count(kinds, kept) if kinds is not None else {},
    )
    added = _score_columns(chosen, sets, judged)
    card = _card(result, found, fmt, drop_unused).encode()
    result.files = _write(Path(out), fmt, _pieces(files, copies), kept, added, card)
    return result


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


def _judge(source: Source, ids: npt.NDArray[np.int64], names: Sequence[str], view: str) -> dict[str, Judged]:
    table = scores(source, names, view)  # one question: all sets as they are at one moment
    return {name: _align(table.filter(pc.equal(table["validation"], name)), ids) for name in names}


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


def _count(kinds: npt.NDArray[Any], kept: Mask) -> dict[str | None, tuple[int, int]]:
    found: dict[str | None, list[int]] = {}
    for kind, keep in zip(kinds.tolist(), kept.tolist(), strict=True):
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


def _write(out: Path, fmt: str, pieces: Iterator[pa.Table], kept: Mask, added: dict[str, Values], card: bytes) -> list[str]:
    """Write the files of a curation; an earlier one goes only when the new one is whole."""
    writers: list[_Writer] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        writers = [_Writer(out / f"kept.{fmt}", fmt), _Writer(out / f"dropped.{fmt}", fmt), _Writer(out / "README.md", "text")]
        at = 0
        for piece in pieces:
            here = slice(at, at + piece.num_rows)
            at += piece.num_rows
            piece = _with_scores(piece, {name: values[here] for name, values in added.items()})
            writers[0].write(piece.filter(pa.array(kept[here])))
            writers[1].write(piece.filter(pa.array(~kept[here])))
        if at != len(kept):
            raise LedgerError("samples were registered while the curation was written; run it again")
        writers[2].stream.write(card)
        for writer in writers:
            writer.finish()
        for stale in (f"{part}.{other}" for part in ("kept", "dropped") for other in FORMATS if other != fmt):
            (out / stale).unlink(missing_ok=True)
    except (OSError, pa.ArrowException) as error:
        raise LedgerError(f"{str(out)!r} cannot be written: {error}") from error
    finally:
        for writer in writers:
            writer.abandon()
    return [writer.path.name for writer in writers]


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
            self.stream.write("".join(_line(row) for row in table.to_pylist()).encode())
            return
        if self.parquet is None:
            self.parquet = pq.ParquetWriter(self.stream, table.schema, compression="zstd", write_page_checksum=True)
        if table.num_rows:
            self.parquet.write_table(table)

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


def _card(c: Curation, found: Info, fmt: str, drop_unused: bool) -> str:
    about = found.about
    every = c.kept + c.dropped
    splits = [(name, n) for name, n in (("kept", c.kept), ("dropped", c.dropped)) if n]
    front = "".join(f"  - split: {name}\n    path: {name}.{fmt}\n" for name, _ in splits)
    front = f"---\nconfigs:\n- config_name: default\n  data_files:\n{front}---\n\n"
    share = c.dropped / every if every else 0.0
    lines = [
        "# A curated training set\n",
        f"{c.kept:,} of {every:,} samples are kept, {c.dropped:,} ({share:.1%}) dropped.\n",
        f"- Rule: {_shown_words(c.rule)}",
        f"- Scored by inrun (In-Run Data Shapley) with method {_shown(about.get('method', '?'))}, update "
        f"{_shown(about.get('update', '?'))}, model {_shown(about.get('model', 'not named'))}; "
        f"run {_shown(about.get('run_id', '?'))}",
        *_credit_line(found),
        f"- Sign and unit: {_shown(about.get('sign', '?'))}; {_shown(about.get('unit', '?'))}",
        f"- Steps covered: {found.first_step} to {found.last_step} ({found.steps:,} steps, {found.rows:,} contributions, "
        f"{sum(found.skipped.values()):,} steps not scored)",
        f"- {c.unused:,} samples were never used in training and have no score: they are {'dropped' if drop_unused else 'kept'}",
    ]
    if c.without_metadata:
        lines.append(f"- {c.without_metadata:,} samples were used and have no metadata: they are in neither file")
    lines.append(
        "\nA score is what the sample did to the validation loss in this one run; a negative score without a standard error"
    )
    lines.append("may be noise. Kept and dropped files hold all registered samples, each once, in the order of registration.")
    if c.groups:
        lines += [f"\n## Dropped by {_shown(c.by)}\n", "| value | samples | dropped | share |", "|---|---:|---:|---:|"]
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
