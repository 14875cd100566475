"""Sketches of per-sample gradients: a few numbers from which inner products with later directions are estimated.

Of a small tensor every entry is kept. Of a large one, entries get a random sign each and are added up in *segments* of
neighbours; the segment sums, weighted by ρ, fall into *buckets*, segment number modulo the number of buckets:

    z_j = Σ_{i in segment j} sign_i g_i          bucket (j mod m) gets ρ_j z_j

A direction is sketched alike with 1/ρ. The noise is least at ρ² = |D| / |g|; taken is |A∘q| / |q|, how far a segment moved for how
much push. A sample touches few rows of a table, so those rows are kept apart, with finer segments; and so are the rows
of an output vocabulary that hold most of a sample's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inrun.engine.flat import FlatLayout
from inrun.engine.plans import Plan
from inrun.engine.shards import Shards
from inrun.engine.signs import Signs, signed_sums
from inrun.layers.tap import Leaf

#: Entries of a direction count as at most so many times their tensor's mean size.
MOST = 30.0


@dataclass
class Epoch:
    """A time in which gradients are sketched in one way, and what was paid to its uses."""

    number: int
    #: Signs by tensor ``[segments, segment]``, or as many segments as it takes for them to repeat, and weights ±ρ by segment;
    #: None for tensors of which every entry is kept.
    signs: list[Tensor | None]
    weights: list[Tensor | None]
    #: The running sum of sketched directions ``[k, columns]``, and of the rows of tables.
    paid: Tensor = field(default_factory=lambda: torch.zeros(0))
    tables: dict[int, Tensor] = field(default_factory=dict)

    def joined_weights(self, some: Sequence[int]) -> Tensor:
        """Return the weights of some tensors, one after the other."""
        return torch.cat([w for i in some if (w := self.weights[i]) is not None])


@dataclass
class SketchedDirection:
    """A direction in the columns of an epoch: ``flat`` ``[k, columns]``, and by table ``[k, rows, per_row]``."""

    flat: Tensor
    tables: dict[int, Tensor]


class Sketcher:
    """Signs, weights and columns of a run."""

    def __init__(self, leaves: Sequence[Leaf], plans: list[Plan], dtype: torch.dtype, seed: int = 0) -> None:
        self.plans = plans
        self.flat = FlatLayout([leaf.parameter for leaf in leaves], dtype)
        #: How parameters are split over processes, if they are.
        self.shards: Shards | None = None
        #: Columns of lossy tensors come first, those with equal segments together.
        self.lossy = sorted((i for i, p in enumerate(plans) if not p.lossless), key=lambda i: plans[i].segment)
        self.kept = [i for i, p in enumerate(plans) if p.lossless]
        self.columns: dict[int, slice] = {}
        at = 0
        for i in self.order:
            self.columns[i] = slice(at, at + plans[i].buckets)
            at += plans[i].buckets
        owner = [torch.full((plans[i].buckets,), j) for j, i in enumerate(self.order)]
        #: The place in ``order`` of the tensor that a column belongs to.
        self.owner = (torch.cat(owner) if owner else torch.zeros(0, dtype=torch.long)).to(self.device)
        self._signs = Signs([plans[i] for i in self.lossy], dtype, self.device, seed)
        self.buckets = self._bucket_index()
        segments = torch.tensor([plans[i].segments for i in self.lossy], dtype=torch.long)
        #: The place in ``lossy`` of the tensor that a segment belongs to.
        self._owner_of_segments = torch.repeat_interleave(torch.arange(len(segments), dtype=torch.int32), segments).to(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Return the precision of sketches."""
        return self.flat.dtype

    @property
    def device(self) -> torch.device:
        """Return where sketches are."""
        return self.flat.device

    @property
    def order(self) -> list[int]:
        """Return the tensors in the order of their columns."""
        return self.lossy + self.kept

    @property
    def size(self) -> int:
        """Return the number of columns."""
        return len(self.owner)

    @property
    def cut(self) -> int:
        """Return the number of columns of lossy tensors, which come first."""
        return self.columns[self.kept[0]].start if self.kept else self.size

    def _bucket_index(self) -> Tensor:
        """Return the column of every segment of the lossy tensors, one after the other."""
        parts = [
            torch.arange(self.plans[i].segments, dtype=torch.int32) % self.plans[i].buckets + self.columns[i].start
            for i in self.lossy
        ]
        return (torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int32)).to(self.device)

    def epoch(self, number: int, moves: dict[int, tuple[Tensor, Tensor]]) -> Epoch:
        """Return new signs, and weights by how segments moved: ``moves`` has A and q by tensor."""
        signs: list[Tensor | None] = [None] * len(self.plans)
        weights: list[Tensor | None] = [None] * len(self.plans)
        if not self.lossy:
            return Epoch(number, signs, weights)
        sizes = [self.plans[i].segments for i in self.lossy]
        joined = self._signs.of_segments(sum(sizes), number)
        joined = joined * self._weights(moves) if moves else joined.clone()
        for j, (i, weight) in enumerate(zip(self.lossy, joined.split(sizes), strict=True)):
            signs[i], weights[i] = self._signs.of_entries(j, number), weight
        return Epoch(number, signs, weights)

    def _moved(self, place: int, move: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
        """Return A and q, whole where they are split over processes."""
        if self.shards is None:
            return move
        return list(self.shards.gather({place: torch.stack([x.reshape(-1).to(self.dtype) for x in move])})[place])

    def _weights(self, moves: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        """Return ρ = (|A∘q| / |q|)^½ by segment, relative to the tensor's; 1 in segments that no gradient ever reached."""
        norms, zero = [], torch.zeros((), dtype=self.dtype, device=self.device)
        for i in self.lossy:
            plan = self.plans[i]
            if i not in moves:
                norms.append(zero.expand(2, plan.segments))
                continue
            factor, q = (x.reshape(plan.segments, plan.segment).to(self.dtype) for x in self._moved(i, moves[i]))
            norms.append(torch.stack([torch.linalg.vector_norm(x, dim=1) for x in (q * factor, q)]))
        moved, push = joined = torch.cat(norms, 1)
        known = (moved > 0) & (push > 0)
        whole = torch.zeros(2, len(self.lossy), dtype=self.dtype, device=self.device)
        typical = whole.index_add_(1, self._owner_of_segments, (joined * known).square_()).sqrt_()
        tiny = torch.finfo(self.dtype).tiny
        by_tensor = typical[1] / typical[0].clamp_min(tiny)
        ratio = moved / push.clamp_min(tiny) * by_tensor.index_select(0, self._owner_of_segments)
        return torch.where(known, ratio, 1.0).clamp_(1e-4, 1e4).sqrt_()

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
        return signed_sums(g.reshape(len(g), plan.segments, plan.segment).to(self.dtype), signs)

    def fold(self, i: int, z: Tensor, epoch: Epoch) -> Tensor:
        """Let weighted segment sums fall into buckets."""
        plan, weights = self.plans[i], epoch.weights[i]
        assert weights is not None
        return self._folded(plan, z * weights)

    @staticmethod
    def _folded(plan: Plan, z: Tensor) -> Tensor:
        if plan.segments % plan.buckets:
            z = torch.nn.functional.pad(z, (0, -plan.segments % plan.buckets))
        return z.view(len(z), -1, plan.buckets).sum(1)

    def of_rows(self, i: int, b: Tensor, tokens: Tensor, epoch: Epoch) -> Tensor:
        """Sketch rows of a table apart: ``b`` ``[n, t, d]`` at ``tokens`` ``[n, t]`` to ``[n, t, per_row]``."""
        plan, signs, weights = self.plans[i], epoch.signs[i], epoch.weights[i]
        assert signs is not None and weights is not None
        signs = signs.view(-1, plan.per_row, plan.fine)
        of_rows = signs[tokens if len(signs) == plan.rows else tokens % len(signs)]
        values = torch.linalg.vecdot(b.reshape(*tokens.shape, plan.per_row, plan.fine).to(self.dtype), of_rows)
        by_segment = weights.view(plan.rows, -1)[tokens].unsqueeze(-1)
        return (values.view(*tokens.shape, by_segment.shape[-2], -1) * by_segment).view_as(values)

    def heavy_rows(self, i: int, g: Tensor, epoch: Epoch) -> tuple[Tensor, Tensor, Tensor]:
        """Take the heaviest rows out of gradients ``[m, rows, columns]``.

        Returns:
            The buckets of the rest ``[m, buckets]``, the rows' numbers ``[m, heavy]`` and their values ``[m, heavy, per_row]``.
        """
        plan, weights = self.plans[i], epoch.weights[i]
        assert weights is not None
        z = self.segment_sums(i, g, epoch).mul_(weights)
        table = z.view(len(g), plan.rows, -1)
        numbers = torch.topk(table.square().sum(-1), plan.heavy, dim=1).indices
        wide = numbers.unsqueeze(-1)
        taken = g.reshape(len(g), plan.rows, plan.columns).gather(1, wide.expand(-1, -1, plan.columns))
        values = self.of_rows(i, taken, numbers, epoch)
        table.scatter_(1, wide.expand(-1, -1, table.shape[2]), 0.0)
        return self._folded(plan, z), numbers, values

    # Directions

    def clip_(self, d: Sequence[Tensor | None]) -> None:
        """Cut off the entries of directions ``[k, *shape]`` that are beyond :data:`MOST` times their tensor's mean, in place.

        An entry that is huge because its factor A is large pays no more than others, |A g| |∇|, and would hide its bucket.
        What gradients are contracted with in the backward must be cut off alike. Rows kept apart are not cut.
        """
        some = [(x, self.plans[i].numel) for i in self.lossy if (x := d[i]) is not None and not self.plans[i].fine]
        if not some:
            return
        norms = torch.stack([torch.linalg.vector_norm(x.flatten(1), 1, dim=1) for x, _ in some])
        if self.shards is not None:
            norms = self.shards.processes.over_shards(norms)
        numel = torch.tensor([MOST / n for _, n in some], dtype=norms.dtype).to(norms.device, non_blocking=True)
        most = norms * numel.unsqueeze(1)
        for (x, _), high, low in zip(some, most, -most, strict=True):
            wide = (-1, *[1] * (x.dim() - 1))
            x.clamp_(low.view(wide), high.view(wide))

    def of_directions(self, d: Sequence[Tensor | None], k: int, epoch: Epoch, tables: Sequence[int]) -> SketchedDirection:
        """Sketch directions ``[k, *shape]`` by tensor; missing ones are 0."""
        if self.shards is not None:
            return self._of_shards(self.shards, d, k, epoch, tables)
        return self.sketch(*self.join(d, k), epoch, tables)

    def _of_shards(
        self, shards: Shards, d: Sequence[Tensor | None], k: int, epoch: Epoch, tables: Sequence[int]
    ) -> SketchedDirection:
        """Sketch directions of which the local rows are given, tensor by tensor; ranks add up theirs."""
        flat = torch.zeros(k, self.size, dtype=self.dtype, device=self.device)
        made: dict[int, Tensor] = {}
        for i, x in ((i, x) for i in self.order if (x := d[i]) is not None):
            whole = shards.embed(i, x.to(self.dtype)).view(k, -1)
            if self.plans[i].lossless:
                flat[:, self.columns[i]] = whole
                continue
            weights = epoch.weights[i]
            assert weights is not None
            flat[:, self.columns[i]] = self._folded(self.plans[i], self.segment_sums(i, whole, epoch) / weights)
            if self.plans[i].fine and i in tables:
                made[i] = self._of_table(self.plans[i], whole, epoch.signs[i], weights)
        shards.processes.all_reduce_("sketches of directions", [flat, *made.values()])
        return SketchedDirection(flat, made)

    def of_flat(self, d: Tensor, epoch: Epoch, tables: Sequence[int]) -> SketchedDirection:
        """Sketch directions ``[k, size]`` that hold all tensors one after the other."""
        return self.of_directions([d[:, where] for where in self.flat.slices], len(d), epoch, tables)

    def join(self, d: Sequence[Tensor | None], k: int) -> tuple[Tensor, Tensor]:
        """Return the entries of the lossy tensors and those of the others, one tensor after the other, ``[k, entries]``."""
        none = torch.zeros((), dtype=self.dtype, device=self.device)

        def part(i: int) -> Tensor:
            x = d[i]
            return none.expand(k, self.plans[i].numel) if x is None else x.reshape(k, -1).to(self.dtype)

        empty = none.expand(k, 0)
        return tuple(torch.cat([part(i) for i in some], 1) if some else empty for some in (self.lossy, self.kept))  # type: ignore[return-value]

    def sketch(self, lossy: Tensor, kept: Tensor, epoch: Epoch, tables: Sequence[int]) -> SketchedDirection:
        """Sketch what :meth:`join` returned."""
        if not self.lossy:
            return SketchedDirection(kept, {})
        k, sums, made, at = len(lossy), [], dict[int, Tensor](), 0
        for some, signs in self._signs.runs(self.lossy, epoch.number):
            plan, wide = self.plans[some[0]], sum(self.plans[i].numel for i in some)
            part = lossy[:, at : at + wide].view(k, -1, plan.segment)
            sums.append(signed_sums(part, signs))
            at += wide
        at = 0
        for i in self.lossy:
            plan = self.plans[i]
            if plan.fine and i in tables:
                made[i] = self._of_table(plan, lossy[:, at : at + plan.numel], epoch.signs[i], epoch.weights[i])
            at += plan.numel
        z = sums[0] if len(sums) == 1 else torch.cat(sums, 1)
        buckets = torch.zeros(k, self.cut, dtype=self.dtype, device=self.device)
        buckets.index_add_(1, self.buckets, z / epoch.joined_weights(self.lossy))
        return SketchedDirection(torch.cat([buckets, kept], 1), made)

    @staticmethod
    def _of_table(plan: Plan, x: Tensor, signs: Tensor | None, weights: Tensor | None) -> Tensor:
        assert signs is not None and weights is not None
        fine = signed_sums(x.view(len(x), -1, plan.fine), signs.view(-1, plan.fine))
        by_segment = weights.view(plan.rows, -1, 1)
        return (fine.view(len(x), plan.rows, by_segment.shape[1], -1) / by_segment).view(len(x), plan.rows, plan.per_row)

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
        return int(self._signs.base.nbytes + self.buckets.nbytes + self.owner.nbytes + self._owner_of_segments.nbytes)

    def state(self) -> dict[str, Any]:
        """Return plain data by which a resumed run sees whether it sketches alike."""
        return {"plans": [[p.rows, p.columns, p.segment, p.buckets, p.fine, p.heavy] for p in self.plans]}
