"""What is kept of every open use until its window has passed: its gradients themselves.

A store answers one question: given what each open step's pushes count for now (κ, by parameter) and the direction D of the step
that is paid, what does every open row get? Rows are in the order of their steps, those of the coming step last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inrun.old.engine.credit.direction import Direction
from inrun.old.engine.credit.memory import Numbers
from inrun.old.engine.microbatch import Microbatch
from inrun.old.engine.processes import Processes
from inrun.old.engine.sites import Scored
from inrun.old.layers import Formed, GradientShape


class ExactStore:
    """Per-sample gradients of all open steps, in host memory."""

    def __init__(self, scored: list[Scored]) -> None:
        """Nothing is kept yet."""
        self.scored = scored
        self.entries: list[ExactEntry] = []

    def capture(self, microbatches: list[Microbatch], quietly: Any) -> ExactEntry:
        """Copy what a backward left of every sample."""
        place = {s: i for i, s in enumerate(self.scored)}
        held: list[tuple[int, int, GradientShape]] = []
        first = 0
        for micro in microbatches:
            for kept in micro.kept:
                for shape in kept.shapes():
                    parts = tuple(part.detach().to("cpu", copy=True) for part in shape.parts())
                    held.append((place[kept.scored], first, kept.restore(parts)))
            for replayed in micro.replays:
                for name, s in replayed.scored.items():
                    for shape in replayed.shapes(name, micro.n, quietly).values():
                        held.append((place[s], first, Formed(shape.form().detach().to("cpu", copy=True))))
            first += micro.n
        return ExactEntry(first, held)

    def parts(self, some: list[ExactEntry], kappa: Numbers, direction: Direction) -> Tensor:
        """Return what the rows of some steps get, ``[rows, k]``, in double precision; ``kappa`` ``[steps, parameters]``."""
        found = []
        columns = direction.k
        host = {i: d.to("cpu") for i, d in direction.whole.items()}
        for row, open_ in zip(kappa, some, strict=True):
            part = torch.zeros(open_.n, columns, dtype=torch.float64)
            for i, first, shape in open_.held:
                if i in host and row[i] != 0.0:
                    v = host[i] if i not in open_.factors else host[i] * open_.factors[i]
                    c = shape.contract(v).double()
                    part[first : first + len(c)] += c * row[i]
            found.append(part)
        return torch.cat(found)

    @staticmethod
    def weights(some: list[ExactEntry]) -> Tensor:
        """Return the norm of every row's gradient, by which a rest is spread, ``[rows]``."""
        return torch.cat([open_.norms() for open_ in some])

    def push(self, entry: ExactEntry) -> None:
        """Keep the coming step's rows."""
        self.entries.append(entry)

    def errors(self, count: int, columns: int, processes: Processes | None) -> list[Tensor]:
        """Return the errors of the oldest steps' rows, ``[n, k]`` each."""
        return [torch.zeros(e.n, columns, dtype=torch.float64) for e in self.entries[:count]]

    def drop(self, count: int) -> None:
        """Let the oldest steps go."""
        self.entries = self.entries[count:]

    def nbytes(self) -> int:
        """Return the memory of what is kept."""
        return sum(self.nbytes_of(e) for e in self.entries)

    @staticmethod
    def nbytes_of(entry: ExactEntry) -> int:
        """Return the memory of one step's rows."""
        return sum(shape.nbytes for _, _, shape in entry.held) + sum(x.nbytes for x in entry.factors.values())


@dataclass
class ExactEntry:
    """The gradients of one step: parameter, first row, shape."""

    n: int
    held: list[tuple[int, int, GradientShape]]
    #: What the step's gradient was multiplied by when it entered the optimizer's memory, by parameter.
    factors: dict[int, Tensor] = field(default_factory=dict)
    #: Σ_n g_n by parameter, for the audit of the coming step.
    entering: list[Tensor] = field(default_factory=list)
    _norms: Tensor | None = None

    def norms(self) -> Tensor:
        """Return the norm of every row's gradient."""
        if self._norms is None:
            squares = torch.zeros(self.n, dtype=torch.float64)
            for _, first, shape in self.held:
                g = shape.form().double()
                g = g.reshape(len(g), -1)
                squares[first : first + len(g)] += g.square().sum(1)
            self._norms = squares.sqrt()
        return self._norms
