"""Sketches of per-sample gradients: a few numbers from which inner products with later directions are estimated.

A tensor is seen as ``[rows, columns]``. Along a row, entries are multiplied by a random sign each and added up in segments of
ℓ; the segment sums, weighted, then fall into buckets, segment number modulo the number of buckets:

    z[r, j] = Σ_{c in segment j} sign[r, c] · g[r, c]        bucket (r·J + j) mod m  gets  weight[r·J + j] · z[r, j]

On the gradient's side the weight of a segment is ρ, on the direction's side 1/ρ. What a sample touches in few rows (tables; the
rare words of an output vocabulary) is kept row by row, without buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inrun.layers.layout import SCRATCH_BYTES, scratch_like


@dataclass(frozen=True)
class SketchPlan:
    """How one tensor is sketched. Plain numbers: fixed for a run."""

    rows: int
    columns: int
    #: Entries per segment; divides ``columns``.
    segment: int
    #: Numbers per sample; as many as there are segments (and segments of one entry) where the sketch is exact.
    buckets: int
    #: Rows of largest energy that are kept apart per sample; 0 for none.
    heavy: int = 0

    @property
    def per_row(self) -> int:
        """Return the number of segments in a row, J."""
        return self.columns // self.segment

    @property
    def segments(self) -> int:
        """Return the number of segments."""
        return self.rows * self.per_row

    @property
    def exact(self) -> bool:
        """Whether nothing is lost."""
        return self.segment == 1 and self.buckets >= self.segments


def segment_sums(x: Tensor, signs: Tensor, segment: int) -> Tensor:
    """Add up signed entries in segments: ``x`` ``[..., entries]`` and ``signs`` ``[entries]``, or of x's shape, to ``[..., J]``."""
    signed = torch.mul(x, signs, out=scratch_like(x)) if x.is_contiguous() and x.dtype == signs.dtype else x * signs
    if segment == 1:
        return signed.clone()
    shape = (*x.shape[:-1], x.shape[-1] // segment)
    return torch.mv(signed.view(-1, segment), signed.new_ones(segment)).view(shape)


def segment_sums_in_pieces(x: Tensor, signs: Tensor, segment: int) -> Tensor:
    """The same for tensors ``[k, entries]`` larger than the cache: some segments at a time."""
    piece = max(1, SCRATCH_BYTES // (4 * segment * x.element_size())) * segment
    parts = [
        torch.stack([segment_sums(row[at : at + piece], signs[at : at + piece], segment) for row in x])
        for at in range(0, x.shape[-1], piece)
    ]
    return torch.cat(parts, dim=1)


def fold(z: Tensor, weights: Tensor, buckets: int) -> Tensor:
    """Let weighted segment sums ``[..., segments]`` fall into buckets: ``[..., buckets]``."""
    weighted = z * weights
    count = weighted.shape[-1]
    if count <= buckets:
        return torch.nn.functional.pad(weighted, (0, buckets - count)) if count < buckets else weighted
    whole = count // buckets * buckets
    summed = weighted[..., :whole].unflatten(-1, (-1, buckets)).sum(-2)
    if whole < count:
        summed[..., : count - whole] += weighted[..., whole:]
    return summed


def heaviest_rows(z: Tensor, weights: Tensor, plan: SketchPlan) -> tuple[Tensor, Tensor]:
    """Take the rows of largest weighted energy out of segment sums ``z`` ``[n, segments]``, which lose them.

    Returns:
        Row numbers ``[n, heavy]`` and their weighted segment sums ``[n, heavy, J]``.
    """
    table = z.view(len(z), plan.rows, plan.per_row)
    weighed = table * weights.view(plan.rows, plan.per_row)
    rows = torch.topk(weighed.square().sum(-1), plan.heavy, dim=1).indices
    index = rows.unsqueeze(-1).expand(-1, -1, plan.per_row)
    values = weighed.gather(1, index)
    table.scatter_(1, index, 0.0)
    return rows, values


def as_bits(rows: Tensor) -> Tensor:
    """Return integers as the bits of floating-point numbers: only such leave a backward."""
    return rows.to(torch.int64, copy=True).contiguous().view(torch.float64)


def from_bits(bits: Tensor) -> Tensor:
    """Undo :func:`as_bits`."""
    return bits.view(torch.int64)
