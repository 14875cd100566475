"""The accounts of an audited (or rough) step: what the data did, what the optimizer did by itself, and the method's own error.

All but ``data`` are measured by forward passes at w, w + decay, w + δ_∅ and w', never taken as a remainder of the others:

    decay     = ℓ(w) − ℓ(w + decay's part of δ_∅)
    momentum  = ℓ(w + decay's part) − ℓ(w + δ_∅)
    optimizer = decay + momentum = ℓ(w) − ℓ(w + δ_∅)
    data      = Σ_n c_n
    residual  = ℓ(w + δ_∅) − ℓ(w') − Σ_n c_n
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from inrun.old.engine.update_path import UpdatePath
from inrun.old.engine.validation import Validation


@dataclass(frozen=True)
class Account:
    """The account of one step and validation set; all in the unit of the loss, positive = the loss fell."""

    loss_before: float
    loss_after: float
    #: Σ_n of the contributions.
    data: float
    #: Σ_n of their absolute values: what the residual is to be compared with.
    spread: float
    #: What the optimizer did without this step's gradient; None where its rule is not known.
    optimizer: float | None = None
    #: The two parts of ``optimizer``; None where they cannot be told apart (decay coupled into Adam's gradient).
    momentum: float | None = None
    decay: float | None = None
    #: The method's own error on the data's part of the move; under whole credit, on the whole move.
    residual: float | None = None
    #: Under whole credit: what the optimizer's memory from before scoring began did.
    inherited: float | None = None
    #: How many points of the move validation gradients were taken at; None for methods without a quadrature.
    points: int | None = None


@dataclass
class Losses:
    """Validation losses ``[k]`` at places of one step; None where not measured."""

    before: Tensor | None = None
    after_decay: Tensor | None = None
    after_zero_move: Tensor | None = None
    after: Tensor | None = None

    def account(self, columns: list[int], data: float, spread: float, points: int | None = None) -> Account | None:
        """Return the account of a validation set, the mean over its columns."""
        if self.before is None or self.after is None:
            return None
        start, end = float(self.before[columns].mean()), float(self.after[columns].mean())
        if self.after_zero_move is None:
            return Account(start, end, data, spread, points=points)
        middle = float(self.after_zero_move[columns].mean())
        momentum = decay = None
        if self.after_decay is not None:
            shrunk = float(self.after_decay[columns].mean())
            decay, momentum = start - shrunk, shrunk - middle
        return Account(start, end, data, spread, start - middle, momentum, decay, middle - end - data, points=points)

    def measure_zero_move(self, path: UpdatePath | None, validation: Validation, step: int) -> None:
        """Fill in the losses at w (unless known), w + decay and w + δ_∅, right before the optimizers step."""
        if self.before is None:
            self.before = validation.losses(step)
        if path is None:
            return
        moving = path.moving()
        with path.at_zero_move(moving):
            self.after_zero_move = validation.losses(step)
        place = path.at_decay(moving)
        if place is not None:
            with place:
                self.after_decay = validation.losses(step)
