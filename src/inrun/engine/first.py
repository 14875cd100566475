"""Theorems 1 and 2 of the paper, with its SGD proxy: η c ⟨g_n, ∇ℓ(w)⟩, or η c ⟨g_n, ∇ℓ(w) − (η/2) H Σ g⟩."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inrun.engine.checks import check_products, nothing
from inrun.engine.parameters import Parameters
from inrun.engine.readers import Request, contract_rows, products
from inrun.engine.reading import Reading, clip_from_products, ratio
from inrun.engine.scorer import Accounts, Outcome, Scorer, finite
from inrun.engine.validation import Gradients, Validation
from inrun.layers.gradients import LookUp

if TYPE_CHECKING:
    from inrun.engine.move import Mover


class FirstScorer(Scorer):
    """Contracts with the validation gradient in the backward; nothing is kept."""

    def __init__(self, parameters: Parameters, validation: Validation) -> None:
        super().__init__(parameters, validation)
        self._found: Gradients
        self._directions: dict[int, Tensor] = {}
        #: What gradients are contracted with in this step.
        self._checked: dict[int, Tensor] = {}
        #: ±η by place, as they are when an optimizer steps.
        self._signed_rates: dict[int, Any] = {}
        self._failures: Tensor | None = None

    def begin(self, step: int) -> None:
        """Take the validation gradient at the weights before the step."""
        self._take(self.validation.gradients(self.parameters.tensors(), step))

    def _take(self, found: Gradients) -> None:
        self._found, dtype = found, self.parameters.dtype
        every = ((i, found.of(i, dtype)) for i in range(len(self.parameters.scored)))
        self._directions = {i: v for i, v in every if v is not None}

    def request(self, n: int, longest: int | None, audited: bool) -> Request:
        """Contract with the validation gradient; for an audit with random signs, too: no change is at right angles to both."""
        self._prepare(audited)
        directions, k = self.parameters.gathered(self._checked), len(self._found.labels)
        signed = frozenset(self._checked) if audited else frozenset()
        return Request(n, self.parameters.dtype, directions=directions, k=k, signed=signed, longest=longest)

    def _prepare(self, audited: bool) -> None:
        """Take random signs beside the directions, if the step is audited."""
        self._checked = self._directions
        if audited:
            self._checked = {i: torch.cat([v, _signs(i, v[:1])]) for i, v in self._directions.items()}

    def clip(self, readings: Sequence[Reading], optimizer: int) -> Tensor:
        """Compare inner products; note the learning rates, which a schedule may change before the step ends."""
        self._note_rates(optimizer)
        return clip_from_products(readings, self.parameters.of(optimizer), self._directions, self.parameters.processes)

    def check(self, readings: Sequence[Reading], optimizer: int, clip: Tensor) -> None:
        """Check conservation."""
        if self._failures is None:
            self._failures = nothing(self.parameters)
        some, processes = self.parameters.of(optimizer), self.parameters.processes
        check_products(self._failures[:2], some, _all_products(readings), clip, self._checked, processes)

    def drop(self) -> None:
        """Forget the check."""
        self._failures = None

    @torch.no_grad()
    def score(self, step: int, mover: Mover, readings: Sequence[Reading], clips: dict[int, Tensor]) -> Outcome:
        """Add up over parameters."""
        found, dtype = self._found, self.parameters.dtype
        parts = [self._contributions(r, clips) for r in readings]
        contributions = torch.cat(parts) if parts else torch.zeros(0, len(found.labels), dtype=dtype)
        processes = self.parameters.processes
        sums = torch.stack([contributions.sum(0, dtype=torch.float64), contributions.abs().sum(0, dtype=torch.float64)])
        total, abs_sum = processes.all_reduced("sums of contributions", sums)
        accounts = Accounts(total, abs_sum, before=found.losses, points=1)
        valid = torch.stack([processes.all_true(finite(contributions, *clips.values())), finite(found.losses)])
        failures, self._failures = self._failures, None
        if failures is not None:  # an audit
            accounts.after, accounts.by_tensor = self.validation.losses(step), self._by_tensor(readings, clips)
        return Outcome(found.labels, found.losses, contributions, accounts, valid, failures)

    def _contributions(self, reading: Reading, clips: dict[int, Tensor]) -> Tensor:
        """Return Σ η c ⟨g_n, v⟩ over the parameters that were stepped, ``[n, k]``."""
        total: Tensor | None = None
        for optimizer, clip in clips.items():
            some = [s for s in self.parameters.of(optimizer) if s.place in reading.products]
            if not some:
                continue
            products = torch.stack([reading.products[s.place] for s in some], 2)
            part = products @ self._rates([s.place for s in some]).to(products.dtype)
            part = part * clip
            total = part if total is None else total + part
        if total is None:
            like = self._found.losses
            total = torch.zeros(reading.n, len(like), dtype=self.parameters.dtype, device=like.device)
        return total

    def _note_rates(self, optimizer: int) -> None:
        for s in self.parameters.of(optimizer):
            lr, sign = s.group["lr"], -1 if s.group.get("maximize") else 1
            self._signed_rates[s.place] = lr * sign

    def _by_tensor(self, readings: Sequence[Reading], clips: dict[int, Tensor]) -> Tensor:
        """Return Σ|contribution| by tensor, ``[k, tensors]``."""
        total = torch.zeros(
            len(self._found.labels), len(self.parameters.scored), dtype=torch.float64, device=self.parameters.device
        )
        for optimizer, clip in clips.items():
            places = [s.place for s in self.parameters.of(optimizer)]
            rates = (self._rates(places) * clip).abs().double()
            for i, rate in zip(places, rates, strict=True):
                parts = [r.products[i].abs().sum(0, dtype=torch.float64) for r in readings if i in r.products]
                total[:, i] = rate * torch.stack(parts).sum(0) if parts else 0.0
        return self.parameters.processes.all_reduced("sums of contributions by tensor", total)

    def _rates(self, places: list[int]) -> Tensor:
        """Return ±η of some parameters, a vector."""
        rates = [self._signed_rates[i] for i in places]
        if any(isinstance(r, Tensor) for r in rates):
            device = self.parameters.device
            return torch.stack([torch.as_tensor(r, dtype=torch.float32).to(device).reshape(()) for r in rates])
        if len(set(rates)) == 1:
            return torch.full((len(rates),), float(rates[0]), dtype=self.parameters.dtype, device=self.parameters.device)
        return torch.tensor(rates, dtype=self.parameters.dtype).to(self.parameters.device, non_blocking=True)


def _signs(place: int, like: Tensor) -> Tensor:
    """Return random signs, the same ones for a tensor at every audit."""
    drawn = torch.randint(0, 2, like.shape, generator=torch.Generator().manual_seed(place), dtype=torch.int8)
    return drawn.to(like.device, like.dtype).mul_(2).sub_(1)


def _all_products(readings: Sequence[Reading]) -> list[Reading]:
    """Return readings whose products are those with signs, too."""
    return [
        replace(r, products={i: torch.cat([x, r.signed[i]], 1) if i in r.signed else x for i, x in r.products.items()})
        for r in readings
    ]


class SecondScorer(FirstScorer):
    """Keeps the per-sample gradients until the batch's gradient, and with it the direction, is known."""

    _audited = False

    def begin(self, step: int) -> None:
        """Nothing is known before the backward."""

    def request(self, n: int, longest: int | None, audited: bool) -> Request:
        """Keep the gradients."""
        self._audited = audited
        return Request(n, self.parameters.dtype, keeps=True, longest=longest)

    def clip(self, readings: Sequence[Reading], optimizer: int) -> Tensor:
        """Compare the batch's gradients."""
        self._note_rates(optimizer)
        known, now = [], []
        for s in self.parameters.of(optimizer):
            totals = [g.total() for r in readings for i, g in r.kept if i == s.place]
            if s.grad is not None and (totals or self.parameters.processes.several):
                total = torch.stack(totals).sum(0) if totals else torch.zeros_like(s.grad)
                known.append(total.reshape(-1).to(self.parameters.dtype))
                now.append(s.grad.reshape(-1).to(self.parameters.dtype))
        processes = self.parameters.processes
        if not known:
            return torch.full((), 1.0 / processes.world, dtype=self.parameters.dtype)
        return ratio(processes.all_reduced("sums of gradients", torch.cat(known)), torch.cat(now), processes)

    def before_move(self, step: int, readings: Sequence[Reading], clips: dict[int, Tensor]) -> None:
        """Take ∇ℓ − (η/2) H Σg with the gradient that the optimizer is about to use, and contract."""
        for optimizer in {s.optimizer for s in self.parameters.scored}:
            self._note_rates(optimizer)
        rates = self._rates([s.place for s in self.parameters.scored])
        move = [None if s.grad is None else s.grad * -rate for s, rate in zip(self.parameters.scored, rates, strict=True)]
        self._take(self.validation.gradients(self.parameters.tensors(), step, move))
        self._prepare(self._audited)
        with torch.no_grad():
            for r in readings:
                self._contract(r)

    def _contract(self, reading: Reading) -> None:
        """Turn kept gradients into inner products with the direction."""
        k = len(self._found.labels)
        for i, g in reading.kept:
            v = self._checked.get(i)
            if v is None:
                continue
            if isinstance(g, LookUp):
                found = contract_rows(g, v).to(v.dtype)
            else:
                parts = [part.reshape(len(part), -1).to(v.dtype) for _, _, part in g.chunks()]
                found = torch.cat([products(part, v.reshape(len(v), -1), k) for part in parts])
            for held, x in ((reading.products, found[:, :k]), (reading.signed, found[:, k:])):
                if x.shape[1] > 0:
                    held[i] = held[i] + x if i in held else x
