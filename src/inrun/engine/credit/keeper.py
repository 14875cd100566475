"""Whole credit over a run: who is still being paid, by what, and when it is settled.

At step t every open row gets κ_{t,s} c_s ⟨g_n, D_t⟩, summed over parameters. What the samples get together is known exactly, one
dot product per parameter: ⟨q_t, D_t⟩ less the parts of weight decay that went through the gradient and of memory from before
scoring began (*inherited*). The difference to the sum of the estimates is spread over the open rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inrun.engine.credit.audit import SketchAudit, check_totals
from inrun.engine.credit.direction import Direction
from inrun.engine.credit.exact_store import ExactEntry, ExactStore
from inrun.engine.credit.memory import REST, PushMemory
from inrun.engine.credit.move import ParameterMove, WholeMove
from inrun.engine.credit.sketch_store import SketchStore
from inrun.engine.credit.sketcher import Sketcher
from inrun.engine.microbatch import Microbatch
from inrun.engine.sites import Scored
from inrun.ledger.labels import Label
from inrun.ledger.record import SettledCredits
from inrun.optimizers import Realised, UpdateRule

#: Finished steps after which a sketch gets new weights; later every :data:`REFRESH`.
REFRESH_AT, REFRESH = (1, 3, 10, 22), 22
#: The first steps differ most from what comes after them: they are sketched with so many times the numbers.
EARLY_STEPS, EARLY_TIMES = 10, 4
#: How often payments are noted for the errors of estimates.
NOTE_EVERY = 4


@dataclass
class Open:
    """The uses of one step that are still being paid."""

    step: int
    ids: Tensor
    #: ``[n, k]``, in double precision.
    credit: Tensor


@dataclass
class Payment:
    """What one step pays, before it is final: nothing has changed yet."""

    move: WholeMove
    direction: Direction
    entry: Any
    kappa: Any
    #: ``[rows, k]``: what every open row gets, the coming step's rows last; before and after the rest was spread.
    estimated: Tensor
    parts: Tensor
    #: ``[k]`` each, in double precision: what the samples get together, decay, inherited.
    data: Tensor
    decay: Tensor
    inherited: Tensor

    @property
    def own(self) -> Tensor:
        """Return what the coming step's rows get, ``[n, k]``."""
        return self.parts[len(self.parts) - self.entry.n :]

    @property
    def spread(self) -> Tensor:
        """Return Σ|parts|, ``[k]``."""
        return self.parts.abs().sum(0)

    @property
    def whole(self) -> Tensor:
        """Return all that the move was worth, ``[k]``."""
        return self.data + self.decay + self.inherited


class WholeCredit:
    """Everything that lasts over steps for whole credit."""

    def __init__(self, scored: list[Scored], rules: list[UpdateRule], exact: bool, sketch: int | None, seed: int = 0) -> None:
        """``sketch`` is the number of numbers per sample."""
        self.scored, self.rules, self.exact = scored, rules, exact
        self.memory = PushMemory(len(scored))
        #: What gradients of every open step were multiplied by when they entered, ``[steps, parameters]``.
        self.factors = np.zeros((0, len(scored)))
        self.open: list[Open] = []
        self.store: ExactStore | SketchStore
        self.audit: SketchAudit | None = None
        if exact:
            self.store = ExactStore(scored)
        else:
            assert sketch is not None
            usual = Sketcher(scored, sketch, seed)
            early = Sketcher(scored, EARLY_TIMES * sketch, seed, like=usual)
            self.store, self.audit = SketchStore(early, usual), SketchAudit(early)
        #: Memory of coupled weight decay, Σ a λw, by parameter; of what was there before scoring began, with its factor.
        self.decays: dict[int, Tensor] = {}
        self.inherited: dict[int, tuple[Tensor, float]] = {}
        self.columns: list[Label] | None = None
        #: What the last step made of each parameter, whose memory the next one takes.
        self.free: dict[int, Realised] = {}
        self.steps = 0
        self.begun = False

    def expect(self, columns: list[Label]) -> None:
        """Fix the validation sets, points and folds of the run."""
        self.columns = columns

    def restore(
        self,
        steps: int,
        begun: bool,
        columns: list[Label] | None,
        open_: list[Open],
        factors: Any,
        decays: dict[int, Tensor],
        inherited: dict[int, tuple[Tensor, float]],
    ) -> None:
        """Go on from a saved state (see ``credit.state``)."""
        self.steps, self.begun, self.columns, self.open, self.factors = steps, begun, columns, open_, factors
        self.decays, self.inherited = decays, inherited

    # What a step asks before its backward

    def begin(self) -> None:
        """Before the first step that is scored (again): what the optimizers remember is nobody's here."""
        if self.begun:
            return
        self.begun = True
        self.decays = {}
        self.inherited = {}
        for i, s in enumerate(self.scored):
            held = self.rules[s.optimizer].remembered(s.state)
            if held is not None and bool(torch.any(held != 0)):
                self.inherited[i] = (held.detach().clone(), 1.0)
        if self.audit is not None and isinstance(self.store, SketchStore):
            self.audit.restart(self.store.sketcher)

    # One step

    def capture(self, microbatches: list[Microbatch], k: int, quietly: Any) -> Any:
        """Collect what the backwards left of the coming step's rows."""
        if isinstance(self.store, SketchStore):
            return self.store.capture(microbatches, k, quietly)
        return self.store.capture(microbatches, quietly)

    @torch.no_grad()
    def pay(self, move: WholeMove, raw: list[Tensor | None], entry: Any, checked: bool, step: int) -> Payment:
        """Work out what a step pays, given the averaged validation gradients; nothing is changed yet."""
        k = len(next(g for g in raw if g is not None))
        decay, inherited = torch.zeros(k, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)
        total = torch.zeros(k, dtype=torch.float64)
        whole: dict[int, Tensor] = {}
        for i, m in move.moves.items():
            through = self.decay_through(i, m, {})
            if raw[i] is None:
                continue
            gradient = raw[i]
            assert gradient is not None
            if m.shrink != 0.0:
                decay += m.shrink * _dots(gradient, m.scored.parameter.detach())
            d = whole[i] = move.direction(i, gradient)
            pace = m.realised.pace
            total += pace * _dots(d, m.realised.q)
            if through is not None:
                part = pace * _dots(d, through)
                decay += part
                total -= part
            if i in self.inherited:
                held, alpha = self.inherited[i]
                part = pace * m.recall.read * m.recall.keep * alpha * _dots(d, held)
                inherited += part
                total -= part
        paces = np.array([move.moves[i].realised.pace if i in whole else 0.0 for i in range(len(self.scored))])
        own = np.array([[move.moves[i].factor if i in move.moves else 0.0 for i in range(len(self.scored))]])
        kappa = self.memory.look(move.recalls()) * np.vstack([self.factors, own]) * paces
        direction = Direction(whole, k)
        if isinstance(entry, ExactEntry):
            entry.factors = {i: m.realised.entry.to("cpu") for i, m in move.moves.items() if m.realised.entry is not None}
        if checked:
            check_totals(self.scored, move, entry, self.store, step)
        estimated = self.store.parts(entry, kappa, direction).cpu()
        parts = self._spread(estimated, total - estimated.sum(0), kappa, entry)
        return Payment(move, direction, entry, kappa, estimated, parts, total, decay, inherited)

    def decay_through(self, i: int, m: ParameterMove, decays: dict[int, Tensor]) -> Tensor | None:
        """Return the part of q that is coupled weight decay; note its memory as it will be."""
        if m.entering_decay == 0.0 and i not in self.decays:
            return None
        weight = m.scored.parameter.detach().to(m.realised.q.dtype) * m.entering_decay
        if m.realised.entry is not None:
            weight = weight * m.realised.entry
        before = self.decays.get(i)
        after = weight * m.recall.enter if before is None else before * m.recall.keep + weight * m.recall.enter
        decays[i] = after
        return after * m.recall.read + weight * m.recall.direct

    def _spread(self, estimated: Tensor, rest: Tensor, kappa: Any, entry: Any) -> Tensor:
        """Share out the rest over the open rows in proportion to κ times the size of their gradients."""
        counts = [o.credit.shape[0] for o in self.open] + [entry.n]
        size = np.abs(kappa).mean(1)
        shares = self.store.weights(entry).cpu() * torch.from_numpy(np.repeat(size, counts))
        whole = float(shares.sum())
        if whole == 0.0:
            return estimated
        return estimated + (shares / whole).unsqueeze(1) * rest

    @torch.no_grad()
    def commit(
        self, payment: Payment | None, move: WholeMove, entry: Any, step: int, ids: Tensor, decays: dict[int, Tensor]
    ) -> list[SettledCredits]:
        """The step happened: pay, remember its rows, and settle what is over. Without a payment nothing is paid.

        ``decays`` is the memory of coupled weight decay as it is after the step.
        """
        assert self.columns is not None
        k = len(self.columns)
        if self.audit is not None:
            assert isinstance(self.store, SketchStore)
            self.audit.advance(move, entry)
        start = 0
        for o in self.open:
            if payment is not None:
                o.credit += payment.parts[start : start + len(o.credit)]
            start += len(o.credit)
        own = torch.zeros(entry.n, k, dtype=torch.float64) if payment is None else payment.own.clone()
        self.open.append(Open(step, ids, own))
        self.factors = np.vstack(
            [self.factors, [[move.moves[i].factor if i in move.moves else 0.0 for i in range(len(self.scored))]]]
        )
        if isinstance(self.store, SketchStore) and payment is not None:
            # One step in so many stands for those around it: errors need no more.
            self.store.note(entry, payment.kappa * NOTE_EVERY, payment.direction, self.steps % NOTE_EVERY == 0)
        self.store.push(entry)
        self.memory.advance(move.recalls())
        self.inherited = {
            i: (held, alpha * (move.moves[i].recall.keep if i in move.moves else 1.0))
            for i, (held, alpha) in self.inherited.items()
            if alpha > 1e-12
        }
        self.decays |= decays
        if payment is not None:
            self._learn(payment)
        self.free |= {i: m.realised for i, m in move.moves.items()}
        self.steps += 1
        return self._settle(self.memory.passed())

    def _learn(self, payment: Payment) -> None:
        """Keep this step's direction as the known one of the next, and give the sketch new weights from time to time."""
        if not isinstance(self.store, SketchStore):
            return
        known = dict(self.store.known_whole) | payment.direction.whole
        fresh = payment.direction.sums(self.store.sketcher)
        sums = list(self.store.known) if self.store.known is not None else list(fresh)
        for i in payment.direction.whole:
            sums[i] = fresh[i]
        self.store.known_whole, self.store.known = known, sums

    def refresh(self, move: WholeMove) -> None:
        """After the optimizers have stepped: new weights for the sketch, if it is time."""
        if not isinstance(self.store, SketchStore) or self.audit is None:
            return
        if self.steps in REFRESH_AT or (self.steps > REFRESH_AT[-1] and self.steps % REFRESH == 0):
            gains = {i: m.realised.gain for i, m in move.moves.items()}
            early = self.steps < EARLY_STEPS
            if early == self.store.early and not any(isinstance(g, Tensor) for g in gains.values()):
                return
            self.store.begin_epoch(gains, early)
            remembered = {i: self.rules[s.optimizer].remembered(s.state) for i, s in enumerate(self.scored)}
            self.audit.rebase(self.store.sketcher, remembered, self.store.weights_now, self.decays, self.inherited)

    # The end of a window

    def _settle(self, count: int) -> list[SettledCredits]:
        if count == 0:
            return []
        assert self.columns is not None
        errors = self.store.errors(count, len(self.columns))
        paid = self.memory.shares_paid()
        found = [
            _settled(o, error, float(share), self.columns)
            for o, error, share in zip(self.open[:count], errors, paid[:count], strict=True)
        ]
        self.open, self.factors = self.open[count:], self.factors[count:]
        self.store.drop(count)
        self.memory.forget(count)
        return found

    def settle_all(self) -> list[SettledCredits]:
        """Settle whatever is open: training has ended, or the optimizer's memory is no longer made of these uses."""
        found = self._settle(len(self.open))
        self.begun = False
        return found

    def so_far(self) -> list[SettledCredits]:
        """Return the credit so far of all open uses, as if they were settled."""
        if not self.open or self.columns is None:
            return []
        errors = self.store.errors(len(self.open), len(self.columns))
        paid = self.memory.shares_paid()
        return [_settled(o, e, float(p), self.columns) for o, e, p in zip(self.open, errors, paid, strict=True)]

    def expected(self, entry: Any, move: WholeMove) -> tuple[int, int]:
        """Return how many steps a window has, and what it will take with rows like these in every step, in bytes."""
        later = max((m.recall.later for m in move.moves.values()), default=0.0)
        steps = 1 if later <= 0 else min(10_000, math.ceil(math.log(REST) / math.log(min(later, 0.9999))))
        return steps, steps * self.store.nbytes_of(entry)

    def nbytes(self) -> int:
        """Return the memory of all that is kept between steps."""
        held = [*self.decays.values(), *(h for h, _ in self.inherited.values())]
        if isinstance(self.store, SketchStore):
            held += [*self.store.known_whole.values(), *(self.store.known or [])]
            held += [w for epoch in self.store.epochs.values() for w in epoch.weights]
            return self.store.nbytes() + self.store.sketcher.nbytes() + sum(x.nbytes for x in held)
        return self.store.nbytes() + sum(x.nbytes for x in held)


def _settled(o: Open, error: Tensor, paid: float, columns: list[Label]) -> SettledCredits:
    values, errors = o.credit.numpy().astype(np.float32), error.cpu().numpy().astype(np.float32)
    return SettledCredits(
        step=o.step,
        sample_ids=o.ids.numpy(),
        credits={str(c): values[:, j].copy() for j, c in enumerate(columns)},
        errors={str(c): errors[:, j].copy() for j, c in enumerate(columns)},
        paid=np.full(len(values), paid, np.float32),
    )


def _dots(d: Tensor, x: Tensor) -> Tensor:
    """Return ⟨d_k, x⟩ in double precision, ``[k]``."""
    return (d.reshape(len(d), -1) @ x.reshape(-1).to(d.dtype)).double().cpu()
