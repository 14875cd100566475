"""From what a step gave to what users and the ledger see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from inrun.ledger import StepRecord
from inrun.ledger.labels import Label
from inrun.ledger.record import SettledCredits

if TYPE_CHECKING:
    from inrun.engine.scorer import Outcome
    from inrun.engine.step import Step


@dataclass(frozen=True)
class Account:
    """The account of one step and validation set; in the unit of the loss, positive = the loss fell."""

    loss_before: float
    loss_after: float
    data: float
    spread: float
    decay: float | None = None
    inherited: float | None = None
    residual: float | None = None
    points: int | None = None


@dataclass(frozen=True)
class StepResult:
    """What one step gave."""

    step: int
    sample_ids: Tensor
    #: Per validation set: ``[n]``, or ``[n, m]`` for a callable that returns m losses; with folds their mean.
    contributions: dict[str, Tensor]
    #: With folds, the standard error of each contribution, ``[n]``.
    standard_errors: dict[str, Tensor]
    accounts: dict[str, Account | None]
    losses: dict[str, float]
    skipped: str | None
    lr: tuple[float | None, ...]
    clip: tuple[float, ...]
    audited: bool
    settled: tuple[SettledCredits, ...] = ()


def by_set(labels: list[Label]) -> dict[str, list[int]]:
    """Return the places of the columns of every validation set."""
    found: dict[str, list[int]] = {}
    for j, label in enumerate(labels):
        found.setdefault(label.name, []).append(j)
    return found


def numbers(x: Tensor | None) -> np.ndarray[Any, Any] | None:
    """Bring numbers to the host, in double precision."""
    return None if x is None else x.detach().to("cpu", torch.float64).numpy()


def make_result(step: Step, outcome: Outcome, settled: list[SettledCredits]) -> StepResult:
    """Sort the columns into validation sets."""
    contributions = outcome.contributions.detach().cpu()
    if step.skipped is not None:
        contributions = torch.zeros(len(step.ids), len(outcome.labels), dtype=contributions.dtype)
    values, errors, accounts, losses = {}, {}, {}, {}
    loss = numbers(outcome.losses)
    assert loss is not None
    for name, js in by_set(outcome.labels).items():
        part, first = contributions[:, js], outcome.labels[js[0]]
        if first.is_fold:
            values[name] = part.mean(1)
            errors[name] = (torch.std(part.double(), dim=1) / len(js) ** 0.5).to(part.dtype)
        else:
            values[name] = part if first.point is not None else part[:, 0]
        accounts[name] = None if step.skipped else _account(outcome, js)
        losses[name] = float(loss[js].mean())
    return StepResult(
        step.number,
        step.ids,
        values,
        errors,
        accounts,
        losses,
        None if step.skipped is None else step.skipped.text(),
        tuple(step.rates.get(i) for i in range(len(step.run.optimizers))),
        tuple(float(numbers(c)) for c in step.clips.values()),  # type: ignore[arg-type]
        step.audited,
        tuple(settled),
    )


def _account(outcome: Outcome, js: list[int]) -> Account | None:
    b = outcome.books
    if b.before is None or b.after is None:
        return None

    def mean(x: Tensor | None) -> float | None:
        found = numbers(x)
        return None if found is None else float(found[js].mean())

    before, after, data, spread = (mean(x) for x in (b.before, b.after, b.data, b.spread))
    assert before is not None and after is not None and data is not None and spread is not None
    return Account(before, after, data, spread, mean(b.decay), mean(b.inherited), mean(b.before - b.after - b.whole), b.points)


def make_record(step: Step, outcome: Outcome, settled: list[SettledCredits]) -> StepRecord:
    """Return the rows of the ledger: one column per validation set, point or fold."""
    host = outcome.contributions.detach().to("cpu", torch.float32).numpy()
    books, clips = outcome.books, [float(numbers(c)) for c in step.clips.values()]  # type: ignore[arg-type]
    rates = [step.rates.get(i) for i in range(len(step.run.optimizers))]
    told = {name: numbers(getattr(books, name)) for name in ("data", "spread", "decay", "inherited", "before", "after")}
    rows = []
    for j, label in enumerate(outcome.labels):

        def at(name: str, j: int = j) -> float | None:
            found = told[name]
            return None if found is None or step.skipped is not None else float(found[j])

        before, after, data = at("before"), at("after"), at("data")
        whole = sum(x for x in (data, at("decay"), at("inherited")) if x is not None)
        rows.append(
            {
                "step": step.number,
                "validation": str(label),
                "loss_before": before,
                "loss_after": after,
                "data": data,
                "spread": at("spread"),
                "optimizer": None,
                "momentum": None,
                "decay": at("decay"),
                "inherited": at("inherited"),
                "points": None if step.skipped is not None else books.points,
                "residual": None if before is None or after is None else before - after - whole,
                "lr": rates[0] if rates else None,
                "clip": clips[0] if clips else None,
                "n_samples": len(step.ids),
                "skipped": None if step.skipped is None else step.skipped.text(),
                "lr_by_optimizer": rates,
                "clip_by_optimizer": clips,
            }
        )
    values = {} if step.skipped is not None else {str(c): host[:, j].copy() for j, c in enumerate(outcome.labels)}
    return StepRecord(step.number, step.ids.numpy(), values, rows, tuple(settled))
