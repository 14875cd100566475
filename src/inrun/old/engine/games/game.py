"""What a step asks of its game, whichever it is: what goes into the backward, what comes before the optimizers, what is booked."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inrun.ledger.labels import Label
from inrun.ledger.record import SettledCredits, Skip
from inrun.old.engine.accounts import Losses
from inrun.old.engine.checks.gradients import GradientWatch
from inrun.old.engine.credit.settlement import WholeBooks
from inrun.old.engine.directions import Asks, Directions
from inrun.old.engine.factors import Factors
from inrun.old.engine.look import StepLook
from inrun.old.engine.microbatch import Microbatch
from inrun.old.engine.run import Run
from inrun.old.engine.settling import Settling
from inrun.old.engine.update_path import UpdatePath


class Skipped:
    """Why a step is not scored, if it is not."""

    def __init__(self) -> None:
        """It is."""
        self.why: Skip | None = None
        self.details = ""

    def note(self, why: Skip, details: str = "") -> None:
        """Do not score the step; the first reason counts."""
        if self.why is None:
            self.why, self.details = why, details

    def insist(self, why: Skip) -> None:
        """Do not score the step for this reason, whatever others there are."""
        self.why, self.details = why, ""


@dataclass(frozen=True)
class Scene:
    """One step as its game sees it: the run, where it is, and what is observed of it."""

    run: Run
    number: int
    audited: bool
    watch: GradientWatch
    path: UpdatePath
    look: StepLook
    skipped: Skipped


class Game(abc.ABC):
    """How one step is scored."""

    asks: Asks
    factors: Factors
    settlement: Settling
    #: What samples' gradients are contracted with; None under whole credit, whose directions lie in the future.
    directions: Directions | None = None

    def __init__(self, scene: Scene) -> None:
        """Begin the step: what is known before the backward is worked out by those who inherit."""
        self.scene, self.run, self.setup = scene, scene.run, scene.run.setup
        self.columns: list[Label] = []
        self.losses: Tensor | None = None
        self.places = Losses()
        #: Quadrature points that validation gradients were taken at, in the step game.
        self.points: int | None = None
        #: Whether the accounts are measured, as at audited and at rough steps.
        self.measured = scene.audited

    def microbatch(self, common: tuple[Any, ...]) -> Microbatch:
        """Return a new microbatch; ``common`` is what every one takes, samples first."""
        return Microbatch(*common)

    @abc.abstractmethod
    def complete(self, microbatches: list[Microbatch], coarse: bool) -> None:
        """Before the first optimizer steps: take what waits for the real gradients, for all optimizers at once.

        ``coarse`` tells that gradients came through tensors of a lower precision than their own.
        """

    @abc.abstractmethod
    def check_scored(self, contributions: Tensor, microbatches: list[Microbatch]) -> None:
        """Raise if a step that should have scored somebody did not."""

    def commit(self, microbatches: list[Microbatch]) -> list[SettledCredits]:
        """When the step has ended: return the uses that were settled by it."""
        return []

    @abc.abstractmethod
    def measure_end(self) -> None:
        """Measure what the accounts need after the optimizers have stepped."""

    @property
    def books(self) -> WholeBooks | None:
        """Return the books of whole credit."""
        return None

    def take_losses(self, losses: Tensor) -> None:
        """Take the validation losses of the step, ``[k]``; one that is not finite leaves it without scores."""
        self.losses = losses
        if not bool(torch.isfinite(losses).all()):
            self.scene.skipped.note(Skip.VALIDATION_LOSS, str(losses.tolist()))
