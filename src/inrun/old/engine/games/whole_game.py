"""Whole credit: a step pays all uses of samples that the optimizer still remembers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inrun.ledger.record import SettledCredits, Skip
from inrun.old.engine.checks.ranks import rounded_parameters
from inrun.old.engine.credit.keeper import WholeCredit
from inrun.old.engine.credit.settlement import WholeBooks, WholeDirections, WholeSettlement
from inrun.old.engine.factors import Factors
from inrun.old.engine.games.game import Game, Scene
from inrun.old.engine.microbatch import Microbatch


class WholeGame(Game):
    """A step under whole credit."""

    settlement: WholeSettlement

    def __init__(self, scene: Scene, credit: WholeCredit) -> None:
        """Learn how many losses there are, and say what the backward is to sketch."""
        super().__init__(scene)
        run, setup = self.run, self.setup
        if credit.columns is None:  # how many losses there are is known once they were seen
            with run.capture.paused():
                credit.expect(setup.validation.columns(scene.number))
        assert credit.columns is not None
        credit.begin()
        self.credit, self.columns = credit, credit.columns
        self.asks = WholeDirections(credit, setup)
        self.factors = Factors(setup, scene.watch, self.asks)
        self.settlement = WholeSettlement(setup, credit, run.usual, scene.path, self.factors, scene.number, run.capture.replaying)

    def complete(self, microbatches: list[Microbatch], coarse: bool) -> None:
        """Take the validation gradients along the whole move and work out what it pays."""
        scene, setup = self.scene, self.setup
        self.factors.measure_all()
        finite = bool(torch.isfinite(torch.stack([note.norm for note in scene.watch.seen.values()])).all())
        if setup.processes.agree("finite gradients", scene.number, not finite):
            scene.skipped.note(Skip.CONTRIBUTIONS)
            return
        rounded = rounded_parameters(setup.scored, microbatches, setup.processes) if coarse else frozenset[nn.Parameter]()
        self.take_losses(self.settlement.work_out(scene.look, microbatches, scene.audited, rounded).losses)

    def check_scored(self, contributions: Tensor, microbatches: list[Microbatch]) -> None:
        """The sketch audits itself at every step."""

    def measure_end(self) -> None:
        """The books were measured along the move."""

    def commit(self, microbatches: list[Microbatch]) -> list[SettledCredits]:
        """Take the step's rows into the window, pay, and return what is settled."""
        why = self.scene.skipped.why
        if self.run.credit is None or why is Skip.NO_STEP:
            return []
        if why is Skip.CONTRIBUTIONS:  # what the optimizers remember is no longer made of numbers
            return self.credit.settle_all()
        return self.settlement.commit(torch.cat([m.ids for m in microbatches]), paid=why is None)

    @property
    def books(self) -> WholeBooks | None:
        """Return what the step's books have."""
        return self.settlement.books
