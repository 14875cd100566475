"""Headline numbers and remarks, in plain words for people who have never heard of Shapley values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inrun.analysis.queries import NO_VALUE
from inrun.analysis.summary_page import standing_out, sums
from inrun.methods import PROXY
from inrun.report.accounts import SetAccounts
from inrun.report.cards import MOODS, FindingCard, finding_cards
from inrun.report.distribution import Distribution
from inrun.report.finding import Piece, cautions, sentences, tell
from inrun.report.findings import Findings
from inrun.report.text import aligned, counted, number, one_line, percent, signed

#: The accounts in plain words; under whole credit samples are paid for all their pushes so far.
ACCOUNTS = {
    "data": "the samples of these steps, paid at once",
    "credits": "the parts paid to samples at these steps, for all their pushes so far",
    "momentum": "earlier samples' pushes, still trailing in the optimizer",
    "decay": "weight decay",
    "inherited": "momentum from before scoring began",
    "rounding": "moves of entries whose gradient is only rounding error; no sample is paid",
    "residual": "the quadrature's error on the whole move",
    "proxy": "what the method's SGD step leaves of the fall",
    "fall": "of the validation loss over these steps, as measured",
}


@dataclass(frozen=True)
class Headline:
    """A number with what it means; ``mood`` is "good", "bad" or empty."""

    label: str
    value: str
    note: str
    mood: str = ""


@dataclass(frozen=True)
class Story:
    """What the page opens with, for one validation set and one column; places are -1 where there is none to choose."""

    place: int
    column: int
    sentences: list[list[Piece]]
    cautions: list[str]
    cards: list[FindingCard]


def stories(found: Findings) -> list[Story]:
    """Return the finding of every validation set by every column; the page shows that of the chosen ones."""
    columns = list(range(len(found.columns))) if "groups" in found.panels else [None]
    told = [(s, c, tell(found, s, c)) for s in range(len(found.accounts)) for c in columns]
    return [Story(s, -1 if c is None else c, sentences(t), cautions(t), finding_cards(t)) for s, c, t in told]


def run_line(found: Findings) -> str:
    """Say in one line what was trained, how it was scored and how far it is."""
    parts = [one_line(found.about["model"], 60)] if "model" in found.about else []
    parts.append(f"scored by method {one_line(found.method, 40)}")
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
        notes.append(f"Used without metadata: {counted(found.used_without_metadata, 'sample')}, here the group “{NO_VALUE}”.")
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
        _negative(scores, folds),
        _fall(accounts),
        *_parts(accounts, found.method),
        _error(accounts),
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


def _negative(scores: Distribution | None, folds: int) -> Headline:
    if scores is None or not scores.samples:
        return Headline("Negative samples", "not measured", "no sample was scored")
    share, note = scores.negative / scores.samples, f"{counted(scores.negative, 'sample')} raised this loss on balance"
    if scores.clear is None:
        return Headline("Negative samples", percent(share), f"{note}; which are clear of their error needs folds")
    return Headline(
        "Negative samples", percent(share), f"{note}, {scores.clear:,} by more than two standard errors ({folds} folds)"
    )


def account_rows(accounts: SetAccounts, method: str) -> list[tuple[str, str, str, str, float, float | str]]:
    """Return the accounts as rows: name, what it is, loss and share of the fall, both again as they are; last is the fall."""
    totals = {name: value for name, value in accounts.totals.items() if value is not None}
    if accounts.fall is None:
        return []
    totals["fall"] = accounts.fall
    figures = aligned(list(totals.values()))
    shares = [percent(v / accounts.fall) if accounts.fall > 0 else "–" for v in totals.values()]
    words = ACCOUNTS | ({"data": ACCOUNTS["credits"]} if method == "whole" else {})
    words |= {"residual": ACCOUNTS["proxy"]} if method in PROXY else {}
    parts: list[float | str] = [v / accounts.fall if accounts.fall > 0 else "" for v in totals.values()]
    return [(name, words[name], figures[k], shares[k], totals[name], parts[k]) for k, name in enumerate(totals)]


def remarks(accounts: SetAccounts, method: str) -> list[str]:
    """Say what the scores add up to, which steps and samples stand out, and why."""
    return [*sums(accounts.judged, method == "whole"), *standing_out(accounts.judged)]


#: What a card says of an account that was not measured.
NOT_AUDITED = "no step was audited; audit_every= measures it"


def _parts(accounts: SetAccounts, method: str) -> list[Headline]:
    """Say what was paid to samples, and what moved the loss beside them."""
    whole = method == "whole"
    names = ["Credits paid" if whole else "Data account"]
    parts, note = ("decay", "inherited"), "weight decay, momentum from before scoring began"
    if not whole:
        parts, note = ("momentum", "decay"), "earlier samples' pushes, weight decay"
    if method not in PROXY:
        names.append("Decay and inherited" if whole else "Momentum and decay")
    if not accounts.audited:
        return [Headline(label, "not measured", NOT_AUDITED) for label in names]
    paid = "to samples" if whole else "paid to samples at once"
    found = [Headline(names[0], signed(accounts.totals.get("data")), f"{paid}: {_covered(accounts)}")]
    if method in PROXY:
        return found
    rest = [v for v in (accounts.totals.get(part) for part in parts) if v is not None]
    if not rest:
        return [*found, Headline(names[1], "not measured", note)]
    return [*found, Headline(names[1], signed(sum(rest)), f"{note}{_of_fall(accounts, sum(rest))}")]


def _fall(accounts: SetAccounts) -> Headline:
    """Say how far the loss fell over the steps that the accounts speak of, so that the two stand beside each other."""
    if accounts.fall is None:
        return Headline("Fall, audited steps", "not measured", NOT_AUDITED)
    where = f"as measured on {accounts.audited:,} of {counted(accounts.steps, 'step')}: what the accounts add up to"
    return Headline("Fall, audited steps", signed(accounts.fall), where)


def _covered(accounts: SetAccounts) -> str:
    where = f"over {counted(accounts.audited, 'audited step')}"
    return where if accounts.covered is None else f"{percent(accounts.covered)} of the fall {where}"


def _of_fall(accounts: SetAccounts, part: float) -> str:
    return f", {percent(part / accounts.fall)} of the fall" if accounts.fall and accounts.fall > 0 else ""


def _error(accounts: SetAccounts) -> Headline:
    judged = accounts.judged
    if not accounts.audited:
        return Headline("Method's error", "not measured", NOT_AUDITED)
    if judged.relative_residual is None:
        return Headline("Method's error", "not measured", judged.short)
    of_fall = "" if judged.residual_to_fall is None else f", {percent(judged.residual_to_fall)} of the fall"
    note = f"|residual| / Σ|c|{of_fall}: {judged.short}"
    return Headline("Method's error", percent(judged.relative_residual), note, MOODS.get(judged.state, ""))
