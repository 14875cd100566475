"""From what a step gave to what users and the ledger see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inrun.engine.processes import Processes
from inrun.engine.scorer import Outcome
from inrun.engine.transfer import Array, Transfer
from inrun.ledger import StepRecord
from inrun.ledger.labels import Label
from inrun.ledger.record import SettledCredits, Skip

#: The parts of a step's account, and what else is measured by validation loss.
PARTS = ("data", "decay", "inherited", "rounding", "momentum")
MEASURED = (*PARTS, "abs_sum", "before", "after")
#: Tensors that an account names.
MOST_TENSORS = 5
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Account:
    """The account of one step and validation set; in the unit of the loss, positive = the loss fell.

    ``data`` + ``decay`` + ``inherited`` + ``rounding`` (+ ``momentum`` with method="step") + ``residual`` is the fall of the loss.
    ``spread`` is Σ|credit|.
    """

    loss_before: float
    loss_after: float
    data: float
    spread: float
    decay: float | None = None
    inherited: float | None = None
    rounding: float | None = None
    momentum: float | None = None
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


@dataclass(eq=False)
class PendingStep:
    """A finished step whose numbers are on their way to the host."""

    number: int
    ids: Tensor
    labels: list[Label]
    transfer: Transfer
    rates: list[float | None]
    optimizers: list[int]
    dtype: torch.dtype
    audited: bool = False
    points: int | None = None
    skipped: Skip | None = None
    #: Of the uses that are settled: step, ids and rows, share of the push that was paid.
    settled: list[tuple[int, Ids, Ids | None, float]] = field(default_factory=list)
    #: Samples of all processes.
    total: int = 0


def send(
    number: int,
    ids: Tensor,
    outcome: Outcome,
    clips: dict[int, Tensor],
    rates: list[float | None],
    audited: bool,
    settled_ids: list[tuple[Ids, Ids | None]],
) -> PendingStep:
    """Send a step's numbers to the host."""
    a = outcome.accounts
    tensors: dict[str, Tensor | None] = {
        "losses": outcome.losses,
        "contributions": outcome.contributions,
        "valid": outcome.valid,
        "failures": outcome.failures,
        "clips": torch.stack([c.reshape(()) for c in clips.values()]) if clips else None,
        **{name: getattr(a, name) for name in MEASURED},
        "by_tensor": a.by_tensor,
    }
    for j, s in enumerate(outcome.settled):
        tensors |= {f"credit.{j}": s.credit, f"error.{j}": s.error}
    settled = [(s.step, *who, s.paid) for s, who in zip(outcome.settled, settled_ids, strict=True)]
    return PendingStep(
        number,
        ids,
        outcome.labels,
        Transfer(tensors),
        rates,
        list(clips),
        outcome.contributions.dtype,
        audited,
        a.points,
        None,
        settled,
    )


def settled_credits(
    labels: list[Label], step: int, ids: Ids, rows: Ids | None, paid: float, credit: Array, error: Array
) -> SettledCredits:
    """Return the credits of the uses of one step, by validation label."""
    return SettledCredits(
        step=step,
        sample_ids=ids,
        credits={str(c): credit[:, j].astype(np.float32) for j, c in enumerate(labels)},
        errors={str(c): error[:, j].astype(np.float32) for j, c in enumerate(labels)},
        paid=np.full(len(ids), paid, np.float32),
        rows=rows,
    )


def credits_of_all(processes: Processes, mine: list[SettledCredits]) -> list[SettledCredits]:
    """Return the credits of every process, on every process; all of them ask."""
    if not processes.several:
        return mine

    def plain(x: Any) -> Any:
        return {k: v.tolist() for k, v in x.items()} if isinstance(x, dict) else x.tolist() if isinstance(x, np.ndarray) else x

    def columns(x: dict[str, list[float]]) -> dict[str, npt.NDArray[np.float32]]:
        return {label: np.array(v, np.float32) for label, v in x.items()}

    found = []
    for of_rank in processes.gather_objects([[plain(x) for x in vars(s).values()] for s in mine]):
        for step, ids, credits, errors, paid, rows in of_rank:
            numbers = None if rows is None else np.array(rows, np.int64)
            paid = np.array(paid, np.float32)
            found.append(SettledCredits(step, np.array(ids, np.int64), columns(credits), columns(errors), paid, numbers))
    return found


class Arrived:
    """A finished step whose numbers are on the host."""

    def __init__(self, pending: PendingStep) -> None:
        self.pending, self.found = pending, pending.transfer.read()
        self.skipped = pending.skipped
        valid = self.found.get("valid")
        if self.skipped is None and valid is not None and not valid.all():
            self.skipped = Skip.CONTRIBUTIONS if not valid.reshape(-1)[0] else Skip.VALIDATION_LOSS
        self.labels = pending.labels
        self.settled = tuple(
            settled_credits(self.labels, *s, self._array(f"credit.{j}"), self._array(f"error.{j}"))
            for j, s in enumerate(pending.settled)
            if len(s[1])
        )

    def _array(self, name: str) -> Array:
        x = self.found[name]
        assert x is not None
        return x

    def _mean(self, name: str, js: list[int]) -> float | None:
        x = self.found.get(name)
        return None if x is None or self.skipped is not None else float(x[js].mean())

    @property
    def clips(self) -> list[float]:
        """Return the factors between the gradients and those that the optimizers used."""
        x = self.found.get("clips")
        return [] if x is None else x.tolist()

    def fall_and_clip(self) -> tuple[float, float]:
        """Return how far the validation losses fell by the accounts, and the smallest clip factor."""
        parts = [x for name in PARTS if (x := self.found.get(name)) is not None]
        return float(np.abs(np.sum(parts, axis=0)).sum()) if parts else 0.0, min(self.clips, default=1.0)

    def residual(self, js: list[int]) -> float | None:
        """Return the fall that the accounts do not explain, the mean over columns; None where it was not measured."""
        before, after = self._mean("before", js), self._mean("after", js)
        if before is None or after is None:
            return None
        return before - after - sum(x for name in PARTS if (x := self._mean(name, js)) is not None)

    def result(self) -> StepResult:
        """Sort the columns into validation sets."""
        p, values, errors, accounts, losses = self.pending, {}, {}, {}, {}
        contributions = self.found.get("contributions")
        if contributions is None or self.skipped is not None:
            contributions = np.zeros((len(p.ids), len(self.labels)))
        for name, js in by_set(self.labels).items():
            part, first = torch.from_numpy(contributions[:, js]), self.labels[js[0]]
            if first.is_fold:
                values[name] = part.mean(1).to(p.dtype)
                errors[name] = (torch.std(part, dim=1) / len(js) ** 0.5).to(p.dtype)
            else:
                values[name] = (part if first.point is not None else part[:, 0]).to(p.dtype)
            accounts[name] = self._account(js)
            loss = self.found.get("losses")
            losses[name] = float("nan") if loss is None else float(loss[js].mean())
        return StepResult(
            p.number,
            p.ids,
            values,
            errors,
            accounts,
            losses,
            None if self.skipped is None else self.skipped.text(),
            tuple(p.rates),
            tuple(self.clips),
            p.audited,
            self.settled,
        )

    def _account(self, js: list[int]) -> Account | None:
        before, after, data, spread = (self._mean(name, js) for name in ("before", "after", "data", "abs_sum"))
        if before is None or after is None or data is None or spread is None:
            return None
        rest = {name: self._mean(name, js) for name in PARTS[1:]}
        return Account(before, after, data, spread, **rest, residual=self.residual(js), points=self.pending.points)

    def largest_tensors(self, j: int) -> tuple[list[int], list[float]] | None:
        """Return the tensors with the largest Σ|contribution|, and their shares of the sum over all; None if not measured."""
        found = self.found.get("by_tensor")
        if found is None or self.skipped is not None or not (total := float(found[j].sum())) > 0:
            return None
        order = np.argsort(-found[j], kind="stable")[:MOST_TENSORS]
        return order.tolist(), (found[j][order] / total).tolist()

    def record(self, names: Sequence[str], with_accounts: bool = True) -> StepRecord:
        """Return the rows of the ledger: one column per validation set, point or fold. ``names`` are those of the tensors."""
        p = self.pending
        rows = [self._row(j, label, names) for j, label in enumerate(self.labels)] if with_accounts else []
        contributions = self.found.get("contributions")
        values = {}
        if contributions is not None and self.skipped is None:
            values = {str(c): contributions[:, j].astype(np.float32) for j, c in enumerate(self.labels)}
        return StepRecord(p.number, p.ids.numpy(), values, rows, self.settled)

    def _row(self, j: int, label: Label, names: Sequence[str]) -> dict[str, object]:
        p, largest = self.pending, self.largest_tensors(j)
        return {
            "step": p.number,
            "validation": str(label),
            "loss_before": self._mean("before", [j]),
            "loss_after": self._mean("after", [j]),
            "data": self._mean("data", [j]),
            "spread": self._mean("abs_sum", [j]),
            "momentum": self._mean("momentum", [j]),
            "decay": self._mean("decay", [j]),
            "inherited": self._mean("inherited", [j]),
            "rounding": self._mean("rounding", [j]),
            "points": None if self.skipped is not None else p.points,
            "residual": self.residual([j]),
            "lr": p.rates[0] if p.rates else None,
            "clip": self.clips[0] if self.clips else None,
            "n_samples": max(p.total, len(p.ids)),
            "skipped": None if self.skipped is None else self.skipped.text(),
            "lr_by_optimizer": p.rates,
            "clip_by_optimizer": self.clips,
            "tensors": None if largest is None else [names[i] for i in largest[0]],
            "tensor_shares": None if largest is None else largest[1],
        }


def by_set(labels: list[Label]) -> dict[str, list[int]]:
    """Return the places of the columns of every validation set."""
    found: dict[str, list[int]] = {}
    for j, label in enumerate(labels):
        found.setdefault(label.name, []).append(j)
    return found
