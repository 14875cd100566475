"""One sample of a batch exchanged for another, whatever the batch is wrapped in."""

from __future__ import annotations

import torch
from torch import Tensor

from inrun.engine.quiet import Arguments
from inrun.layers.trees import flatten, unflatten


def exchange_sample(arguments: Arguments, n: int, sample: int) -> Arguments | None:
    """Return the arguments with one sample replaced by another; None if all samples are equal."""
    leaves, structure = flatten(arguments)
    mine = [isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == n for x in leaves]
    apart = [m and not _looks_like_a_mask(x, n) for x, m in zip(leaves, mine, strict=True)]
    mine = apart if any(apart) else mine
    for source in (s for s in range(n) if s != sample):
        if any(m and not torch.equal(x[sample], x[source]) for x, m in zip(leaves, mine, strict=True)):
            swapped = [_with_row(x, sample, x[source]) if m else x for x, m in zip(leaves, mine, strict=True)]
            return unflatten(swapped, structure)
    flipped = [_with_row(x, sample, x[sample].flip(0)) if m and x.dim() > 1 else x for x, m in zip(leaves, mine, strict=True)]
    changed = any(m and not torch.equal(x, y) for x, y, m in zip(leaves, flipped, mine, strict=True))
    return unflatten(flipped, structure) if changed else None


def _looks_like_a_mask(x: Tensor, n: int) -> bool:
    """Whether a tensor may be a mask [t, t] with t = n, which no sample owns: square, and of two values at the most."""
    return x.dim() == 2 and x.shape == (n, n) and (x.dtype == torch.bool or len(torch.unique(x)) <= 2)


def _with_row(x: Tensor, row: int, value: Tensor) -> Tensor:
    x = x.detach().clone()
    x[row] = value
    return x
