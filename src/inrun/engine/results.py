"""From the columns of a finished step to what users and the ledger see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inrun.engine.books import Account
from inrun.engine.fold import standard_error
from inrun.ledger import StepRecord

if TYPE_CHECKING:
    from inrun.engine.step import Step, StepResult


def make_result(
    step: Step, number: int, ids: Tensor, contributions: Tensor, clip: tuple[float, ...], zero_gains: int
) -> StepResult:
    """Sort the columns ``[n, k]`` into validation sets."""
    from inrun.engine.step import StepResult

    by_set: dict[str, list[int]] = {}
    for j, column in enumerate(step.columns):
        by_set.setdefault(column.name, []).append(j)
    if step.skipped:
        contributions = torch.zeros_like(contributions)
    values, errors, losses = {}, {}, {}
    accounts: dict[str, Account | None] = {}
    for name, js in by_set.items():
        part = contributions[:, js]
        first = step.columns[js[0]]
        if first.is_fold:
            values[name], errors[name] = part.mean(1), standard_error(part).to(part.dtype)
        else:
            values[name] = part if first.point is not None else part[:, 0]
        summed = part.double().mean(1)
        accounts[name] = step.at.account(js, float(summed.sum()), float(summed.abs().sum()))
        losses[name] = float("nan") if step.losses is None else float(step.losses[js].mean())
    return StepResult(
        step=number,
        sample_ids=ids,
        contributions=values,
        standard_errors=errors,
        accounts=accounts,
        losses=losses,
        skipped=step.skipped,
        clip=clip,
        audited=step.audited,
        kept_bytes=step.kept_bytes,
        expected_bytes=0 if step.expected is None else step.expected.nbytes,
        zero_gains=zero_gains,
    )


def make_record(step: Step, result: StepResult, contributions: Tensor) -> StepRecord:
    """Return the rows of the ledger: one column per validation set, point or fold."""
    host = contributions.detach().to("cpu", torch.float32)
    rows: list[dict[str, Any]] = []
    spreads = _spreads(step, contributions)
    for j, column in enumerate(step.columns):
        part = contributions[:, j].double()
        account = None if step.skipped else step.at.account([j], float(part.sum()), float(part.abs().sum()))
        rows.append(
            {
                "step": result.step,
                "validation": column.label,
                "loss_before": None if step.at.before is None else float(step.at.before[j]),
                "loss_after": None if account is None else account.loss_after,
                "data": None if step.skipped else float(part.sum()),
                "spread": None if step.skipped else spreads[j],
                "optimizer": None if account is None else account.optimizer,
                "momentum": None if account is None else account.momentum,
                "decay": None if account is None else account.decay,
                "residual": None if account is None else account.residual,
                "lr": step.lr,
                "clip": result.clip[0],
                "n_samples": len(result.sample_ids),
                "skipped": step.skipped,
            }
        )
    values = {} if step.skipped else {c.label: host[:, j].numpy().copy() for j, c in enumerate(step.columns)}
    return StepRecord(result.step, result.sample_ids.numpy(), values, rows)


def _spreads(step: Step, contributions: Tensor) -> list[float]:
    """Return Σ|c_n| per column; of folds that of their mean, since it is the set's residual that is compared with it."""
    by_set: dict[str, list[int]] = {}
    for j, column in enumerate(step.columns):
        by_set.setdefault(column.name if column.is_fold else f"{column.name}[{j}]", []).append(j)
    found = [0.0] * len(step.columns)
    for js in by_set.values():
        spread = float(contributions[:, js].double().mean(1).abs().sum())
        for j in js:
            found[j] = spread
    return found
