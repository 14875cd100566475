"""Take steps of a run once more, under an accountant for other validation data.

Exactly: training goes on from the last checkpoint before a step, with its batches, learning rates and random numbers. This is the
run itself, to rounding. It is put onto every checkpoint that it comes by.

Pinned: a recorded batch is run at a state that was saved (see ``viewpoints``), with the learning rate and the clip factor that
its step had, and nothing of it stays. Steps do not depend on each other, and can share a validation gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from inrun.engine import Accountant
from inrun.errors import ConfigurationError
from inrun.ledger import StepRecord
from inrun.replay import MODES
from inrun.replay.source import RecordedStep, Source
from inrun.replay.viewpoints import Anchor, Shelf, Stage, Viewpoint, viewpoint_of
from inrun.training.loop import Training, lr_at, validation_loss
from inrun.training.order import Ids
from inrun.training.prepare import Held

#: Called with steps done and steps in all.
Tell = Callable[[int, int], None]
Write = Callable[[StepRecord], None]


@dataclass(frozen=True)
class Look:
    """How a run is looked back at. None takes what the run itself was scored with."""

    #: One of :data:`inrun.replay.MODES`.
    mode: str = "exact"
    method: str | None = None
    update: str | None = None
    #: Steps that share one validation gradient, as far as they are looked at from one viewpoint.
    refresh: int | None = None

    def accountant_options(self, source: Source) -> dict[str, Any]:
        """Return what the accountant is told, with the run's own choices where there is no other."""
        s = source.config.scoring
        own = self.method in (None, s.method)
        return {
            "method": self.method or s.method,
            "update": self.update or (s.update if own else "auto"),
            "refresh": self.refresh or (s.refresh if own else 1),
            "quadrature": s.quadrature if own else None,
            "deferred_memory": s.deferred_memory,
            "bitwise": s.bitwise,
        }


@dataclass(frozen=True)
class Passed:
    """How far weights that were trained again were from a checkpoint when they came by it."""

    step: int
    #: The largest difference of one weight; 0 means equal bit for bit.
    difference: float


class _Relay:
    """Hands records on; the accountant needs no more of a ledger."""

    def __init__(self) -> None:
        self._to: Write = lambda record: None

    def send_to(self, write: Write) -> None:
        self._to = write

    def write(self, record: StepRecord) -> None:
        self._to(record)


@dataclass(frozen=True)
class _InTurns(Held):
    """A validation set that draws its rows anew only where a validation gradient is taken anew."""

    every: int = 1

    def rows(self, step: int, device: str) -> torch.Tensor:
        return super().rows(step - step % self.every, device)


class Replayer:
    """A model, an optimizer and an accountant for looking back at one run.

    Args:
        source: The run.
        sets: Names of the validation sets to score.
        look: How.
    """

    def __init__(self, source: Source, sets: Sequence[str], look: Look) -> None:
        """Make the model; :meth:`close` lets go of it."""
        if look.mode not in MODES:
            raise ConfigurationError(f"a step cannot be looked at from {look.mode!r}; accepted are {', '.join(MODES)}")
        unknown = [name for name in sets if name not in source.data.validation]
        if unknown or not sets:
            what = f"no validation set {unknown[0]!r}" if unknown else "no validation set to score"
            raise ConfigurationError(f"there is {what}; {source.run} knows {', '.join(source.data.validation) or 'none'}")
        self.source, self.look, self.sets = source, look, list(sets)
        plain = msgspec.structs.replace(source.config, scoring=msgspec.structs.replace(source.config.scoring, enabled=False))
        self.training = Training(plain, source.data)
        options = look.accountant_options(source)
        self.relay = _Relay()
        losses = {}
        for name in sets:
            held = source.data.validation[name]
            losses[name] = validation_loss(_InTurns(**vars(held), every=options["refresh"]), source.config.device)
        audit = source.config.scoring.audit_every if look.mode == "exact" else 0  # elsewhere the books would not be the run's
        self.accountant = Accountant(
            self.training.model, self.training.optimizer, losses, audit_every=audit, ledger=self.relay, **options
        )
        shelf = Shelf(source.config, source.data.tokenizer.vocab_size, self.training.model)
        self.stage = Stage(self.training.model, self.training.optimizer, shelf)

    def close(self) -> None:
        """Let go of the model."""
        self.accountant.close()

    def pinned(
        self,
        steps: Sequence[RecordedStep],
        anchors: Sequence[Anchor],
        mode: str,
        write: Write,
        tell: Tell = lambda done, total: None,
    ) -> None:
        """Score recorded steps, each from its own viewpoint, in their order."""
        self.relay.send_to(write)
        at, last = [a.step for a in anchors], None
        with torch.random.fork_rng():
            for done, recorded in enumerate(steps, 1):
                view = viewpoint_of(recorded.step, at, mode)
                here = self.stage.put(recorded, anchors, view)
                # Random numbers of the step are known at the checkpoint alone; elsewhere dropout would only add noise of its own.
                self.training.model.train(here)
                self._go_to(recorded.step, fresh=last is None or (view.first, view.second) != (last.first, last.second))
                last = view
                self._score(recorded.ids, recorded.lr, recorded.clip)
                tell(done, len(steps))

    def exact(
        self, wanted: Sequence[int], anchors: Sequence[Anchor], write: Write, tell: Tell = lambda done, total: None
    ) -> list[Passed]:
        """Train again and score the steps that are wanted, beginning at the last checkpoint before them, again and again.

        Returns:
            How far off the weights were where training came by a checkpoint; it then went on from the checkpoint itself.
        """
        self.relay.send_to(write)
        recorded, at = {r.step: r for r in self.source.steps}, [a.step for a in anchors]
        passed: list[Passed] = []
        position = -1
        self.training.model.train()
        with torch.random.fork_rng():
            for done, step in enumerate(sorted(wanted), 1):
                anchor = anchors[viewpoint_of(step, at, "before").first]
                jumps = anchor.step > position
                if jumps:
                    position = anchor.step
                    self._go_on_from(anchor)
                while True:
                    if not jumps and position in at:
                        here = anchors[at.index(position)]
                        passed.append(Passed(position, self.stage.furthest(here)))
                        self._go_on_from(here)
                    self._step_exactly(position, recorded.get(position), scored=position == step, fresh=jumps)
                    jumps, position = False, position + 1
                    if position > step:
                        break
                tell(done, len(wanted))
        if position in at:
            passed.append(Passed(position, self.stage.furthest(anchors[at.index(position)])))
        return passed

    def _step_exactly(self, step: int, known: RecordedStep | None, scored: bool, fresh: bool) -> None:
        # A step without books was not scored live; it moved the weights all the same, unless its gradient was not finite.
        ids = self.training.order.batch(step) if known is None else known.ids
        lr = lr_at(step, self.source.config) if known is None else known.lr
        if scored:
            self._go_to(step, fresh)
            self._score(ids, lr, None)
        else:
            self.training.set_lr(lr)
            with self.accountant.suspended():
                self._train(ids, None, None)

    def _go_on_from(self, anchor: Anchor) -> None:
        updates = self.stage.shelf.load(anchor).updates
        there = RecordedStep(anchor.step, self.source.steps[0].ids, 0.0, None, updates)
        self.stage.put(there, [anchor], Viewpoint(0, None, 0.0))

    def _go_to(self, step: int, fresh: bool) -> None:
        """Tell the accountant which step comes; where a run refreshes its validation gradients, and if ``fresh``, it has none."""
        refresh = self.accountant.refresh
        self.accountant.seek(step, afresh=fresh or (refresh > 1 and step % refresh == 0))

    def _score(self, ids: Ids, lr: float, clip: float | None) -> None:
        self.training.set_lr(lr)  # before the step opens: lookahead moves by it
        with self.accountant.step() as observe:
            self._train(ids, clip, observe)

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
