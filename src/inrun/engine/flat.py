"""All scored parameters as one vector, so that work across parameters takes one operation.

Directions, copies of the weights and validation gradients are rows ``[..., size]``. Parameters lie in the order of their
optimizers and groups, so the parameters of a group are one slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def local(x: Tensor) -> Tensor:
    """Return what is here of a tensor: its rows of this rank where ``fully_shard`` splits it."""
    if not hasattr(x, "to_local"):
        return x
    with torch.no_grad():
        found: Tensor = x.to_local()
        return found


class FlatLayout:
    """Where the entries of each tensor lie in the vector."""

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
        tensors = [local(t) for t in tensors]
        self.dtype = dtype
        self.device = tensors[0].device
        self.shapes = [t.shape for t in tensors]
        self.slices: list[slice] = []
        at = 0
        for t in tensors:
            self.slices.append(slice(at, at + t.numel()))
            at += t.numel()
        self.size = at
        self._zero = torch.zeros((), dtype=dtype, device=self.device)

    def buffer(self, *lead: int) -> Tensor:
        """Return a new buffer ``[*lead, size]``, not initialized."""
        return torch.empty(*lead, self.size, dtype=self.dtype, device=self.device)

    def fill(self, out: Tensor, tensors: Sequence[Tensor | None], first: int = 0) -> None:
        """Copy tensors into a vector ``[size]``, beginning with tensor ``first``; None stands for zeros."""
        parts = [
            self._zero.expand(self.shapes[i].numel()) if t is None else local(t.detach()).reshape(-1)
            for i, t in enumerate(tensors, first)
        ]
        if parts:
            start, stop = self.slices[first].start, self.slices[first + len(parts) - 1].stop
            torch.cat(parts, out=out[start:stop])

    def view(self, x: Tensor, place: int) -> Tensor:
        """Return one tensor's part of ``[..., size]``, ``[..., *shape]``."""
        return x[..., self.slices[place]].view((*x.shape[:-1], *self.shapes[place]))

    def views(self, x: Tensor, places: Iterable[int] | None = None) -> list[Tensor]:
        """Return the parts of some tensors, of all by default."""
        return [self.view(x, i) for i in (range(len(self.shapes)) if places is None else places)]

    def part(self, places: Sequence[int]) -> slice:
        """Return the slice of consecutive tensors."""
        return slice(self.slices[places[0]].start, self.slices[places[-1]].stop)
