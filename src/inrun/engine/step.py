"""One optimizer step: its microbatches, and the moment the optimizer is about to step.

enter        validation gradients and directions, where the method knows them by now; audit or not
microbatch   forward and backward under observation; contractions land in the probes, some are kept
optimizer    factor (clip, scale), coverage, the move and its gradients, kept contractions; conservation if audited
exit         contributions to the ledger, loss after if audited
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from inrun.engine.audit import Balance, check_balances, inner
from inrun.engine.books import Account, Losses, measure_zero_move
from inrun.engine.capture import Expected, Microbatch
from inrun.engine.directions import Timing
from inrun.engine.ids import check_ids
from inrun.engine.sites import Scored
from inrun.engine.validation import Column
from inrun.engine.watch import norm_of
from inrun.errors import ConservationError, CoverageError, OptimizerError, StepError
from inrun.layers import FallbackRule, KeptRowSums
from inrun.layers.embedding import KeptRows
from inrun.layers.registry import KeptFactors

if TYPE_CHECKING:
    from inrun.engine.accountant import Accountant


@dataclass(frozen=True)
class StepResult:
    """What one step gave."""

    step: int
    sample_ids: Tensor
    #: Per validation set: ``[n]``, or ``[n, m]`` for a callable that returns m losses; with folds their mean.
    contributions: dict[str, Tensor]
    #: With folds, the standard error of each contribution, ``[n]``.
    standard_errors: dict[str, Tensor]
    #: Per validation set; None on steps that were not audited.
    accounts: dict[str, Account | None]
    #: Validation losses where the method took their gradients (``first``: at the weights before the step).
    losses: dict[str, float]
    #: Why the step was not scored, or None.
    skipped: str | None
    #: The factor between backward and optimizer (clipping, loss scaling) of each optimizer.
    clip: tuple[float, ...]
    audited: bool
    #: Bytes kept from the backward until the optimizer's step.
    kept_bytes: int
    #: The same, as told from shapes before the backward.
    expected_bytes: int
    #: Entries that scored 0 because the optimizer had no history of them (counted in early and audited steps).
    zero_gains: int


class Step:
    """A context manager around one optimizer step. Made by :meth:`inrun.Accountant.step`."""

    def __init__(self, accountant: Accountant, ids: Any) -> None:
        """``ids`` opens one microbatch for the whole step; None leaves that to :meth:`microbatch`."""
        self.accountant = accountant
        self.given_ids = None if ids is None else check_ids(ids)
        self.microbatches: list[Microbatch] = []
        self.columns: list[Column] = []
        self.losses: Tensor | None = None
        self.skipped: str | None = None
        self.audited = False
        #: Hooks of others may change gradients unseen: sums are checked though the step is not audited.
        self.hooked = False
        #: Parameters that the optimizers moved, known when they step.
        self.moved: list[Scored] | None = None
        #: Optimizers whose ``step`` came to its end.
        self.completed: set[int] = set()
        self.settled: dict[int, float] = {}
        #: How many calls of each optimizer's ``step`` are running, one inside the other.
        self.depth: dict[int, int] = {}
        #: Factors between backward and optimizer, as they stood when the directions were completed.
        self.factors: dict[int, float] = {}
        #: Optimizers whose gradients were changed by more than one factor.
        self.reworked: set[int] = set()
        self.at: Losses = Losses()
        self.expected: Expected | None = None
        self.contributions: list[Tensor] = []
        self.balances: dict[nn.Parameter, Balance] = {}
        #: The loss scaler found infinities and will not let the optimizer step.
        self.held_back = False
        self.kept_bytes = 0
        self.broken = False
        self.lr: float | None = None

    def __enter__(self) -> Step:
        """Take the validation gradients and begin to observe."""
        a = self.accountant
        if a.open_step is not None:
            raise StepError("a step is already open; steps cannot be nested, leave the first one before the next")
        a.check_open()
        a.open_step = self
        try:
            self.audited = a.audits.due(a.steps_done)
            a.audits.begin()
            a.watch.reset()
            a.go_last()
            self.hooked = a.watch.has_hooks()
            a.buffers.begin_step()
            self.expected = a.expected()
            a.prepare_directions(self)
            self._check_losses()
            if self.given_ids is not None:
                self._open(self.given_ids)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Write the step's contributions, unless an exception is on its way."""
        try:
            if kind is None:
                self._finish()
        finally:
            self._close()

    @contextlib.contextmanager
    def microbatch(self, ids: Any) -> Iterator[None]:
        """Observe one forward and backward of an accumulation window."""
        if self.given_ids is not None:
            raise StepError("step(ids) already covers the whole step; use step() without ids to open microbatches")
        if self.accountant.open_step is not self:
            raise StepError("this step is not open; write `with accountant.step() as step:` around its microbatches")
        if self.accountant.capture.micro is not None:
            raise StepError("a microbatch is already open; microbatches cannot be nested")
        self._open(check_ids(ids))
        try:
            yield
        except BaseException:
            self.broken = True
            raise
        finally:
            self.accountant.capture.micro = None
        self._check_coverage()

    def _check_losses(self) -> None:
        if self.losses is not None and not bool(torch.isfinite(self.losses).all()):
            self.skipped = self.skipped or f"validation loss is not finite: {self.losses.tolist()}"

    def _open(self, ids: Tensor) -> None:
        if self.settled:
            raise StepError("the optimizer has stepped already; open a new step for the next backward")
        a = self.accountant
        # Where all contractions wait, nothing adds to the probes, but they still tell which backward is the training's.
        k = max(len(self.columns), 1)
        probes = [
            torch.zeros(ids.numel(), k, dtype=a.probe_dtype, device=a.device, requires_grad=True) for _ in range(a.lane_count)
        ]
        assert self.expected is not None
        balanced = self.audited or self.hooked
        micro = Microbatch(ids, a.directions, probes, balanced, a.buffers, self.expected, contracts=a.watch.contract)
        self.microbatches.append(micro)
        a.capture.micro = micro

    def _close(self) -> None:
        self.accountant.capture.micro = None
        self.accountant.open_step = None
        for micro in self.microbatches:
            micro.over = True
            micro.pending = []
        self.microbatches = []

    @property
    def balanced(self) -> bool:
        """Whether the sums of this step are checked."""
        return any(micro.balanced for micro in self.microbatches)

    def _check_coverage(self) -> None:
        """Raise if a parameter received gradient that no rule contracted."""
        a = self.accountant
        missed = [s.name for s in a.scored if s.parameter in a.watch.missed and not a.directions.is_zero(s)]
        if missed:
            raise CoverageError(
                f"{', '.join(missed)} received gradient, but no observed module used it in this step; its scores would be "
                "missing. Usual causes: the weight is multiplied without calling its module, the backward belongs to a "
                "forward outside the step or of backward(inputs=...), or the model was changed after the Accountant was made."
            )

    def settle(self, optimizer: int) -> None:
        """Finish the contributions of one optimizer's parameters, right before it steps."""
        try:
            self._settle(optimizer)
        except BaseException:
            self.broken = True
            raise

    @torch.no_grad()
    def _settle(self, optimizer: int) -> None:
        a = self.accountant
        if optimizer in self.settled:
            raise StepError("optimizer.step() was called twice inside one step; open a new step for each update")
        mine = [s for s in a.scored if s.optimizer == optimizer]
        if not any(s.parameter in a.watch.seen for s in mine):
            raise StepError("optimizer.step() without a backward inside the step: there is nothing to score")
        if self.broken:
            raise StepError("a microbatch of this step failed; leave the step and begin a new one after zero_grad()")
        self._check_coverage()
        a.watch.check_history()
        a.watch.check_left_over(mine)
        a.directions.check_options(optimizer)
        if self.lr is None:
            first = a.optimizers[0].param_groups[0].get("lr")
            self.lr = None if first is None else float(first)  # Adafactor may have none
        a.watch.settled = True
        a.capture.micro = None
        if self.moved is None:
            self.moved = a.moves.moving()
        if self.held_back:
            self.settled[optimizer] = 1.0
            return
        if not self.settled:
            self._complete()
        factor = self._factor(optimizer, mine)
        self.settled[optimizer] = factor
        for micro, total in zip(self.microbatches, self.contributions, strict=True):
            for lane, group in a.lanes_of(optimizer):
                grad = micro.probes[lane].grad
                if grad is not None:
                    total.add_(grad, alpha=float(group["lr"]) * factor)
        self._settle_pending(optimizer, factor)
        if self.balanced:
            if a.directions.streaming and not all(m.balanced and m.countable for m in self.microbatches if m.begun):
                raise StepError(
                    "a backward with create_graph=True came after others of the same step: gradient may flow past the rules, and "
                    "the sums of this step cannot be checked any more; take audit_every=1"
                )
            began = time.perf_counter()
            self._balance_streaming(mine, factor)
            a.audits.spent(time.perf_counter() - began)

    def _complete(self) -> None:
        """Before the first optimizer steps: take what waits for the real gradients, for all optimizers at once."""
        a = self.accountant
        if a.directions.timing is not Timing.BEFORE:
            for i in range(len(a.optimizers)):
                seen = [s for s in a.scored if s.optimizer == i and s.parameter in a.watch.seen]
                if seen:
                    self.factors[i] = self._measure_factor(i, seen)
        if a.directions.timing is Timing.AT_STEP:
            a.prepare_at_step(self)
            self._check_losses()
        a.directions.complete()
        if self.audited:
            began = time.perf_counter()
            measure_zero_move(a.real_moves, a.validation, a.steps_done, self.at)
            a.audits.spent(time.perf_counter() - began)
        shape = len(self.columns)
        self.contributions = [torch.zeros(m.n, shape, dtype=a.probe_dtype, device=a.device) for m in self.microbatches]

    def _measure_factor(self, optimizer: int, mine: list[Scored]) -> float:
        """Return the factor between backward and optimizer; note where it is not one number and need not be."""
        a = self.accountant
        streams = any(s.parameter in a.directions.streaming for s in mine)
        found = a.watch.factor(mine, strict=streams)
        if found is None:
            self.reworked.add(optimizer)
            return 1.0
        return found / a.loss_scale(optimizer)

    def _factor(self, optimizer: int, mine: list[Scored]) -> float:
        if optimizer not in self.factors:
            return self._measure_factor(optimizer, mine)
        if len(self.settled) and self.accountant.directions.timing is not Timing.BEFORE:
            was_reworked = optimizer in self.reworked
            now = self._measure_factor(optimizer, mine)
            changed = optimizer in self.reworked and not was_reworked
            if changed or abs(now - self.factors[optimizer]) > 1e-5 * abs(now):
                raise StepError(
                    "a gradient was clipped or unscaled after another optimizer had stepped; the whole move is measured before the "
                    "first one steps. Clip and unscale (scaler.unscale_) for all optimizers before the first optimizer.step()."
                )
        return self.factors[optimizer]

    def _settle_pending(self, optimizer: int, factor: float) -> None:
        """Contract what was kept, one parameter after the other so that each direction is made once."""
        a = self.accountant
        waiting: dict[Scored, list[tuple[int, Any]]] = {}
        row_factors: dict[Scored, Tensor] = {}
        for index, micro in enumerate(self.microbatches):
            for pending in micro.pending:
                s, kept = pending.scored, pending.kept
                if s.optimizer != optimizer:
                    continue
                self.kept_bytes += kept.nbytes()
                self._check_replay(kept)
                if isinstance(kept, KeptRowSums):
                    if s not in row_factors:
                        row_factors[s] = a.directions.row_factors(s)
                    c = kept.weigh(row_factors[s])
                    self.contributions[index].add_(c.to(a.probe_dtype), alpha=factor)
                else:
                    waiting.setdefault(s, []).append((index, kept))
            micro.pending = [p for p in micro.pending if p.scored.optimizer != optimizer]
        for s, kepts in waiting.items():
            rows = _joint_rows([kept for _, kept in kepts]) if a.directions.rules[s.optimizer].elementwise else None
            v = a.directions.deferred(s, rows)
            if v is None:
                continue
            ratio = None if optimizer not in self.reworked else self._ratio(s, [kept for _, kept in kepts])
            turned = v if ratio is None else v * (ratio if rows is None else ratio[rows])
            contributed = torch.zeros(v.shape[0], dtype=torch.float64, device=v.device)
            for index, kept in kepts:
                c = kept.contract(turned) if rows is None else kept.contract_rows(rows, turned)
                self.contributions[index].add_(c.to(a.probe_dtype), alpha=factor)
                contributed += c.double().sum(0)
            if self.balanced:
                self._balance_pending(s, [kept for _, kept in kepts], rows, v, contributed, factor)

    def _check_replay(self, kept: Any) -> None:
        """Raise if a module that must run again has weights of an optimizer that has stepped (fused ones count no writes)."""
        if isinstance(kept, KeptFactors) and isinstance(kept.rule, FallbackRule) and len(self.settled) > 1:
            own = set(kept.module.parameters())
            stepped = list(self.settled)[:-1]
            if any(s.optimizer in stepped and s.parameter in own for s in self.accountant.scored):
                raise StepError(
                    f"{type(kept.module).__name__} has no rule and must run again, but an optimizer that has stepped already moved "
                    "some of its weights; give all its parameters to one optimizer"
                )

    def _ratio(self, s: Scored, kepts: list[Any]) -> Tensor:
        """Return entry by entry what was done to a gradient since the backward (value clipping, clipping by groups).

        The share of a sample is then P ∘ ratio ∘ g_n. Added noise is nobody's share: where signs turn, raise.
        """
        a = self.accountant
        used = a.directions.used_gradient(s)
        total = torch.stack([kept.total() for kept in kepts]).sum(0).to(used.dtype)
        before = float(a.watch.seen[s.parameter].norm)
        if abs(float(norm_of(total)) - before) > 1e-3 * before:
            raise ConservationError(
                f"at step {a.steps_done} the samples' gradients of {s.name} do not add up to its gradient: some of it flows "
                "through no sample's rows (a penalty on the weights in the loss, a weight multiplied outside its module)"
            )
        clear = total.abs() > 1e-3 * before / max(total.numel(), 1) ** 0.5
        ratio = used / torch.where(total == 0, 1.0, total)
        if bool((clear & (ratio < 0)).any()):
            raise OptimizerError(
                f"between backward and optimizer.step() entries of the gradient of {s.name} changed their sign: something was "
                "added to it (noise?), which is no sample's share. Clipping and scaling of any kind can be scored."
            )
        largest = float(ratio[clear].max()) if bool(clear.any()) else 0.0
        return torch.where(total == 0, 0.0, ratio.clamp(0.0, largest))

    def _balance_pending(
        self, s: Scored, kepts: list[Any], rows: Tensor | None, v: Tensor, contributed: Tensor, factor: float
    ) -> None:
        began = time.perf_counter()
        a = self.accountant
        streaming = a.directions.streaming.get(s.parameter)
        if streaming is not None:
            # Other uses of this weight streamed: contract the kept ones with that direction too, then all must add up.
            total = torch.stack([kept.contract(streaming.v).double().sum(0) for kept in kepts]).sum(0)
            micro = self.microbatches[0]
            micro.sums[s.parameter] = micro.sums.get(s.parameter, 0) + total
        else:
            gradient = a.directions.used_gradient(s)
            expected, scale = inner(gradient if rows is None else gradient[rows], v)
            self.balances[s.parameter] = Balance(s, contributed * factor, expected, scale)
        a.audits.spent(time.perf_counter() - began)

    def _balance_streaming(self, mine: list[Scored], factor: float) -> None:
        for s in mine:
            direction = self.accountant.directions.streaming.get(s.parameter)
            sums = [m.sums[s.parameter] for m in self.microbatches if s.parameter in m.sums]
            if direction is None or not sums or s.parameter.grad is None:
                continue
            expected, scale = inner(self.accountant.directions.used_gradient(s), direction.v)
            self.balances[s.parameter] = Balance(s, torch.stack(sums).sum(0) * factor, expected, scale)
        rows = sum(m.n for m in self.microbatches)
        norms = [self.accountant.watch.seen[s.parameter].norm for s in mine if s.parameter in self.accountant.watch.seen]
        if self.skipped is None and bool(torch.isfinite(torch.stack(norms)).all()):
            coarse = {p: d for m in self.microbatches for p, d in m.coarse.items()}
            check_balances(list(self.balances.values()), rows, self.accountant.steps_done, coarse)

    def _finish(self) -> None:
        a = self.accountant
        if self.broken or set(self.settled) - self.completed:
            raise StepError(
                "a microbatch or optimizer.step() of this step failed and the exception was caught inside it; nothing was "
                "recorded. Let it leave the `with` block, and begin a new step after zero_grad()."
            )
        self._check_coverage()
        a.watch.check_history()
        if not self.microbatches:
            raise StepError("the step had no microbatch: give ids to step(), or open step.microbatch(ids)")
        stepped = set(self.settled)
        expected = {s.optimizer for s in a.scored if s.parameter in a.watch.seen}
        if not a.watch.seen:
            raise StepError("the step had no backward: call loss.backward() and optimizer.step() inside it")
        if not self.contributions:  # no optimizer stepped, or the scaler held it back
            self.contributions = [torch.zeros(m.n, len(self.columns), device=a.device) for m in self.microbatches]
        contributions = torch.cat(self.contributions)
        if expected - stepped:
            norms = torch.stack([note.norm.double() for note in a.watch.seen.values()])
            if bool(torch.isfinite(norms).all()):
                raise StepError(
                    "the step ended without optimizer.step(); call it inside the `with` block, so that the "
                    "contributions get this update's learning rate and clip factor"
                )
            self.skipped = "gradient is not finite and the optimizer did not step"
        elif self.skipped is None and not bool(torch.isfinite(contributions).all()):
            self.skipped = "gradient or contributions are not finite"
        a.record(self, contributions)


def _joint_rows(kepts: list[Any]) -> Tensor | None:
    """Return the rows of a table that any kept look-up touches, or None for all."""
    if not all(isinstance(kept, KeptRows) for kept in kepts):
        return None
    rows = [kept.rows() for kept in kepts]
    if any(r is None for r in rows):
        return None
    return rows[0] if len(rows) == 1 else torch.unique(torch.cat([r for r in rows if r is not None]))
