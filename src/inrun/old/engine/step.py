"""One optimizer step: its microbatches, and the moment the optimizer is about to step.

enter        validation gradients and directions, where the method knows them by now; audit or not
microbatch   forward and backward under observation; what was asked for arrives in the probes
optimizer    factor (clip, scale), coverage, the move and its gradients, kept gradients; more points if rough; checks if audited
exit         contributions to the ledger, loss after if audited or rough
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from inrun.engine.ids import check_ids
from inrun.errors import InrunError, ProcessError, StepError
from inrun.ledger.labels import Label
from inrun.ledger.record import SettledCredits, Skip
from inrun.old.engine.capture import Occasion
from inrun.old.engine.checks.gradients import GradientWatch
from inrun.old.engine.checks.merged import check_merged_step
from inrun.old.engine.checks.ranks import check_different_data, check_rows_everywhere, fingerprint
from inrun.old.engine.documents import Documents
from inrun.old.engine.extras import Extras
from inrun.old.engine.games import Game, MergedGame, Scene, Skipped, StepGame, WholeGame
from inrun.old.engine.look import StepLook
from inrun.old.engine.merged import merge_losses
from inrun.old.engine.microbatch import Allowance, Microbatch
from inrun.old.engine.record import FinishedStep, shared_sums
from inrun.old.engine.run import OpenStep, Run
from inrun.old.engine.sites import Scored
from inrun.old.engine.update_path import UpdatePath
from inrun.torch_private import current_backward

log = logging.getLogger("inrun")
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
        #: Whether conservation is checked.
        self.audited = False
        self.microbatches: list[Microbatch] = []
        self.skipped = Skipped()
        #: The loss scaler found infinities and will not let the optimizer step.
        self.held_back = False
        self.broken = self._dropped = self._recorded = False
        #: How many calls of each optimizer's ``step`` are running, one inside the other; those that came to their end.
        self._running: dict[int, int] = {}
        self._completed: set[int] = set()
        #: Parameters that the optimizers moved, known when they step.
        self.moved: list[Scored] | None = None
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
            self.audited = bool(meeting.first(0))
            self.watch = GradientWatch(setup.scored, self.processes)
            self.allowance = Allowance(setup.deferred_memory, setup.method.name)
            self.path = UpdatePath(setup.scored, setup.rules, setup.update, run.buffers)
            self.look = StepLook(setup.validation, self.path, run.capture, self.number, run.moved, run.hessian_checked)
            self.game = self._begin()
            if setup.extra:
                self.extras = Extras(setup.extra, self.game.directions, run.capture.repeated)
            if self.given_ids is not None:
                self._open(self.given_ids)
        except BaseException as error:
            if run.open_step is self:
                self._close()
            self._tell(error)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Write the step's contributions, unless an exception came before the optimizers had stepped."""
        try:
            if kind is None:
                self._finish()
            elif self._happened():
                self._finish_in_spite()
        except BaseException as error:
            self._tell(error)
            raise
        finally:
            if not self._recorded and self.game.settlement.settled:
                self.run.forget_pushes()
            self._close()
        if value is not None:
            self._tell(value)

    def _happened(self) -> bool:
        """Whether all that the step is for was done when an exception came (logging behind ``optimizer.step()``, Ctrl-C)."""
        settled = self.game.settlement.settled
        done = bool(settled) and settled <= self._completed and self._settled_all()
        return done and not (self.broken or self._dropped or self.processes.several)

    def _finish_in_spite(self) -> None:
        """Record a step that happened, with an exception on its way: the optimizer has moved, and remembers its samples."""
        try:
            self._finish()
        except InrunError as error:  # the user's own exception is the one to see
            log.warning("inrun: step %d was not recorded: %s", self.number, error)

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

    def _begin(self) -> Game:
        """Return the game that the step is scored by."""
        run = self.run
        scene = Scene(run, self.number, self.audited, self.watch, self.path, self.look, self.skipped)
        if self.merged is not None:
            return MergedGame(scene, self.merged, self.merged_points)
        return StepGame(scene) if run.credit is None else WholeGame(scene, run.credit)

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
            self.game.settlement.contract_replays(micro)
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
        if self.game.settlement.begun:
            raise StepError("an optimizer has stepped already, so that the step has had its effect and cannot be skipped")
        self._dropped = True
        self.run.capture.rest()

    def _open(self, ids: Tensor) -> Microbatch:
        if self.game.settlement.begun:
            raise StepError("the optimizer has stepped already; open a new step for the next backward")
        setup, run = self.setup, self.run
        if self.processes.sharded:
            check_rows_everywhere(self.processes, ids, self.number)
        samples = ids if ids.dim() == 1 else Documents(ids, setup.device)
        asks, columns = self.game.asks, max(len(self.game.columns), 1)
        micro = self.game.microbatch(
            (samples, asks, columns, setup.probe_dtype, setup.device, run.buffers, self.allowance, run.flag)
        )
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
        merged, losses = merge_losses(self.microbatches, train_loss, validation_loss)
        self.game.take_losses(losses)
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
        wanted = [s for s in self.setup.scored if not self.game.asks.is_zero(s)]
        self.watch.check_coverage(wanted, [m.backwards for m in self.microbatches])
        for micro in self.microbatches:
            micro.check_outputs()
        if self.extras is not None:
            self.extras.check_backwards()

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
        if self._moves_nothing(mine):
            return
        with self.processes.together(f"optimizer.step() ({index})", self.number) as meeting:
            if self._held is not None:
                raise self._held
            self._check_order(index, mine)
            self.setup.check_unchanged()  # adapters are switched on inside steps, too
            self.run.check_known_before(self.watch.seen)
            found_inf = getattr(self.setup.optimizers[index], "found_inf", None)
            held_back = found_inf is not None and float(found_inf) > 0
            hooked = self.watch.hooked or any(m.flowed_past() for m in self.microbatches)
            coarse = self.processes.rounds() or any(m.coarse for m in self.microbatches)
            any_seen = any(s.parameter in self.watch.seen for s in mine)
            first = self.processes.several and self.run.last is None
            meeting.own = [int(held_back), int(hooked), int(coarse), int(any_seen), first and fingerprint(self.microbatches)]
        if self.processes.several:
            check_different_data(meeting, 4, self.number)
            self.watch.take_reduced(self.setup.scored, self.processes)
        with self.processes.together(f"the checks before optimizer.step() ({index})", self.number):
            if not meeting.any(3):
                raise StepError("optimizer.step() without a backward inside the step: there is nothing to score")
            self.watch.check_left_over(mine)
            self.game.asks.check_options(index)
        if meeting.any(0):
            self.skipped.insist(Skip.NO_STEP)
            self.held_back = True
        self.game.factors.note_rate(index)
        self.watch.settle()
        self.run.capture.rest()
        if self.moved is None:
            self.path.expect({s.optimizer for s in self.setup.scored if s.parameter in self.watch.seen})
            self.moved = self.path.moving()
        if self.held_back:
            self.game.settlement.hold_back(index)
            return
        if not self.game.settlement.begun:
            self.game.complete(self.microbatches, coarse=meeting.any(2))
        # At a run's first step too: a tied weight that is also used past its modules (a fused loss) is seen by sums alone.
        checked = self.run.last is None or self.audited or meeting.any(1)
        spent = self.game.settlement.settle(index, self.microbatches, checked, self.skipped.why is None)
        self.run.audits.spent(spent)

    def _moves_nothing(self, mine: list[Scored]) -> bool:
        """Whether an optimizer has no gradients at all while another one's parameters got some: to torch that is no step."""
        idle = bool(mine) and all(s.parameter.grad is None for s in mine)
        return idle and bool(self.watch.seen) and not self.processes.several

    def _check_order(self, index: int, mine: list[Scored]) -> None:
        """Raise if an optimizer steps where it should not, or if something in the step went wrong by now."""
        if self.game.settlement.has(index):
            raise StepError("optimizer.step() was called twice inside one step; open a new step for each update")
        if self._dropped:
            raise StepError("optimizer.step() after step.skip(): the step was dropped; leave the `with` block first")
        if not self.processes.several and not any(s.parameter in self.watch.seen for s in mine):
            raise StepError(
                "optimizer.step() without a backward inside the step: there is nothing to score"
                if not self.watch.seen
                else f"the optimizer of {mine[0].name} steps although none of its parameters got gradient in this step: what it "
                "remembers would move them, and that belongs to no sample here. Leave its step() out, or set its gradients to None "
                "(zero_grad()), with which it moves nothing."
            )
        if self.broken or self.run.flag.spoiled:
            raise StepError("a microbatch of this step failed; leave the step and begin a new one after zero_grad()")
        self._check_coverage()
        self.watch.check_history()

    # The end

    def _finish(self) -> None:
        with self.processes.together("the end", self.number) as meeting:
            if self._held is not None:
                raise self._held
            if not self._dropped:
                self._check_end()
            contributions = self._contributions()
            finite = bool(torch.isfinite(contributions).all())
            meeting.own = [int(self._dropped), int(self._settled_all()), int(finite), int(self.skipped.why is None)]
        if meeting.any(0):
            if not all(x[0] for x in meeting.all):
                raise StepError("some ranks dropped the step (step.skip()) and others did not; nothing is recorded")
            self.skipped.insist(Skip.DROPPED)
            for micro in self.microbatches:
                micro.release()
            self.microbatches = []
            self._record(torch.zeros(0, max(len(self.game.columns), 1)), [])
            return
        if not meeting.same(1):
            raise ProcessError("some ranks left the step without optimizer.step() and others did not; nothing is recorded")
        if not meeting.first(1):
            self.skipped.insist(Skip.NO_STEP)
        elif not all(x[2] for x in meeting.all) or not all(x[3] for x in meeting.all):
            self.skipped.note(Skip.CONTRIBUTIONS)
        elif self.skipped.why is None:
            self.game.check_scored(contributions, self.microbatches)
        self._record(contributions, self.game.commit(self.microbatches))

    def _check_end(self) -> None:
        """Raise if the step ends in the middle of something."""
        if self.broken or self.run.flag.spoiled or self.game.settlement.settled - self._completed:
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
                raise StepError(self._not_stepped())

    def _not_stepped(self) -> str:
        """Say that an optimizer has not stepped; where others have, which one, and that it must unless its part is frozen."""
        if not self.game.settlement.settled:
            return (
                "the step ended without optimizer.step(); call it inside the `with` block, so that the "
                "contributions get this update's learning rate and clip factor"
            )
        waiting = [s for s in self.setup.scored if s.optimizer in self._unsettled() and s.parameter in self.watch.seen]
        kinds = sorted({f"{type(s.owner).__name__} (optimizer {s.optimizer})" for s in waiting})
        return (
            f"the step ended before {', '.join(kinds)} stepped, although {', '.join(s.name for s in waiting[:5])} got gradient; "
            "the samples' part in it would be in no step. Step all optimizers in the `with` block, or freeze the parameters of "
            "those that rest (requires_grad_(False)) before the forward."
        )

    def _unsettled(self) -> set[int]:
        """Return the optimizers whose parameters got gradient and that have not stepped, nor were about to."""
        return {s.optimizer for s in self.setup.scored if s.parameter in self.watch.seen} - self.game.settlement.settled

    def _settled_all(self) -> bool:
        """Whether every optimizer whose parameters got gradient has stepped, or was about to."""
        return not self._unsettled()

    def _contributions(self) -> Tensor:
        if self._dropped:
            return torch.zeros(0, max(len(self.game.columns), 1))
        return self.game.settlement.contributions(self.microbatches, len(self.game.columns))

    def _used_factors(self) -> tuple[float, ...]:
        """Return what a sample's gradient was multiplied by until the optimizers used it."""
        return tuple(clip * self.processes.share for clip in self.game.factors.clips())

    def _rows(self) -> int:
        """Return the rows of the step, on all ranks."""
        return int(self.processes.summed("small", torch.tensor([sum(m.n for m in self.microbatches)])))

    def _record(self, contributions: Tensor, settled: list[SettledCredits]) -> None:
        setup, game, skipped = self.setup, self.game, self.skipped.why
        game.measure_end()
        columns = game.columns
        if not columns:
            columns = [Label(name) for name in setup.validation.names]
            contributions = contributions.new_zeros(len(contributions), len(columns))
        finished = FinishedStep(
            step=self.number,
            sample_ids=torch.cat([m.ids for m in self.microbatches] or [torch.zeros(0, dtype=torch.int64)]),
            columns=columns,
            contributions=contributions,
            losses=game.losses,
            places=game.places,
            skipped=skipped,
            details=self.skipped.details,
            lr=game.factors.rates(),
            clip=game.factors.clips(),
            audited=self.audited,
            kept_bytes=game.settlement.kept_bytes,
            expected_bytes=self.allowance.nbytes,
            zero_gains=game.asks.zero_gains,
            points=game.points,
            books=game.books,
            settled=tuple(settled),
            extra=None if self.extras is None or skipped else self.extras.tell(self.microbatches, self._used_factors()),
            sums=shared_sums(columns, contributions, self.processes),
            rows=self._rows(),
        )
        self._recorded = True
        self._finish_run(finished, self.look, setup.scored if skipped else self.moved)
