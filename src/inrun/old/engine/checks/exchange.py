"""One sample of a batch exchanged for another, whatever the batch is wrapped in."""

from __future__ import annotations

import torch
from torch import Tensor

from inrun.old.engine.quiet import Arguments
from inrun.old.layers.trees import flatten, tensors_of, unflatten


def exchange_sample(arguments: Arguments, n: int, sample: int, blocks: bool = False, lengths: bool = True) -> Arguments | None:
    """Return the arguments with one sample replaced by the one that differs most from it; None if all samples are equal.

    Samples that differ in one position would move one entry, which may look like a row as well as like a column. With
    ``blocks``, tensors of k n rows have k rows of every sample. ``lengths=False`` leaves one integer per sample as it is.
    """
    leaves, structure = flatten(arguments)
    mine = _of_samples(leaves, n, blocks)
    if not lengths:
        mine = [m and not _is_length(x) for x, m in zip(leaves, mine, strict=True)]
    different = sum((_differences(x, n, sample) for x, m in zip(leaves, mine, strict=True) if m), torch.zeros(n))
    source = int(different.argmax())
    if different[source] == 0 and not lengths:
        return None
    if different[source] == 0:
        return shift_sample(arguments, n, sample, blocks, flip=True)
    swapped = [_with_rows(x, n, sample, _rows(x, n, source)) if m else x for x, m in zip(leaves, mine, strict=True)]
    return unflatten(swapped, structure)


def shift_sample(arguments: Arguments, n: int, sample: int, blocks: bool = False, flip: bool = False) -> Arguments | None:
    """Return the arguments with the entries of one sample moved by one place (or turned round); None if that changes nothing."""
    leaves, structure = flatten(arguments)

    def moved(x: Tensor) -> Tensor:
        rows = _rows(x, n, sample)
        return _with_rows(x, n, sample, rows.flip(1) if flip else rows.roll(1, 1))

    mine = [m and x.dim() > 1 for x, m in zip(leaves, _of_samples(leaves, n, blocks), strict=True)]
    other = [moved(x) if m else x for x, m in zip(leaves, mine, strict=True)]
    changed = any(m and not torch.equal(x, y) for x, y, m in zip(leaves, other, mine, strict=True))
    return unflatten(other, structure) if changed else None


def has_blocks(arguments: Arguments, n: int) -> bool:
    """Whether some tensor may have several rows of every sample."""
    return any(x.dim() > 0 and x.shape[0] > n and x.shape[0] % n == 0 for x in tensors_of(arguments))


def has_lengths(arguments: Arguments, n: int) -> bool:
    """Whether some tensor has one integer per sample, which may be its length."""
    return any(len(x) == n and _is_length(x) for x in tensors_of(arguments) if x.dim() > 0)


def _is_length(x: object) -> bool:
    return isinstance(x, Tensor) and x.dim() == 1 and x.dtype in (torch.int64, torch.int32)


def _of_samples(leaves: list[object], n: int, blocks: bool) -> list[bool]:
    """Tell which leaves are tensors with rows of samples."""
    mine = [isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == n for x in leaves]
    apart = [m and not _looks_like_a_mask(x, n) for x, m in zip(leaves, mine, strict=True)]  # type: ignore[arg-type]
    mine = apart if any(apart) else mine
    if not blocks:
        return mine
    more = [isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] > n and x.shape[0] % n == 0 for x in leaves]
    return [a or b for a, b in zip(mine, more, strict=True)]


def _looks_like_a_mask(x: Tensor, n: int) -> bool:
    """Whether a tensor may be a mask [t, t] with t = n, which no sample owns: square, and of two values at the most."""
    return x.dim() == 2 and x.shape == (n, n) and (x.dtype == torch.bool or len(torch.unique(x)) <= 2)


def _rows(x: Tensor, n: int, sample: int) -> Tensor:
    block = x.shape[0] // n
    return x.detach()[sample * block : (sample + 1) * block]


def _differences(x: Tensor, n: int, sample: int) -> Tensor:
    """Return how many entries of every sample differ from those of one, ``[n]`` on the host."""
    each = x.detach().reshape(n, -1)
    return (each != each[sample]).sum(1).cpu().float()


def _with_rows(x: Tensor, n: int, sample: int, value: Tensor) -> Tensor:
    x, value = x.detach().clone(), value.clone()
    block = x.shape[0] // n
    x[sample * block : (sample + 1) * block] = value
    return x
