"""Parts of what the optimizers remember that no sample is paid for: coupled weight decay, momentum of before, rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inrun.optimizers import Memory

#: Slices of a vector, and how their optimizer remembers.
Spans = list[tuple[slice, Memory]]


class Carried:
    """One vector that is remembered like the optimizer's own: m ← keep·m + enter·x;  its part of q is read·m + direct·x."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._next: Tensor | None = None

    def begin(self, value: Tensor) -> None:
        """Start from a vector."""
        self.value = value

    @torch.no_grad()
    def part(self, spans: Spans, inflow: Tensor | None = None) -> Tensor | None:
        """Return the part of this step's q; nothing is final before :meth:`commit`. None where there is none."""
        if self.value is None and inflow is None:
            return None
        like = inflow if inflow is not None else self.value
        assert like is not None
        after = torch.zeros_like(like) if self.value is None else self.value.clone()
        q = torch.zeros_like(like)
        for where, m in spans:
            here = after[where].mul_(m.keep)
            if inflow is not None:
                here.add_(inflow[where], alpha=m.enter)
            torch.mul(here, m.read, out=q[where])
            if inflow is not None and m.direct != 0.0:
                q[where].add_(inflow[where], alpha=m.direct)
        self._next = after
        return q

    def commit(self) -> None:
        """The step is final."""
        if self._next is not None:
            self.value, self._next = self._next, None

    @property
    def nbytes(self) -> int:
        """Return the memory of the vector."""
        return 0 if self.value is None else self.value.nbytes


def merged(spans: Sequence[tuple[slice, Memory | None]]) -> Spans:
    """Join slices that lie next to each other and are remembered alike; those without memory are left out."""
    found: Spans = []
    for where, memory in sorted(spans, key=lambda s: s[0].start):
        if memory is None or where.start == where.stop:
            continue
        if found and found[-1][0].stop == where.start and found[-1][1] == memory:
            found[-1] = (slice(found[-1][0].start, where.stop), memory)
        else:
            found.append((where, memory))
    return found
