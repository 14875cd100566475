"""The accounts of a run in one page: what the data did, what the optimizer did, how far the method is off."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from inrun.ledger.labels import sets_of_accounts
from inrun.methods import METHODS

#: |residual| / Σ|c_n| below which the books balance, and above which the method is too coarse for the steps taken.
BALANCED, COARSE = 0.01, 0.10
#: Validation sets that get a page of their own; a set that is scored point by point may have thousands.
MOST_PAGES = 20


@dataclass(frozen=True)
class WorstStep:
    """An audited step with a large residual."""

    step: int
    residual: float
    relative: float


@dataclass
class SetSummary:
    """The accounts of one validation set over the audited steps; all in the unit of the loss, positive = the loss fell.

    A point of a set is a set of its own. The folds of a set are averaged, step by step.
    """

    validation: str
    steps: int
    audited: int
    skipped: int
    fall: float
    data: float
    #: Standard error of ``data`` over the folds; None for a set without.
    data_error: float | None
    #: None where the optimizer's own part was not measured, or its parts cannot be told apart.
    optimizer: float | None
    momentum: float | None
    decay: float | None
    residual: float | None
    #: Σ|residual| / Σ|c_n| over the audited steps: the figure of merit.
    relative_residual: float | None
    worst: list[WorstStep] = field(default_factory=list)
    verdict: str = ""


@dataclass
class Summary:
    """The accounts of a run; ``str()`` gives a page for people, ``as_dict()`` plain data."""

    method: str
    update: str
    sets: list[SetSummary]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        sets = [{**vars(s), "worst": [vars(w) for w in s.worst]} for s in self.sets]
        return {"method": self.method, "update": self.update, "validation_sets": sets}

    def __str__(self) -> str:
        """Return the page."""
        pages = [_page(s, self.method, self.update) for s in self.sets[:MOST_PAGES]]
        if len(self.sets) > MOST_PAGES:
            pages.append(f"and {len(self.sets) - MOST_PAGES} more validation sets; as_dict() and inrun audit --json have all")
        return "\n\n".join(pages) or "no steps yet"


def summarise(accounts: pa.Table, method: str, update: str) -> Summary:
    """Add up the accounts of a run, one summary per validation set; see :class:`SetSummary` for points and folds."""
    by_label: dict[str, list[dict[str, Any]]] = {}
    for row in accounts.to_pylist():
        by_label.setdefault(row["validation"], []).append(row)
    sets = sets_of_accounts({label: any(r["skipped"] is None for r in rows) for label, rows in by_label.items()})
    order = {label: place for place, label in enumerate(by_label)}  # sets as they were first written
    names = sorted(sets, key=lambda name: order[sets[name][0]])
    found = [_summarise_set(name, _by_step(by_label, sets[name]), method, update) for name in names]
    return Summary(method, update, found)


def _by_step(by_label: dict[str, list[dict[str, Any]]], labels: list[str]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for label in labels:
        for row in by_label[label]:
            found.setdefault(row["step"], []).append(row)
    return found


def _summarise_set(name: str, steps: dict[int, list[dict[str, Any]]], method: str, update: str) -> SetSummary:
    rows = [{"step": step, **_mean(found)} for step, found in sorted(steps.items())]
    skipped = sum(1 for found in steps.values() if found[0]["skipped"] is not None)
    audited = [r for r in rows if r["loss_after"] is not None and r["loss_before"] is not None]
    measured = [r for r in audited if r["residual"] is not None]
    whole = len(measured) == len(audited) and bool(audited)
    spread = sum(r["spread"] for r in measured)
    off = sum(abs(r["residual"]) for r in measured)
    relative = off / spread if spread > 0 else None
    worst = sorted(measured, key=lambda r: -abs(r["residual"]))[:5]
    found = SetSummary(
        validation=name,
        steps=len(rows),
        audited=len(audited),
        skipped=skipped,
        fall=math.fsum(r["loss_before"] - r["loss_after"] for r in audited),
        data=math.fsum(r["data"] for r in audited),
        data_error=_fold_error([steps[r["step"]] for r in audited]),
        optimizer=_total(measured, "optimizer") if whole else None,
        momentum=_total(measured, "momentum") if whole else None,
        decay=_total(measured, "decay") if whole else None,
        residual=_total(measured, "residual") if whole else None,
        relative_residual=relative,
        worst=[WorstStep(r["step"], r["residual"], abs(r["residual"]) / r["spread"] if r["spread"] else 0.0) for r in worst],
    )
    found.verdict = verdict(relative, method, update, found.audited, found.steps - found.skipped)
    return found


def _mean(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Average the rows of one step, one per fold of the set; None where any is missing."""
    keys = ("loss_before", "loss_after", "data", "spread", "optimizer", "momentum", "decay", "residual")
    columns = {key: [r[key] for r in rows] for key in keys}
    return {key: None if None in values else math.fsum(values) / len(values) for key, values in columns.items()}


def _fold_error(steps: list[list[dict[str, Any]]]) -> float | None:
    """Return the standard error of the data account over the folds of a set, from their rows step by step."""
    totals: dict[str, float] = {}
    for rows in steps:
        for row in rows:
            totals[row["validation"]] = totals.get(row["validation"], 0.0) + row["data"]
    return float(np.std(list(totals.values()), ddof=1)) / math.sqrt(len(totals)) if len(totals) > 1 else None


def _total(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [r[key] for r in rows]
    return None if None in values else math.fsum(values)


def enough(audited: int, steps: int) -> bool:
    """Whether the audited steps can speak for a run: all of them, or ten and one in fifty at the least.

    In a rough run a few steps hold most of the residual; three that were audited may well miss them.
    """
    return audited >= steps or audited >= max(10, steps / 50)


def verdict(relative: float | None, method: str, update: str, audited: int | None = None, steps: int | None = None) -> str:
    """Say in plain words what the residual means and what to do about it; of how many steps, where that is known."""
    if relative is None:
        return "No audited step measured the residual; audit more often (audit_every=) to know how far the method is off."
    size = f"The residual is {100 * relative:.2g} % of what the samples were given and taken"
    if relative <= BALANCED and audited is not None and steps is not None and not enough(audited, steps):
        return (
            f"{size} on the {audited} audited of {steps} steps: too few to say that the books balance, since single steps can hold "
            "most of a run's residual. Audit more often (audit_every=)."
        )
    if relative <= BALANCED:
        return f"{size}: the books balance."
    if relative <= COARSE:
        return f"{size}: ranks hold, sums are off by about that much. {advice(method, update)}"
    return f"{size}: {method}+{update} is too coarse for steps of this size. {advice(method, update)}"


def advice(method: str, update: str) -> str:
    """Name the next finer choice; of a method that is not registered here, say what there is."""
    if method in METHODS:
        return METHODS[method].advice(update)
    return f"Take a finer method (this version of inrun has {', '.join(METHODS)}), or a smaller learning rate."


def _page(s: SetSummary, method: str, update: str) -> str:
    def line(label: str, value: float | None, note: str) -> str:
        shown = "not measured" if value is None else f"{value:+.6f}"
        share = "" if value is None or not s.fall else f"{100 * value / s.fall:7.1f} %"
        return f"  {label:<10}{shown:>14}  {share:>9}  {note}"

    error = "" if s.data_error is None else f", ± {s.data_error:.2g} over the folds"
    lines = [
        f"{s.validation}: {method}+{update}, {s.steps} steps, {s.audited} audited, {s.skipped} not scored",
        line("fall", s.fall, "of the validation loss over the audited steps"),
        line("data", s.data, f"contributions of the samples of these steps{error}"),
    ]
    if s.momentum is not None and s.decay is not None:
        lines.append(line("momentum", s.momentum, "the optimizer's memory: earlier samples' gradients, still at work"))
        lines.append(line("decay", s.decay, "weight decay"))
    else:
        lines.append(line("optimizer", s.optimizer, "momentum and decay: what a step does without its gradient"))
    lines.append(line("residual", s.residual, "the method's own error on the data's part"))
    if s.relative_residual is not None:
        lines.append(f"  |residual| / Σ|c_n| = {s.relative_residual:.3g}")
    if s.worst:
        named = ", ".join(f"{w.step} ({w.residual:+.2g}, {100 * w.relative:.2g} %)" for w in s.worst[:3])
        lines.append(f"  largest residuals at steps {named}")
    lines.append(f"  {s.verdict}")
    return "\n".join(lines)
