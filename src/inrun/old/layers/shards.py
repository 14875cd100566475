"""Tensors that are split by rows over processes, as ``fully_shard`` splits parameters, and how one becomes whole for a moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shards:
    """The rows of one parameter of ``shape``: rank r has ``chunk`` of them from r · chunk on, the last ranks fewer or none."""

    group: Any
    rank: int
    world: int
    shape: torch.Size
    #: Told the bytes that this rank hands over whenever something becomes whole.
    tally: Callable[[int], None] = field(default=lambda nbytes: None, compare=False, repr=False)

    @property
    def chunk(self) -> int:
        """Return the rows of a rank that has all of its rows."""
        return -(-self.shape[0] // self.world)

    @property
    def mine(self) -> slice:
        """Return the rows of this rank."""
        first = min(self.rank * self.chunk, self.shape[0])
        return slice(first, min(first + self.chunk, self.shape[0]))

    @property
    def local(self) -> torch.Size:
        """Return the shape of this rank's part."""
        return torch.Size((self.mine.stop - self.mine.start, *self.shape[1:]))

    def whole(self, x: Tensor) -> Tensor:
        """Gather the rows of all ranks: ``[k, rows here, ...]`` to ``[k, rows, ...]``. All ranks call it, in the same order.

        Nothing is remembered: the result is the caller's, and is freed with it.
        """
        k, rest = x.shape[0], x.shape[2:]
        sent = x
        if x.shape[1] < self.chunk:
            sent = x.new_zeros(k, self.chunk, *rest)
            sent[:, : x.shape[1]] = x
        found = x.new_empty(self.world, k, self.chunk, *rest)
        import torch.distributed as dist

        self.tally(sent.nbytes)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(found.view(-1), sent.contiguous().view(-1), group=self.group)
        if k == 1:
            return found.view(1, self.world * self.chunk, *rest)[:, : self.shape[0]]
        return found.transpose(0, 1).reshape(k, self.world * self.chunk, *rest)[:, : self.shape[0]]
