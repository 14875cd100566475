"""Everything that lasts over the steps of a run, and what happens when one ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inrun.engine.layouts import Layouts
from inrun.engine.move import Mover
from inrun.engine.parameters import Parameters
from inrun.engine.quadrature import Typical, refine
from inrun.engine.record import StepResult, make_record, make_result
from inrun.engine.scorer import Outcome, Scorer
from inrun.engine.step import Step
from inrun.engine.window import Settled
from inrun.errors import StepError
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
        write: Any,
    ) -> None:
        self.optimizers, self.parameters, self.scorer, self.mover = list(optimizers), parameters, scorer, mover
        self.tape = Tape(model, parameters.leaves, bitwise)
        self.layouts = self.tape.layouts = Layouts(self.tape, model)
        self.typical = Typical()
        self.write = write
        self.steps_done = 0
        self.last: StepResult | None = None
        self.open_step: Step | None = None
        #: Places of parameters whose taps fired in this step.
        self.covered: set[int] = set()
        self.labels: list[Label] = []
        #: Ids by step, of uses that are not settled.
        self._ids: dict[int, np.ndarray[Any, Any]] = {}

    def begin(self, step: Step) -> None:
        """Open a step."""
        if self.open_step is not None:
            raise StepError("a step is open already. Leave its `with` block before the next one.")
        self.open_step, self.covered = step, set()

    def end(self, step: Step) -> None:
        """Close a step."""
        if self.open_step is step:
            self.open_step = None

    def note_taps(self, taps: list[Tap]) -> None:
        """Note which parameters' gradients were seen."""
        for tap in taps:
            if tap.fired:
                self.covered |= {leaf.reader.place for s in tap.targets for leaf in s.leaves if leaf.reader is not None}  # type: ignore[attr-defined]

    # The end of a step

    def score(self, step: Step) -> None:
        """Score a step whose optimizers have stepped, and record it."""
        outcome = self.scorer.score(step.number, self.mover, step.readings, step.clips)
        losses = outcome.losses.cpu().numpy()
        contributions = outcome.contributions
        clip = min(float(c.detach().cpu().numpy()) for c in step.clips.values())
        finite = np.isfinite(losses).all() and np.isfinite(clip) and np.isfinite(contributions.detach().cpu().numpy()).all()
        if not finite:
            step.skipped = Skip.VALIDATION_LOSS if not np.isfinite(losses).all() else Skip.CONTRIBUTIONS
        elif self.scorer.refines:
            outcome = refine(self.scorer, self.typical, outcome, step, self.mover, clip)
        settled = self.scorer.commit() if finite else self.scorer.forgo(step.skipped is Skip.VALIDATION_LOSS)
        self._ids[step.number] = step.ids.numpy()
        self._record(step, outcome, settled)

    def record_skipped(self, step: Step) -> None:
        """Record a step that is not scored."""
        labels = [Label(name) for name in self.scorer.validation.names]
        zero = torch.zeros(0, len(labels))
        from inrun.engine.scorer import Books

        self._record(step, Outcome(labels, torch.full((len(labels),), float("nan")), zero, Books(zero.sum(0), zero.sum(0))), [])

    def _record(self, step: Step, outcome: Outcome, settled: list[Settled]) -> None:
        self.labels = outcome.labels
        done = self.settled(settled, self.labels)
        self.write(make_record(step, outcome, done))
        self.last = make_result(step, outcome, done)
        self.steps_done += 1

    def settled(self, some: list[Settled], labels: list[Label]) -> list[SettledCredits]:
        """Bring settled credits to the host."""
        found = []
        for s in some:
            ids = self._ids.pop(s.step, np.zeros(0, np.int64))
            if len(ids) == 0:
                continue
            credit, error = (x.detach().to("cpu", torch.float64).numpy() for x in (s.credit, s.error))
            found.append(
                SettledCredits(
                    step=s.step,
                    sample_ids=ids,
                    credits={str(c): credit[:, j].astype(np.float32) for j, c in enumerate(labels)},
                    errors={str(c): error[:, j].astype(np.float32) for j, c in enumerate(labels)},
                    paid=np.full(len(ids), s.paid, np.float32),
                )
            )
        return found


__all__ = ["Run", "StepRecord", "Tensor"]
