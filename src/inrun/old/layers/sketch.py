"""Sketches of per-sample gradients: a few numbers from which inner products with later directions are estimated.

A tensor is seen as ``[rows, columns]``. Along a row, entries are multiplied by a random sign each and added up in segments of
ℓ; the segment sums, weighted, then fall into buckets, segment number modulo the number of buckets:

    z[r, j] = Σ_{c in segment j} sign[r, c] · g[r, c]        bucket (r·J + j) mod m  gets  weight[r·J + j] · z[r, j]

On the gradient's side the weight of a segment is ρ, on the direction's side 1/ρ. What a sample touches in few rows (tables; the
rare words of an output vocabulary) is kept row by row, without buckets, in finer segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inrun.old.layers.layout import scratch_like

#: Entries that are signed and added up at a time: with their signs they stay in the caches, and there are few calls.
PIECE = 1 << 19


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
    #: Entries per segment where a row is kept apart; divides ``segment``. 0 for the same.
    fine: int = 0

    @property
    def per_row(self) -> int:
        """Return the number of segments in a row."""
        return self.columns // self.segment

    @property
    def row_segment(self) -> int:
        """Return the entries per segment of a row that is kept apart."""
        return self.fine or self.segment

    @property
    def per_row_apart(self) -> int:
        """Return the number of segments of a row that is kept apart, J."""
        return self.columns // self.row_segment

    def coarse(self, sums: Tensor) -> Tensor:
        """Add up the fine segments of all rows ``[..., rows·J]`` to those that fall into buckets, ``[..., segments]``."""
        group = self.segment // self.row_segment
        if group == 1:
            return sums
        return torch.mv(sums.reshape(-1, group), sums.new_ones(group)).view(*sums.shape[:-1], -1)

    def weights_apart(self, weights: Tensor) -> Tensor:
        """Give every fine segment the weight of the one it is in: ``[segments]`` to ``[rows, J]``."""
        group = self.segment // self.row_segment
        return (weights if group == 1 else weights.repeat_interleave(group)).view(self.rows, self.per_row_apart)

    @property
    def segments(self) -> int:
        """Return the number of segments."""
        return self.rows * self.per_row

    @property
    def exact(self) -> bool:
        """Whether nothing is lost."""
        return self.segment == 1 and self.buckets >= self.segments


def segment_sums(x: Tensor, signs: Tensor, segment: int, most: Tensor | None = None) -> Tensor:
    """Add up signed entries in segments: ``x`` ``[..., entries]`` and ``signs`` ``[entries]``, or of x's shape, to ``[..., J]``.

    With ``most`` ``[..., 1]``, entries that are larger count as that much.
    """
    if signs.dim() == 1 and x.numel() > PIECE and x.device.type == "cpu" and x.dtype == signs.dtype:
        bound = None if most is None else most.reshape(-1, 1)
        return _segment_sums_in_pieces(x.reshape(-1, x.shape[-1]), signs, segment, bound).view(*x.shape[:-1], -1)
    signed = torch.mul(x, signs, out=scratch_like(x)) if x.is_contiguous() and x.dtype == signs.dtype else x * signs
    if most is not None:
        signed.clamp_(-most, most)
    if segment == 1:
        return signed.clone()
    shape = (*x.shape[:-1], x.shape[-1] // segment)
    return torch.mv(signed.view(-1, segment), signed.new_ones(segment)).view(shape)


def _segment_sums_in_pieces(x: Tensor, signs: Tensor, segment: int, most: Tensor | None) -> Tensor:
    """The same for ``[m, entries]`` larger than the caches: some rows at a time, or parts of one, whose signed copies stay."""
    ones, found = x.new_ones(segment), x.new_empty(x.numel() // segment)
    if signs.numel() <= PIECE:
        some = PIECE // signs.numel()
        pieces = [(part, signs) for part in x.split(some)]
        bounds = [None] * len(pieces) if most is None else list(most.split(some))
    else:
        some = max(1, PIECE // segment) * segment
        pieces = [(part, sign) for row in x.unbind(0) for part, sign in zip(row.split(some), signs.split(some), strict=True)]
        per_row = len(pieces) // len(x)
        bounds = [None] * len(pieces) if most is None else [bound for bound in most.unbind(0) for _ in range(per_row)]
    signed, at = scratch_like(x, (max(part.numel() for part, _ in pieces),)), 0
    for (part, sign), bound in zip(pieces, bounds, strict=True):
        count = part.numel()
        made = torch.mul(part, sign, out=signed[:count].view(part.shape))
        if bound is not None:
            made.clamp_(-bound, bound)
        torch.mv(signed[:count].view(-1, segment), ones, out=found[at : at + count // segment])
        at += count // segment
    return found.view(len(x), -1)


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


def heaviest_rows(z: Tensor, weights: Tensor, plan: SketchPlan) -> Tensor:
    """Take the rows of largest weighted energy out of segment sums ``z`` ``[n, segments]``, which lose them.

    Returns:
        Row numbers ``[n, heavy]``.
    """
    table = z.view(len(z), plan.rows, plan.per_row)
    weighed = table * weights.view(plan.rows, plan.per_row)
    rows = torch.topk(weighed.square_().sum(-1), plan.heavy, dim=1).indices
    table.scatter_(1, rows.unsqueeze(-1).expand(-1, -1, plan.per_row), 0.0)
    return rows


def rows_apart(g: Tensor, rows: Tensor, signs: Tensor, weights: Tensor, plan: SketchPlan) -> Tensor:
    """Return the weighted fine segment sums of some rows of gradients: ``g`` ``[n, r, columns]``, ``rows`` ``[n, r]``."""
    z = segment_sums(g.to(signs.dtype).contiguous(), signs.view(plan.rows, plan.columns)[rows], plan.row_segment)
    return z * plan.weights_apart(weights)[rows]


def as_bits(rows: Tensor) -> Tensor:
    """Return integers as the bits of floating-point numbers: only such leave a backward."""
    return rows.to(torch.int64, copy=True).contiguous().view(torch.float64)


def from_bits(bits: Tensor) -> Tensor:
    """Undo :func:`as_bits`."""
    return bits.view(torch.int64)
