"""What one step is paid by, and in which ways it is sketched."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from inrun.old.engine.credit.sketcher import Sketcher


@dataclass(frozen=True)
class Epoch:
    """A time in which gradients are sketched in one way."""

    sketcher: Sketcher
    #: ρ by segment, per parameter.
    weights: list[Tensor]
    early: bool

    @functools.cached_property
    def inverse(self) -> list[Tensor]:
        """Return 1/ρ, which directions are multiplied by."""
        return [1.0 / w for w in self.weights]

    @functools.cached_property
    def inverse_apart(self) -> dict[int, Tensor]:
        """Return 1/ρ for the rows that are kept apart, ``[rows, J]`` each, as far as asked for."""
        return {}

    def joined(self, sums: list[Tensor]) -> Tensor:
        """Let a direction's segment sums fall into the sampled columns: ``[k, columns]``."""
        return self.sketcher.joined(sums, self.inverse)

    def table(self, index: int, sums: Tensor) -> Tensor:
        """Return a direction's segment sums row by row, ``[k, rows, J]``."""
        plan = self.sketcher.plans[index]
        if index not in self.inverse_apart:
            self.inverse_apart[index] = plan.weights_apart(self.inverse[index]).contiguous()
        return sums.view(len(sums), plan.rows, plan.per_row_apart) * self.inverse_apart[index]


@dataclass
class Direction:
    """What one step is paid by: D per parameter, ``[k, *shape]`` per unit of pace, and what it was when steps were sketched."""

    whole: dict[int, Tensor]
    k: int
    _sums: dict[int, list[Tensor]] = field(default_factory=dict)
    _joined: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of_sums(cls, sums: Mapping[Sketcher, list[Tensor]], k: int) -> Direction:
        """Know a direction by nothing but its segment sums."""
        return cls({}, k, {id(sketcher): x for sketcher, x in sums.items()})

    def joined(self, epoch: Epoch) -> Tensor:
        """Return SD in the columns of an epoch, ``[k, columns]``; made once."""
        if id(epoch) not in self._joined:
            self._joined[id(epoch)] = epoch.joined(self.sums(epoch.sketcher))
        return self._joined[id(epoch)]

    def sums(self, sketcher: Sketcher) -> list[Tensor]:
        """Return the segment sums by parameter, ``[k, segments]``, as a sketcher takes them; made once."""
        if id(sketcher) not in self._sums:
            self._sums[id(sketcher)] = sketcher.all_sums(self.whole, self.k)
        return self._sums[id(sketcher)]
