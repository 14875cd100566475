"""What one step is paid by, and in which ways it is sketched."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from inrun.engine.credit.sketcher import Sketcher


@dataclass(frozen=True)
class Epoch:
    """A time in which gradients are sketched in one way."""

    sketcher: Sketcher
    #: ρ by segment, per parameter.
    weights: list[Tensor]
    early: bool


@dataclass
class Direction:
    """What one step is paid by: D per parameter, ``[k, *shape]`` per unit of pace, and what it was when steps were sketched."""

    whole: dict[int, Tensor]
    k: int
    _sums: dict[int, list[Tensor]] = field(default_factory=dict)
    _joined: dict[int, Tensor] = field(default_factory=dict)

    def joined(self, epoch: Epoch) -> Tensor:
        """Return SD in the columns of an epoch, ``[k, columns]``; made once."""
        if id(epoch) not in self._joined:
            self._joined[id(epoch)] = epoch.sketcher.joined(self.sums(epoch.sketcher), epoch.weights, divide=True)
        return self._joined[id(epoch)]

    def sums(self, sketcher: Sketcher) -> list[Tensor]:
        """Return the segment sums by parameter, ``[k, segments]``, as a sketcher takes them; made once."""
        if id(sketcher) not in self._sums:
            self._sums[id(sketcher)] = sketcher.all_sums(self.whole, self.k)
        return self._sums[id(sketcher)]
