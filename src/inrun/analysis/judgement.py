"""What is kept and what is dropped: scores, aligned with the registered samples, under a rule and people's marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from inrun.analysis.curation_rules import CurationRule, Judged, Mask, Values, column_values, make_rule
from inrun.analysis.marked import Marked, keep_all
from inrun.analysis.queries import CLEAR
from inrun.errors import ConfigurationError, LedgerError
from inrun.ledger.scores import Names, score_table
from inrun.ledger.tables import Tables, some

#: How several validation sets become one verdict.
COMBINE = {
    "mean": "the rule is applied to the mean of the sets' scores",
    "any": "a sample is dropped if the rule drops it for any of the sets",
    "all": "a sample is dropped only if the rule drops it for all of the sets",
}


@dataclass(frozen=True)
class Choice:
    """How to judge; the arguments of :func:`inrun.analysis.curate.curate` that say so."""

    keep: str | None = None
    top_fraction: float | None = None
    quota: Sequence[str] = ()
    validation: Names = None
    combine: str = "mean"
    view: str = "plain"
    z: float = CLEAR
    drop_unused: bool = False
    by: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.combine not in COMBINE:
            raise ConfigurationError(f"combine is {self.combine!r}; accepted are {', '.join(COMBINE)}")
        if not (math.isfinite(self.z) and self.z >= 0):
            raise ConfigurationError(f"z is {self.z!r}; it must be a number of at least 0")
        if self.rules > 1:
            raise ConfigurationError("keep, top fraction and quota are different rules; give one of them")

    @property
    def rules(self) -> int:
        """Return how many rules are given; the default rule is none."""
        return sum([self.keep is not None, self.top_fraction is not None, bool(self.quota)])


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
    #: Which were there to train on: of documents those with a registered piece.
    trained: Mask

    @property
    def used(self) -> Mask:
        """Which have a score."""
        return _any([s.used for s in self.sets.values()])

    def groups(self) -> dict[str | None, tuple[int, int]]:
        """Count by kind what has a score, and what of that is dropped."""
        found: dict[str | None, list[int]] = {}
        if self.kinds is not None:
            used = self.used
            for kind, keep in zip(self.kinds[used].tolist(), self.kept[used].tolist(), strict=True):
                entry = found.setdefault(kind, [0, 0])
                entry[0] += 1
                entry[1] += not keep
        return {kind: (n, d) for kind, (n, d) in sorted(found.items(), key=lambda e: (e[0] is None, e[0] or ""))}

    def score_columns(self) -> dict[str, Values]:
        """Name the score columns: ``score`` of the set or of the mean, and ``score.NAME`` where there are several sets."""
        found: dict[str, Values] = {}
        if len(self.judged) == 1:
            (only,) = self.judged.values()
            found |= {"score": only.score, "standard_error": only.standard_error, "times_used": only.times_used}
        if len(self.chosen) > 1:
            for name in self.chosen:
                one = self.sets[name]
                found |= {f"score.{name}": one.score, f"standard_error.{name}": one.standard_error}
                found[f"times_used.{name}"] = one.times_used
        return found


def judge(
    tables: Tables,
    choice: Choice,
    marked: Marked | None,
    units: pa.Table | None = None,
    trained: npt.NDArray[np.int64] | None = None,
) -> Judgement:
    """Judge the samples of a run, or the documents that its tables take them together as.

    Args:
        tables: The run.
        choice: The rule, and by what it judges.
        marked: People's marks, which stand above the rule.
        units: Which document a sample is a piece of, where documents are judged.
        trained: The pieces that were there to train on: a document without any (of a validation set) cannot be called unused.
    """
    if not tables.columns:
        raise LedgerError(
            f"{str(tables.run.path)!r} has no sample metadata, so there is nothing to write; see ledger.register_samples"
        )
    tables.check_rows()
    chosen = list(tables.choose(choice.validation))
    ids, copies = _registered(tables)
    by = choice.by or ("domain" if "domain" in tables.columns else None)
    kinds = None if by is None else column_values(tables, by)
    rule = make_rule(tables, choice.keep, choice.top_fraction, choice.quota, choice.z)
    if marked is not None and not choice.rules:
        rule = CurationRule("nothing is dropped for its score", keep_all)
    tables.choose(rule.names)
    # One question: all sets as they are at one moment.
    names = list(dict.fromkeys([*chosen, *rule.names]))
    table = score_table(tables, names, choice.view)
    sets = {name: _align(table.filter(pc.equal(table["validation"], name)), ids) for name in names}
    judged = {name: sets[name] for name in chosen}
    if choice.combine == "mean" and len(chosen) > 1:
        judged = {"mean": _mean([sets[name] for name in chosen])}
    there = np.ones(len(ids), bool)
    if units is not None and trained is not None:
        there = np.isin(ids, units.filter(pc.is_in(units["sample_id"], pa.array(trained)))["unit"].to_numpy())
    kept = _verdict(rule, judged, sets, choice.combine, there & choice.drop_unused)
    words = _in_words(rule, chosen, choice.combine, choice.view)
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
        by=by,
        kinds=kinds,
        trained=there,
    )


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


def _verdict(rule: CurationRule, judged: dict[str, Judged], sets: dict[str, Judged], combine: str, unused: Mask) -> Mask:
    """Return which samples are kept; ``unused`` are dropped unless used. A set that did not use a sample has no say on it."""
    drops = [~rule.keep(j, sets) & j.used for j in judged.values()]
    says = [j.used for j in judged.values()]
    used = _any(says)
    if combine == "all":
        dropped = np.logical_and.reduce([d | ~s for d, s in zip(drops, says, strict=True)]) & used
    else:
        dropped = _any(drops)
    return ~(dropped | (~used & unused))


def _in_words(rule: CurationRule, chosen: list[str], combine: str, view: str) -> str:
    words = f"{rule.words}; view {view!r}; judged by {some(chosen)}"
    return f"{words}; {COMBINE[combine]}" if len(chosen) > 1 else words
