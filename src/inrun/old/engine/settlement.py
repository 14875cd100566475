"""From what arrived in the probes to contributions: c_n = factor · Σ_parameters ⟨g_n, v⟩, when the optimizers step.

What was contracted inside the backward only needs its scale, its learning rate and the clip factor. What was kept is contracted
now, one parameter after the other, so that each direction is made once. On checked steps both sides of every sum are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inrun.errors import StepError
from inrun.old.engine.checks.conservation import (
    SECOND_ORDER,
    USUAL_CAUSES,
    Balance,
    Summed,
    balance_of,
    check_balances,
    products_with,
)
from inrun.old.engine.directions import Directions
from inrun.old.engine.factors import Factors
from inrun.old.engine.microbatch import Microbatch, Replayed
from inrun.old.engine.settling import Settling
from inrun.old.engine.setup import Setup
from inrun.old.engine.sites import Scored
from inrun.old.layers import GradientShape

#: A kept gradient, and the microbatch that it is of.
Held = tuple[Microbatch, GradientShape]


@dataclass(frozen=True)
class Contracted:
    """How what was kept of one parameter was contracted: rows of the weight or all, direction, and Σ_n before the factor."""

    rows: Tensor | None
    v: Tensor
    contributed: Summed


class Settlement(Settling):
    """The contributions of one step, as its optimizers step one after the other."""

    def __init__(
        self,
        setup: Setup,
        directions: Directions,
        factors: Factors,
        step: int,
        quietly: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``quietly`` makes a context in which modules that run again are not observed."""
        super().__init__()
        self.setup, self.directions, self.factors, self.step, self.quietly = setup, directions, factors, step, quietly
        self.processes = setup.processes
        #: Per microbatch, ``[n, k]``.
        self._totals: dict[Microbatch, Tensor] = {}
        #: Modules without a rule that were contracted at the end of their microbatch, ``[n, k]`` before any factor.
        self._replayed: dict[Microbatch, dict[Scored, Tensor]] = {}
        #: Backwards whose part of a parameter of such a module is in there.
        self._booked: dict[tuple[Replayed, str], set[int]] = {}
        self._balances: dict[nn.Parameter, Balance] = {}

    def begin(self, microbatches: list[Microbatch], columns: int) -> None:
        """The number of columns is known now."""
        self._totals = _zeros(microbatches, columns)

    def contributions(self, microbatches: list[Microbatch], columns: int) -> Tensor:
        """Return all rows of the step, ``[n, k]``; zeros where no optimizer stepped."""
        return torch.cat([self._totals.get(m, zeros) for m, zeros in _zeros(microbatches, columns).items()])

    # Modules without a rule

    @torch.no_grad()
    def contract_replays(self, micro: Microbatch) -> None:
        """At the end of a microbatch: contract what streams and must run again, and let go of its inputs."""
        for replayed in micro.replays:
            waits = []
            for name, s in replayed.scored.items():
                direction = self.directions.stream(s, sparse=False)
                if direction is not None:
                    known = self._booked.setdefault((replayed, name), set())
                    found = replayed.shapes(name, micro.n, self.quietly, known)
                    self._book_replay(micro, s, list(found.values()), direction.v)
                    known |= set(found)
                elif not self.directions.is_zero(s):
                    waits.append(name)
            if not waits:
                replayed.forget()

    def _book_replay(self, micro: Microbatch, s: Scored, shapes: list[GradientShape], v: Tensor) -> None:
        booked = self._replayed.setdefault(micro, {})
        for shape in shapes:
            c = shape.contract(v).to(micro.dtype)
            booked[s] = booked[s] + c if s in booked else c

    def _check_replay(self, replayed: Replayed) -> None:
        """Raise if a module that must run again has weights of an optimizer that has stepped (fused ones count no writes)."""
        own = set(replayed.site.module.parameters())
        if any(s.optimizer in self.settled and s.parameter in own for s in self.setup.scored):
            raise StepError(
                f"{type(replayed.site.module).__name__} has no rule and must run again, but an optimizer that has stepped already "
                "moved some of its weights; give all its parameters to one optimizer"
            )

    # One optimizer

    def settle(self, optimizer: int, microbatches: list[Microbatch], checked: bool, finite: bool) -> float:
        """Finish the contributions of one optimizer's parameters.

        Args:
            optimizer: Which one.
            microbatches: Of the step.
            checked: Compare the sums with the gradients.
            finite: Whether losses are finite; if not, nothing is compared.

        Returns:
            Seconds that only the comparison took.
        """
        mine = [s for s in self.setup.scored if s.optimizer == optimizer]
        with self.processes.together(f"the contraction ({optimizer})", self.step):
            # What a sample's gradient is multiplied by until the optimizer uses it: processes are averaged.
            factor = self.factors.settle(optimizer, others_have_stepped=self.begun) * self.processes.share
            for micro in microbatches:
                if any(replayed.arrived for replayed in micro.replays):
                    self.contract_replays(micro)
            for micro in microbatches:
                self._add_streamed(micro, mine, factor)
            spent = self._settle_kept(optimizer, microbatches, factor, checked)
        self.settled.add(optimizer)
        if checked and finite:
            began = time.perf_counter()
            self._balance_streamed(mine, microbatches, factor)
            if self.processes.several:
                self._balance_all(mine)
            self._check(mine, microbatches)
            spent += time.perf_counter() - began
        return spent

    def _add_streamed(self, micro: Microbatch, mine: list[Scored], factor: float) -> None:
        """Add up what was contracted inside the backward: each parameter with its scale and learning rate."""
        total = self._totals[micro]
        parts: list[Tensor] = []
        scales: list[float] = []
        places: list[int] = []
        rates: dict[Scored, tuple[int, float]] = {}
        for place, s in enumerate(mine):
            direction = self.directions.streaming.get(s.parameter)
            if direction is None:
                continue
            rate = direction.scale * factor * float(s.group["lr"])
            rates[s] = (place, rate)
            booked = self._replayed.get(micro, {}).get(s)
            summed = micro.sums.get(s)
            for c in (booked, None if summed is None else summed.grad):
                if c is not None:
                    parts.append(c.unsqueeze(0))
                    scales.append(rate)
                    places.append(place)
            by_rows = micro.row_sums.get(s)
            if by_rows is not None and by_rows.grad is not None:
                # The row factors hold the learning rate.
                weighed = by_rows.grad @ self.directions.row_factors(s).to(by_rows.dtype)
                parts.append(weighed.unsqueeze(0))
                scales.append(direction.scale * factor)
                places.append(place)
        for scored, leaf in micro.joined.items():
            here = [i for i, s in enumerate(scored) if s in rates]
            if here and leaf.grad is not None:
                parts.append(leaf.grad if len(here) == len(scored) else leaf.grad[here])
                places += [rates[scored[i]][0] for i in here]
                scales += [rates[scored[i]][1] for i in here]
        if parts:
            # In the order of the parameters, whichever probe they came by: sums are then the same to the last bit.
            order = sorted(range(len(places)), key=places.__getitem__)
            weights = torch.tensor([scales[i] for i in order], dtype=total.dtype, device=total.device)
            total += torch.einsum("pnk,p->nk", torch.cat(parts)[order], weights)

    def _settle_kept(self, optimizer: int, microbatches: list[Microbatch], factor: float, checked: bool) -> float:
        """Contract what was kept, one parameter after the other so that each direction is made once."""
        spent = 0.0
        for s, held in self._waiting(optimizer, microbatches).items():
            shapes = [shape for _, shape in held]
            self.kept_bytes += sum(shape.nbytes for shape in shapes)
            found = self._contract(s, held, factor, self._totals)
            if found is not None and checked:
                began = time.perf_counter()
                self._balance_kept(s, shapes, found, factor)
                spent += time.perf_counter() - began
        return spent

    def _waiting(self, optimizer: int, microbatches: list[Microbatch]) -> dict[Scored, list[Held]]:
        """Return what was kept of an optimizer's parameters; none of those whose calls took no part in any backward."""
        waiting: dict[Scored, list[Held]] = {}
        for micro in microbatches:
            for kept in micro.kept:
                if kept.scored.optimizer == optimizer:
                    waiting.setdefault(kept.scored, []).extend((micro, shape) for shape in kept.shapes())
            for replayed in micro.replays:
                mine = [(n, s) for n, s in replayed.scored.items() if s.optimizer == optimizer and replayed.arrived]
                mine = [(n, s) for n, s in mine if self.directions.stream(s, sparse=False) is None]
                if mine:
                    self._check_replay(replayed)
                for name, s in mine:
                    waiting.setdefault(s, []).extend((micro, x) for x in replayed.shapes(name, micro.n, self.quietly).values())
        found = {s: held for s, held in waiting.items() if held}
        return found if not self.processes.sharded else self._waiting_anywhere(optimizer, found)

    def _waiting_anywhere(self, optimizer: int, here: dict[Scored, list[Held]]) -> dict[Scored, list[Held]]:
        """Where directions are split over processes: what waits on any of them, in the same order on all."""
        mine = [s for s in self.setup.scored if s.optimizer == optimizer]
        anywhere = self.processes.summed("small", torch.tensor([s in here for s in mine], dtype=torch.int32)).tolist()
        return {s: here.get(s, []) for s, count in zip(mine, anywhere, strict=True) if count}

    def _contract(self, s: Scored, held: list[Held], factor: float, totals: dict[Microbatch, Tensor]) -> Contracted | None:
        """Add what was kept of a parameter to ``totals``; None where no validation loss depends on it."""
        shapes = [shape for _, shape in held]
        whole = s.shards is not None or not self.directions.rules[s.optimizer].elementwise
        rows = None if whole else _joint_rows(shapes)
        v = self.directions.deferred(s, rows)
        if v is None:
            return None
        v = s.whole(v)
        turned = v
        if self.factors.reworked(s.optimizer):
            total = torch.stack([shape.total() for shape in shapes]).sum(0)
            ratio = self.factors.rework(s, total, self.step)
            turned = v * (ratio if rows is None else ratio[rows])
        contributed = Summed.none(len(v), v.device)
        for micro, shape in held:
            c = shape.contract(turned) if rows is None else shape.contract_touched(rows, turned)
            totals[micro].add_(c.to(micro.dtype), alpha=factor)
            contributed += Summed.of(c)
        return Contracted(rows, v, contributed)

    def tried(self, microbatches: list[Microbatch], columns: int) -> Tensor:
        """Return the contributions of all optimizers by the directions as they stand, ``[n, k]``, where all wait; book nothing."""
        totals = _zeros(microbatches, columns)
        for optimizer, factor in self.factors.measured().items():
            for s, held in self._waiting(optimizer, microbatches).items():
                self._contract(s, held, factor * self.processes.share, totals)
        return torch.cat(list(totals.values()))

    # Conservation

    def _balance_kept(self, s: Scored, shapes: list[GradientShape], found: Contracted, factor: float) -> None:
        streamed = self.directions.streaming.get(s.parameter)
        if streamed is not None:
            # Other uses of this weight streamed: contract the kept ones with that direction too, then all must add up.
            v = s.whole(streamed.v)
            total = Summed.none(len(v), v.device)
            for shape in shapes:
                total += Summed.of(shape.contract(v))
            self._balances[s.parameter] = self._balance(s, total, None, v)
            return
        gradient = s.used_gradient
        used = gradient if found.rows is None else gradient[found.rows]
        self._balances[s.parameter] = self._balance(s, found.contributed.times(factor), used, found.v)

    def _balance(self, s: Scored, contributed: Summed, gradient: Tensor | None, v: Tensor) -> Balance:
        """Put both sides of a sum together; of several processes the gradient is that of others, too (``_balance_all``)."""
        if gradient is None or self.processes.several:
            return Balance(s, contributed, *(torch.zeros_like(contributed.total) for _ in range(3)))
        return balance_of(s, contributed, products_with(gradient, v).to(contributed.total.device))

    def _balance_streamed(self, mine: list[Scored], microbatches: list[Microbatch], factor: float) -> None:
        for s in mine:
            direction = self.directions.streaming.get(s.parameter)
            if direction is None or s.parameter.grad is None:
                continue
            sums = []
            for m in microbatches:
                sums += [Summed.of(c) for c in m.sums_of(s)]
                if s in m.row_sums and (c := m.row_sums[s].grad) is not None:
                    sums.append(Summed.of(c.double().sum(2)))
                if s in (booked := self._replayed.get(m, {})):
                    sums.append(Summed.of(booked[s]))
            if s.parameter in self._balances:
                sums.append(self._balances[s.parameter].contributed)
            if sums:
                total = sum(sums[1:], sums[0]).times(factor)
                self._balances[s.parameter] = self._balance(s, total, s.used_gradient, direction.v)

    def _balance_all(self, mine: list[Scored]) -> None:
        """Of several processes: both sides of every parameter's sum, for the samples of all of them.

        A process that has no sample with gradient for a parameter has 0 on its side, and the same gradient. Sizes of terms, to
        which rounding is relative, are each process's own.
        """
        of = {s: v for s in mine if s.parameter.grad is not None and (v := self.directions.whole(s)) is not None}
        if not of:
            return
        sums, sizes, products = [], [], []
        for s, v in of.items():
            own = self._balances.get(s.parameter)
            here = Summed.none(len(v)) if own is None else own.contributed
            sums.append(here.total.cpu())
            sizes.append(here.size.cpu())
            products.append(products_with(s.used_gradient, v))
        self.processes.sum_("conservation", sums)
        whole = self.processes.joined(torch.stack(products))
        for s, contributed, size, found in zip(of, sums, sizes, whole, strict=True):
            self._balances[s.parameter] = balance_of(s, Summed(contributed, size), found)

    def _check(self, mine: list[Scored], microbatches: list[Microbatch]) -> None:
        seen = self.factors.watch.seen
        norms = [seen[s.parameter].norm for s in mine if s.parameter in seen]
        if self.processes.agree("finite gradients", self.step, not bool(torch.isfinite(torch.stack(norms)).all())):
            return
        with self.processes.together("conservation", self.step):
            coarse = {p: d for m in microbatches for p, d in m.coarse.items()}
            if self.processes.rounds():
                coarse = {s.parameter: torch.bfloat16 for s in mine}
            causes = SECOND_ORDER if any(m.flowed_past() for m in microbatches) else USUAL_CAUSES
            rows = sum(m.n for m in microbatches) * self.processes.world
            check_balances(list(self._balances.values()), rows, self.step, coarse, causes)


def _joint_rows(shapes: list[GradientShape]) -> Tensor | None:
    """Return the rows of a parameter that any of the gradients may touch, or None for all."""
    rows = [shape.touched() for shape in shapes]
    some = [r for r in rows if r is not None]
    if len(some) < len(rows):
        return None
    return some[0] if len(some) == 1 else torch.unique(torch.cat(some))


def _zeros(microbatches: list[Microbatch], columns: int) -> dict[Microbatch, Tensor]:
    """Return nothing yet, ``[n, k]`` per microbatch."""
    return {m: torch.zeros(m.n, columns, dtype=m.dtype, device=m.device) for m in microbatches}
