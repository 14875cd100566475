"""Everything that lasts over the steps of a run, and what happens when one ends."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inrun.engine.checks import judge
from inrun.engine.excess import ExcessWarning
from inrun.engine.layouts import Layouts
from inrun.engine.move import Mover
from inrun.engine.parameters import Parameters
from inrun.engine.quadrature import Typical, refine
from inrun.engine.record import Arrived, Ids, PendingStep, StepResult, send, settled_credits
from inrun.engine.resharing import processes_state
from inrun.engine.scorer import Outcome, RefiningScorer, Scorer
from inrun.engine.sharded import ShardedModel
from inrun.engine.step import Step
from inrun.engine.transfer import Transfer, lag_of
from inrun.engine.window import Settled
from inrun.errors import InrunError, StepError
from inrun.layers.tap import Tap
from inrun.layers.tape import Tape
from inrun.ledger.labels import Label
from inrun.ledger.record import SettledCredits, Skip, StepRecord

log = logging.getLogger("inrun")


class Run:
    """The parts of an accountant, and the state of its run."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Parameters,
        scorer: Scorer,
        mover: Mover,
        bitwise: bool,
        write: Callable[[StepRecord], None],
    ) -> None:
        self.optimizers, self.parameters, self.scorer, self.mover = list(optimizers), parameters, scorer, mover
        self.tape = Tape(model, parameters.leaves, bitwise)
        self.tape.layouts = Layouts(self.tape, model)
        self.tape.defers = parameters.processes.several
        self.sharded = None if parameters.shards is None else ShardedModel(model, parameters, self.tape)
        self.history = History(parameters, write)
        self.steps_done = 0
        self.open_step: Step | None = None
        #: Whether an optimizer stepped since, and no step was open.
        self.moved_outside = False
        #: Places of parameters whose taps fired in this step.
        self.covered: set[int] = set()
        #: Ids and rows by step, of uses that are not settled.
        self.ids: dict[int, tuple[Ids, Ids | None]] = {}

    @property
    def layouts(self) -> Layouts:
        """Return the layouts of the taps."""
        return self.tape.layouts  # type: ignore[no-any-return]

    def begin(self, step: Step) -> None:
        """Open a step."""
        if self.open_step is not None:
            raise StepError("a step is open already. Leave its `with` block before the next one.")
        self.history.check()
        self.parameters.processes.begin_step()
        if self.moved_outside:
            self._settle_after(Skip.OUTSIDE, "the optimizer stepped outside of accountant.step()")
            step.number = self.steps_done
        self.open_step, self.covered = step, set()

    def end(self, step: Step) -> None:
        """Close a step."""
        if self.open_step is step:
            self.open_step = None

    def note_taps(self, taps: list[Tap]) -> None:
        """Note which parameters' gradients were seen."""
        self.layouts.note_dead(taps)
        for tap in taps:
            if tap.fired:
                self.covered |= {leaf.reader.place for s in tap.targets for leaf in s.leaves if leaf.reader is not None}  # type: ignore[attr-defined]

    # The end of a step

    def score(self, step: Step) -> None:
        """Score a step whose optimizers have stepped, and record it."""
        outcome = self.scorer.score(step.number, self.mover, step.readings, step.clips)
        if isinstance(self.scorer, RefiningScorer):
            rough = self._is_rough(outcome, step)
            if rough or step.audited:
                outcome = refine(self.scorer, outcome, step.number, self.mover)
        if self.scorer.keeps_uses:
            rows = step.row_numbers
            self.ids[step.number] = (step.ids.numpy(), None if rows is None else rows.numpy())
        outcome.settled = self.scorer.commit(step.number, self.mover)
        self._send(step, outcome)

    def _is_rough(self, outcome: Outcome, step: Step) -> bool:
        """Return whether a step stands out. On a GPU, where nobody waits for this step's numbers, recent steps tell."""
        if lag_of(self.parameters.device):
            return self.history.typical.recently_rough
        # These tensors are on the host: tolist() waits for no device, and counters of blocking reads do not take it for one.
        if not all(outcome.valid.tolist()):
            return False
        clip = min((float(c.reshape(-1).tolist()[0]) for c in self._clips(step).values()), default=1.0)
        return self.history.typical.note(clip, sum(map(abs, outcome.accounts.explained.tolist())))

    def _send(self, step: Step, outcome: Outcome) -> None:
        who = [self.ids.pop(s.step) for s in outcome.settled]
        rates = [step.rates.get(i) for i in range(len(self.optimizers))]
        pending = send(step.number, step.ids, outcome, self._clips(step), rates, step.audited, who)
        pending.total = step.total
        self._add(pending)

    def _clips(self, step: Step) -> dict[int, Tensor]:
        """Return the factors of gradients without the share of a process."""
        world = self.parameters.processes.world
        return step.clips if world == 1 else {i: c * world for i, c in step.clips.items()}

    def record_skipped(self, step: Step) -> None:
        """Record a step that is not scored."""
        self.scorer.drop()
        labels = [Label(name) for name in self.scorer.validation.names]
        rates = [step.rates.get(i) for i in range(len(self.optimizers))]
        pending = PendingStep(step.number, step.ids, labels, Transfer({}), rates, [], self.parameters.dtype, skipped=step.skipped)
        pending.total = step.total
        self._add(pending)
        assert step.skipped is not None
        log.warning("inrun: step %d is not scored: %s", step.number, step.skipped.text())

    def abandon(self, step: Step) -> None:
        """Leave a step that failed. If its weights moved all the same, what the optimizers remember is nobody's from now on."""
        self.scorer.drop()
        if self.parameters.processes.several:
            return
        moved = bool(step.stepped) or (bool(step.clips) and self.mover.has_moved())
        if not moved or self.history.failed is not None or self.steps_done > step.number:
            return
        self._settle_after(Skip.FAILED, f"step {step.number} failed after its optimizers had stepped")

    def _settle_after(self, skip: Skip, what: str) -> None:
        """Settle what is open as it stands, after a move that no step describes, and record it as a step of nobody."""
        self.moved_outside = False
        settled = self.scorer.restart(self.optimizers, self.mover)
        if skip is Skip.OUTSIDE and not settled:
            return
        log.warning("inrun: %s; open uses are settled as they stand", what)
        tensors = {f"{name}.{j}": getattr(s, name) for j, s in enumerate(settled) for name in ("credit", "error")}
        who = [(s.step, *self.ids.pop(s.step), s.paid) for s in settled]
        labels = self.history.labels or [Label(name) for name in self.scorer.validation.names]
        dtype, none = self.parameters.dtype, torch.zeros(0, dtype=torch.int64)
        self._add(PendingStep(self.steps_done, none, labels, Transfer(tensors), [], [], dtype, skipped=skip, settled=who))

    def _add(self, pending: PendingStep) -> None:
        self.steps_done += 1
        for arrived in self.history.add(pending, lag_of(self.parameters.device)):
            if lag_of(self.parameters.device) and arrived.skipped is None:
                self.history.typical.note(*reversed(arrived.fall_and_clip()))

    # Credits

    def credits_on_host(self, some: list[Settled]) -> list[SettledCredits]:
        """Return credits of uses, which stay open."""
        found = []
        for s in some:
            ids, rows = self.ids[s.step]
            if len(ids):
                credit, error = (x.detach().cpu().double().numpy() for x in (s.credit, s.error))
                found.append(settled_credits(self.history.labels, s.step, ids, rows, s.paid, credit, error))
        return found

    def settle_all(self) -> list[SettledCredits]:
        """Settle what is open."""
        found = self.credits_on_host(self.scorer.settle_all())
        self.ids.clear()
        return found

    # Going on later

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors; nothing is on its way any more."""
        self.history.flush()
        return {
            "processes": processes_state(self.parameters.processes),
            "steps_done": self.steps_done,
            "typical": self.history.typical.state_dict(),
            "labels": [[c.name, c.point, c.is_fold] for c in self.history.labels],
            "ids": {
                str(step): [torch.from_numpy(ids.copy()), None if rows is None else torch.from_numpy(rows.copy())]
                for step, (ids, rows) in self.ids.items()
            },
            "scorer": self.scorer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.steps_done = state["steps_done"]
        self.history.typical.load_state_dict(state["typical"])
        self.history.labels = [Label(*c) for c in state["labels"]]
        self.ids = {int(step): (_numpy(ids), None if rows is None else _numpy(rows)) for step, (ids, rows) in state["ids"].items()}
        self.scorer.load_state_dict(state["scorer"])


def _numpy(x: Tensor) -> Ids:
    return np.array(x.numpy(), np.int64)


class History:
    """Finished steps on their way to the ledger. A failed audit stops it: nothing that came later is written."""

    def __init__(self, parameters: Parameters, write: Callable[[StepRecord], None]) -> None:
        self._write = write
        self._names, self._first = [s.name for s in parameters.scored], parameters.processes.rank == 0
        self._excess = ExcessWarning(self._names)
        self._scored = parameters
        self.typical = Typical()
        self._pending: deque[PendingStep] = deque()
        self.labels: list[Label] = []
        self.last: StepResult | None = None
        self.failed: InrunError | None = None

    def check(self) -> None:
        """Raise if an audit failed before."""
        if self.failed is not None:
            raise StepError(f"scoring stopped earlier: {self.failed}")

    def add(self, pending: PendingStep, lag: int) -> list[Arrived]:
        """Add a step, and write those that have arrived."""
        self.labels = pending.labels if pending.skipped is None else self.labels or pending.labels
        self._pending.append(pending)
        return self.flush(lag)

    def flush(self, lag: int = 0) -> list[Arrived]:
        """Write all steps but the newest ``lag``; return what was written.

        Raises:
            ConservationError: A step's gradients were not the sum of its samples'.
            CreditError: An optimizer remembered something else.
        """
        done = []
        while len(self._pending) > lag:
            arrived = Arrived(self._pending.popleft())
            self.failed = self._error(arrived)
            if self.failed is not None:
                self._pending.clear()
                raise self.failed
            self._write(arrived.record(self._names, with_accounts=self._first))
            self.last = arrived.result()
            if self._first:
                self._excess.note(arrived)
            if arrived.skipped in (Skip.VALIDATION_LOSS, Skip.CONTRIBUTIONS):
                log.warning("inrun: step %d is not scored: %s", arrived.pending.number, arrived.skipped.text())
            done.append(arrived)
        return done

    def _error(self, arrived: Arrived) -> InrunError | None:
        failures = arrived.found.get("failures")
        if failures is None or not arrived.pending.audited or arrived.skipped is not None:
            return None
        return judge(arrived.pending.number, self._names, self._scored.precisions(), failures)
