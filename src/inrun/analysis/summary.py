"""The accounts of a run in one page: what data and optimizer did, how far the method is off, and what that is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from inrun.analysis.outliers import LargeSample, OutsizedSample, Samples, large_samples, samples_in_table
from inrun.analysis.steps import (
    FIGURES,
    LargeTensor,
    OutsizedStep,
    Steps,
    audited_share,
    largest_tensors,
    longest_stretch,
    outsized_steps,
    top_steps,
)
from inrun.analysis.verdict import LEAST_AUDITS, MOST, advise, far_exceeds, judge, percent
from inrun.ledger import LedgerReader, method_of
from inrun.ledger.labels import sets_of_accounts
from inrun.ledger.reader import reader_of

#: Validation sets that get a page of their own; a set that is scored point by point may have thousands.
MOST_PAGES = 20
#: A sample is a reason for a step's size from this part of it on.
MUCH = 0.25
#: The accounts beside data; which of them a step has depends on the method.
PARTS = ("momentum", "decay", "inherited", "rounding", "residual")
#: Outsized steps that are kept, and audited steps with the largest residuals.
MOST_STEPS, MOST_WORST = 20, 5


@dataclass(frozen=True)
class WorstStep:
    """An audited step with a large residual."""

    step: int
    residual: float
    relative: float


@dataclass
class SetSummary:
    """The accounts of one validation set over the audited steps; all in the unit of the loss, positive = the loss fell.

    A point of a set is a set of its own. The folds of a set are averaged, step by step. Validation rows may be drawn anew at every
    step, so a fall is measured within steps, never from one to another.
    """

    validation: str
    steps: int
    audited: int
    skipped: int
    fall: float
    data: float
    #: Standard error of ``data`` over the folds; None for a set without.
    data_error: float | None
    #: None where the method has no such account. ``momentum`` is of ``method="step"``: the part that earlier gradients moved.
    momentum: float | None
    decay: float | None
    #: Whole credit: momentum from before scoring began.
    inherited: float | None
    #: Moves of entries whose batch gradient is nothing but floating-point cancellation.
    rounding: float | None
    residual: float | None
    #: Σ|residual| / Σ|c_n| over the audited steps: the figure of merit.
    relative_residual: float | None
    #: Σ|residual| and Σ|c_n|, each over Σ|fall|, over the same steps; None where no step's loss changed.
    residual_to_fall: float | None
    spread_to_fall: float | None
    #: Whether Σ|c_n| far exceeds what the loss fell.
    exceeds: bool
    #: What all scored steps, audited or not, paid the samples: the sum of the scores. None where a step does not say.
    scores_sum: float | None
    #: What the audited steps hold of Σ|c_n| over all scored steps; None where that is not known.
    audited_share: float | None
    #: Whether enough steps were audited, all over the run.
    sampled: bool
    #: How many steps the top 3 % are, and what they hold of Σ|c_n|.
    top_steps: int
    top_share: float | None
    #: The most quadrature points that a step took; None where that was not booked.
    most_points: int | None
    worst: list[WorstStep] = field(default_factory=list)
    #: Steps that hold an outsized part of Σ|c_n|, the largest first; how many there are, and what all of them hold.
    outsized: list[OutsizedStep] = field(default_factory=list)
    outsized_steps: int = 0
    outsized_share: float = 0.0
    #: Samples that hold an outsized part; None where nobody looked.
    samples: list[OutsizedSample] | None = None
    #: The tensors and the samples with the largest parts of Σ|c_n|.
    largest_tensors: list[LargeTensor] = field(default_factory=list)
    largest_samples: list[LargeSample] = field(default_factory=list)
    #: The verdict in a word, in a few words, and in full; and what to do.
    state: str = ""
    short: str = ""
    verdict: str = ""
    advice: list[str] = field(default_factory=list)


@dataclass
class Summary:
    """The accounts of a run; ``str()`` gives a page for people, ``as_dict()`` plain data."""

    method: str
    sets: list[SetSummary]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        sets = [asdict(s) for s in self.sets]
        return {"method": self.method, "validation_sets": sets}

    def __str__(self) -> str:
        """Return the page."""
        from inrun.analysis.summary_page import page

        pages = [page(s, self) for s in self.sets[:MOST_PAGES]]
        if len(self.sets) > MOST_PAGES:
            pages.append(f"and {len(self.sets) - MOST_PAGES} more validation sets; as_dict() and inrun audit --json have all")
        return "\n\n".join(pages) or "no steps yet"

    def _repr_html_(self) -> str:
        """Return the page for a notebook."""
        from inrun.analysis.summary_html import summary_html

        return summary_html(self)


def summarise(accounts: pa.Table, method: str, uses: pa.Table | Mapping[str, Samples] | None = None) -> Summary:
    """Add up the accounts of a run, one summary per validation set; see :class:`SetSummary` for points and folds.

    Args:
        accounts: One row per step and validation label; columns that older books lack count as empty.
        method: Of the run.
        uses: What every use of a sample was worth (step, sample_id, validation, contribution), to find samples that hold an
            outsized part; or those found already, by validation set. None: nobody looks.
    """
    samples = samples_in_table(uses) if isinstance(uses, pa.Table) else uses
    found = Summary(method, [])
    for name, rows in _rows_by_set(accounts).items():
        steps = _columns(rows)
        measured = [rows[step] for step in steps.step[steps.audited].tolist()]
        tensors = largest_tensors((r["spread"], r.get("tensors"), r.get("tensor_shares")) for some in measured for r in some)
        large = None if samples is None else samples.get(name, Samples([], []))
        found.sets.append(summarise_set(name, steps, method, large, tensors, _fold_error(measured)))
    return found


def steps_by_set(accounts: pa.Table) -> dict[str, Steps]:
    """Return the steps of every validation set, sets as they were first written; the folds of a set are averaged, step by step."""
    return {name: _columns(rows) for name, rows in _rows_by_set(accounts).items()}


def _rows_by_set(accounts: pa.Table) -> dict[str, dict[int, list[dict[str, Any]]]]:
    by_label: dict[str, list[dict[str, Any]]] = {}
    for row in accounts.to_pylist():
        by_label.setdefault(row["validation"], []).append(row)
    sets = sets_of_accounts({label: any(r["skipped"] is None for r in rows) for label, rows in by_label.items()})
    order = {label: place for place, label in enumerate(by_label)}  # sets as they were first written
    return {name: _by_step(by_label, sets[name]) for name in sorted(sets, key=lambda name: order[sets[name][0]])}


def summarise_run(source: LedgerReader | str | Path) -> Summary:
    """Return the summary of a run's ledger, with the samples that hold an outsized part (in the first sets, if there are many)."""
    reader = reader_of(source)
    with reader.tables() as tables:
        few = dict(list(tables.sets().items())[:MOST_PAGES])
        samples = large_samples(tables.connection, few)
    return summarise(reader.accounts(), method_of(reader.about), samples)


def summarise_set(
    name: str,
    steps: Steps,
    method: str,
    samples: Samples | None = None,
    tensors: Sequence[LargeTensor] = (),
    data_error: float | None = None,
) -> SetSummary:
    """Add up the steps of one validation set and judge them."""
    audited = steps.audited
    measured = audited & ~np.isnan(steps["residual"])
    booked = bool(audited.any()) and bool((measured == audited).all())
    none = {"whole": "momentum", "step": "inherited"}.get(method)
    parts = {key: steps.total(key, measured) if booked and key != none else None for key in PARTS}
    if booked and parts["rounding"] is None and not np.isnan(steps["rounding"][measured]).all():
        parts["rounding"] = math.fsum(np.nan_to_num(steps["rounding"][measured]))  # steps that had none may not book it
    off = np.abs(steps["residual"])
    spread = math.fsum(np.nan_to_num(steps["spread"][measured]))
    falls = math.fsum(np.abs(steps["loss_before"] - steps["loss_after"])[measured])
    losses = math.fsum(np.abs(steps["loss_before"][measured]))
    order = sorted(np.flatnonzero(measured).tolist(), key=lambda i: -off[i])[:MOST_WORST]
    outsized = _with_samples(outsized_steps(steps), samples.outsized if samples else [])
    count, share = top_steps(steps)
    points = steps["points"][~np.isnan(steps["points"])]
    found = SetSummary(
        validation=name,
        steps=len(steps.step),
        audited=int(audited.sum()),
        skipped=int((~steps.scored).sum()),
        fall=math.fsum((steps["loss_before"] - steps["loss_after"])[audited]),
        data=math.fsum(np.nan_to_num(steps["data"][audited])),
        data_error=data_error,
        momentum=parts["momentum"],
        decay=parts["decay"],
        inherited=parts["inherited"],
        rounding=parts["rounding"],
        residual=parts["residual"],
        relative_residual=math.fsum(off[measured]) / spread if spread > 0 else None,
        residual_to_fall=math.fsum(off[measured]) / falls if falls > 0 else None,
        spread_to_fall=spread / falls if falls > 0 else None,
        exceeds=far_exceeds(spread, falls, losses),
        scores_sum=steps.total("data", steps.scored),
        audited_share=audited_share(steps, measured if measured.any() else audited),
        sampled=int(measured.sum()) >= LEAST_AUDITS and longest_stretch(steps.scored & ~measured) < MOST * len(measured),
        top_steps=count,
        top_share=share,
        most_points=int(points.max()) if len(points) else None,
        worst=[_worst(steps, i) for i in order],
        outsized=outsized[:MOST_STEPS],
        outsized_steps=len(outsized),
        outsized_share=math.fsum(s.share for s in outsized),
        samples=None if samples is None else samples.outsized,
        largest_tensors=list(tensors),
        largest_samples=[] if samples is None else samples.largest,
    )
    verdict = judge(found, method)
    found.state, found.short, found.verdict = verdict.state, verdict.short, verdict.words
    found.advice = advise(found, verdict.state, method)
    return found


def _with_samples(outsized: list[OutsizedStep], samples: list[OutsizedSample]) -> list[OutsizedStep]:
    """Give steps the samples that hold much of them as a reason."""
    for step in outsized:
        step.why.extend(
            f"{percent(s.step_share)} of it is sample {s.sample_id}" for s in samples if s.step == step.step and s.step_share > MUCH
        )
    return outsized


def _worst(steps: Steps, i: int) -> WorstStep:
    residual, spread = float(steps["residual"][i]), float(steps["spread"][i])
    return WorstStep(int(steps.step[i]), residual, abs(residual) / spread if spread > 0 else 0.0)


def _by_step(by_label: dict[str, list[dict[str, Any]]], labels: list[str]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for label in labels:
        for row in by_label[label]:
            found.setdefault(row["step"], []).append(row)
    return dict(sorted(found.items()))


def _columns(steps: dict[int, list[dict[str, Any]]]) -> Steps:
    """Average the rows of every step, one per fold of the set; a figure that any of them lacks is missing."""
    figures = {key: [_mean([row.get(key) for row in rows]) for rows in steps.values()] for key in FIGURES}
    return Steps.of(list(steps), [rows[0]["skipped"] is None for rows in steps.values()], figures)


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return math.fsum(known) / len(known) if len(known) == len(values) else None


def _fold_error(steps: list[list[dict[str, Any]]]) -> float | None:
    """Return the standard error of the data account over the folds of a set, from their rows step by step."""
    totals: dict[str, float] = {}
    for rows in steps:
        for row in rows:
            totals[row["validation"]] = totals.get(row["validation"], 0.0) + (row["data"] or 0.0)
    return float(np.std(list(totals.values()), ddof=1)) / math.sqrt(len(totals)) if len(totals) > 1 else None
