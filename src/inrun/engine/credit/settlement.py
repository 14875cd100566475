"""One step under whole credit: what is asked of its backward, and what it pays when the optimizers step."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inrun.engine.credit.keeper import EARLY_TIMES, Payment, WholeCredit
from inrun.engine.credit.move import WholeMove
from inrun.engine.credit.refinement import cut_the_way
from inrun.engine.credit.stores import SketchStore
from inrun.engine.directions import Direction, Sketch
from inrun.engine.factors import Factors
from inrun.engine.look import StepLook
from inrun.engine.microbatch import Microbatch
from inrun.engine.setup import Setup
from inrun.engine.sites import Scored
from inrun.engine.update_path import UpdatePath
from inrun.engine.validation import Gradients
from inrun.errors import DeferredMemoryError, ValidationError
from inrun.ledger.record import SettledCredits
from inrun.methods.midpoint import Quadrature, find_quadrature

log = logging.getLogger("inrun")
#: The residual of a step that is put up with, relative to Σ|c| of the parts it paid, and the rules tried one after the other.
RESIDUAL, FINER = 0.01, ("gauss2", "gauss3")
#: Pieces that the way of a rough step is cut into at most, where these do not do.
MOST_PIECES = 33
#: Signs of a rough step: clipped to a fraction of what is usual, or a fall (or rise) of so many times the usual one.
CLIPPED, LARGE = 0.3, 3.0
#: Bytes from which on memory is said without being asked.
WORTH_SAYING = 10_000_000
#: Steps that the usual is taken from.
RECENT = 50


class Usual:
    """What steps are usually like: the cheap signs by which a rough one is known. Lasts over steps."""

    def __init__(self) -> None:
        """No step was seen yet."""
        self.clips: list[float] = []
        self.falls: list[float] = []

    def is_rough(self, clip: float, fall: float) -> bool:
        """Whether a step stands out; the first few always do."""
        if len(self.falls) < 5:
            return True
        return clip < CLIPPED * statistics.median(self.clips) or fall > LARGE * statistics.median(self.falls)

    def note(self, clip: float, fall: float) -> None:
        """Remember a step."""
        self.clips, self.falls = [*self.clips[1 - RECENT :], clip], [*self.falls[1 - RECENT :], fall]

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"clips": self.clips, "falls": self.falls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore."""
        self.clips, self.falls = list(state["clips"]), list(state["falls"])


class WholeDirections:
    """What a backward is asked for: inner products with the known direction and sketches, or the gradients themselves."""

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


class WholeSettlement:
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
        self.setup, self.credit, self.usual, self.path, self.factors = setup, credit, usual, path, factors
        self.step, self.quietly = step, quietly
        self.settled: set[int] = set()
        self.kept_bytes = 0
        self._payment: Payment | None = None
        self._move: WholeMove | None = None
        self._entry: Any = None
        #: Memory of coupled weight decay as it will be after the step.
        self._decays: dict[int, Tensor] = {}
        self.books: WholeBooks | None = None

    @property
    def begun(self) -> bool:
        """Whether some optimizer has stepped or is about to."""
        return bool(self.settled)

    def has(self, optimizer: int) -> bool:
        """Whether an optimizer's step was taken into account."""
        return optimizer in self.settled

    def hold_back(self, optimizer: int) -> None:
        """The scaler lets nothing step."""
        self.settled.add(optimizer)

    def contract_replays(self, micro: Microbatch) -> None:
        """Modules that run again do so when the optimizers are about to step."""

    def settle(self, optimizer: int, microbatches: list[Microbatch], checked: bool, finite: bool) -> float:
        """All was worked out before the first optimizer stepped; raise if a gradient was clipped since."""
        self.factors.settle(optimizer, others_have_stepped=self.begun)
        self.settled.add(optimizer)
        return 0.0

    # Before the first optimizer steps

    def work_out(self, look: StepLook, microbatches: list[Microbatch], audited: bool, coarse: bool) -> Gradients:
        """Take the validation gradients along the whole move and work out what it pays."""
        credit, setup = self.credit, self.setup
        self._move = move = WholeMove(setup.scored, setup.rules, self.path, self.factors.measured(), credit.free)
        points = find_quadrature(setup.method.quadrature)  # type: ignore[attr-defined]
        found = look.averaged(move.at, points)
        self._check_columns(found)
        k = len(found.columns)
        if self._entry is None:
            self._entry = entry = credit.capture(microbatches, k, self.quietly)
            self.kept_bytes = credit.store.nbytes()
            if credit.steps == 0:
                self._tell_memory(entry, move)
        for i, m in move.moves.items():
            credit.decay_through(i, m, self._decays)
        if not bool(torch.isfinite(found.losses).all()):
            return found
        self._audit(entry, coarse)
        payment = credit.pay(move, self._own(found, k), entry, audited, self.step)
        clip, fall = min(self.factors.measured().values()), float(payment.whole.abs().sum())
        rough = self.usual.is_rough(clip, fall)
        self.usual.note(clip, fall)
        before = after = None
        used = len(points)
        if audited or rough:
            before, after = self._losses(look, move)
            payment, used = self._refine(look, payment, before, before - after, points)
        self._payment = payment
        self.books = WholeBooks(payment.data, payment.spread, payment.decay, payment.inherited, before, after, used)
        return found

    def _tell_memory(self, entry: Any, move: WholeMove) -> None:
        """Say once, before any of it is taken, what the open windows will keep; raise if that is more than allowed."""
        steps, nbytes = self.credit.expected(entry, move)
        early = 1.0 if self.credit.exact else 1.0 / EARLY_TIMES  # the first steps have finer sketches than the others
        whole, limit = int(nbytes * early), self.setup.deferred_memory
        kind = "per-sample gradients in host memory" if self.credit.exact else "sketches"
        if limit is not None and whole > limit:
            raise DeferredMemoryError(
                f"whole credit would keep about {whole / 1e6:,.0f} MB of {kind} for {entry.n} rows in each of {steps} steps, and "
                f'deferred_memory allows {limit / 1e6:,.0f} MB. Raise it, take credit_memory="sketch" (or a smaller sketch=), or '
                'credit="step".'
            )
        if whole >= WORTH_SAYING or limit is not None:
            log.warning(
                "inrun: whole credit keeps about %.0f MB of %s (%d rows in each of %d steps; limit: %s)",
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

    def _audit(self, entry: Any, coarse: bool) -> None:
        """The sketch's own audit, before anything is spread."""
        credit, move = self.credit, self._move
        if credit.audit is None or move is None or not isinstance(credit.store, SketchStore):
            return
        credit.audit.check(move, entry, credit.store.weights_now, self._decays, credit.inherited, self.step, coarse)

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

    def _refine(self, look: StepLook, payment: Payment, before: Tensor, fall: Tensor, points: Quadrature) -> tuple[Payment, int]:
        """Take more points while the residual is too large."""
        assert self._move is not None
        used = len(points)
        for name in FINER:
            off = (fall - payment.whole).abs()
            finer = find_quadrature(name)
            if bool((off <= RESIDUAL * payment.spread).all()) or not bool(torch.isfinite(fall).all()):
                break
            if len(finer) <= used:
                continue
            payment, used = self._with(look, finer), len(finer)
        if bool(torch.isfinite(fall).all()) and not bool(((fall - payment.whole).abs() <= RESIDUAL * payment.spread).all()):
            pieces = self._cut(look, before, before - fall, RESIDUAL * payment.spread)
            payment, used = self._with(look, pieces), len(pieces)
        return payment, used

    def _with(self, look: StepLook, points: Sequence[tuple[float, float]]) -> Payment:
        assert self._move is not None
        raw = look.averaged(self._move.at, points).raw
        return self.credit.pay(self._move, raw, self._entry, False, self.step)

    @torch.no_grad()
    def _cut(self, look: StepLook, before: Tensor, after: Tensor, allowed: Tensor) -> list[tuple[float, float]]:
        """Cut the way into pieces that explain the fall."""
        move = self._move
        assert move is not None

        def slope(place: float) -> Tensor:
            return move.worth(look.averaged(move.at, ((place, 1.0),)).raw)

        def loss(place: float) -> Tensor:
            with look.capture.paused(), move.at(place):
                return self.setup.validation.losses(self.step).cpu()

        return cut_the_way(slope, loss, before, after, 0.8 * allowed, MOST_PIECES)

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
