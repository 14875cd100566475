"""How gradients and directions are sketched in a run: how many numbers each parameter gets, signs, and weights.

Parameters that are used other than by look-up share the ``sampled`` columns of a sample's sketch; pure tables are kept row by
row and have columns only in sketches of whole tensors, for the audit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from inrun.old.engine.directions import Sketch
from inrun.old.engine.sites import Scored
from inrun.old.layers import SketchPlan, fold, segment_sums

#: Entries per segment of a matrix, and segments per row where rows are kept apart.
SEGMENT, PER_ROW, PER_ROW_SMALL = 32, 64, 32
#: Sketches below this size are small.
SMALL = 16_384
#: Rows of an output vocabulary that are kept apart per sample.
HEAVY = 32
#: Numbers that a parameter gets at least.
LEAST = 32
#: The share of the numbers that may go to parameters that are kept entry by entry, the smallest first.
ENTRY_BY_ENTRY = 0.25
#: Entries of a direction count as at most so many times their mean size.
MOST = 30.0


def default_size(entries: int) -> int:
    """Return numbers per sample for a model with so many scored entries (docs/whole-credit.md has the measurements)."""
    return int(min(max(16_384, 2 ** math.ceil(math.log2(12 * max(entries, 1) ** 0.5))), 262_144))


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor that is not larger than ``most``."""
    return next(d for d in range(max(1, min(most, number)), 0, -1) if number % d == 0)


def output_layers(scored: list[Scored]) -> set[Scored]:
    """Return the parameters that are output vocabularies, whose rare rows hold most of a sample's gradient.

    They are much higher than wide, or the last matrix of the model and higher than wide.
    """
    found = {s for s in scored if any(site.rule.rows_are_classes(name, s.parameter) for site, name in s.uses)}
    matrices = [s for s in scored if s.parameter.dim() == 2 and not s.only_sparse]
    return found | {s for s in matrices[-1:] if s.parameter.shape[0] > s.parameter.shape[1]}


def plan_of(s: Scored, share: int, per_row: int, is_output: bool) -> SketchPlan:
    """Choose segments for one parameter that may have about ``share`` numbers, or ``per_row`` where rows are kept apart."""
    p = s.parameter
    rows, columns = (p.shape[0], p.numel() // max(p.shape[0], 1)) if p.dim() > 1 else (1, p.numel())
    if s.some_sparse or (is_output and rows > 4 * HEAVY):
        fine = _divisor(columns, max(1, columns // per_row))
        segment = fine * _divisor(columns // fine, max(1, min(SEGMENT, p.numel() // share) // fine))
        return SketchPlan(rows, columns, segment, share, 0 if s.only_sparse else min(HEAVY, rows), fine)
    if p.numel() <= share:
        return SketchPlan(rows, columns, 1, p.numel())
    segment = _divisor(columns, max(1, min(SEGMENT, p.numel() // share)))
    return SketchPlan(rows, columns, segment, min(share, rows * (columns // segment)))


def _mean_size(x: Tensor) -> Tensor:
    """Return the mean of |x| over the last dimension, ``[..., 1]``, without a copy of x."""
    return torch.linalg.vector_norm(x, 1, dim=-1, keepdim=True) / x.shape[-1]


def shares_of(scored: list[Scored], size: int, outputs: set[Scored]) -> list[int]:
    """Share ``size`` numbers among the parameters: as many as entries for the smallest, ∝ √entries for the others.

    A direction can be a thousand times larger in one entry than in the rest of its tensor: what hardly ever had a gradient moves
    far by the next one under Adam. In few buckets nothing averages that out; entry by entry it does no harm.
    """
    sampled = [s for s in scored if not s.only_sparse]
    left, small = size, set()
    for s in sorted((s for s in sampled if s not in outputs and not s.some_sparse), key=lambda s: s.parameter.numel()):
        if size - left + s.parameter.numel() > ENTRY_BY_ENTRY * size:
            break
        left -= s.parameter.numel()
        small.add(s)
    parts = {s: math.sqrt(s.parameter.numel()) * (4.0 if s in outputs else 1.0) for s in sampled if s not in small}
    whole = sum(parts.values()) or 1.0

    def share(s: Scored) -> int:
        if s in small:
            return max(1, s.parameter.numel())
        return max(LEAST, int(left * parts[s] / whole)) if s in parts else 256

    return [share(s) for s in scored]


class Sketcher:
    """Signs and weights of a run; ``weights`` may change from time to time (an *epoch* of the sketch)."""

    def __init__(self, scored: list[Scored], size: int, seed: int, like: Sketcher | None = None) -> None:
        """Share ``size`` numbers among the parameters; the same seed gives the same signs, shared with ``like``."""
        self.scored, self.size, self.seed = scored, size, seed
        outputs = output_layers(scored)
        per_row = PER_ROW if size >= SMALL else PER_ROW_SMALL
        shares = shares_of(scored, size, outputs)
        self.plans = [plan_of(s, share, per_row, s in outputs) for s, share in zip(scored, shares, strict=True)]
        self.sampled = [i for i, s in enumerate(scored) if not s.only_sparse]
        self.device = scored[0].parameter.device
        double = any(s.parameter.dtype == torch.float64 for s in scored)
        self.dtype = torch.float64 if double else torch.float32
        self.signs: list[Tensor] = [
            self._signs(i, plan) if like is None or plan.exact != like.plans[i].exact else like.signs[i]
            for i, plan in enumerate(self.plans)
        ]
        self.ones = [torch.ones(plan.segments, dtype=self.dtype, device=self.device) for plan in self.plans]
        sizes = [self.plans[i].buckets for i in self.sampled]
        self.columns = sum(sizes)
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        #: Where a sampled parameter's columns are.
        self.places = {i: slice(ends[j], ends[j + 1]) for j, i in enumerate(self.sampled)}
        #: Which parameter a column belongs to, and where each sampled parameter's columns begin.
        owner = [i for i in self.sampled for _ in range(self.plans[i].buckets)]
        self.owner = torch.tensor(owner, dtype=torch.int64, device=self.device)
        self._starts = np.array(ends[:-1], np.int64)
        #: 1 for columns that hold more than one entry.
        self.lossy = torch.ones(self.columns, dtype=self.dtype, device=self.device)
        for i, place in self.places.items():
            self.lossy[place] = float(not self.plans[i].exact)

    def _signs(self, index: int, plan: SketchPlan) -> Tensor:
        mine = self._rows_here(index, plan)
        if plan.exact and mine is None:
            return torch.ones(plan.rows * plan.columns, dtype=self.dtype, device=self.device)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        drawn = torch.randint(0, 2, (plan.rows * plan.columns,), generator=generator, dtype=torch.int8)
        if mine is None:
            return drawn.to(self.dtype).mul_(2).sub_(1).to(self.device)
        signs = torch.ones_like(drawn) if plan.exact else drawn.mul_(2).sub_(1)
        return signs.view(plan.rows, plan.columns)[mine].reshape(-1).clone().to(self.device)

    def _rows_here(self, index: int, plan: SketchPlan) -> slice | None:
        """Return the rows of a parameter whose signs are here, as small numbers; None where all are, as they are used."""
        shards = self.scored[index].shards
        return None if shards is None or self.scored[index].parameter.dim() == 1 else shards.mine

    def by_parameter(self, x: Tensor) -> Tensor:
        """Add up columns by the parameter they belong to: ``[..., columns]`` to ``[..., parameters]``."""
        found = torch.zeros(*x.shape[:-1], len(self.scored), dtype=x.dtype, device=x.device)
        if not self.sampled:
            return found
        if x.device.type == "cpu":
            found[..., self.sampled] = torch.from_numpy(np.add.reduceat(x.numpy(), self._starts, axis=-1))
            return found
        return found.index_add_(-1, self.owner, x)

    def spread_out(self, x: Tensor, every: int = 1) -> Tensor:
        """Give every column (or every so many) its parameter's number: ``[..., parameters]`` to ``[..., columns]``."""
        return x[..., self.owner[::every]]

    def sketch(self, index: int, weights: Tensor) -> Sketch:
        """Return what a backward needs to sketch one parameter."""
        return Sketch(self.plans[index], self.signs[index], weights)

    def sums(self, index: int, x: Tensor, is_direction: bool = False) -> Tensor:
        """Return the segment sums of whole tensors, ``[k, *shape]`` to ``[k, segments]``, in the finer segments of rows apart.

        In directions entries beyond :data:`MOST` are cut off, where no rows are kept apart. Adam's direction is A∘∇ with A ~ 1/|g|:
        an entry that is huge for A alone pays its samples |A g| |∇|, no more than any other, and its noise would hide a bucket.
        """
        s, plan, signs = self.scored[index], self.plans[index], self.signs[index]
        cut = is_direction and not (plan.exact or plan.heavy or s.some_sparse)
        if self._rows_here(index, plan) is None:
            flat = s.whole(x).reshape(len(x), -1).to(self.dtype)
            return segment_sums(flat, signs, plan.row_segment, _mean_size(flat) * MOST if cut else None)
        # A row's segments are those of one process: the sums of what is here, and then those of all.
        flat, most = x.reshape(len(x), -1).to(self.dtype), None
        if cut:
            most = s.whole(_mean_size(flat.view(len(x), -1, plan.columns))).mean(1) * MOST
        found = segment_sums(flat, signs.to(self.dtype), plan.row_segment, most)
        return s.whole(found.view(len(x), -1, plan.per_row_apart)).reshape(len(x), -1)

    def all_sums(self, whole: Mapping[int, Tensor], k: int) -> list[Tensor]:
        """Return the segment sums of a direction, of every parameter, zeros for those that are missing."""
        return [
            self.sums(i, whole[i], is_direction=True)
            if i in whole
            else torch.zeros(k, plan.rows * plan.per_row_apart, dtype=self.dtype, device=self.device)
            for i, plan in enumerate(self.plans)
        ]

    def mean_by_segment(self, index: int, x: Tensor) -> Tensor:
        """Return the mean of a tensor over each segment, ``[segments]``."""
        s, plan = self.scored[index], self.plans[index]
        if self._rows_here(index, plan) is None:
            return s.whole(x.unsqueeze(0)).reshape(plan.segments, plan.segment).to(self.dtype).mean(1)
        found = x.reshape(-1, plan.segment).to(self.dtype).mean(1)
        return s.whole(found.view(1, -1, plan.per_row)).reshape(-1)

    def weights_from(self, moves: Mapping[int, tuple[Tensor | float, Tensor]]) -> list[Tensor]:
        """Return ρ by segment, relative to that of the tensor, for gradients; directions are divided by it.

        The noise of ⟨Sg, SD⟩ is least at ρ² = |D| / |g|. With |g| ~ |q| and |D| ~ |A∘q|, entry by entry:

            ρ² = |A∘q| / |q|,        norms over the segment

        A plain mean of A would be that of the entries that hardly ever have a gradient, whose A is largest.

        Args:
            moves: Gain A and momentum q by parameter, as the step had them.
        """
        found = list(self.ones)
        for i, (gain, q) in moves.items():
            if not isinstance(gain, Tensor):
                continue
            pushed = q.to(self.dtype)
            moved = self.mean_by_segment(i, (pushed * gain.to(self.dtype)).square_())
            push = self.mean_by_segment(i, pushed.square())
            known = (moved > 0) & (push > 0)
            if bool(known.any()):
                typical = moved[known].sum() / push[known].sum()
                # The fourth root: these are squares of norms. Segments that no gradient ever reached are like the others.
                ratio = torch.where(known, moved / push.clamp_min(torch.finfo(push.dtype).tiny) / typical, 1.0)
                found[i] = ratio.clamp(1e-8, 1e8) ** 0.25
        return found

    def joined(self, sums: list[Tensor], weights: list[Tensor]) -> Tensor:
        """Let segment sums fall into the sampled columns: ``[k, columns]``."""
        parts = [self.folded(i, sums[i], weights[i]) for i in self.sampled]
        return torch.cat(parts, dim=1) if parts else torch.zeros(len(sums[0]), 0, dtype=self.dtype, device=self.device)

    def folded(self, index: int, sums: Tensor, weights: Tensor) -> Tensor:
        """Let the segment sums of one parameter ``[k, rows·J]`` fall into its buckets, ``[k, buckets]``."""
        return fold(self.plans[index].coarse(sums), weights, self.plans[index].buckets)

    def nbytes(self) -> int:
        """Return the memory of the signs."""
        return sum(s.nbytes for s in self.signs)
