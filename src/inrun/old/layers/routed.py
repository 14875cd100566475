"""Gradients of experts: every position of a sample is sent to a few of E weights.

Letters: n samples, m pairs (position, expert) of each, S = n·m pairs in all, E experts. A pair s of expert e adds x_s y_sᵀ to
the expert's part of its sample's gradient: g_n[e] = Σ_{s of n, e_s = e} x_s y_sᵀ, ``[E, p, q]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from inrun.old.layers.layout import SCRATCH_BYTES
from inrun.old.layers.shapes import Formed, GradientShape
from inrun.old.layers.sketch import SketchPlan, as_bits, from_bits


@dataclass(frozen=True)
class Order:
    """Pairs sorted by expert; those of an expert stay in the order of the samples."""

    #: The expert of every pair, sample by sample, ``[n, m]``.
    experts: Tensor
    #: How many experts there are.
    count: int

    @cached_property
    def sorted(self) -> Tensor:
        """Return which pair stands where, ``[S]``."""
        return torch.argsort(self.experts.reshape(-1), stable=True)

    @cached_property
    def back(self) -> Tensor:
        """Return where every pair stands, ``[S]``."""
        found = torch.empty_like(self.sorted)
        found[self.sorted] = torch.arange(len(found), device=found.device)
        return found

    @cached_property
    def owner(self) -> Tensor:
        """Return the sample of every sorted pair, ``[S]``."""
        return torch.div(self.sorted, max(self.experts.shape[1], 1), rounding_mode="floor")

    @cached_property
    def groups(self) -> list[tuple[int, slice]]:
        """Return the experts that have pairs, and where these stand."""
        ends = torch.bincount(self.experts.reshape(-1), minlength=self.count).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        return [(e, slice(first, last)) for e, (first, last) in enumerate(zip(starts, ends, strict=True)) if last > first]

    def sum_by_sample(self, z: Tensor) -> Tensor:
        """Add up numbers of sorted pairs, ``[S, k]``, to ``[n, k]``."""
        return z.new_zeros(len(self.experts), z.shape[1]).index_add_(0, self.owner, z)


def multiply(order: Order, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """Return x_s W_eᵀ (or x_s W_e where the weights are stored ``transposed``) for sorted pairs ``[S, i]``."""
    out = x.new_empty(len(x), weight.shape[2] if transposed else weight.shape[1])
    for e, pairs in order.groups:
        torch.mm(x[pairs], weight[e] if transposed else weight[e].t(), out=out[pairs])
    return out


class Routed(GradientShape):
    """g_n[e] = Σ x_s y_sᵀ over the pairs of sample n that are sent to e; ``x`` ``[S, p]`` and ``y`` ``[S, q]`` are sorted."""

    def __init__(self, x: Tensor, y: Tensor, order: Order) -> None:
        """Hold both factors."""
        self.x, self.y, self.order = x, y, order

    def contract(self, v: Tensor) -> Tensor:
        """x_s · (v_e y_s) or (x_s v_e) · y_s, one product of the size of the layer's forward; the smaller result is multiplied."""
        x, y = self.x.to(v.dtype), self.y.to(v.dtype)
        near, far, turned = (x, y, False) if x.shape[1] <= y.shape[1] else (y, x, True)
        each = [multiply(self.order, far, direction, transposed=turned).mul_(near).sum(1) for direction in v]
        return self.order.sum_by_sample(torch.stack(each, 1))

    def total(self) -> Tensor:
        """One product per expert."""
        dtype = torch.promote_types(self.x.dtype, self.y.dtype)
        found = self.x.new_zeros(self.order.count, self.x.shape[1], self.y.shape[1], dtype=dtype)
        for e, pairs in self.order.groups:
            torch.mm(self.x[pairs].to(dtype).t(), self.y[pairs].to(dtype), out=found[e])
        return found

    def form(self) -> Tensor:
        """Lay the pairs of an expert out by sample and multiply; samples that have fewer pairs are filled up with zeros."""
        n, dtype = len(self.order.experts), torch.promote_types(self.x.dtype, self.y.dtype)
        found = self.x.new_zeros(n, self.order.count, self.x.shape[1], self.y.shape[1], dtype=dtype)
        for e, pairs in self.order.groups:
            owner = self.order.owner[pairs]
            counts = torch.bincount(owner, minlength=n)
            place = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
            sides = []
            for side in (self.x, self.y):
                laid_out = side.new_zeros(n, int(counts.max()), side.shape[1], dtype=dtype)
                laid_out[owner, place] = side[pairs].to(dtype)
                sides.append(laid_out)
            found[:, e] = torch.bmm(sides[0].transpose(1, 2), sides[1])
        return found

    def segment_sums(self, signs: Tensor, plan: SketchPlan) -> Tensor:
        """Form the gradients of some samples at a time."""
        piece, (x, y) = max(1, SCRATCH_BYTES // max(signs.nbytes, 1)), self._by_sample()
        some = [slice(i, i + piece) for i in range(0, max(len(self.order.experts), 1), piece)]
        made = [Routed.sort(x[s], y[s], self.order.experts[s], self.order.count) for s in some]
        return torch.cat([Formed(shape.form()).segment_sums(signs, plan) for shape in made])

    def keep(self, kind: type[GradientShape], buffer: Tensor | None = None) -> GradientShape:
        """Form the gradients where they are to be kept formed."""
        return Formed(self.form()) if kind is Formed else super().keep(kind)

    def _by_sample(self) -> tuple[Tensor, Tensor]:
        n, back = len(self.order.experts), self.order.back
        x, y = (side[back].reshape(n, -1, side.shape[1]) for side in (self.x, self.y))
        return x, y

    def parts(self) -> tuple[Tensor, ...]:
        """Both factors, sample by sample, and the experts as the bits of floating-point numbers."""
        return (*self._by_sample(), as_bits(self.order.experts))

    @staticmethod
    def sort(x: Tensor, y: Tensor, experts: Tensor, count: int) -> Routed:
        """Make one of factors sample by sample, ``[n, m, p]`` and ``[n, m, q]``."""
        order = Order(experts, count)
        return Routed(x.flatten(0, 1)[order.sorted], y.flatten(0, 1)[order.sorted], order)

    @staticmethod
    def of(parts: tuple[Tensor, ...], count: int) -> Routed:
        """Undo ``parts``."""
        x, y, bits = parts
        return Routed.sort(x, y, from_bits(bits), count)


def biases(b: Tensor, order: Order) -> Formed:
    """Return g_n[e] = Σ b_s over the pairs of sample n that are sent to e, ``[n, E, o]``; ``b`` ``[S, o]`` is sorted."""
    n = len(order.experts)
    place = order.owner * order.count + order.experts.reshape(-1)[order.sorted]
    wide = b.to(torch.promote_types(b.dtype, torch.float32))
    return Formed(wide.new_zeros(n * order.count, b.shape[1]).index_add_(0, place, wide).view(n, order.count, -1))
