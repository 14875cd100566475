"""How a step is scored: what is read of its backward, and what its move pays.

A :class:`Scorer` is one method. The run makes it once; a step calls, in this order:

    begin         what must be known before the forward
    request       what a microbatch reads of its per-sample gradients
    clip          before the optimizer steps: the factor between its gradients and the samples'
    before_move   before the first optimizer steps;  check: before each, on audited steps
    score         after all have stepped: validation gradients along the move, contributions, accounts
    commit        the step is final: its uses enter the window, and uses whose window has ended are settled
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inrun.engine.parameters import Parameters
from inrun.engine.readers import Request
from inrun.engine.reading import Reading
from inrun.engine.validation import Validation
from inrun.engine.window import Settled
from inrun.ledger.labels import Label

if TYPE_CHECKING:
    from inrun.engine.move import Mover

#: Places along the move, from 0 (before) to 1 (after), and their weights.
Points = Sequence[tuple[float, float]]
MIDPOINT: Points = ((0.5, 1.0),)


@dataclass
class Accounts:
    """The accounts of one step, ``[k]`` each in float64, on the device; losses where they were measured."""

    data: Tensor
    #: Σ|credit| of all that the step pays.
    abs_sum: Tensor
    decay: Tensor | None = None
    inherited: Tensor | None = None
    #: What entries moved whose batch gradient is nothing but floating-point cancellation.
    rounding: Tensor | None = None
    #: With ``method="step"``: the part of the move that earlier steps' gradients made.
    momentum: Tensor | None = None
    before: Tensor | None = None
    after: Tensor | None = None
    points: int | None = None
    #: Where the losses were measured: Σ|contribution| of the step's own samples by tensor, ``[k, tensors]``.
    by_tensor: Tensor | None = None

    @property
    def explained(self) -> Tensor:
        """Return all that the move is said to be worth."""
        return sum((x for x in (self.decay, self.inherited, self.rounding, self.momentum) if x is not None), self.data)


@dataclass
class Outcome:
    """What a step gave: contributions ``[n, k]`` and its accounts.

    ``failures`` are what an audit found (``checks.py``); ``valid`` tells whether the gradients
    and the validation losses were finite, ``[2]``.
    """

    labels: list[Label]
    losses: Tensor
    contributions: Tensor
    accounts: Accounts
    valid: Tensor
    failures: Tensor | None = None
    settled: list[Settled] = field(default_factory=list)


class Scorer:
    """One method."""

    #: Whether more points of the move may be taken.
    refines = False
    #: Whether it needs the weights of before the step.
    keeps_weights = False
    #: Whether uses stay open after their step.
    keeps_uses = False

    def __init__(self, parameters: Parameters, validation: Validation) -> None:
        self.parameters, self.validation = parameters, validation

    def begin(self, step: int) -> None:
        """Work out what must be known before the forward."""

    def request(self, n: int, longest: int | None, audited: bool) -> Request:
        """Return what a microbatch of n samples reads."""
        raise NotImplementedError

    def clip(self, readings: Sequence[Reading], optimizer: int) -> Tensor:
        """Return the factor between an optimizer's gradients and the samples', as a tensor of no dimensions."""
        raise NotImplementedError

    def before_move(self, step: int, readings: Sequence[Reading], clips: dict[int, Tensor]) -> None:
        """Work out what needs the weights before the move and the gradients that the optimizer is about to use."""

    def check(self, readings: Sequence[Reading], optimizer: int, clip: Tensor) -> None:
        """Audit one optimizer's gradients before it steps."""

    def drop(self) -> None:
        """The step will not be scored: its optimizers did not step."""

    def restart(self, optimizers: Sequence[torch.optim.Optimizer], mover: Mover) -> list[Settled]:
        """Settle all that is open; what the optimizers remember is nobody's from now on."""
        return self.settle_all()

    def score(self, step: int, mover: Mover, readings: Sequence[Reading], clips: dict[int, Tensor]) -> Outcome:
        """Score a step whose optimizers have stepped."""
        raise NotImplementedError

    def commit(self, step: int, mover: Mover) -> list[Settled]:
        """Make the step's score final; return the uses that it settles."""
        return []

    def settle_all(self) -> list[Settled]:
        """Settle all uses that are open."""
        return []

    def open_credits(self) -> list[Settled]:
        """Return the credits so far of the uses that are open."""
        return []

    def nbytes(self) -> int:
        """Return the memory that is held between steps."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors by which a resumed run goes on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""


class RefiningScorer(Scorer):
    """A method whose validation gradient is averaged along the move, by more points where the move is rough."""

    refines = True
    keeps_weights = True
    keeps_uses = True

    def again(self, step: int, mover: Mover, points: Points) -> Accounts:
        """Score the same step at other points of its move."""
        raise NotImplementedError

    def own_credits(self) -> Tensor:
        """Return the contributions of the step that is not final yet, ``[n, k]``."""
        raise NotImplementedError

    def abs_sum(self) -> Tensor:
        """Return Σ|credit| of all that the step pays, ``[k]``."""
        raise NotImplementedError

    def by_tensor(self) -> Tensor:
        """Return Σ|contribution| of the step's samples by tensor, ``[k, tensors]``."""
        raise NotImplementedError

    def slope(self, step: int, mover: Mover, place: float) -> Tensor:
        """Return −dℓ/ds at a place s of the move, ``[k]``."""
        raise NotImplementedError


def finite(*tensors: Tensor) -> Tensor:
    """Return whether all entries are finite, as a tensor of no dimensions."""
    total = torch.stack([t.detach().float().sum() for t in tensors]).sum()
    return torch.isfinite(total)
