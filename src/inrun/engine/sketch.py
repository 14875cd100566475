"""Sketches of per-sample gradients: a few numbers from which inner products with later directions are estimated.

Of a small tensor every entry is kept. Of a large one, entries get a random sign each and are added up in *segments* of
neighbours; the segment sums, weighted by ρ, fall into *buckets*, segment number modulo the number of buckets:

    z_j = Σ_{i in segment j} sign_i g_i          bucket (j mod m) gets ρ_j z_j

A direction is sketched alike with 1/ρ. The noise is least at ρ² = |D| / |g|; taken is |A∘q| / |q|, how far a segment moved for how
much push. A sample touches few rows of a table, so those rows are kept apart, with finer segments; and so are the rows
of an output vocabulary that hold most of a sample's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inrun.engine.flat import FlatLayout
from inrun.layers.tap import Leaf

#: Entries per segment at most; numbers per row that is kept apart, and for sketches below ``SMALL`` numbers.
SEGMENT, PER_ROW, PER_ROW_SMALL, SMALL = 32, 64, 32, 16_384
#: Rows of an output vocabulary that are kept apart per sample.
HEAVY = 32
#: Numbers that a tensor gets at least, and the share of all that may go to tensors of which every entry is kept.
LEAST, ENTRIES = 32, 0.25
#: Entries of a direction count as at most so many times their tensor's mean size.
MOST = 30.0
#: The base signs are this much longer than the model, so that every epoch reads them from another place.
SHIFTS, SHIFT = 257, 4_099


def default_size(entries: int) -> int:
    """Return the numbers per sample for a model with so many scored entries."""
    return int(min(max(SMALL, 2 ** math.ceil(math.log2(12 * max(entries, 1) ** 0.5))), 262_144))


def divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is not larger than ``most``."""
    return next(d for d in range(max(1, min(most, number)), 0, -1) if number % d == 0)


@dataclass(frozen=True)
class Plan:
    """How one tensor is sketched, seen as ``[rows, columns]``."""

    rows: int
    columns: int
    #: Entries per segment, and buckets; a segment of 1 with as many buckets as entries keeps every entry.
    segment: int
    buckets: int
    #: Entries per segment where a row is kept apart; 0 where none is.
    fine: int = 0
    #: Rows kept apart per sample because they hold most of its gradient.
    heavy: int = 0

    @property
    def numel(self) -> int:
        """Return the number of entries."""
        return self.rows * self.columns

    @property
    def lossless(self) -> bool:
        """Whether every entry is kept."""
        return self.segment == 1 and self.buckets == self.numel

    @property
    def segments(self) -> int:
        """Return the number of segments."""
        return self.numel // self.segment

    @property
    def per_row(self) -> int:
        """Return the numbers of a row that is kept apart."""
        return self.columns // self.fine if self.fine else 0


def make_plans(leaves: Sequence[Leaf], size: int | None, tables: set[int], outputs: set[int]) -> list[Plan]:
    """Share ``size`` numbers among the tensors: as many as entries for the smallest, in proportion to √entries for the others.

    Args:
        leaves: The scored parameters.
        size: Numbers per sample; None keeps every entry.
        tables: Places of parameters that are looked up.
        outputs: Places of output vocabularies, which get four times the share.
    """
    shapes = [
        (p.shape[0], p.numel() // max(p.shape[0], 1)) if p.dim() > 1 else (1, p.numel())
        for p in (leaf.parameter for leaf in leaves)
    ]
    if size is None:
        return [Plan(rows, columns, 1, rows * columns) for rows, columns in shapes]
    left, small = size, set[int]()
    for i in sorted(range(len(shapes)), key=lambda i: math.prod(shapes[i])):
        if i in outputs or size - left + math.prod(shapes[i]) > ENTRIES * size:
            continue
        left -= math.prod(shapes[i])
        small.add(i)
    parts = {i: math.sqrt(math.prod(s)) * (4.0 if i in outputs else 1.0) for i, s in enumerate(shapes) if i not in small}
    parts = {i: x for i, x in parts.items() if not (i in tables and i not in outputs)}
    whole, per_row = sum(parts.values()) or 1.0, PER_ROW if size >= SMALL else PER_ROW_SMALL
    found = []
    for i, (rows, columns) in enumerate(shapes):
        numel = rows * columns
        share = max(LEAST, int(left * parts[i] / whole)) if i in parts else 8 * LEAST
        if i in small or numel <= share:
            found.append(Plan(rows, columns, 1, numel))
            continue
        apart = i in tables or (i in outputs and rows > 4 * HEAVY)
        fine = divisor(columns, max(1, columns // per_row)) if apart else 0
        segment = fine * divisor(columns // fine, max(1, SEGMENT // fine)) if fine else divisor(columns, SEGMENT)
        segment = segment if segment > 1 or fine else divisor(numel, SEGMENT)
        buckets = divisor_near(numel // segment, share)
        found.append(Plan(rows, columns, segment, buckets, fine, HEAVY if i in outputs and rows > 4 * HEAVY else 0))
    return found


def divisor_near(number: int, share: int) -> int:
    """Return a divisor near ``share``, or ``share`` itself where there is none: then the last round of buckets is not full."""
    below = divisor(number, share)
    return below if 2 * below > share else min(share, number)


@dataclass
class Epoch:
    """A time in which gradients are sketched in one way, and what was paid to its uses."""

    number: int
    #: Signs by tensor ``[segments, segment]`` and weights ρ by segment; None for tensors of which every entry is kept.
    signs: list[Tensor | None]
    weights: list[Tensor | None]
    #: The running sum of sketched directions ``[k, columns]``, and of the rows of tables.
    paid: Tensor = field(default_factory=lambda: torch.zeros(0))
    tables: dict[int, Tensor] = field(default_factory=dict)
    #: What the optimizer remembers of the samples, sketched, ``[columns]``.
    remembered: Tensor | None = None


@dataclass
class SketchedDirection:
    """A direction in the columns of an epoch: ``flat`` ``[k, columns]``, and by table ``[k, rows, per_row]``."""

    flat: Tensor
    tables: dict[int, Tensor]


class Sketcher:
    """Signs, weights and columns of a run."""

    def __init__(self, leaves: Sequence[Leaf], plans: list[Plan], dtype: torch.dtype, seed: int = 0) -> None:
        self.leaves, self.plans, self.dtype = list(leaves), plans, dtype
        self.flat = FlatLayout([leaf.parameter for leaf in leaves], dtype)
        self.device = self.flat.device
        #: Columns of lossy tensors come first.
        self.order = [i for i, p in enumerate(plans) if not p.lossless] + [i for i, p in enumerate(plans) if p.lossless]
        self.columns: dict[int, slice] = {}
        at = 0
        for i in self.order:
            self.columns[i] = slice(at, at + plans[i].buckets)
            at += plans[i].buckets
        self.size = at
        self.lossy = [i for i in self.order if not plans[i].lossless]
        self.kept = [i for i in self.order if plans[i].lossless]
        self.cut = sum(plans[i].buckets for i in self.lossy)
        owner = [torch.full((plans[i].buckets,), j) for j, i in enumerate(self.order)]
        #: The place in ``order`` of the tensor that a column belongs to.
        self.owner = (torch.cat(owner) if owner else torch.zeros(0, dtype=torch.long)).to(self.device)
        self._offsets, total = {}, 0
        for i in self.lossy:
            self._offsets[i], total = total, total + plans[i].numel
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, 2, (total + SHIFTS * SHIFT if total else 0,), generator=generator, dtype=torch.int8)
        self._base = drawn.to(self.dtype).mul_(2).sub_(1).to(self.device)
        self.buckets = self._bucket_index()

    def _bucket_index(self) -> Tensor:
        """Return the column of every segment of the lossy tensors, one after the other."""
        parts = [torch.arange(self.plans[i].segments) % self.plans[i].buckets + self.columns[i].start for i in self.lossy]
        return (torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)).to(self.device)

    def epoch(self, number: int, moves: dict[int, tuple[Tensor, Tensor]]) -> Epoch:
        """Return new signs, and weights by how segments moved: ``moves`` has A and q by tensor."""
        shift = (number % SHIFTS) * SHIFT
        signs: list[Tensor | None] = [None] * len(self.plans)
        weights: list[Tensor | None] = [None] * len(self.plans)
        for i in self.lossy:
            plan, start = self.plans[i], self._offsets[i] + shift
            signs[i] = self._base[start : start + plan.numel].view(plan.segments, plan.segment)
            weights[i] = (
                self._weights(i, *moves[i]) if i in moves else torch.ones(plan.segments, dtype=self.dtype, device=self.device)
            )
        return Epoch(number, signs, weights)

    def _weights(self, i: int, factor: Tensor | float, q: Tensor) -> Tensor:
        plan = self.plans[i]
        if not isinstance(factor, Tensor):
            return torch.ones(plan.segments, dtype=self.dtype, device=self.device)
        pushed = q.reshape(plan.segments, plan.segment).to(self.dtype)
        moved = (pushed * factor.reshape_as(pushed).to(self.dtype)).square_().mean(1)
        push = pushed.square().mean(1)
        known = (moved > 0) & (push > 0)
        tiny = torch.finfo(self.dtype).tiny
        typical = (moved * known).sum() / (push * known).sum().clamp_min(tiny)
        # The fourth root: these are squares of norms. Segments that no gradient ever reached are like the others.
        ratio = torch.where(known, moved / push.clamp_min(tiny) / typical.clamp_min(tiny), 1.0)
        return ratio.clamp_(1e-8, 1e8).pow_(0.25)

    # Gradients

    def of_gradients(self, i: int, g: Tensor, epoch: Epoch) -> Tensor:
        """Sketch per-sample gradients of one tensor: ``[m, *shape]`` to ``[m, buckets]``."""
        plan = self.plans[i]
        if plan.lossless:
            return g.reshape(len(g), -1).to(self.dtype)
        return self.fold(i, self.segment_sums(i, g, epoch), epoch)

    def segment_sums(self, i: int, g: Tensor, epoch: Epoch) -> Tensor:
        """Return the signed sums of segments, ``[m, segments]``."""
        plan, signs = self.plans[i], epoch.signs[i]
        assert signs is not None
        return torch.linalg.vecdot(g.reshape(len(g), plan.segments, plan.segment).to(self.dtype), signs)

    def fold(self, i: int, z: Tensor, epoch: Epoch) -> Tensor:
        """Let weighted segment sums fall into buckets."""
        plan, weights = self.plans[i], epoch.weights[i]
        assert weights is not None
        z = z * weights
        if plan.segments % plan.buckets:
            z = torch.nn.functional.pad(z, (0, -plan.segments % plan.buckets))
        return z.view(len(z), -1, plan.buckets).sum(1)

    def of_rows(self, i: int, b: Tensor, tokens: Tensor, epoch: Epoch) -> Tensor:
        """Sketch rows of a table apart: ``b`` ``[n, t, d]`` at ``tokens`` ``[n, t]`` to ``[n, t, per_row]``."""
        plan, signs = self.plans[i], epoch.signs[i]
        assert signs is not None
        of_rows = signs.view(plan.rows, plan.per_row, plan.fine)[tokens]
        values = torch.linalg.vecdot(b.reshape(*tokens.shape, plan.per_row, plan.fine).to(self.dtype), of_rows)
        return values * self.fine_weights(i, epoch)[tokens]

    def fine_weights(self, i: int, epoch: Epoch) -> Tensor:
        """Return ρ for rows that are kept apart, ``[rows, per_row]``."""
        plan, weights = self.plans[i], epoch.weights[i]
        assert weights is not None
        return weights.view(plan.rows, -1).repeat_interleave(plan.segment // plan.fine, 1)

    def heavy_rows(self, i: int, g: Tensor, epoch: Epoch) -> tuple[Tensor, Tensor, Tensor]:
        """Take the heaviest rows out of gradients ``[m, rows, columns]``.

        Returns:
            The buckets of the rest ``[m, buckets]``, the rows' numbers ``[m, heavy]`` and their values ``[m, heavy, per_row]``.
        """
        plan = self.plans[i]
        z = self.segment_sums(i, g, epoch)
        weights = epoch.weights[i]
        assert weights is not None
        table = (z * weights).view(len(g), plan.rows, -1)
        numbers = torch.topk(table.square().sum(-1), plan.heavy, dim=1).indices
        taken = g.reshape(len(g), plan.rows, plan.columns).gather(1, numbers.unsqueeze(-1).expand(-1, -1, plan.columns))
        values = self.of_rows(i, taken, numbers, epoch)
        z.view(len(g), plan.rows, -1).scatter_(1, numbers.unsqueeze(-1).expand(-1, -1, table.shape[2]), 0.0)
        return self.fold(i, z, epoch), numbers, values

    # Directions

    def of_directions(
        self, d: Sequence[Tensor | None], k: int, epoch: Epoch, tables: Sequence[int], cut: bool = True
    ) -> SketchedDirection:
        """Sketch directions ``[k, *shape]`` by tensor; missing ones are 0.

        Entries beyond :data:`MOST` times the mean are cut off where no rows are kept apart: an entry that is huge because its
        factor A is large pays no more than others, |A g| |∇|, and would hide its bucket.
        """
        parts, kept = [], []
        made: dict[int, Tensor] = {}
        for i in self.lossy:
            plan, x, signs = self.plans[i], d[i], epoch.signs[i]
            assert signs is not None
            if x is None:
                parts.append(torch.zeros(k, plan.segments, dtype=self.dtype, device=self.device))
                continue
            x = x.reshape(k, plan.segments, plan.segment).to(self.dtype)
            if cut and not plan.fine:
                most = torch.linalg.vector_norm(x, 1, dim=(1, 2), keepdim=True) * (MOST / plan.numel)
                x = x.clamp(-most, most)
            parts.append(torch.linalg.vecdot(x, signs))
            if plan.fine and i in tables:
                fine = x.view(k, plan.rows, plan.per_row, plan.fine) * signs.view(plan.rows, plan.per_row, plan.fine)
                made[i] = fine.sum(-1) / self.fine_weights(i, epoch)
        for i in self.kept:
            x = d[i]
            size = self.plans[i].numel
            kept.append(
                torch.zeros(k, size, dtype=self.dtype, device=self.device) if x is None else x.reshape(k, size).to(self.dtype)
            )
        flat = torch.zeros(k, self.size, dtype=self.dtype, device=self.device)
        if parts:
            weights = torch.cat([w for i in self.lossy if (w := epoch.weights[i]) is not None])
            flat.index_add_(1, self.buckets, torch.cat(parts, 1) / weights)
        if kept:
            flat[:, self.cut :] = torch.cat(kept, 1)
        return SketchedDirection(flat, made)

    def of_flat(self, d: Tensor, epoch: Epoch, tables: Sequence[int]) -> SketchedDirection:
        """Sketch directions ``[k, size]``, which hold all tensors one after the other."""
        return self.of_directions(list(self.flat.views(d)), len(d), epoch, tables)

    def kept_columns(self, place: int) -> slice:
        """Return the columns of a tensor of which every entry is kept, counted among those columns."""
        return slice(self.columns[place].start - self.cut, self.columns[place].stop - self.cut)

    def columns_of(self, numbers: Any) -> Tensor | float:
        """Return numbers by tensor as one number if they are all alike (zeros aside), else by column."""
        some = {float(x) for x in numbers if x != 0.0}
        if len(some) <= 1:
            return some.pop() if some else 0.0
        by_order = torch.tensor([float(numbers[i]) for i in self.order], dtype=self.dtype)
        return by_order.to(self.device, non_blocking=True)[self.owner]

    def by_tensor(self, x: Tensor) -> Tensor:
        """Add up columns by tensor: ``[..., columns]`` to ``[..., tensors]``, in the order of :attr:`order`."""
        found = torch.zeros(*x.shape[:-1], len(self.order), dtype=x.dtype, device=x.device)
        return found.index_add_(-1, self.owner, x)

    def by_tensor_of_lossy(self, x: Tensor) -> Tensor:
        """Add up the columns of lossy tensors by tensor: ``[n, cut]`` to ``[n, tensors]``, in the order of :attr:`lossy`."""
        found = torch.zeros(len(x), len(self.lossy), dtype=x.dtype, device=x.device)
        return found.index_add_(1, self.owner[: self.cut], x)

    def nbytes(self) -> int:
        """Return the memory of signs and index."""
        return int(self._base.nbytes + self.buckets.nbytes + self.owner.nbytes)

    def state(self) -> dict[str, Any]:
        """Return plain data by which a resumed run sees whether it sketches alike."""
        return {"plans": [[p.rows, p.columns, p.segment, p.buckets, p.fine, p.heavy] for p in self.plans]}
