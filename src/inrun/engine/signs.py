"""The random signs of sketches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from inrun.engine.plans import Plan

#: So many random signs are held: a larger tensor repeats them. Every epoch reads them from another place of the first ``SHIFTS``.
SIGNS, SHIFTS = 1 << 22, 1 << 18


class Signs:
    """Random signs, drawn once: of entries, and of segments, by which those that repeat differ."""

    def __init__(self, plans: Sequence[Plan], dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.plans = plans
        #: For each tensor, after how many segments its signs repeat (whole rows), and where they begin.
        self.lengths = [min(p.numel, max(1, SIGNS // unit) * unit) for p in plans for unit in [math.lcm(p.columns, p.segment)]]
        self.starts = [0] * len(plans)
        for j in range(1, len(plans)):
            at = self.starts[j - 1] + self.lengths[j - 1]
            self.starts[j] = at if at + self.lengths[j] <= SIGNS else 0
        most = max((s + n for s, n in zip(self.starts, self.lengths, strict=True)), default=0)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, 2, (most + SHIFTS if most else 0,), generator=generator, dtype=torch.int8)
        self.base = drawn.to(dtype).mul_(2).sub_(1).to(device)

    def of_entries(self, j: int, number: int) -> Tensor:
        """Return the signs of the entries of the j-th tensor in an epoch, ``[segments, segment]``."""
        start = self.starts[j] + number * 104_729 % SHIFTS
        return self.base[start : start + self.lengths[j]].view(-1, self.plans[j].segment)

    def of_segments(self, count: int, number: int) -> Tensor:
        """Return the signs of so many segments in an epoch."""
        start = number * 15_485_863 % SHIFTS
        drawn = self.base[start : start + len(self.base) - SHIFTS]
        return drawn[:count] if count <= len(drawn) else drawn.repeat(-(-count // len(drawn)))[:count]

    def runs(self, places: Sequence[int], number: int) -> list[tuple[list[int], Tensor]]:
        """Return runs of tensors whose signs lie one after the other, and their signs ``[segments, segment]``."""
        found: list[tuple[list[int], Tensor]] = []
        j = 0
        while j < len(places):
            last = j
            while last + 1 < len(places) and self._joins(last):
                last += 1
            start = self.starts[j] + number * 104_729 % SHIFTS
            signs = self.base[start : start + sum(self.lengths[j : last + 1])]
            found.append((list(places[j : last + 1]), signs.view(-1, self.plans[j].segment)))
            j = last + 1
        return found

    def _joins(self, j: int) -> bool:
        here, there = self.plans[j], self.plans[j + 1]
        whole = self.lengths[j] == here.numel and self.lengths[j + 1] == there.numel
        return whole and here.segment == there.segment and self.starts[j + 1] == self.starts[j] + self.lengths[j]


def signed_sums(x: Tensor, signs: Tensor) -> Tensor:
    """Return the sums of segments ``[m, segments, segment]`` times signs, which repeat where there are fewer; ``[m, segments]``."""
    if len(signs) == x.shape[1]:
        return torch.linalg.vecdot(x, signs)
    return torch.cat([torch.linalg.vecdot(part, signs[: part.shape[1]]) for part in x.split(len(signs), 1)], 1)
