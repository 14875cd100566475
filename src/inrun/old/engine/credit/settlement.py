"""One step under whole credit: what is asked of its backward, and what it pays when the optimizers step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inrun.errors import ValidationError
from inrun.ledger.record import SettledCredits
from inrun.old import DeferredMemoryError
from inrun.old.engine.credit.keeper import WholeCredit
from inrun.old.engine.credit.move import WholeMove
from inrun.old.engine.credit.payment import Payment
from inrun.old.engine.credit.sketch_store import SketchStore
from inrun.old.engine.directions import Direction, Sketch
from inrun.old.engine.factors import Factors
from inrun.old.engine.look import StepLook
from inrun.old.engine.microbatch import Microbatch
from inrun.old.engine.refinement import Points, Usual, refine
from inrun.old.engine.settling import Settling
from inrun.old.engine.setup import Setup
from inrun.old.engine.sites import Scored
from inrun.old.engine.update_path import UpdatePath
from inrun.old.engine.validation import Gradients

log = logging.getLogger("inrun")
#: Bytes from which on memory is said without being asked.
WORTH_SAYING = 10_000_000


class WholeDirections:
    """What a backward is asked for: inner products with the known direction and sketches, or the gradients themselves."""

    only_contracts = False

    def __init__(self, credit: WholeCredit, setup: Setup) -> None:
        """Begin a step."""
        self.credit, self.rules, self.zero_gains = credit, setup.rules, 0
        self._place = {s: i for i, s in enumerate(setup.scored)}
        self.streaming: dict[nn.Parameter, Direction] = {}
        if isinstance(credit.store, SketchStore):
            known = credit.store.known_whole
            self.streaming = {s.parameter: Direction(known[i], 1.0) for s, i in self._place.items() if i in known}

    def stream(self, s: Scored, sparse: bool) -> Direction | None:
        """Return the known direction; look-ups are sketched row by row and need none."""
        return None if sparse else self.streaming.get(s.parameter)

    def sketch(self, s: Scored) -> Sketch | None:
        """Return how gradients are sketched."""
        store = self.credit.store
        if not isinstance(store, SketchStore):
            return None
        i = self._place[s]
        return store.sketcher.sketch(i, store.weights_now[i])

    def by_rows(self, s: Scored) -> bool:
        """No gain is corrected afterwards."""
        return False

    def is_zero(self, s: Scored) -> bool:
        """What later validation losses depend on is not known."""
        return False

    def check_options(self, optimizer: int) -> None:
        """Options are read when the optimizers step."""


@dataclass
class WholeBooks:
    """The books of one step, ``[k]`` each, in double precision; losses only where they were measured."""

    data: Tensor
    spread: Tensor
    decay: Tensor
    inherited: Tensor
    before: Tensor | None
    after: Tensor | None
    points: int

    @property
    def residual(self) -> Tensor | None:
        """Return what the quadrature missed."""
        if self.before is None or self.after is None:
            return None
        return self.before - self.after - self.data - self.decay - self.inherited


class WholeSettlement(Settling):
    """What one step pays under whole credit."""

    def __init__(
        self,
        setup: Setup,
        credit: WholeCredit,
        usual: Usual,
        path: UpdatePath,
        factors: Factors,
        step: int,
        quietly: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Begin a step."""
        super().__init__()
        self.setup, self.credit, self.usual, self.path, self.factors = setup, credit, usual, path, factors
        self.step, self.quietly = step, quietly
        self._payment: Payment | None = None
        self._move: WholeMove | None = None
        self._entry: Any = None
        #: Memory of coupled weight decay as it will be after the step.
        self._decays: dict[int, Tensor] = {}
        self.books: WholeBooks | None = None

    def contract_replays(self, micro: Microbatch) -> None:
        """Modules that run again do so when the optimizers are about to step."""

    def settle(self, optimizer: int, microbatches: list[Microbatch], checked: bool, finite: bool) -> float:
        """All was worked out before the first optimizer stepped; raise if a gradient was clipped since."""
        self.factors.settle(optimizer, others_have_stepped=self.begun)
        self.settled.add(optimizer)
        return 0.0

    # Before the first optimizer steps

    def work_out(self, look: StepLook, microbatches: list[Microbatch], audited: bool, coarse: Set[nn.Parameter]) -> Gradients:
        """Take the validation gradients along the whole move and work out what it pays.

        ``coarse`` are the parameters whose gradient came through tensors of a lower precision than their own.
        """
        credit, setup = self.credit, self.setup
        processes = setup.processes
        self._move = move = WholeMove(setup.scored, setup.rules, self.path, self.factors.measured(), credit.free, processes)
        points = setup.method.points
        found = look.averaged(move.at, points)
        self._check_columns(found)
        k = len(found.columns)
        if self._entry is None:
            with processes.together("what backwards left", self.step):
                self._entry = entry = credit.capture(microbatches, k, self.quietly)
                self.kept_bytes = credit.store.nbytes()
                if credit.steps == 0:
                    self._tell_memory(entry, move)
            credit.add_up(entry)
        for i, m in move.moves.items():
            credit.decay_through(i, m, self._decays)
        if not bool(torch.isfinite(found.losses).all()):
            return found
        credit.check_memory(move, entry, self._decays, self.step, bool(coarse))
        payment = credit.pay(move, self._own(found, k), entry, audited, self.step, to_all=audited, coarse=coarse)
        clip, fall = min(self.factors.measured().values()), float(payment.whole.abs().sum())
        rough = processes.agree("rough or not", self.step, self.usual.is_rough(clip, fall))
        self.usual.note(clip, fall)
        if rough and payment.first:
            payment = credit.to_all_rows(payment)
        before = after = None
        used = len(points)
        if audited or rough:
            before, after = self._losses(look, move)
            payment, used = refine(look, move, before, after, payment, used, lambda finer: self._with(finer, look), bool(coarse))
        self._payment = payment
        self.books = WholeBooks(payment.data, payment.spread, payment.decay, payment.inherited, before, after, used)
        return found

    def _tell_memory(self, entry: Any, move: WholeMove) -> None:
        """Say once, before any of it is taken, what the open windows will keep; raise if that is more than allowed."""
        steps, whole = self.credit.expected(entry, move)
        limit = self.setup.deferred_memory
        kind = "per-sample gradients in host memory" if self.credit.exact else "sketches"
        if limit is not None and whole > limit:
            raise DeferredMemoryError(
                f"whole credit would keep up to about {whole / 1e6:,.0f} MB of {kind} for {entry.n} rows in each of {steps} steps, "
                f'and deferred_memory allows {limit / 1e6:,.0f} MB. Raise it, take credit_memory="sketch" (or a smaller sketch=), '
                'or credit="step".'
            )
        if whole >= WORTH_SAYING or limit is not None:
            log.warning(
                "inrun: whole credit keeps at most about %.0f MB of %s and what they need (%d rows in each of %d steps; limit: %s)",
                whole / 1e6,
                kind,
                entry.n,
                steps,
                "none" if limit is None else f"{limit / 1e6:,.0f} MB",
            )

    def _check_columns(self, found: Gradients) -> None:
        if self.credit.columns is None:
            self.credit.expect(found.columns)
        elif found.columns != self.credit.columns:
            raise ValidationError(
                f"there are {len(found.columns)} validation losses at step {self.step}, and there were {len(self.credit.columns)} "
                "before; under whole credit uses are paid over many steps, so that points and folds must stay the same. Take "
                "credit='step', or a fixed number of points."
            )

    @staticmethod
    def _own(found: Gradients, k: int) -> list[Tensor | None]:
        """Several columns share buffers that the next pass overwrites."""
        return found.raw if k == 1 else [None if g is None else g.clone() for g in found.raw]

    def _losses(self, look: StepLook, move: WholeMove) -> tuple[Tensor, Tensor]:
        """Measure the losses at both ends of the move."""
        with look.capture.paused():
            before = self.setup.validation.losses(self.step)
            with move.at(1.0):
                after = self.setup.validation.losses(self.step)
        return before.cpu(), after.cpu()

    def _with(self, points: Points, look: StepLook) -> Payment:
        assert self._move is not None
        raw = look.averaged(self._move.at, points).raw
        return self.credit.pay(self._move, raw, self._entry, False, self.step)

    # The end of the step

    def contributions(self, microbatches: list[Microbatch], columns: int) -> Tensor:
        """Return what the step's own rows were paid at once, ``[n, k]``; zeros where nothing was."""
        dtype = self.setup.probe_dtype
        if self._payment is None:
            return torch.zeros(sum(m.n for m in microbatches), columns, dtype=dtype)
        return self._payment.own.to(dtype)

    def commit(self, ids: Tensor, paid: bool) -> list[SettledCredits]:
        """The optimizers have stepped: remember the step's rows, pay if ``paid``, and settle what is over."""
        assert self._move is not None and self._entry is not None
        payment = self._payment if paid else None
        found = self.credit.commit(payment, self._move, self._entry, self.step, ids, self._decays)
        self.credit.refresh(self._move)
        return found
