"""The uses that are being paid, and what one step pays them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inrun.old.engine.credit.direction import Direction
from inrun.old.engine.credit.memory import Numbers
from inrun.old.engine.credit.move import WholeMove


@dataclass
class Open:
    """The uses of one step that are still being paid."""

    step: int
    ids: Tensor
    #: ``[n, k]``, in double precision.
    credit: Tensor
    #: The numbers of the rows in the step, ``[n]``, where several processes share it: those of lower ranks come first.
    rows: Tensor | None = None


@dataclass
class Payment:
    """What one step pays, before it is final: nothing has changed yet."""

    move: WholeMove
    direction: Direction
    entry: Any
    kappa: Numbers
    paces: Numbers
    #: ``[rows, k]``: what rows get, the coming step's last; the ``first`` of the open steps are owed theirs.
    parts: Tensor
    first: int
    #: What was missing in the estimates and is spread in ``parts``, ``[k]``.
    rest: Tensor
    #: Σ|parts| of all open rows over that of the coming step's rows, as it was last.
    to_all: Tensor
    #: ``[k]`` each, in double precision: what the samples get together, decay, inherited.
    data: Tensor
    decay: Tensor
    inherited: Tensor
    #: Σ parts, Σ|parts| and Σ|own|, of all processes, ``[k]`` each.
    paid: Tensor
    paid_absolute: Tensor
    own_absolute: Tensor

    @property
    def own(self) -> Tensor:
        """Return what the coming step's rows get, ``[n, k]``."""
        return self.parts[len(self.parts) - self.entry.n :]

    @property
    def spread(self) -> Tensor:
        """Return Σ|parts| of all open rows, ``[k]``; as far as they are owed, in proportion to the coming step's own."""
        return self.paid_absolute if self.first == 0 else self.own_absolute * self.to_all

    @property
    def whole(self) -> Tensor:
        """Return all that the move was worth, ``[k]``."""
        return self.data + self.decay + self.inherited
