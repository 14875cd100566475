"""Weight gradients and contractions from the same products: running sums that stay in the cache (docs/bench.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from inrun.old.layers.layout import CACHE_BYTES, SCRATCH_BYTES, dot_each, scratch_like
from inrun.old.layers.sketch import segment_sums


def added_up(g: Tensor) -> Tensor:
    """Return Σ_n g_n of ``[n, ...]``: a product with ones reads at the speed of memory, which a sum over n does not."""
    return torch.mm(g.new_ones(1, len(g)), g.reshape(len(g), -1)).view(g.shape[1:])


def contract_formed(g: Tensor, v: Tensor, by_rows: bool) -> Tensor:
    """Contract formed gradients ``[m, p, q]`` with directions ``[k, p, q]``: ``[m, k]``, or ``[m, k, p]`` by rows."""
    if by_rows and v.shape[0] == 1 and g.nbytes <= CACHE_BYTES:
        return torch.linalg.vecdot(g, v[0]).unsqueeze(1)
    if by_rows:
        # In pieces whose products stay in the cache: twice as fast as a batched product, where whole ones would be slower.
        rows = max(1, SCRATCH_BYTES // max(g[0, :1].nbytes, 1))
        pieces = [list(zip(x.split(rows), d.split(rows), strict=True)) for x in g for d in v]
        return torch.stack([torch.cat([torch.linalg.vecdot(a, b) for a, b in x]) for x in pieces]).view(len(g), len(v), -1)
    return dot_each(g, v)


class Rows(Protocol):
    """A tensor ``[n, t, q]``, or what makes one some samples at a time."""

    @property
    def shape(self) -> Sequence[int]:
        """Return ``[n, t, q]``."""
        ...

    def __getitem__(self, some: slice) -> Tensor:
        """Return some samples."""
        ...


def shared_outer(
    x: Tensor,
    y: Rows,
    v: Tensor,
    by_rows: bool = False,
    signs: Tensor | None = None,
    segment: int = 1,
    most: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Make the weight gradient G = Σ_n g_n and the contractions ⟨g_n, v⟩ from the same products.

    The batched GEMM accumulates into as many running sums as fit the cache, S ← S + g_n, one sample each at a time, and
    ⟨g_n, v⟩ = ⟨S after, v⟩ − ⟨S before, v⟩; the running sums add up to G. So no g_n is ever added by a pass of its own,
    the sums stay in the cache, and the rounding is that of a sum over part of the batch, below that of G itself.
    A weight too large for several running sums has one, which is G.

    Args:
        x: ``[n, t, p]``.
        y: ``[n, t, q]``.
        v: Directions, ``[k, p, q]``.
        by_rows: Leave the rows of the weight apart.
        signs: Of a sketch, ``[p·q]``.
        segment: Entries per segment of the sketch.
        most: Samples at a time, at the most.

    Returns:
        G ``[p, q]``; the inner products ``[n, k]``, or ``[n, k, p]`` row by row; signed segment sums ``[n, p·q/segment]``.
    """
    n, k, p, q = x.shape[0], v.shape[0], x.shape[2], y.shape[2]
    if signs is None and 0 < n * p * q * x.itemsize <= CACHE_BYTES and (most is None or most >= n):
        # All at once: with small weights calls take longer than the arithmetic.
        each = torch.bmm(x.transpose(1, 2), y[:], out=scratch_like(x, (n, p, q)))
        return added_up(each), contract_formed(each, v, by_rows), None
    if n == 0:
        none = None if signs is None else x.new_zeros(0, p * q // segment)
        return x.new_zeros(p, q), x.new_zeros((0, k, p) if by_rows else (0, k)), none
    chains = _chains(n if most is None else min(n, most), n, p * q * x.itemsize)
    if chains == 1:
        return _one_running_sum(x, y, v, by_rows, signs, segment)
    # A sketch needs scratch memory of its own while the sums run.
    running = scratch_like(x, (chains, p, q), "" if signs is None else "running")
    sums: list[Tensor] = []
    segments: list[Tensor] = []
    for first in range(0, n, chains):
        group = slice(first, min(first + chains, n))
        part, left, right = running[: group.stop - first], x[group].transpose(1, 2), y[group]
        if first == 0:
            torch.bmm(left, right, out=part)
        else:
            torch.baddbmm(part, left, right, out=part)
        sums.append(contract_formed(part, v, by_rows))
        if signs is not None:
            segments.append(segment_sums(part.view(len(part), -1), signs, segment))
    return added_up(running), _differences(_joined(sums), chains), _differences(_joined(segments), chains) if segments else None


def _one_running_sum(
    x: Tensor, y: Rows, v: Tensor, by_rows: bool, signs: Tensor | None, segment: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As :func:`shared_outer` with one running sum, which is G in the end; a product per sample is faster than a batch of one."""
    n, k, total = x.shape[0], v.shape[0], x.new_empty(x.shape[2], y.shape[2])
    flat, directions, apart = total.view(-1), v.reshape(k, -1).unbind(0), by_rows or v.dtype != x.dtype
    rights: Iterable[Tensor] = y.unbind(0) if isinstance(y, Tensor) else (y[i : i + 1][0] for i in range(n))
    dots: list[Tensor] = []
    rows: list[Tensor] = []
    segments: list[Tensor] = []
    for left, right in zip(x.transpose(1, 2).unbind(0), rights, strict=True):
        if dots or rows:
            total.addmm_(left, right)
        else:
            torch.mm(left, right, out=total)
        if apart:
            rows.append(contract_formed(total.unsqueeze(0), v, by_rows))
        else:
            dots += [torch.dot(flat, d) for d in directions]
        if signs is not None:
            segments.append(segment_sums(flat.unsqueeze(0), signs, segment))
    sums = _joined(rows) if apart else torch.stack(dots).view(n, k)
    return total, _differences(sums, 1), _differences(_joined(segments), 1) if segments else None


def _chains(most: int, n: int, nbytes: int) -> int:
    """Return how many running sums of ``nbytes`` to keep: as many as stay in the cache, in groups of like size, or one.

    By themselves, with cold caches (docs/bench.md), products of weights of which fewer than six fit take less time with one running
    sum, a product per sample, than with several by batched products.
    """
    fit = min(most, CACHE_BYTES // max(nbytes, 1))
    return 1 if fit < 6 and fit < n else -(-n // -(-n // fit))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _differences(after: Tensor, chains: int) -> Tensor:
    """Return what every sample added to its running sum."""
    return after if len(after) <= chains else torch.cat([after[:chains], after[chains:] - after[:-chains]])
