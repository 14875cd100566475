"""One optimizer step: its microbatches, and the moment the optimizer is about to step.

enter        validation gradients and directions, where the method knows them by now; audit or not
microbatch   forward and backward under observation; what was asked for arrives in the probes
optimizer    factor (clip, scale), coverage, the move and its gradients, kept gradients; more points if rough; checks if audited
exit         contributions to the ledger, loss after if audited or rough
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from inrun.engine.accounts import Losses
from inrun.engine.adaptive import StepRefinement
from inrun.engine.capture import Occasion
from inrun.engine.checks.gradients import GradientWatch
from inrun.engine.checks.merged import check_merged_model, check_merged_step, check_scored
from inrun.engine.checks.ranks import check_different_data, check_rows_everywhere, fingerprint, rounded_parameters
from inrun.engine.credit.keeper import WholeCredit
from inrun.engine.credit.settlement import WholeDirections, WholeSettlement
from inrun.engine.directions import Asks, Directions, Timing
from inrun.engine.documents import Documents
from inrun.engine.extras import Extras
from inrun.engine.factors import Factors
from inrun.engine.ids import check_ids
from inrun.engine.look import StepLook
from inrun.engine.merged import MergedDirections, MergedMicrobatch, merge_losses, open_merged
from inrun.engine.microbatch import Allowance, Microbatch
from inrun.engine.record import FinishedStep, shared_sums
from inrun.engine.run import OpenStep, Run
from inrun.engine.settlement import Settlement
from inrun.engine.settling import Settling
from inrun.engine.sites import Scored
from inrun.engine.update_path import UpdatePath
from inrun.engine.validation import Gradients
from inrun.errors import InrunError, ProcessError, StepError
from inrun.ledger.labels import Label
from inrun.ledger.record import SettledCredits, Skip
from inrun.torch_private import current_backward

#: Takes a finished step: writes it and goes on to the next.
Finish = Callable[[FinishedStep, StepLook, list[Scored] | None], None]


class Step(OpenStep):
    """A context manager around one optimizer step. Made by :meth:`inrun.Accountant.step`."""

    def __init__(
        self, run: Run, ids: Any, begin: Callable[[], None], finish: Finish, merged: int | None = None, points: bool = False
    ) -> None:
        """``ids`` opens one microbatch for the whole step; None leaves that to :meth:`microbatch`.

        ``merged`` are the rows of validation at the end of the batch, ``points`` gives each a column of its own.
        """
        check_merged_step(run.setup, ids, merged, points)
        self.merged, self.merged_points = merged, points
        self.run, self.setup, self._begin_run, self._finish_run = run, run.setup, begin, finish
        self.given_ids = None if ids is None else check_ids(ids)
        self.number = run.steps_done
        #: Whether conservation is checked; whether the accounts are measured, as at audited and at rough steps.
        self.audited = self.measured = False
        #: Quadrature points that validation gradients were taken at, in the step game.
        self.points: int | None = None
        self.microbatches: list[Microbatch] = []
        self.columns: list[Label] = []
        self.losses: Tensor | None = None
        self.places = Losses()
        self.skipped: Skip | None = None
        self._details = ""
        #: The loss scaler found infinities and will not let the optimizer step.
        self.held_back = False
        self.broken = self._dropped = False
        #: How many calls of each optimizer's ``step`` are running, one inside the other; those that came to their end.
        self._running: dict[int, int] = {}
        self._completed: set[int] = set()
        #: Parameters that the optimizers moved, known when they step.
        self.moved: list[Scored] | None = None
        self.whole: WholeSettlement | None = None
        self.extras: Extras | None = None
        self.processes = run.setup.processes
        #: Of several processes: an error that waits for the next meeting, so that it is raised on all.
        self._held: InrunError | None = None

    # Entering and leaving

    def __enter__(self) -> Step:
        """Take the validation gradients and begin to observe."""
        run, setup = self.run, self.setup
        try:
            with self.processes.together("the beginning", run.steps_done) as meeting:
                self._begin_run()
                run.open(self)
                self.number = run.steps_done
                meeting.own = [int(run.audits.due(self.number))]
            self.audited = self.measured = bool(meeting.first(0))
            self.measured = self.measured and self.merged is None  # there is nothing to measure losses with
            self.watch = GradientWatch(setup.scored, self.processes)
            self.allowance = Allowance(setup.deferred_memory, setup.method.name)
            self.path = UpdatePath(setup.scored, setup.rules, setup.update, run.buffers)
            self.look = StepLook(setup.validation, self.path, run.capture, self.number, run.moved, run.hessian_checked)
            if self.merged is not None:
                self._begin_merged(self.merged)
            elif run.credit is None:
                self._begin_step_game()
            else:
                self._begin_whole_credit(run.credit)
            if setup.extra:
                raw = self.directions if run.credit is None else None
                self.extras = Extras(setup.extra, raw, run.capture.repeated)
            if self.given_ids is not None:
                self._open(self.given_ids)
        except BaseException as error:
            if run.open_step is self:
                self._close()
            self._tell(error)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Write the step's contributions, unless an exception is on its way."""
        try:
            if kind is None:
                self._finish()
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            self._close()
        if value is not None:
            self._tell(value)

    def _tell(self, error: BaseException) -> None:
        """Leave word for the other processes; where one of them is the reason, say which."""
        self.processes.announce(error)
        lost = self.processes.explain(error)
        if lost is not None:
            raise lost from error

    def hold(self, error: InrunError) -> bool:
        """Of several processes: keep an error until all meet, and observe no more; others would wait for this one in vain."""
        if not self.processes.several:
            return False
        self._held = self._held or error
        self.run.capture.rest()
        return True

    def _close(self) -> None:
        self.run.close(self)
        if hasattr(self, "watch"):
            self.watch.close()
        for micro in self.microbatches:
            micro.release()
        if self.extras is not None:
            self.extras.release()
        self.microbatches = []

    def _begin_step_game(self) -> None:
        run, setup = self.run, self.setup
        keep_raw = setup.refresh > 1 or "cosine" in setup.extra
        self.directions = Directions(self.path, setup.optimizers, setup.timing, run.history, keep_raw)
        self.asks: Asks = self.directions
        self.factors = Factors(setup, self.watch, self.directions)
        self.settlement: Settling = Settlement(setup, self.directions, self.factors, self.number, run.capture.paused)
        if not setup.method.deferred:
            self._take_gradients_before()

    def _begin_merged(self, rows: int) -> None:
        run, setup = self.run, self.setup
        check_merged_model(setup)
        self.columns = [Label("validation", j if self.merged_points else None) for j in range(rows if self.merged_points else 1)]
        self.directions = MergedDirections(self.path, setup.optimizers, setup.timing, run.history, keep_raw=False)
        self.directions.prepare(count=self.audited)
        self.asks = self.directions
        self.factors = Factors(setup, self.watch, self.directions)
        self.settlement = Settlement(setup, self.directions, self.factors, self.number, run.capture.paused)

    def _begin_whole_credit(self, credit: WholeCredit) -> None:
        run, setup = self.run, self.setup
        if credit.columns is None:  # how many losses there are is known once they were seen
            with run.capture.paused():
                credit.expect(setup.validation.columns(self.number))
        assert credit.columns is not None
        credit.begin()
        self.columns = credit.columns
        self.asks = WholeDirections(credit, setup)
        self.factors = Factors(setup, self.watch, self.asks)
        self.settlement = self.whole = WholeSettlement(
            setup, credit, run.usual, self.path, self.factors, self.number, run.capture.paused
        )

    def _take_gradients_before(self) -> None:
        """Before the backward: take validation gradients (or reuse them) and make the directions that are known by now."""
        found, own = self.run.gradients_before(self.look)
        self._take(found)
        self.directions.prepare(count=self.audited)
        if own and self.look.at_start is not None:
            self.places.before = self.look.at_start
        elif self.audited:
            # This step's loss, not that where the gradient was taken.
            with self.run.capture.paused():
                self.places.before = self.setup.validation.losses(self.number)

    def _take(self, found: Gradients) -> None:
        self.directions.take(found.raw)
        self.columns, self.losses = found.columns, found.losses
        if not bool(torch.isfinite(found.losses).all()):
            self._skip(Skip.VALIDATION_LOSS, str(found.losses.tolist()))

    def _skip(self, why: Skip, details: str = "") -> None:
        """Do not score this step; the first reason counts."""
        if self.skipped is None:
            self.skipped, self._details = why, details

    # Microbatches

    @contextlib.contextmanager
    def microbatch(self, ids: Any) -> Iterator[None]:
        """Observe one forward and backward of an accumulation window."""
        if self.given_ids is not None:
            raise StepError("step(ids) already covers the whole step; use step() without ids to open microbatches")
        if self.run.open_step is not self:
            raise StepError("this step is not open; write `with accountant.step() as step:` around its microbatches")
        if self.run.capture.has_microbatch:
            raise StepError("a microbatch is already open; microbatches cannot be nested")
        micro = self._open(check_ids(ids))
        try:
            yield
        except BaseException:
            self.broken = True
            raise
        finally:
            self.run.capture.rest()
        if self._dropped or self._held is not None:
            return
        try:
            self._check_coverage()
            self.settlement.contract_replays(micro)
        except InrunError as error:
            if not self.hold(error):
                raise

    def skip(self) -> None:
        """Drop the step: for a loop that leaves a batch out, before or after its backward, and does not step the optimizer.

        Nobody is scored for it and nothing is raised when it ends; the accounts say that the loop dropped it. What a backward left
        in ``.grad`` is yours to clear. Leave the ``with`` block as usual.
        """
        if self.run.open_step is not self:
            raise StepError("this step is not open; call skip() inside `with accountant.step() as step:`")
        if self.settlement.begun:
            raise StepError("an optimizer has stepped already, so that the step has had its effect and cannot be skipped")
        self._dropped = True
        self.run.capture.rest()

    def _open(self, ids: Tensor) -> Microbatch:
        if self.settlement.begun:
            raise StepError("the optimizer has stepped already; open a new step for the next backward")
        setup, run = self.setup, self.run
        if self.processes.sharded:
            check_rows_everywhere(self.processes, ids, self.number)
        samples = ids if ids.dim() == 1 else Documents(ids, setup.device)
        columns = max(len(self.columns), 1)
        common = (samples, self.asks, columns, setup.probe_dtype, setup.device, run.buffers, self.allowance, run.flag)
        if self.merged is None:
            micro = Microbatch(*common)
        else:
            checked = self.audited or self.watch.hooked or run.last is None
            micro = open_merged(setup, common, self.merged, self.merged_points, checked, run.capture.repeated)
        micro.extras = self.extras
        self.microbatches.append(micro)
        if self._held is not None:
            return micro
        run.capture.observe(micro, Occasion(self.number, self.audited, run.audits.spent))
        return micro

    def merge(self, train_loss: Tensor, validation_loss: Tensor) -> Tensor:
        """Return the loss of a merged step, train_loss + validation_loss; optional, and better than adding them up yourself.

        The accounts then know the validation loss, a loss scaler is told apart from it, and on audited steps each loss is seen to
        be made of its own rows. With ``points=True`` give one loss per validation row, ``[m]``.
        """
        merged, self.losses = merge_losses(self.microbatches, train_loss, validation_loss)
        self.places.before = self.losses
        if not bool(torch.isfinite(self.losses).all()):
            self._skip(Skip.VALIDATION_LOSS, str(self.losses.tolist()))
        return merged

    def expected_bytes(self) -> tuple[int, int]:
        """Return what is kept until the optimizer steps, as the forwards tell, and for how many rows."""
        return self.allowance.nbytes, sum(m.n for m in self.microbatches)

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Note a gradient, right after it was accumulated."""
        empty = bool(self.microbatches) and self.microbatches[-1].n == 0
        before = self.watch.seen.get(parameter) if empty else None
        try:
            self.watch.arrive(parameter, measure=empty)
            if empty:
                self._check_empty(parameter, 0.0 if before is None else float(before.norm))
        except StepError as error:
            if self.hold(error):
                return
            self.broken = True
            raise

    def _check_empty(self, parameter: nn.Parameter, before: float) -> None:
        """Take note of a gradient of a batch without rows, which must have added nothing."""
        seen = self.watch.seen.get(parameter)
        if seen is None:
            return
        self.watch.measure()
        if float(seen.norm) != before:
            raise StepError(
                f"{self.watch.names[parameter]} received gradient in a batch without rows, which is no sample's; give ids for the "
                "rows, or leave such a batch out with step.skip()"
            )
        self.microbatches[-1].note_backward(parameter, current_backward())

    def _check_coverage(self) -> None:
        self.run.capture.check_compiled()
        wanted = [s for s in self.setup.scored if not self.asks.is_zero(s)]
        self.watch.check_coverage(wanted, [m.backwards for m in self.microbatches])
        for micro in self.microbatches:
            micro.check_outputs()

    # The optimizers

    def before_optimizer(self, index: int) -> None:
        """Finish the contributions of one optimizer's parameters, right before it steps."""
        if current_backward() != -1:
            raise StepError(
                "the optimizer steps inside the backward; optimizer-in-backward cannot be scored. Call optimizer.step() after the "
                "backward, and leave out the hook that steps (register_post_accumulate_grad_hook)."
            )
        # A subclass whose step calls its parent's runs the hooks twice: only the outer call is the step.
        self._running[index] = self._running.get(index, 0) + 1
        if self._running[index] > 1:
            return
        try:
            self._settle(index)
        except BaseException:
            self.broken = True
            raise

    def after_optimizer(self, index: int) -> None:
        """Note that an optimizer's step came to its end."""
        self._running[index] = self._running.get(index, 1) - 1
        if self._running[index] <= 0:
            self._completed.add(index)

    @torch.no_grad()
    def _settle(self, index: int) -> None:
        mine = [s for s in self.setup.scored if s.optimizer == index]
        with self.processes.together(f"optimizer.step() ({index})", self.number) as meeting:
            if self._held is not None:
                raise self._held
            self._check_order(index, mine)
            found_inf = getattr(self.setup.optimizers[index], "found_inf", None)
            held_back = found_inf is not None and float(found_inf) > 0
            hooked = self.watch.hooked or any(m.flowed_past() for m in self.microbatches)
            coarse = self.processes.rounds() or any(m.coarse for m in self.microbatches)
            any_seen = any(s.parameter in self.watch.seen for s in mine)
            first = self.processes.several and self.run.last is None
            meeting.own = [int(held_back), int(hooked), int(coarse), int(any_seen), first and fingerprint(self.microbatches)]
        if self.processes.several:
            check_different_data(meeting, 4, self.number)
            self.watch.take_reduced(mine, self.processes)
        with self.processes.together(f"the checks before optimizer.step() ({index})", self.number):
            if not meeting.any(3):
                raise StepError("optimizer.step() without a backward inside the step: there is nothing to score")
            self.watch.check_left_over(mine)
            self.asks.check_options(index)
        if meeting.any(0):
            self.skipped, self._details, self.held_back = Skip.NO_STEP, "", True
        self.factors.note_rate(index)
        self.watch.settle()
        self.run.capture.rest()
        if self.moved is None:
            self.moved = self.path.moving()
        if self.held_back:
            self.settlement.hold_back(index)
            return
        if not self.settlement.begun:
            self._complete(coarse=meeting.any(2))
        # At a run's first step too: a tied weight that is also used past its modules (a fused loss) is seen by sums alone.
        checked = self.run.last is None or self.audited or meeting.any(1)
        spent = self.settlement.settle(index, self.microbatches, checked, self.skipped is None)
        self.run.audits.spent(spent)

    def _check_order(self, index: int, mine: list[Scored]) -> None:
        """Raise if an optimizer steps where it should not, or if something in the step went wrong by now."""
        if self.settlement.has(index):
            raise StepError("optimizer.step() was called twice inside one step; open a new step for each update")
        if self._dropped:
            raise StepError("optimizer.step() after step.skip(): the step was dropped; leave the `with` block first")
        if not self.processes.several and not any(s.parameter in self.watch.seen for s in mine):
            raise StepError("optimizer.step() without a backward inside the step: there is nothing to score")
        if self.broken or self.run.flag.spoiled:
            raise StepError("a microbatch of this step failed; leave the step and begin a new one after zero_grad()")
        self._check_coverage()
        self.watch.check_history()

    def _complete(self, coarse: bool) -> None:
        """Before the first optimizer steps: take what waits for the real gradients, for all optimizers at once."""
        if self.whole is not None:
            self._complete_whole(self.whole, coarse)
            return
        assert isinstance(self.settlement, Settlement)
        for micro in self.microbatches:
            if isinstance(micro, MergedMicrobatch):
                micro.settle()
        if self.setup.timing is not Timing.BEFORE:
            self.factors.measure_all()
        if self.setup.timing is Timing.AT_STEP:
            self._take(self.setup.method.at_step(self.look))
            if self.look.at_start is not None:
                self.places.before = self.look.at_start
        self.directions.complete()
        self.points = len(self.setup.method.points) or None
        if self.setup.method.adaptive and self.skipped is None:
            self._adapt(StepRefinement(self.look, self.directions, self.factors, self.settlement, self._take), coarse)
        elif self.measured:
            self._measure_start()
        self.settlement.begin(self.microbatches, len(self.columns))

    def _adapt(self, refinement: StepRefinement, coarse: bool) -> None:
        """Measure rough steps like audited ones, and take more points there where the residual is large."""
        known = self.run.known_rough
        rough = refinement.is_rough(self.run.usual) if known is None else known
        rough = self.processes.agree("rough or not", self.number, rough)
        self.measured = self.measured or rough
        if not self.measured:
            return
        self._measure_start()
        if known is not False:
            # Of the path that is scored: the paper's proxy begins at w.
            start = self.places.before if self.setup.update == "sgd" else self.places.after_zero_move
            assert start is not None and self.points is not None
            self.points = refinement.refine(start, self.microbatches, self.columns, self.points, coarse)

    def _measure_start(self) -> None:
        """Measure what the accounts need before the optimizers step."""
        began = time.perf_counter()
        rules, setup = self.setup.real_rules, self.setup
        real = self.path if setup.update != "sgd" else None
        if real is None and rules is not None:
            real = UpdatePath(setup.scored, rules, "secant", self.run.buffers)
        with self.run.capture.paused():
            self.places.measure_zero_move(real, setup.validation, self.number)
        self.run.audits.spent(time.perf_counter() - began)

    def _complete_whole(self, whole: WholeSettlement, coarse: bool) -> None:
        self.factors.measure_all()
        finite = bool(torch.isfinite(torch.stack([note.norm for note in self.watch.seen.values()])).all())
        if self.processes.agree("finite gradients", self.number, not finite):
            self._skip(Skip.CONTRIBUTIONS)
            return
        rounded = rounded_parameters(self.setup.scored, self.microbatches, self.processes) if coarse else frozenset[nn.Parameter]()
        found = whole.work_out(self.look, self.microbatches, self.audited, rounded)
        self.losses = found.losses
        if not bool(torch.isfinite(found.losses).all()):
            self._skip(Skip.VALIDATION_LOSS, str(found.losses.tolist()))

    # The end

    def _finish(self) -> None:
        with self.processes.together("the end", self.number) as meeting:
            if self._held is not None:
                raise self._held
            if not self._dropped:
                self._check_end()
            contributions = self._contributions()
            finite = bool(torch.isfinite(contributions).all())
            meeting.own = [int(self._dropped), int(self._settled_all()), int(finite), int(self.skipped is None)]
        if meeting.any(0):
            if not all(x[0] for x in meeting.all):
                raise StepError("some ranks dropped the step (step.skip()) and others did not; nothing is recorded")
            self.skipped, self._details = Skip.DROPPED, ""
            for micro in self.microbatches:
                micro.release()
            self.microbatches = []
            self._record(torch.zeros(0, max(len(self.columns), 1)), [])
            return
        if not meeting.same(1):
            raise ProcessError("some ranks left the step without optimizer.step() and others did not; nothing is recorded")
        if not meeting.first(1):
            self.skipped, self._details = Skip.NO_STEP, ""
        elif not all(x[2] for x in meeting.all) or not all(x[3] for x in meeting.all):
            self._skip(Skip.CONTRIBUTIONS)
        elif self.merged is not None and self.skipped is None:
            check_scored(contributions, self.merged, self.factors.moves, self._may_score_nothing())
        self._record(contributions, self._commit())

    def _may_score_nothing(self) -> bool:
        """Whether a merged step whose samples all score 0 may be right: both losses were told, and none of them lost its rows."""
        arrived = any(m.has_arrived() for m in self.microbatches if isinstance(m, MergedMicrobatch))
        return self.losses is not None and (arrived or not any(bool(seen.norm) for seen in self.watch.seen.values()))

    def _check_end(self) -> None:
        """Raise if the step ends in the middle of something."""
        if self.broken or self.run.flag.spoiled or self.settlement.settled - self._completed:
            raise StepError(
                "a microbatch or optimizer.step() of this step failed and the exception was caught inside it; nothing was "
                "recorded. Let it leave the `with` block, and begin a new step after zero_grad()."
            )
        self._check_coverage()
        self.watch.check_history()
        if not self.microbatches:
            raise StepError("the step had no microbatch: give ids to step(), or open step.microbatch(ids)")
        if not self.watch.seen:
            raise StepError("the step had no backward: call loss.backward() and optimizer.step() inside it")
        if not self._settled_all():
            self.watch.measure()
            norms = torch.stack([note.norm.double() for note in self.watch.seen.values()])
            if bool(torch.isfinite(norms).all()):
                raise StepError(
                    "the step ended without optimizer.step(); call it inside the `with` block, so that the "
                    "contributions get this update's learning rate and clip factor"
                )

    def _settled_all(self) -> bool:
        """Whether every optimizer whose parameters got gradient has stepped, or was about to."""
        return not {s.optimizer for s in self.setup.scored if s.parameter in self.watch.seen} - self.settlement.settled

    def _contributions(self) -> Tensor:
        if self._dropped:
            return torch.zeros(0, max(len(self.columns), 1))
        return self.settlement.contributions(self.microbatches, len(self.columns))

    def _commit(self) -> list[SettledCredits]:
        """Under whole credit: take the step's rows into the window, pay, and return what is settled."""
        if self.whole is None or self.run.credit is None or self.skipped is Skip.NO_STEP:
            return []
        if self.skipped is Skip.CONTRIBUTIONS:  # what the optimizers remember is no longer made of numbers
            return self.run.credit.settle_all()
        return self.whole.commit(torch.cat([m.ids for m in self.microbatches]), paid=self.skipped is None)

    def _used_factors(self) -> tuple[float, ...]:
        """Return what a sample's gradient was multiplied by until the optimizers used it."""
        return tuple(clip * self.processes.share for clip in self.factors.clips())

    def _rows(self) -> int:
        """Return the rows of the step, on all ranks."""
        return int(self.processes.summed("small", torch.tensor([sum(m.n for m in self.microbatches)])))

    def _record(self, contributions: Tensor, settled: list[SettledCredits]) -> None:
        setup = self.setup
        if self.measured and self.skipped is None and self.whole is None:
            began = time.perf_counter()
            with self.run.capture.paused():
                self.places.after = setup.validation.losses(self.number)
            self.run.audits.spent(time.perf_counter() - began)
        columns = self.columns
        if not columns:
            columns = [Label(name) for name in setup.validation.names]
            contributions = contributions.new_zeros(len(contributions), len(columns))
        finished = FinishedStep(
            step=self.number,
            sample_ids=torch.cat([m.ids for m in self.microbatches] or [torch.zeros(0, dtype=torch.int64)]),
            columns=columns,
            contributions=contributions,
            losses=self.losses,
            places=self.places,
            skipped=self.skipped,
            details=self._details,
            lr=self.factors.rates(),
            clip=self.factors.clips(),
            audited=self.audited,
            kept_bytes=self.settlement.kept_bytes,
            expected_bytes=self.allowance.nbytes,
            zero_gains=self.asks.zero_gains,
            points=self.points,
            books=None if self.whole is None else self.whole.books,
            settled=tuple(settled),
            extra=None if self.extras is None or self.skipped else self.extras.tell(self.microbatches, self._used_factors()),
            sums=shared_sums(columns, contributions, self.processes),
            rows=self._rows(),
        )
        self._finish_run(finished, self.look, setup.scored if self.skipped else self.moved)
