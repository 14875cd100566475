"""From the columns of a finished step to what users and the ledger see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inrun.engine.folds import standard_error
from inrun.ledger import StepRecord
from inrun.ledger.labels import Label
from inrun.ledger.record import SettledCredits, Skip
from inrun.old.engine.accounts import Account, Losses
from inrun.old.engine.credit.settlement import WholeBooks
from inrun.old.engine.processes import Processes


@dataclass(frozen=True)
class StepResult:
    """What one step gave."""

    step: int
    sample_ids: Tensor
    #: Per validation set: ``[n]``, or ``[n, m]`` for a callable that returns m losses; with folds their mean.
    contributions: dict[str, Tensor]
    #: With folds, the standard error of each contribution, ``[n]``.
    standard_errors: dict[str, Tensor]
    #: Per validation set; None on steps that were neither audited nor rough.
    accounts: dict[str, Account | None]
    #: Validation losses where the method took their gradients (``first``: at the weights before the step).
    losses: dict[str, float]
    #: Why the step was not scored, or None.
    skipped: str | None
    #: The learning rate of each optimizer's first group (None where it has none), and the factor between its backward and its
    #: step (clipping, loss scaling).
    lr: tuple[float | None, ...]
    clip: tuple[float, ...]
    audited: bool
    #: Bytes kept from the backward until the optimizer's step.
    kept_bytes: int
    #: The same, as told from shapes before the backward.
    expected_bytes: int
    #: Entries that scored 0 because the optimizer had no history of them (counted in early and audited steps).
    zero_gains: int
    #: Under whole credit: what was settled with this step, of uses of earlier steps.
    settled: tuple[SettledCredits, ...] = ()
    #: With ``extra="norm"``: the norm of each sample's part of the gradient that the optimizers used, ``[n]``.
    norms: Tensor | None = None
    #: With ``extra="cosine"``: its cosine with the validation gradient, per set ``[n]``, or ``[n, m]`` for points or folds.
    cosines: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Sums:
    """What the contributions of a step sum to, on all processes: numbers by column, and by the name of a validation set.

    ``data`` is Σ_n c_n, ``absolute`` Σ_n |c_n|, ``spread`` that of the mean over folds; of a set, ``mean`` Σ_n of the mean over its
    columns and ``mean_absolute`` Σ_n of its absolute value.
    """

    data: list[float]
    absolute: list[float]
    spread: list[float]
    mean: dict[str, float]
    mean_absolute: dict[str, float]


def places_by_name(columns: list[Label]) -> dict[str, list[int]]:
    """Return the places of the columns of every validation set."""
    found: dict[str, list[int]] = {}
    for j, column in enumerate(columns):
        found.setdefault(column.name, []).append(j)
    return found


@torch.no_grad()
def shared_sums(columns: list[Label], contributions: Tensor, processes: Processes) -> Sums:
    """Add contributions ``[n, k]`` up, over rows and processes."""
    double, by_name = contributions.double(), places_by_name(columns)
    k = len(columns)
    own = [*double.sum(0).tolist(), *double.abs().sum(0).tolist(), *spreads(columns, contributions)]
    if len(by_name) == k:  # every set has one column
        own += own[: 2 * k]
    else:
        means = torch.stack([double[:, js].mean(1) for js in by_name.values()])
        own += means.sum(1).tolist() + means.abs().sum(1).tolist()
    every = processes.summed("accounts", torch.tensor(own, dtype=torch.float64)).tolist()
    rest, names = every[3 * k :], list(by_name)
    return Sums(
        every[:k],
        every[k : 2 * k],
        every[2 * k : 3 * k],
        dict(zip(names, rest[: len(names)], strict=True)),
        dict(zip(names, rest[len(names) :], strict=True)),
    )


@dataclass(frozen=True)
class FinishedStep:
    """What a step hands over when it is done."""

    step: int
    sample_ids: Tensor
    columns: list[Label]
    #: ``[n, k]``, one column per validation set, point or fold.
    contributions: Tensor
    #: Where the method took its gradients, ``[k]``; None if it never did.
    losses: Tensor | None
    #: At places of the step, as far as they were measured.
    places: Losses
    skipped: Skip | None
    #: What there is to say beside the reason.
    details: str
    lr: tuple[float | None, ...]
    clip: tuple[float, ...]
    audited: bool
    kept_bytes: int
    expected_bytes: int
    zero_gains: int
    #: On all processes: what contributions sum to, and how many rows there are.
    sums: Sums
    rows: int
    #: In the step game: how many quadrature points the method took; None where it takes none.
    points: int | None = None
    #: Under whole credit: the books of the step, and what was settled with it.
    books: WholeBooks | None = None
    settled: tuple[SettledCredits, ...] = ()
    #: Norms ``[n]`` and cosines ``[n, k]``, where they were asked for.
    extra: tuple[Tensor, Tensor | None] | None = None

    @property
    def reason(self) -> str | None:
        """Return why the step was not scored, as the accounts say it; None if it was."""
        return None if self.skipped is None else self.skipped.text(self.details)

    def by_set(self) -> dict[str, list[int]]:
        """Return the places of the columns of every validation set."""
        return places_by_name(self.columns)

    def result(self) -> StepResult:
        """Sort the columns into validation sets."""
        contributions = torch.zeros_like(self.contributions) if self.skipped else self.contributions
        values, errors, losses = {}, {}, {}
        accounts: dict[str, Account | None] = {}
        for name, js in self.by_set().items():
            part = contributions[:, js]
            first = self.columns[js[0]]
            if first.is_fold:
                values[name], errors[name] = part.mean(1), standard_error(part).to(part.dtype)
            else:
                values[name] = part if first.point is not None else part[:, 0]
            accounts[name] = self._account(js, self.sums.mean[name], self.sums.mean_absolute[name])
            losses[name] = float("nan") if self.losses is None else float(self.losses[js].mean())
        return StepResult(
            step=self.step,
            sample_ids=self.sample_ids,
            contributions=values,
            standard_errors=errors,
            accounts=accounts,
            losses=losses,
            skipped=self.reason,
            lr=self.lr,
            clip=self.clip,
            audited=self.audited,
            kept_bytes=self.kept_bytes,
            expected_bytes=self.expected_bytes,
            zero_gains=self.zero_gains,
            settled=self.settled,
            norms=None if self.extra is None else self.extra[0],
            cosines=self._cosines(),
        )

    def _cosines(self) -> dict[str, Tensor]:
        found = None if self.extra is None else self.extra[1]
        if found is None:
            return {}
        return {
            name: found[:, js] if self.columns[js[0]].point is not None else found[:, js[0]] for name, js in self.by_set().items()
        }

    def record(self, with_accounts: bool = True) -> StepRecord:
        """Return the rows of the ledger: one column per validation set, point or fold.

        Accounts are of the step on all processes: one of them writes them down.
        """
        host = self.contributions.detach().to("cpu", torch.float32)
        rows: list[dict[str, Any]] = []
        held = self._spreads()
        for j, column in enumerate(self.columns if with_accounts else []):
            data = self.sums.data[j]
            account = None if self.skipped else self._account([j], data, self.sums.absolute[j])
            books = None if self.skipped else self.books
            rows.append(
                {
                    "step": self.step,
                    "validation": str(column),
                    "loss_before": self._loss_before(j),
                    "loss_after": None if account is None else account.loss_after,
                    "data": None if self.skipped else data if books is None else float(books.data[j]),
                    "spread": None if self.skipped else held[j],
                    "optimizer": None if account is None else account.optimizer,
                    "momentum": None if account is None else account.momentum,
                    "decay": float(books.decay[j]) if books is not None else None if account is None else account.decay,
                    "inherited": None if books is None else float(books.inherited[j]),
                    "points": None if self.skipped else self.points if books is None else books.points,
                    "residual": None if account is None else account.residual,
                    "lr": self.lr[0],
                    "clip": self.clip[0],
                    "n_samples": self.rows,
                    "skipped": self.reason,
                    "lr_by_optimizer": list(self.lr),
                    "clip_by_optimizer": list(self.clip),
                }
            )
        values = {} if self.skipped else {str(c): host[:, j].numpy().copy() for j, c in enumerate(self.columns)}
        norms, cosines = self._told()
        return StepRecord(self.step, self.sample_ids.numpy(), values, rows, self.settled, norms, cosines)

    def _told(self) -> tuple[npt.NDArray[np.float32] | None, dict[str, npt.NDArray[np.float32]]]:
        """Return norms, and cosines by label, as the ledger keeps them."""
        if self.extra is None or self.skipped:
            return None, {}
        norms, cosines = (None if x is None else x.detach().to("cpu", torch.float32).numpy() for x in self.extra)
        return norms, {} if cosines is None else {str(c): cosines[:, j].copy() for j, c in enumerate(self.columns)}

    def _loss_before(self, j: int) -> float | None:
        before = self.places.before if self.books is None else self.books.before
        return None if before is None else float(before[j])

    def _account(self, js: list[int], data: float, spread: float) -> Account | None:
        """Return the account of a set's columns; under whole credit from the books of the step."""
        books = self.books
        if books is None:
            return self.places.account(js, data, spread, self.points)
        if books.before is None or books.after is None or books.residual is None:
            return None
        mean = {name: float(getattr(books, name)[js].mean()) for name in ("before", "after", "data", "spread", "decay")}
        return Account(
            loss_before=mean["before"],
            loss_after=mean["after"],
            data=mean["data"],
            spread=mean["spread"],
            decay=mean["decay"],
            residual=float(books.residual[js].mean()),
            inherited=float(books.inherited[js].mean()),
            points=books.points,
        )

    def _spreads(self) -> list[float]:
        if self.books is not None:
            return [float(x) for x in self.books.spread]
        return self.sums.spread


def spreads(columns: list[Label], contributions: Tensor) -> list[float]:
    """Return Σ|c_n| per column of ``[n, k]``; of folds that of their mean: it is the set's residual that is compared with it."""
    groups: dict[str, list[int]] = {}
    for j, column in enumerate(columns):
        groups.setdefault(column.set_name, []).append(j)
    if len(groups) == len(columns):
        return contributions.double().abs().sum(0).tolist()
    found = [0.0] * len(columns)
    for js in groups.values():
        spread = float(contributions[:, js].double().mean(1).abs().sum())
        for j in js:
            found[j] = spread
    return found
