"""Take steps of a run once more, under an accountant for other validation data.

Exactly: training goes on from the last checkpoint before a step, with its batches, learning rates and random numbers. This is the
run itself, to rounding. It is put onto every checkpoint that it comes by.

With method="whole" a use is paid by the steps after it, too. That needs them all in their order, from the beginning, where nothing
is remembered yet: an exact replay without gaps. Wherever steps are looked at one by one method="step" is taken, and said so.

Pinned: a recorded batch is run at a state that was saved (see ``viewpoints``), with the learning rate and the clip factor that
its step had, and nothing of it stays.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from inrun.engine import Accountant
from inrun.engine.processes import Processes
from inrun.errors import ConfigurationError, CreditError, TrainingError
from inrun.ledger import StepRecord
from inrun.ledger.record import SettledCredits
from inrun.replay import MODES
from inrun.replay.source import RecordedStep, Source
from inrun.replay.viewpoints import Anchor, Shelf, Stage, Viewpoint, viewpoint_of
from inrun.training.loop import Training, lr_at
from inrun.training.order import Ids
from inrun.training.processes import Job
from inrun.training.validation import validation_loss

log = logging.getLogger("inrun")
#: The relative difference of what the optimizer remembers that rounding may cause.
MEMORY = 5e-3
OTHER_STATE = (
    "training again came to another state of the optimizer than the run's checkpoint has, as with other software or hardware, and "
    "credits cannot go on over it. Replay step by step with --method step."
)
#: Called with steps done and steps in all.
Tell = Callable[[int, int], None]
Write = Callable[[StepRecord], None]
Settle = Callable[[Sequence[SettledCredits]], None]


@dataclass(frozen=True)
class Look:
    """How a run is looked back at. None takes what the run itself was scored with."""

    #: One of :data:`inrun.replay.MODES`.
    mode: str = "exact"
    #: One of :data:`inrun.methods.METHODS`.
    method: str | None = None
    #: Numbers per sample, or "exact".
    sketch: int | str | None = None

    def method_for(self, source: Source, steps: Sequence[RecordedStep]) -> str:
        """Return the method by which these steps are scored.

        Raises:
            ConfigurationError: Whole credit was asked for where steps are looked at one by one.
        """
        wanted = self.method or source.method
        in_order = bool(steps) and [r.step for r in steps] == [r.step for r in source.steps[: len(steps)]]
        if wanted != "whole" or (self.mode == "exact" and in_order):
            return wanted
        why = "only some steps are taken again" if self.mode == "exact" else f"steps are looked at one by one (from {self.mode})"
        if self.method == "whole":
            raise ConfigurationError(
                f"whole credit pays a use by all the steps after it, and here {why}; replay every step exactly, or take method=step"
            )
        log.warning(
            "inrun: %s was scored by whole credit, which pays a use by all the steps after it. Here %s, so they are scored by "
            'method="step": what a use did in its own step',
            source.run,
            why,
        )
        return "step"


@dataclass(frozen=True)
class Passed:
    """How far weights that were trained again were from a checkpoint when they came by it."""

    step: int
    #: The largest difference of one weight; 0 means equal bit for bit.
    difference: float


class _Relay:
    """Hands on records of the steps that are wanted, and their settled credits; the accountant needs no more of a ledger."""

    def __init__(self) -> None:
        self._to: Write = lambda record: None
        self._settle: Settle = lambda settled: None
        self._wanted: Container[int] = ()

    def send_to(self, write: Write, settle: Settle, wanted: Container[int]) -> None:
        self._to, self._settle, self._wanted = write, settle, wanted

    def write(self, record: StepRecord) -> None:
        if record.step in self._wanted:
            self._to(replace(record, settled=()))
        self.settle(record.settled)

    def settle(self, settled: Sequence[SettledCredits]) -> None:
        self._settle([s for s in settled if s.step in self._wanted])


class Replayer:
    """A model, an optimizer and an accountant for looking back at one run.

    Args:
        source: The run.
        sets: Names of the validation sets to score.
        look: How.
        steps: Those that will be replayed; all by default.
    """

    def __init__(self, source: Source, sets: Sequence[str], look: Look, steps: Sequence[RecordedStep] | None = None) -> None:
        """Make the model; :meth:`close` lets go of it."""
        if look.mode not in MODES:
            raise ConfigurationError(f"a step cannot be looked at from {look.mode!r}; accepted are {', '.join(MODES)}")
        unknown = [name for name in sets if name not in source.data.validation]
        if unknown or not sets:
            what = f"no validation set {unknown[0]!r}" if unknown else "no validation set to score"
            raise ConfigurationError(f"there is {what}; {source.run} knows {', '.join(source.data.validation) or 'none'}")
        self.source, self.look, self.sets = source, look, list(sets)
        method = look.method_for(source, source.steps if steps is None else steps)
        scoring = source.config.scoring
        plain = msgspec.structs.replace(source.config, scoring=msgspec.structs.replace(scoring, enabled=False))
        self.training = Training(plain, source.data)
        self.relay = _Relay()
        alone = Job(Processes(), source.config.device)
        self.accountant = Accountant(
            self.training.model,
            self.training.optimizer,
            {name: validation_loss(source.data.validation[name], alone) for name in sets},
            method=method,
            sketch=scoring.sketch if look.sketch is None else look.sketch,
            ledger=self.relay,
            audit_every=scoring.audit_every,
            check_rows=scoring.check_rows,
            bitwise=scoring.bitwise,
        )
        shelf = Shelf(source.config, source.data.tokenizer.vocab_size, self.training.model)
        self.stage = Stage(self.training.model, self.training.optimizer, shelf)

    def close(self, settle: bool = False) -> None:
        """Let go of the model; ``settle`` what is still being paid, as the end of a run does."""
        self.accountant.close(settle=settle)

    def pinned(
        self,
        steps: Sequence[RecordedStep],
        anchors: Sequence[Anchor],
        mode: str,
        write: Write,
        tell: Tell = lambda done, total: None,
    ) -> None:
        """Score recorded steps, each from its own viewpoint, in their order."""
        self.relay.send_to(write, lambda settled: None, {r.step for r in steps})
        at = [a.step for a in anchors]
        with torch.random.fork_rng():
            for done, recorded in enumerate(steps, 1):
                view = viewpoint_of(recorded.step, at, mode)
                here = self.stage.put(recorded, anchors, view)
                # Random numbers of the step are known at the checkpoint alone; elsewhere dropout would only add noise of its own.
                self.training.model.train(here)
                self._score(recorded.step, recorded.ids, recorded.lr, recorded.clip)
                tell(done, len(steps))

    def exact(
        self,
        wanted: Sequence[int],
        anchors: Sequence[Anchor],
        write: Write,
        tell: Tell = lambda done, total: None,
        settle: Settle = lambda settled: None,
    ) -> list[Passed]:
        """Train again and score the steps that are wanted, beginning at the last checkpoint before them, again and again.

        Returns:
            How far off the weights were where training came by a checkpoint; it then went on from the checkpoint itself.
        """
        self.relay.send_to(write, settle, set(wanted))
        whole = self.accountant.method == "whole"
        recorded, at = {r.step: r for r in self.source.steps}, [a.step for a in anchors]
        passed: list[Passed] = []
        position = -1
        self.training.model.train()
        with torch.random.fork_rng():
            for done, step in enumerate(sorted(wanted), 1):
                anchor = anchors[viewpoint_of(step, at, "before").first]
                # Under whole credit no step is left out, or what the optimizer remembers would be nobody's.
                jumps = anchor.step > position and (position < 0 or not whole)
                if jumps:
                    position = anchor.step
                    self._go_on_from(anchor)
                while True:
                    if not jumps and position in at:
                        here = anchors[at.index(position)]
                        passed.append(Passed(position, self.stage.furthest(here)))
                        remembered = self.stage.remembered()
                        self._go_on_from(here)
                        if whole:
                            self._check_memory(position, remembered)
                    self._step_exactly(position, recorded.get(position), scored=whole or position == step)
                    jumps, position = False, position + 1
                    if position > step:
                        break
                tell(done, len(wanted))
        if position in at:
            passed.append(Passed(position, self.stage.furthest(anchors[at.index(position)])))
        return passed

    def _check_memory(self, step: int, before: Tensor) -> None:
        """Raise if what the optimizer remembers is not what it was before a checkpoint was put in its place."""
        now = self.stage.remembered()
        off = float((now - before).norm() / before.norm().clamp_min(1e-30)) if len(now) == len(before) else math.inf
        if not off <= MEMORY:
            raise TrainingError(f"{OTHER_STATE} (Step {step}: off by {off:.1e}.)")

    def _step_exactly(self, step: int, known: RecordedStep | None, scored: bool) -> None:
        # A step without books was not scored live; it moved the weights all the same, unless its gradient was not finite.
        ids = self.training.order.batch(step) if known is None else known.ids
        lr = lr_at(step, self.source.config) if known is None else known.lr
        if scored:
            self._score(step, ids, lr, None)
        else:
            self.training.set_lr(lr)
            self._train(ids, None, None)

    def _go_on_from(self, anchor: Anchor) -> None:
        updates = self.stage.shelf.load(anchor).updates
        there = RecordedStep(anchor.step, self.source.steps[0].ids, 0.0, None, updates)
        self.stage.put(there, [anchor], Viewpoint(0, None, 0.0))

    def _score(self, step: int, ids: Ids, lr: float, clip: float | None) -> None:
        self.training.set_lr(lr)
        self.accountant.seek(step)
        try:
            with self.accountant.step() as observe:
                self._train(ids, clip, observe)
        except CreditError as error:
            raise TrainingError(f"{OTHER_STATE} ({error})") from error

    def _train(self, ids: Ids, clip: float | None, observe: Any) -> None:
        """Take a step as training does; with a clip factor that is known, instead of one that is measured here."""
        t = self.training
        t.backward(ids, self.source.data.sample_tokens(ids, t.device), observe)
        if clip is None:
            norm = t.clip()
        else:
            norm = 0.0
            for p in t.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(clip)
        if math.isfinite(norm):
            t.optimizer.step()
        t.optimizer.zero_grad()
