"""What a step needs of its settlement, whichever credit is kept: optimizers step one after the other, and each is settled once."""

from __future__ import annotations

import abc

from torch import Tensor

from inrun.old.engine.microbatch import Microbatch


class Settling(abc.ABC):
    """Which optimizers of a step have been settled, and what becomes of the step's rows."""

    def __init__(self) -> None:
        """No optimizer is about to step."""
        #: Optimizers that have stepped or are about to.
        self.settled: set[int] = set()
        #: Bytes kept from the backward on.
        self.kept_bytes = 0

    @property
    def begun(self) -> bool:
        """Whether some optimizer has stepped or is about to."""
        return bool(self.settled)

    def has(self, optimizer: int) -> bool:
        """Whether an optimizer's step was taken into account."""
        return optimizer in self.settled

    def hold_back(self, optimizer: int) -> None:
        """The scaler lets nothing step: there is nothing to settle."""
        self.settled.add(optimizer)

    @abc.abstractmethod
    def contract_replays(self, micro: Microbatch) -> None:
        """At the end of a microbatch: contract what must run again, if that can be done by now."""

    @abc.abstractmethod
    def settle(self, optimizer: int, microbatches: list[Microbatch], checked: bool, finite: bool) -> float:
        """Settle one optimizer, which is about to step; return the seconds that only checks took."""

    @abc.abstractmethod
    def contributions(self, microbatches: list[Microbatch], columns: int) -> Tensor:
        """Return what the step's own rows did in it, ``[n, k]``; zeros where no optimizer stepped."""
