"""The loss of a validation set as the accountant takes it, by one process or by several."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from inrun.engine.folds import folds
from inrun.training.loss import PADDING, next_token_loss, row_losses, token_losses
from inrun.training.prepare import Held
from inrun.training.processes import Job


def validation_loss(held: Held, job: Job) -> Any:
    """Return the loss of a validation set as the accountant takes it: of the model and the step.

    Of several processes each takes its part of the rows, and the mean over processes is the loss of all of them. Rows that cannot
    be shared out evenly are taken by every process.
    """
    k, device, world = max(held.settings.folds, 1), job.device, job.world

    def mine(rows: Tensor) -> tuple[Tensor, Tensor]:
        """This process's rows, as many of each fold, and the number of targets of a process, on average."""
        targets = (rows[:, 1:] != PADDING).sum()
        if len(rows) % (k * world):
            return rows, targets
        some = len(rows) // world
        return rows[job.rank * some : (job.rank + 1) * some], targets / world

    def losses(model: nn.Module, step: int) -> Tensor:
        rows, targets = mine(held.rows(step, device))
        found, _ = token_losses(model, rows)
        return found * len(rows) / targets

    def loss(model: nn.Module, step: int) -> Tensor:
        rows, targets = mine(held.rows(step, device))
        return token_losses(model, rows)[0].sum() / targets

    if world == 1:
        if k > 1:
            return folds(lambda model, step: row_losses(model, held.rows(step, device)), k)
        return lambda model, step: next_token_loss(model, held.rows(step, device))
    return folds(losses, k) if k > 1 else loss
