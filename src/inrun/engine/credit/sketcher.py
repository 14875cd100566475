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

from inrun.engine.directions import Sketch
from inrun.engine.sites import Scored
from inrun.layers import SketchPlan, fold, segment_sums

#: Entries per segment of a matrix, and segments per row where rows are kept apart.
SEGMENT, PER_ROW, PER_ROW_SMALL = 32, 64, 32
#: Sketches below this size are small.
SMALL = 16_384
#: Rows of an output vocabulary that are kept apart per sample.
HEAVY = 32
#: Numbers that a parameter gets at least.
LEAST = 32


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


class Sketcher:
    """Signs and weights of a run; ``weights`` may change from time to time (an *epoch* of the sketch)."""

    def __init__(self, scored: list[Scored], size: int, seed: int, like: Sketcher | None = None) -> None:
        """Share ``size`` numbers among the parameters, ∝ √entries; the same seed gives the same signs, shared with ``like``."""
        self.scored, self.size, self.seed = scored, size, seed
        outputs = output_layers(scored)
        parts = {s: math.sqrt(s.parameter.numel()) * (4.0 if s in outputs else 1.0) for s in scored if not s.only_sparse}
        whole = sum(parts.values()) or 1.0
        per_row = PER_ROW if size >= SMALL else PER_ROW_SMALL
        shares = [max(LEAST, int(size * parts[s] / whole)) if s in parts else 256 for s in scored]
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

    def sums(self, index: int, x: Tensor) -> Tensor:
        """Return the segment sums of whole tensors, ``[k, *shape]`` to ``[k, segments]``, in the finer segments of rows apart."""
        s, plan, signs = self.scored[index], self.plans[index], self.signs[index]
        if self._rows_here(index, plan) is None:
            return segment_sums(s.whole(x).reshape(len(x), -1).to(self.dtype), signs, plan.row_segment)
        # A row's segments are those of one process: the sums of what is here, and then those of all.
        found = segment_sums(x.reshape(len(x), -1).to(self.dtype), signs.to(self.dtype), plan.row_segment)
        return s.whole(found.view(len(x), -1, plan.per_row_apart)).reshape(len(x), -1)

    def all_sums(self, whole: Mapping[int, Tensor], k: int) -> list[Tensor]:
        """Return the segment sums of every parameter, zeros for those that are missing."""
        return [
            self.sums(i, whole[i])
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

    def weights_from(self, gains: Mapping[int, Tensor | float]) -> list[Tensor]:
        """Return ρ = √gain by segment, relative to its mean, for gradients; directions are divided by it."""
        found = list(self.ones)
        for i, gain in gains.items():
            if isinstance(gain, Tensor):
                mean = self.mean_by_segment(i, gain)
                typical = mean.mean()
                if bool(typical > 0):
                    found[i] = (mean / typical).clamp(1e-4, 1e4).sqrt()
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
