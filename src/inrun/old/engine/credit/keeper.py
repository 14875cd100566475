"""Whole credit over a run: who is still being paid, by what, and when it is settled.

At step t every open row gets κ_{t,s} c_s ⟨g_n, D_t⟩, summed over parameters. What the samples get together is known exactly, one
dot product per parameter: ⟨q_t, D_t⟩ less the parts of weight decay that went through the gradient and of memory from before
scoring began (*inherited*). The difference to the sum of the estimates is spread over the open rows.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inrun.ledger.labels import Label
from inrun.ledger.record import SettledCredits
from inrun.old.engine.credit.audit import ExactAudit, SketchAudit, check_totals
from inrun.old.engine.credit.direction import Direction
from inrun.old.engine.credit.doubt import Doubt
from inrun.old.engine.credit.exact_store import ExactEntry, ExactStore
from inrun.old.engine.credit.memory import REST, PushMemory
from inrun.old.engine.credit.move import ParameterMove, WholeMove
from inrun.old.engine.credit.owing import Owed, split_rest
from inrun.old.engine.credit.payment import Open, Payment
from inrun.old.engine.credit.sketch_store import SketchStore
from inrun.old.engine.credit.sketcher import Sketcher
from inrun.old.engine.microbatch import Microbatch
from inrun.old.engine.processes import Processes
from inrun.old.engine.sites import Scored
from inrun.old.optimizers import Realised, UpdateRule

#: Finished steps after which a sketch gets new weights; later every :data:`REFRESH`.
REFRESH_AT, REFRESH = (1, 3, 10, 22), 22
#: The first steps differ most from what comes after them: they are sketched with so many times the numbers.
EARLY_STEPS, EARLY_TIMES = 10, 4
#: Steps in which uses from before are owed what they get, which is paid after the last; and the first steps, which all pay at once.
BLOCK, AT_ONCE = 11, 22
#: One block in so many ends with a step that pays all open rows by itself: so Σ|parts| of all is known now and then.
MEASURED = 4


class WholeCredit:
    """Everything that lasts over steps for whole credit."""

    def __init__(
        self,
        scored: list[Scored],
        rules: list[UpdateRule],
        exact: bool,
        sketch: int | None,
        seed: int = 0,
        processes: Processes | None = None,
    ) -> None:
        """``sketch`` is the number of numbers per sample; every process keeps those of its own samples, by the same signs."""
        self.scored, self.rules, self.exact = scored, rules, exact
        self.processes = processes or Processes()
        self.memory = PushMemory(len(scored))
        #: What gradients of every open step were multiplied by when they entered, ``[steps, parameters]``.
        self.factors = np.zeros((0, len(scored)))
        self.open: list[Open] = []
        self.store: ExactStore | SketchStore
        self.audit: SketchAudit | None = None
        self.doubt: Doubt | None = None
        #: None where gradients are kept as they are and several processes would have to add theirs up whole.
        self.exact_audit: ExactAudit | None = None
        if exact:
            self.store = ExactStore(scored)
            self.exact_audit = None if self.processes.several else ExactAudit(scored)
        else:
            assert sketch is not None
            usual = Sketcher(scored, sketch, seed)
            early = Sketcher(scored, EARLY_TIMES * sketch, seed, like=usual)
            self.store, self.audit, self.doubt = SketchStore(early, usual), SketchAudit(early), Doubt(sketch)
        #: Memory of coupled weight decay, Σ a λw, by parameter; of what was there before scoring began, with its factor.
        self.decays: dict[int, Tensor] = {}
        self.inherited: dict[int, tuple[Tensor, float]] = {}
        self.columns: list[Label] | None = None
        #: What older uses are owed, and Σ|parts| of all open rows over that of a step's own, as it was last.
        self.owed = Owed.from_now(np.zeros((0, len(scored))))
        self.to_all = torch.ones(1, dtype=torch.float64)
        #: What the samples got so far, and how much of it was missing in the estimates and spread, ``[k]`` each.
        self.given = self.spread = torch.zeros(1, dtype=torch.float64)
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
        owed: Owed,
        sums: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Go on from a saved state (see ``credit.state``)."""
        self.owed, (self.to_all, self.given, self.spread) = owed, sums
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
        found = [self.rules[s.optimizer].remembered(s.state) for s in self.scored]
        some = torch.tensor([held is not None and bool(torch.any(held != 0)) for held in found], dtype=torch.int32)
        for i, (held, count) in enumerate(zip(found, self.processes.joined(some).tolist(), strict=True)):
            if held is not None and count:
                self.inherited[i] = (held.detach().clone(), 1.0)
        if self.audit is not None and isinstance(self.store, SketchStore):
            self.audit.restart(self.store.sketcher)
        if self.exact_audit is not None:
            self.exact_audit.forget()

    # One step

    def capture(self, microbatches: list[Microbatch], k: int, quietly: Any) -> Any:
        """Collect what the backwards left of the coming step's rows."""
        if isinstance(self.store, SketchStore):
            return self.store.capture(microbatches, k, quietly)
        return self.store.capture(microbatches, quietly)

    def add_up(self, entry: Any) -> None:
        """Add the coming step's sketches up over samples and processes: what the audit follows."""
        if self.audit is not None:
            entry.entering = self.audit.entering(entry)
            self.processes.sum_("sketch", entry.entering)
        elif self.exact_audit is not None:
            entry.entering = self.exact_audit.added_up(entry)

    def check_memory(self, move: WholeMove, entry: Any, decays: dict[int, Tensor], step: int, coarse: bool) -> None:
        """Raise if what the optimizers remember is not what the samples pushed, before anything is paid."""
        if self.audit is not None and isinstance(self.store, SketchStore):
            self.audit.check(move, entry, self.store.weights_now, decays, self.inherited, step, coarse)
        elif self.exact_audit is not None and self.exact_audit.remembered:
            self.exact_audit.check(move, entry, [], decays, self.inherited, step, coarse)

    @torch.no_grad()
    def pay(
        self,
        move: WholeMove,
        raw: list[Tensor | None],
        entry: Any,
        checked: bool,
        step: int,
        to_all: bool = True,
        coarse: Set[nn.Parameter] = frozenset(),
    ) -> Payment:
        """Work out what a step pays, given the averaged validation gradients: to all open rows, or to those of its block.

        Nothing is changed yet, but that what earlier steps owe is paid first where all are.
        """
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
                decay += m.shrink * _dots(gradient, m.scored.weight)
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
        total, decay, inherited = self.processes.joined(torch.stack([total, decay, inherited]))
        paces = np.array([move.moves[i].realised.pace if i in whole else 0.0 for i in range(len(self.scored))])
        own = np.array([[move.moves[i].factor if i in move.moves else 0.0 for i in range(len(self.scored))]])
        kappa = self.memory.look(move.recalls()) * np.vstack([self.factors, own]) * paces
        direction = Direction(whole, k)
        if isinstance(entry, ExactEntry):
            entry.factors = {i: m.realised.entry.to("cpu") for i, m in move.moves.items() if m.realised.entry is not None}
        if checked:
            check_totals(move, entry, self.store, step, self.processes, coarse)
        empty = torch.zeros(0, k, dtype=torch.float64)
        none, first = torch.zeros_like(total), self.owed.count
        books = (total, decay, inherited, none, none, none)
        payment = Payment(move, direction, entry, kappa, paces, empty, first, none, self.to_all, *books)
        if to_all or self.pays_at_once or self.owed.count == 0:
            return self.to_all_rows(payment)
        parts = self.store.parts([*self.store.entries[first:], entry], kappa[first:], direction).cpu()
        return self._measured(replace(payment, parts=parts))

    def _measured(self, payment: Payment) -> Payment:
        """Add up what rows get, on all processes."""
        sums = torch.stack([payment.parts.sum(0), payment.parts.abs().sum(0), payment.own.abs().sum(0)])
        paid, absolute, own = self.processes.summed("whole credit", sums)
        return replace(payment, paid=paid, paid_absolute=absolute, own_absolute=own)

    def _with_rest(self, data: Tensor, parts: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return what of ``data`` ``[k]`` is missing in the parts of all processes, and what each of our rows gets of it."""
        given, whole = self.processes.summed("whole credit", torch.cat([parts.sum(0), sizes.sum().view(1)])).split([len(data), 1])
        rest = data - given
        return rest, split_rest(rest, sizes, float(whole))

    @property
    def pays_at_once(self) -> bool:
        """Whether the coming step pays all open rows whatever it is like."""
        measured = self.owed.steps >= BLOCK - 1 and self.steps // BLOCK % MEASURED == 0
        return self.steps < AT_ONCE or measured

    @torch.no_grad()
    def to_all_rows(self, payment: Payment) -> Payment:
        """Return a payment to all open rows; what earlier steps owe is paid first."""
        self.pay_owed()
        everyone = [*self.store.entries, payment.entry]
        parts = self.store.parts(everyone, payment.kappa, payment.direction).cpu()
        sizes = np.repeat(np.abs(payment.kappa).mean(1), [e.n for e in everyone])
        rest, shares = self._with_rest(payment.data, parts, self.store.weights(everyone).cpu() * torch.from_numpy(sizes))
        return self._measured(replace(payment, parts=parts + shares, first=0, rest=rest))

    @torch.no_grad()
    def _owed_parts(self, alone: bool = False) -> tuple[list[Tensor], Tensor]:
        """Return what the rows of all open steps are to get of what is owed, and the block's rest that is spread in it.

        ``alone`` asks no other process, and spreads nothing if there are others.
        """
        owed = self.owed
        entries: list[Any] = list(self.store.entries)
        assert owed.rest is not None
        parts = self.store.parts(entries[: owed.count], owed.a, owed.direction()).cpu()
        sizes = self.store.weights(entries).cpu() * torch.from_numpy(np.repeat(owed.sizes, [e.n for e in entries]))
        if alone and self.processes.several:
            rest, found = torch.zeros_like(owed.rest), torch.zeros(len(sizes), len(owed.rest), dtype=torch.float64)
        else:
            rest, found = self._with_rest(owed.rest, parts, sizes)
        found[: len(parts)] += parts
        return list(found.split([e.n for e in entries])), rest

    @torch.no_grad()
    def pay_owed(self, alone: bool = False) -> None:
        """Pay what is owed, and begin a block."""
        if self.owed.steps:
            parts, rest = self._owed_parts(alone)
            self.spread = self.spread + rest
            for o, part in zip(self.open, parts, strict=True):
                o.credit += part
            owed = self.owed
            if isinstance(self.store, SketchStore):
                sizes = np.abs(owed.a * owed.passed).max(1, initial=0.0)
                self.store.note(self.store.entries[: owed.count], owed.a, owed.direction(), sizes)
        self.owed = Owed.from_now(self.memory.a * self.factors)

    def decay_through(self, i: int, m: ParameterMove, decays: dict[int, Tensor]) -> Tensor | None:
        """Return the part of q that is coupled weight decay; note its memory as it will be."""
        if m.entering_decay == 0.0 and i not in self.decays:
            return None
        weight = m.scored.weight.to(m.realised.q.dtype) * m.entering_decay
        if m.realised.entry is not None:
            weight = weight * m.realised.entry
        before = self.decays.get(i)
        after = weight * m.recall.enter if before is None else before * m.recall.keep + weight * m.recall.enter
        decays[i] = after
        return after * m.recall.read + weight * m.recall.direct

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
        elif self.exact_audit is not None and self.exact_audit.remembered:
            self.exact_audit.advance(move, entry)
        if isinstance(entry, ExactEntry):
            entry.entering = []  # as large as the model, and of no more use
        if payment is not None:
            paid = self.open[payment.first :]
            for o, part in zip(paid, payment.parts.split([*(len(o.credit) for o in paid), entry.n])[:-1], strict=True):
                o.credit += part
            self.given, self.spread = self.given + payment.data, self.spread + payment.rest
            self._note(payment)
        own = torch.zeros(entry.n, k, dtype=torch.float64) if payment is None else payment.own.clone()
        self.open.append(Open(step, ids, own, self._row_numbers(entry.n)))
        self.factors = np.vstack(
            [self.factors, [[move.moves[i].factor if i in move.moves else 0.0 for i in range(len(self.scored))]]]
        )
        self.store.push(entry)
        recalls = move.recalls()
        self.memory.advance(recalls)
        self.owed.step(recalls)
        if payment is not None and payment.first:
            store = self.store
            by = store.sketchers_of(store.entries[: payment.first]) if isinstance(store, SketchStore) else None
            rest = payment.data - payment.paid
            self.owed.add(recalls, payment.paces, payment.direction, payment.kappa, rest, by)
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
        if payment is not None and payment.first and self.owed.steps < BLOCK:
            return []  # uses are settled when a block has paid
        if payment is not None and not payment.first:
            own = payment.own_absolute
            self.to_all = torch.where(own > 0, payment.spread / torch.where(own > 0, own, 1.0), 1.0)
        self.pay_owed()
        settled = self._settle(self.memory.passed())
        self.owed = Owed.from_now(self.memory.a * self.factors)
        return settled

    def _note(self, payment: Payment) -> None:
        """Remember what is paid as far as the errors of estimates need it."""
        if isinstance(self.store, SketchStore):
            self.store.measure_rows(payment.entry, payment.direction)
            some, kappa = [*self.store.entries[payment.first :], payment.entry], payment.kappa[payment.first :]
            self.store.note(some, kappa, payment.direction, np.abs(kappa).max(1))

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
            moves = {i: (m.realised.gain, m.realised.q) for i, m in move.moves.items()}
            early = self.steps < EARLY_STEPS
            if early == self.store.early and not any(isinstance(gain, Tensor) for gain, _ in moves.values()):
                return
            self.store.begin_epoch(moves, early)
            remembered = {i: self.rules[s.optimizer].remembered(s.state) for i, s in enumerate(self.scored)}
            self.audit.rebase(self.store.sketcher, remembered, self.store.weights_now, self.decays, self.inherited)

    def _row_numbers(self, n: int) -> Tensor | None:
        """Return the numbers of this process's rows among those of all; None for a process alone."""
        if not self.processes.several:
            return None
        counts = torch.zeros(self.processes.world, dtype=torch.int64)
        counts[self.processes.rank] = n
        before = self.processes.summed("small", counts)[: self.processes.rank].sum()
        return torch.arange(n) + before

    # The end of a window

    def _settle(self, count: int, alone: bool = False) -> list[SettledCredits]:
        if count == 0:
            return []
        assert self.columns is not None
        errors = self.store.errors(count, len(self.columns), None if alone else self.processes)
        paid = self.memory.shares_paid()
        found = [
            _settled(o, error, float(share), self.columns)
            for o, error, share in zip(self.open[:count], errors, paid[:count], strict=True)
        ]
        self.open, self.factors = self.open[count:], self.factors[count:]
        self.store.drop(count)
        self.memory.forget(count)
        if self.doubt is not None:
            self.doubt.add(found)
        return found

    def settle_all(self, alone: bool = False) -> list[SettledCredits]:
        """Settle whatever is open: training has ended, or the optimizer's memory is no longer made of these uses.

        All processes do so together, but for one that is ``alone`` since something went wrong.
        """
        self.pay_owed(alone)
        found = self._settle(len(self.open), alone)
        self.owed = Owed.from_now(self.memory.a * self.factors)
        self.begun = False
        return found

    def so_far(self, together: bool = False) -> list[SettledCredits]:
        """Return the credit so far of all open uses, as if they were settled.

        ``together`` tells that all processes ask. Otherwise none is asked: what is still to be spread over the rows of all in the
        open block is then left out.
        """
        if not self.open or self.columns is None:
            return []
        errors = self.store.errors(len(self.open), len(self.columns), self.processes if together else None)
        paid = self.memory.shares_paid()
        open_ = self.open
        if self.owed.steps:
            parts, _ = self._owed_parts(alone=not together)
            open_ = [replace(o, credit=o.credit + part) for o, part in zip(open_, parts, strict=True)]
        return [_settled(o, e, float(p), self.columns) for o, e, p in zip(open_, errors, paid, strict=True)]

    def expected(self, entry: Any, move: WholeMove) -> tuple[int, int]:
        """Return how many steps a window has, and the most that will be held with rows like these in every step, in bytes."""
        later = max((m.recall.later for m in move.moves.values()), default=0.0)
        steps = 1 if later <= 0 else min(10_000, math.ceil(math.log(REST) / math.log(min(later, 0.9999))))
        moved = [x for m in move.moves.values() for x in (m.realised.q, m.realised.gain) if isinstance(x, Tensor)]
        always = sum(x.nbytes for x in moved)
        steps += 0 if later <= 0 else BLOCK - 1
        if not isinstance(self.store, SketchStore):
            owed = (
                0
                if later <= 0 or self.columns is None
                else len(self.columns) * sum(m.realised.q.nbytes for m in move.moves.values())
            )
            return steps, steps * self.store.nbytes_of(entry) + always + owed
        return steps, self.store.expected_bytes(entry, steps, EARLY_STEPS, REFRESH) + always

    def nbytes(self) -> int:
        """Return the memory of all that is kept between steps."""
        held = [*self.decays.values(), *(h for h, _ in self.inherited.values())]
        held += [x for r in self.free.values() for x in (r.q, r.gain) if isinstance(x, Tensor)]
        return self.store.nbytes() + self.owed.nbytes() + sum(x.nbytes for x in held)


def _settled(o: Open, error: Tensor, paid: float, columns: list[Label]) -> SettledCredits:
    values, errors = o.credit.numpy().astype(np.float32), error.cpu().numpy().astype(np.float32)
    return SettledCredits(
        step=o.step,
        sample_ids=o.ids.numpy(),
        credits={str(c): values[:, j].copy() for j, c in enumerate(columns)},
        errors={str(c): errors[:, j].copy() for j, c in enumerate(columns)},
        paid=np.full(len(values), paid, np.float32),
        rows=None if o.rows is None else o.rows.numpy(),
    )


def _dots(d: Tensor, x: Tensor) -> Tensor:
    """Return ⟨d_k, x⟩ in double precision, ``[k]``."""
    return (d.reshape(len(d), -1) @ x.reshape(-1).to(d.dtype)).double().cpu()
