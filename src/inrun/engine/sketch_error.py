"""The standard errors of sketched credits.

A credit is ⟨S g, S V⟩, with V all that paid the use. The part of V along the direction v that was known at the backward is exact.
Of the rest, V⊥, the signs make a random error, whose variance is

    Σ_b (S g)_b² (S V⊥)_b² (1 − buckets / entries)

over the buckets b of lossy tensors, and alike for rows kept apart. It is estimated from every fourth bucket. Uses of one sample
that were sketched with the same signs have errors that are alike, and their covariance is a sum of the same kind: it is added to
the variance of the older use, so that the squares of the errors of a sample's uses add up to the variance of its score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from inrun.engine.sketch import SketchedDirection, Sketcher

if TYPE_CHECKING:
    from inrun.engine.window import Slot

#: One column in so many stands for all.
EVERY = 4
#: The part of the estimated variance that is a use's own; the rest is the mean of its step.
OWN = 0.5


class SketchErrors:
    """What is noted of every open step to tell the errors of its credits; ``held`` is by place."""

    def __init__(self, sketcher: Sketcher, tables: Sequence[int]) -> None:
        self.sketcher, self.tables = sketcher, list(tables)
        self.some = slice(0, sketcher.cut, EVERY)
        #: known: S v; paid: S V without the running sum of its epoch; entered: Σ (S D)² by tensor of the step's own direction;
        #: rows: Σ (S g)² (S D)² of rows apart by table.
        self.held: dict[str, Tensor] = {}
        plans = [sketcher.plans[i] for i in sketcher.order]
        noise = torch.tensor([1.0 - p.buckets / p.numel for p in plans], dtype=sketcher.dtype)
        self._noise = noise.to(sketcher.device)[sketcher.owner[self.some]] if plans else noise
        self._owner = sketcher.owner[self.some]

    def reserve(self, steps: int, rows: int, sets: int) -> None:
        """Make room for so many steps of so many rows; what is noted is kept."""
        sk, few, tensors = self.sketcher, len(self._owner), len(self.sketcher.lossy)
        shapes = {"known": (steps, sets, few), "paid": (steps, sets, few), "entered": (steps, sets, tensors)}
        shapes["rows"] = (steps, len(self.tables), rows, sets)  # type: ignore[assignment]
        for name, shape in shapes.items():
            old, new = self.held.get(name), torch.zeros(shape, dtype=sk.dtype, device=sk.device)
            if old is not None:
                new[tuple(slice(0, size) for size in old.shape)] = old
            self.held[name] = new

    def enter(self, slot: Slot, direction: SketchedDirection, ratio: Any, known: Tensor | None, apart: Any) -> None:
        """Note a step that enters.

        Args:
            slot: The step.
            direction: S D.
            ratio: κ_{t,t} over the weight of the step's rows, by column.
            known: S v of the direction that was known at the backward, if any.
            apart: Rows of tables by tensor and call.
        """
        if not self.sketcher.cut:
            return
        place, here = slot.place, direction.flat[:, self.some]
        ratio = ratio[self.some] if isinstance(ratio, Tensor) else ratio
        torch.sub(here * ratio, slot.epoch.paid[:, self.some], out=self.held["paid"][place])
        if known is None:
            self.held["known"][place].zero_()
        else:
            self.held["known"][place] = known[:, self.some]
        if not self.tables:
            return
        self.held["entered"][place] = self._by_tensor(here.square())
        self.held["rows"][place].zero_()
        for (i, _), t in apart.items():
            fine = self.sketcher.plans[i].fine
            if i not in direction.tables or fine == 1:
                continue
            numbers, squares = t.numbers[place, : slot.rows], t.values[place, : slot.rows].square()
            for k, one in enumerate(direction.tables[i]):
                spread = torch.einsum("nrj,nrj->n", squares, one.square()[numbers])
                self.held["rows"][place, self.tables.index(i), : slot.rows, k] += spread * (1.0 - 1.0 / fine)

    def rebase(self, slots: Sequence[Slot], kept: Any, by: Any) -> None:
        """The running sums begin anew: rows were multiplied by ``kept`` (by tensor; ``by`` by column)."""
        if not self.sketcher.cut or not slots:
            return
        part = by[self.some] if isinstance(by, Tensor) else by
        for slot in slots:
            self.held["paid"][slot.place].add_(slot.epoch.paid[:, self.some]).div_(part)
        for j, i in enumerate(self.tables):
            self.held["rows"][:, j] *= float(kept[i]) ** 2

    def of(self, slot: Slot, ring: Tensor, slots: Sequence[Slot]) -> Tensor:
        """Return the standard errors of a step's credits, ``[n, k]``; ``slots`` are the open steps."""
        sk, place, n = self.sketcher, slot.place, slot.rows
        if not sk.cut or n == 0:
            return torch.zeros(n, self.held["paid"].shape[1] if self.held else 1, dtype=sk.dtype, device=sk.device)
        rest = self._rest(slot)
        weighted = rest.square() * self._noise
        rows = ring[place, :n, self.some]
        variance = rows.square() @ weighted.t() * EVERY
        if self.tables:
            share = self._by_tensor(rest.square()) / self.held["entered"][place].clamp_min(torch.finfo(sk.dtype).tiny)
            at = [sk.lossy.index(i) for i in self.tables]
            variance = variance + (self.held["rows"][place, :, :n] * share.t()[at].unsqueeze(1)).sum(0)
        mixed = OWN * variance + (1.0 - OWN) * variance.mean(0)
        pairs = self._pairs(slot, slots)
        if pairs is not None:
            mixed = self._with_pairs(slot, ring, rest, variance, mixed, pairs)
        return mixed.sqrt_()

    def _rest(self, slot: Slot) -> Tensor:
        """Return S V⊥ of a step, ``[k, few]``."""
        v, known = self.held["paid"][slot.place] + slot.epoch.paid[:, self.some], self.held["known"][slot.place]
        along, square = self._by_tensor(torch.stack([v * known, known * known]))
        share = torch.where(square > 0, along / square.clamp_min(torch.finfo(v.dtype).tiny), 0.0)
        return v - share.index_select(1, self._owner) * known

    def _by_tensor(self, x: Tensor) -> Tensor:
        found = torch.zeros(*x.shape[:-1], len(self.sketcher.lossy), dtype=x.dtype, device=x.device)
        return found.index_add_(-1, self._owner, x)

    # Uses of one sample

    @staticmethod
    def _pairs(slot: Slot, slots: Sequence[Slot]) -> tuple[list[Slot], Any] | None:
        """Return the steps of the same epoch from this on, and pairs of uses of one sample: row here, which step, row there."""
        if slot.ids is None:
            return None
        steps = [s for s in slots if s.epoch is slot.epoch and s.step >= slot.step and s.ids is not None]
        rows = np.concatenate([np.arange(s.rows) for s in steps])
        which = np.repeat(np.arange(len(steps)), [s.rows for s in steps])
        ids = np.concatenate([s.ids for s in steps])  # type: ignore[misc]
        order = np.argsort(ids, kind="stable")
        first, last = (np.searchsorted(ids[order], slot.ids, side) for side in ("left", "right"))
        counts = last - first
        if counts.max(initial=1) == 1:
            return None
        here = np.repeat(np.arange(slot.rows), counts)
        at = order[np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())]
        later = (which[at] > 0) | (rows[at] > here)  # this step comes first
        return (steps, np.stack([here, which[at], rows[at]])[:, later]) if later.any() else None

    def _with_pairs(
        self, slot: Slot, ring: Tensor, rest: Tensor, variance: Tensor, mixed: Tensor, pairs: tuple[list[Slot], Any]
    ) -> Tensor:
        """Add the covariances with later uses of the same samples."""
        steps, numbers = pairs
        here, which, there = torch.from_numpy(numbers).to(ring.device, non_blocking=True)
        places = torch.tensor([s.place for s in steps], device=ring.device)[which]
        rows = ring[slot.place, here][:, self.some] * ring[places, there][:, self.some]
        added = torch.zeros_like(mixed)
        for k in range(rest.shape[0]):
            both = torch.stack([self._rest(s)[k] for s in steps]) * rest[k] * self._noise
            added[:, k].index_add_(0, here, (rows * both[which]).sum(1))
        # Rows apart err alike: as much more as the buckets do.
        return (mixed + 2.0 * EVERY * added).clamp_min(0.1 * mixed)

    def nbytes(self) -> int:
        """Return the memory of what is noted."""
        return sum(x.nbytes for x in self.held.values())
