"""Where the samples lie in a tensor, and the normal form ``[n, t, features]`` that rules work in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inrun.errors import RowOwnershipError


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors of nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


@dataclass(frozen=True)
class Layout:
    """Where the samples lie.

    ==========  ==========================================================================
    kind        the leading dimensions
    ==========  ==========================================================================
    ``first``   n, or n·r with the rows of a sample next to each other
    ``second``  t and n
    ``inside``  t·n, samples inside
    ``index``   any: ``index`` ``[n, m]`` says which rows are a sample's, −1 for none
    ``all``     one sample, to which everything belongs
    ``unread``  not known
    ==========  ==========================================================================

    ``lead`` is the number of leading dimensions that ``index`` counts through.
    """

    kind: str
    n: int
    index: Tensor | None = None
    lead: int = 1

    def split(self, x: Tensor, features: int) -> Tensor:
        """Return ``x`` in normal form, ``[n, t, *features]``, with 0 where ``index`` has no row.

        Args:
            x: A tensor whose last ``features`` dimensions are features.
            features: How many there are.
        """
        tail = x.shape[x.dim() - features :]
        if self.kind in ("first", "all"):
            return x.reshape(self.n, -1, *tail)
        if self.kind in ("second", "inside"):
            rows = x if self.kind == "second" else x.unflatten(0, (-1, self.n))
            return rows.transpose(0, 1).reshape(self.n, -1, *tail)
        assert self.index is not None
        if self.lead > x.dim() - features:
            raise RowOwnershipError(
                f"samples lie along the features of a tensor of {tuple(x.shape)}. Give samples in the first dimension, or leave "
                "the parameters of its function out with parameters=."
            )
        rows = x.reshape(-1, *x.shape[self.lead :])
        index = self.index.to(x.device)
        found = rows.index_select(0, index.clamp_min(0).reshape(-1))
        blank = (index < 0).reshape(-1, *([1] * (found.dim() - 1)))
        found = found.masked_fill(blank, 0.0) if found.is_floating_point() else found
        return found.reshape(self.n, -1, *tail)

    def owners(self, shape: torch.Size) -> Tensor:
        """Return the sample of every entry of a tensor of ``shape``, −1 for none; broadcasts to it."""
        if self.kind == "all":
            return torch.zeros([1] * len(shape), dtype=torch.long)
        if self.kind == "first":
            who = torch.arange(shape[0]) // (shape[0] // self.n)
            return who.view(-1, *[1] * (len(shape) - 1))
        if self.kind == "second":
            return torch.arange(self.n).view(1, -1, *[1] * (len(shape) - 2))
        if self.kind == "inside":
            return (torch.arange(shape[0]) % self.n).view(-1, *[1] * (len(shape) - 1))
        assert self.index is not None
        lead = shape[: self.lead]
        who = torch.full((lead.numel(),), -1)
        samples = torch.arange(self.n).unsqueeze(1).expand_as(self.index)
        inside = self.index >= 0
        who[self.index[inside]] = samples[inside]
        return who.view(*lead, *[1] * (len(shape) - self.lead))


#: Of a tap that nothing reached when its rows were read.
UNREAD = Layout("unread", 0)


def index_of(who: Tensor, n: int) -> Tensor:
    """Return the rows of every sample, ``[n, m]`` with −1 for none, given the sample of every row ``[rows]``, −1 for none."""
    order = torch.argsort(who, stable=True)
    order = order[who[order] >= 0]
    counts = torch.bincount(who[order], minlength=n)
    m = max(1, int(counts.max())) if len(order) else 1
    index = torch.full((n, m), -1)
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(order)) - starts[who[order]]
    index[who[order], place] = order
    return index
