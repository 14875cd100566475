"""Headline numbers and remarks, in plain words for people who have never heard of Shapley values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inrun.analysis.summary import BALANCED, COARSE, enough
from inrun.report.accounts import SetAccounts
from inrun.report.distribution import Distribution
from inrun.report.findings import Findings
from inrun.report.text import aligned, counted, number, one_line, percent, signed

#: The accounts in plain words.
ACCOUNTS = {
    "data": "the samples of these steps, paid at once",
    "momentum": "earlier samples' pushes, still trailing in the optimizer",
    "decay": "weight decay",
    "optimizer": "momentum and weight decay together",
    "residual": "the method's own error on the data's part",
    "fall": "of the validation loss over these steps, as measured",
}


@dataclass(frozen=True)
class Headline:
    """A number with what it means; ``mood`` is "good", "bad" or empty."""

    label: str
    value: str
    note: str
    mood: str = ""


def run_line(found: Findings) -> str:
    """Say in one line what was trained, how it was scored and how far it is."""
    method, update = (one_line(found.about.get(key, "?"), 40) for key in ("method", "update"))
    parts = [one_line(found.about["model"], 60)] if "model" in found.about else []
    parts.append(f"scored by {method} + {update}")
    if found.last_step is None:
        parts.append("no steps yet")
    else:
        parts.append(f"steps {found.first_step:,} to {found.last_step:,}")
    return " · ".join(parts)


def notices(found: Findings) -> list[str]:
    """Say what a reader must know before trusting the numbers."""
    notes = []
    if found.last_step is None:
        notes.append(
            "This run holds no steps yet. Train some steps, or wait for the ledger's next flush, and build the report again."
        )
    elif found.at_work:
        notes.append(f"In progress: training is still writing. These are the books up to step {found.last_step:,}.")
    elif found.at_work is None:
        notes.append(
            "The books were not closed: their writer was killed, or works on another machine. "
            f"What it flushed reaches to step {found.last_step:,}."
        )
    if found.last_step is not None and not found.distributions:
        notes.append("No step was scored, so there is nothing to say about samples.")
    if found.skipped:
        named = "; ".join(f"{count:,}: {one_line(reason, 120)}" for reason, count in list(found.skipped.items())[:3])
        notes.append(f"Not scored: {counted(sum(found.skipped.values()), 'step')} ({named}).")
    if found.distributions and not found.samples_registered:
        notes.append(
            "No metadata was registered for the samples, so there are no domains and no texts; see ledger.register_samples."
        )
    elif found.used_without_metadata:
        notes.append(f"Used without metadata: {counted(found.used_without_metadata, 'sample')}, here the group “(no metadata)”.")
    if found.more_sets:
        notes.append(f"Not shown: {counted(found.more_sets, 'more validation set')}; inrun scores RUN -v NAME has them.")
    if found.shown.left_out:
        notes.append(f"Left out to keep this page small: {counted(found.shown.left_out, 'sample')}; inrun scores RUN has all.")
    if not found.text and found.samples_registered:
        notes.append("Texts of samples were left out of this page on request.")
    if found.metrics is not None and found.metrics.unreadable:
        notes.append(f"Could not be read: {counted(found.metrics.unreadable, 'line')} of metrics.jsonl.")
    return notes


def headlines(found: Findings) -> list[list[Headline]]:
    """Return the headline numbers, one list per validation set."""
    scored: Sequence[Distribution | None] = found.distributions or [None] * len(found.accounts)
    return [_of_set(found, b, d, found.sets[b.name]) for b, d in zip(found.accounts, scored, strict=True)]


def _of_set(found: Findings, accounts: SetAccounts, scores: Distribution | None, folds: int) -> list[Headline]:
    registered = f"of {found.samples_registered:,} registered" if found.samples_registered else "no metadata registered"
    out = sum(found.skipped.values())
    steps = f"{found.first_step:,} to {found.last_step:,}" + (f", {out:,} not scored" if out else ", all scored")
    return [
        Headline("Samples scored", f"{found.samples_used:,}", registered),
        Headline("Optimizer steps", f"{found.steps:,}", steps),
        _loss(accounts, None if found.metrics is None else found.metrics.evaluation.get(accounts.name)),
        *_negative(scores, folds),
        *_accounts(accounts),
    ]


def _loss(accounts: SetAccounts, evaluated: dict[str, list[Any]] | None) -> Headline:
    """Say how far the loss fell; by the evaluations where there are some, since a step of the books may look at other rows."""
    first, last, steps = accounts.loss_first, accounts.loss_last, accounts.loss_steps
    if evaluated is not None and len(evaluated["step"]) > 1:
        (first, last), steps = (evaluated["loss"][k] for k in (0, -1)), (evaluated["step"][0], evaluated["step"][-1])
    if first is None or last is None:
        return Headline("Validation loss", "not measured", "no step recorded it")
    change = first - last
    if change == 0:
        return Headline("Validation loss", number(last), "unchanged")
    note = f"fell by {number(change)}" if change > 0 else f"rose by {number(-change)}"
    where = "steps {:,} to {:,}".format(*steps)
    return Headline("Validation loss", f"{number(first)} → {number(last)}", f"{note}, {where}", "good" if change > 0 else "bad")


def _negative(scores: Distribution | None, folds: int) -> list[Headline]:
    if scores is None or not scores.samples:
        return [Headline("Negative samples", "not measured", "no sample was scored")]
    share = scores.negative / scores.samples
    found = [Headline("Negative samples", percent(share), f"{counted(scores.negative, 'sample')} raised this loss on balance")]
    if scores.clear is None:
        return [*found, Headline("… clear of their error", "not measured", "needs folds: inrun.folds(validation, k)")]
    note = f"{counted(scores.clear, 'sample')} below zero by more than two standard errors ({folds} folds)"
    return [*found, Headline("… clear of their error", percent(scores.clear / scores.samples), note)]


def account_rows(accounts: SetAccounts) -> list[tuple[str, str, str, str]]:
    """Return the accounts as rows of name, what it is, loss and share of the fall; the last row is the fall."""
    totals = {name: value for name, value in accounts.totals.items() if value is not None}
    if accounts.fall is None:
        return []
    if "momentum" in totals and "decay" in totals:
        totals.pop("optimizer", None)
    totals["fall"] = accounts.fall
    figures = aligned(list(totals.values()))
    shares = [percent(v / accounts.fall) if accounts.fall > 0 else "–" for v in totals.values()]
    return [(name, ACCOUNTS[name], figures[k], shares[k]) for k, name in enumerate(totals)]


def _accounts(accounts: SetAccounts) -> list[Headline]:
    if not accounts.audited:
        none = "no step was audited; audit_every= measures it"
        return [Headline(label, "not measured", none) for label in ("Data account", "Optimizer account", "Method's error")]
    where = counted(accounts.audited, "audited step")
    data, optimizer = accounts.totals.get("data"), accounts.totals.get("optimizer")
    covered = f"{percent(accounts.covered)} of the fall over {where}" if accounts.covered is not None else f"over {where}"
    found = [Headline("Data account", signed(data), f"paid to samples at once: {covered}")]
    if optimizer is None:
        found.append(Headline("Optimizer account", "not measured", "momentum and weight decay"))
    else:
        of_fall = f", {percent(optimizer / accounts.fall)} of the fall" if accounts.fall and accounts.fall > 0 else ""
        found.append(Headline("Optimizer account", signed(optimizer), f"momentum and weight decay{of_fall}"))
    relative = accounts.relative_residual
    if relative is None:
        return [*found, Headline("Method's error", "not measured", "no audited step measured the residual")]
    mood = "good" if relative <= BALANCED else "bad" if relative > COARSE else ""
    verdict = "the books balance" if mood == "good" else "ranks hold, sums are rough" if not mood else "too coarse for these steps"
    if mood == "good" and not enough(accounts.audited, accounts.steps - accounts.skipped):
        mood, verdict = "", f"on {where} only, too few to tell"
    return [*found, Headline("Method's error", percent(relative), f"|residual| / Σ|c|: {verdict}", mood)]
