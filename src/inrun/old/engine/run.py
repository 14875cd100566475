"""What lasts over the steps of a run: where it is, what it reuses, and whether a step is open.

It is also the listener of everything that is attached to the user's objects (see ``attach``): calls, gradients and optimizer
steps come in here and go to the capture or to the step that is open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from inrun.errors import InrunError, StepError
from inrun.ledger.record import SettledCredits
from inrun.old.engine.audits import Schedule
from inrun.old.engine.buffers import Buffers
from inrun.old.engine.capture import Capture
from inrun.old.engine.credit.keeper import WholeCredit
from inrun.old.engine.credit.state import credit_state, is_readable, load_credit_state
from inrun.old.engine.directions import History, Timing
from inrun.old.engine.look import StepLook
from inrun.old.engine.microbatch import StepFlag
from inrun.old.engine.plan import Desk
from inrun.old.engine.record import StepResult
from inrun.old.engine.refinement import Usual
from inrun.old.engine.setup import Setup
from inrun.old.engine.sites import Scored, Site
from inrun.old.engine.validation import Gradients

log = logging.getLogger("inrun")
#: Bytes of kept gradients from which on their size is said without being asked.
WORTH_SAYING = 10_000_000


class OpenStep:
    """What a run knows of the step that is open (``Step`` implements it)."""

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """A parameter's gradient was accumulated."""
        raise NotImplementedError

    #: Whether ``optimizer.step(closure)`` is taken to run its closure once, at the beginning.
    single_closure = False

    def before_optimizer(self, index: int) -> None:
        """An optimizer is about to step."""
        raise NotImplementedError

    def after_optimizer(self, index: int) -> None:
        """An optimizer has stepped."""
        raise NotImplementedError

    def hold(self, error: InrunError) -> bool:
        """Whether the step keeps an error until all processes meet."""
        raise NotImplementedError

    def expected_bytes(self) -> tuple[int, int]:
        """Return what the step keeps until the optimizer steps, as its forwards tell, and for how many rows."""
        raise NotImplementedError


class Once:
    """A closure that was run: its loss is handed out once."""

    def __init__(self, closure: Callable[[], Any]) -> None:
        """Run the closure, with gradient as an optimizer would."""
        with torch.enable_grad():
            self._loss = closure()
        self._asked = False

    def again(self) -> Any:
        """Return the loss; raise when it is asked for a second time, as in a line search."""
        if self._asked:
            raise StepError("the optimizer runs its closure several times per step (a line search), which cannot be scored")
        self._asked = True
        return self._loss


class Run:
    """The state of a run between steps."""

    def __init__(self, setup: Setup, audits: Schedule) -> None:
        """Begin at step 0."""
        self.setup, self.audits = setup, audits
        self.capture = Capture(setup.model, setup.called, setup.sites, setup.form, setup.check_rows, setup.processes)
        self.buffers = Buffers()
        self.history = History(setup.processes)
        #: Steps that were recorded; the number of the next one.
        self.steps_done = 0
        self.last: StepResult | None = None
        #: Parameters that moved in the last step; None before the first.
        self.moved: list[Scored] | None = None
        self.hessian_checked = False
        plan = setup.credit
        #: Whole credit, if it is kept; what steps are usually like, where rough ones are looked at more closely.
        self.credit = (
            None if plan is None else WholeCredit(setup.scored, setup.rules, plan.exact, plan.sketch, processes=setup.processes)
        )
        self.usual = Usual()
        #: In a replay: whether the coming step took more points when it was scored live; None where that is not known.
        self.known_rough: bool | None = None
        self.open_step: OpenStep | None = None
        self.flag = StepFlag()
        #: Validation gradients that serve more than one step, with that of which they are.
        self._reused: tuple[Gradients, int] | None = None
        #: Parameters that were frozen when these were taken.
        self._without_gradient: list[Scored] = []
        self._told_memory = self._warned_outside = self._suspended = False
        #: Credits that were settled outside any step, for the ledger.
        self._left_over: list[SettledCredits] = []

    @property
    def model(self) -> nn.Module:
        """Return the model that is observed."""
        return self.setup.model

    @property
    def called(self) -> nn.Module:
        """Return what the user calls: the model, or what torch.compile made of it."""
        return self.setup.called

    def desk(self, site: Site) -> Desk:
        """Return what compiled code finds at an observed module."""
        return self.capture.plan.desks[site]

    # Verbs of a step

    def open(self, step: OpenStep) -> None:
        """Let a step begin; one at a time."""
        if self.open_step is not None:
            raise StepError("a step is already open; steps cannot be nested, leave the first one before the next")
        self.setup.check_unchanged()
        self.open_step = step
        self.setup.processes.begin_step()
        self.flag.raise_()
        self.audits.begin()
        self.buffers.begin_step()

    def close(self, step: OpenStep) -> None:
        """The step is over, recorded or not."""
        if self.open_step is step:
            self.open_step = None
            self.flag.lower()
        self.capture.rest()

    def gradients_before(self, look: StepLook) -> tuple[Gradients, bool]:
        """Return the validation gradients that are known before the backward, and whether they are this step's own."""
        thawed = any(s.parameter.requires_grad for s in self._without_gradient)
        if self._reused is None or thawed or self.steps_done % self.setup.refresh == 0:
            self._reused = None  # free the old ones first
            self._without_gradient = [s for s in self.setup.scored if not s.parameter.requires_grad]
            self._reused = (self.setup.method.before(look), self.steps_done)
        found, since = self._reused
        if self.setup.refresh == 1:
            self._reused = None
        return found, since == self.steps_done

    def check_known_before(self, seen: Collection[nn.Parameter]) -> None:
        """Raise if a parameter got gradient that was frozen when the validation gradients were taken: it would score 0."""
        late = [s.name for s in self._without_gradient if s.parameter in seen]
        if late:
            raise StepError(
                f"{', '.join(late[:5])} was frozen when the validation gradients were taken, and has gradient now, which would "
                "score 0. Unfreeze parameters, and switch adapters on, before accountant.step()."
            )

    def finish(self, result: StepResult, moved: list[Scored] | None, hessian_checked: bool) -> None:
        """Take a recorded step into account and go on to the next."""
        self.last, self.moved, self.hessian_checked = result, moved, hessian_checked
        self.audits.finish(self.steps_done, result.audited)
        self.steps_done += 1
        self.known_rough = None

    def seek(self, step: int, afresh: bool = True, rough: bool | None = None) -> None:
        """Go on from another step; ``afresh`` takes new validation gradients there and may audit it."""
        if self.open_step is not None:
            raise StepError("a step is open; leave it first")
        self.steps_done, self.known_rough = step, rough
        if afresh:
            self._reused = None
            self.audits.replan(step)

    def hush(self) -> None:
        """Do not say what waiting gradients keep."""
        self._told_memory = True

    def suspend(self, suspended: bool) -> None:
        """Say nothing of optimizer steps while another accountant has the model."""
        self._suspended = suspended

    def take_left_over(self) -> list[SettledCredits]:
        """Return credits that were settled outside any step, once."""
        found, self._left_over = self._left_over, []
        return found

    # State for a resumed run

    def state_dict(self) -> dict[str, Any]:
        """Return step, phase of audits and what moved, as plain data."""
        return {
            "step": self.steps_done,
            "audit": self.audits.state_dict(),
            "moved": None if self.moved is None else [s.name for s in self.moved],
            "usual": self.usual.state_dict(),
            "processes": {"rank": self.setup.processes.rank, "world": self.setup.processes.world},
            **({} if self.credit is None else {"credit": credit_state(self.credit)}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.seek(int(state["step"]))
        moved = state.get("moved")
        self.moved = None if moved is None else [s for s in self.setup.scored if s.name in set(moved)]
        self.audits.load_state_dict(state["audit"])
        if "usual" in state:
            self.usual.load_state_dict(state["usual"])
        saved = state.get("credit")
        if self.credit is not None and saved is not None and is_readable(saved):
            load_credit_state(self.credit, saved)
        elif self.credit is not None:
            why = "has no open windows" if saved is None else "has open windows as another version of inrun kept them"
            log.warning("inrun: the saved state %s: what the optimizer remembers is booked as inherited", why)

    # What the user's objects say

    def read(self, site: Site, name: str, value: nn.Parameter) -> Tensor:
        """Hand out a parameter that a forward reads."""
        return self.capture.read(site, name, value)

    def route(self, site: Site, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of an observed module."""
        try:
            return self.capture.route(site, original, args, kwargs)
        except InrunError as error:
            if not self._hold(error):
                raise
            return original(*args, **kwargs)

    def begin_model(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> bool:
        """A call of the model begins, inside compiled code or not; return whether it is observed."""
        try:
            return self.capture.begin_model(args, kwargs, compiled)
        except InrunError as error:
            if not self._hold(error):
                raise
            return False

    def _hold(self, error: InrunError) -> bool:
        """Of several processes: leave an error to the step, which raises it on all when they meet."""
        return self.open_step is not None and self.open_step.hold(error)

    def end_model(self, args: tuple[Any, ...], kwargs: dict[str, Any], failed: bool) -> None:
        """An observed call has ended; say once, before any of it is taken, what waiting gradients keep."""
        try:
            ended = self.capture.end_model(args, kwargs, failed)
        except InrunError as error:
            if not self._hold(error):
                raise
            return
        if ended and not self._told_memory and self.open_step is not None:
            self._told_memory = True
            self._tell_memory(*self.open_step.expected_bytes())

    def _tell_memory(self, nbytes: int, rows: int) -> None:
        limit = self.setup.deferred_memory
        if self.setup.credit is not None or self.setup.timing is Timing.BEFORE or (nbytes < WORTH_SAYING and limit is None):
            return
        of_model = sum(s.parameter.nbytes for s in self.setup.scored)
        log.warning(
            "inrun: %s+%s keeps %.0f MB for %d rows from the backward until the optimizer steps, and about %.0f MB for weights "
            "and gains; rows of further microbatches of a step add up (limit: %s)",
            self.setup.method.name,
            self.setup.update,
            nbytes / 1e6,
            rows,
            3 * of_model / 1e6,
            "none" if limit is None else f"{limit / 1e6:,.0f} MB",
        )

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """A parameter's gradient was accumulated."""
        if self.open_step is not None and not self.setup.validation.fills_gradients:
            self.open_step.gradient_arrived(parameter)

    def before_optimizer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """An optimizer is about to step; return other arguments for it, if it must have them."""
        if self.open_step is None:
            if self.credit is not None and not self._suspended:
                self._left_over += self.credit.settle_all()  # the optimizer remembers pushes of others from now on
            if not self._warned_outside and not self._suspended:
                log.warning("inrun: optimizer.step() outside accountant.step(); its samples are not scored")
                self._warned_outside = True
            return None
        # torch hands over the arguments of the unbound step: the optimizer itself comes first.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        changed = None
        if closure is not None:
            if not self.open_step.single_closure:
                raise StepError(
                    "optimizer.step(closure) runs the model several times per step and cannot be scored; for a closure that is run "
                    "once, before the optimizer moves anything, open the step with accountant.step(ids, single_closure=True)"
                )
            # Run here, so that the gradient is there when it is scored; the optimizer gets the loss.
            once = Once(closure)
            changed = (args[:1], {**kwargs, "closure": once.again})
        self.open_step.before_optimizer(index)
        return changed

    def forget_pushes(self) -> None:
        """An optimizer has moved, or may have, in a step that is not recorded: it remembers pushes of nobody that is known."""
        if self.credit is not None:
            self._left_over += self.credit.settle_all(alone=self.setup.processes.several)

    def after_optimizer(self, index: int) -> None:
        """An optimizer has stepped."""
        if self.open_step is not None:
            self.open_step.after_optimizer(index)
