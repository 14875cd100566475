"""The step game: every sample is paid for its part of this step's own move."""

from __future__ import annotations

import time

from torch import Tensor

from inrun.old.engine.adaptive import StepRefinement
from inrun.old.engine.directions import Directions, Timing
from inrun.old.engine.factors import Factors
from inrun.old.engine.games.game import Game, Scene
from inrun.old.engine.microbatch import Microbatch
from inrun.old.engine.settlement import Settlement
from inrun.old.engine.update_path import UpdatePath
from inrun.old.engine.validation import Gradients


class StepGame(Game):
    """Contributions c_n = factor · Σ ⟨g_n, v⟩, with validation gradients taken where the method says."""

    directions: Directions
    settlement: Settlement

    def __init__(self, scene: Scene) -> None:
        """Take the validation gradients that are known before the backward, or reuse them."""
        super().__init__(scene)
        self._play(Directions, keep_raw=self.setup.refresh > 1 or "cosine" in self.setup.extra)
        if not self.setup.method.deferred:
            self._take_gradients_before()

    def _play(self, kind: type[Directions], keep_raw: bool) -> None:
        scene, setup = self.scene, self.setup
        self.directions = kind(scene.path, setup.optimizers, setup.timing, self.run.history, keep_raw)
        self.asks = self.directions
        self.factors = Factors(setup, scene.watch, self.directions)
        self.settlement = Settlement(setup, self.directions, self.factors, scene.number, self.run.capture.replaying)

    def _take_gradients_before(self) -> None:
        """Before the backward: take validation gradients (or reuse them) and make the directions that are known by now."""
        look, audited = self.scene.look, self.scene.audited
        found, own = self.run.gradients_before(look)
        self._take(found)
        self.directions.prepare(count=audited)
        if own and look.at_start is not None:
            self.places.before = look.at_start
        elif audited:
            # This step's loss, not that where the gradient was taken.
            with self.run.capture.paused():
                self.places.before = self.setup.validation.losses(self.scene.number)

    def _take(self, found: Gradients) -> None:
        self.directions.take(found.raw)
        self.columns = found.columns
        self.take_losses(found.losses)

    def complete(self, microbatches: list[Microbatch], coarse: bool) -> None:
        """Take the gradients and gains that wait for the real move, and more points if it is rough."""
        setup, look = self.setup, self.scene.look
        if setup.timing is not Timing.BEFORE:
            self.factors.measure_all()
        if setup.timing is Timing.AT_STEP:
            self._take(setup.method.at_step(look))
            if look.at_start is not None:
                self.places.before = look.at_start
        self.directions.complete()
        self.points = len(setup.method.points) or None
        if setup.method.adaptive and self.scene.skipped.why is None:
            self._adapt(StepRefinement(look, self.directions, self.factors, self.settlement, self._take), microbatches, coarse)
        elif self.measured:
            self._measure_start()
        self.settlement.begin(microbatches, len(self.columns))

    def _adapt(self, refinement: StepRefinement, microbatches: list[Microbatch], coarse: bool) -> None:
        """Measure rough steps like audited ones, and take more points there where the residual is large."""
        known = self.run.known_rough
        rough = refinement.is_rough(self.run.usual) if known is None else known
        rough = self.setup.processes.agree("rough or not", self.scene.number, rough)
        self.measured = self.measured or rough
        if not self.measured:
            return
        self._measure_start()
        if known is not False:
            # Of the path that is scored: the paper's proxy begins at w.
            start = self.places.before if self.setup.update == "sgd" else self.places.after_zero_move
            assert start is not None and self.points is not None
            self.points = refinement.refine(start, microbatches, self.columns, self.points, coarse)

    def _measure_start(self) -> None:
        """Measure what the accounts need before the optimizers step."""
        began = time.perf_counter()
        rules, setup = self.setup.real_rules, self.setup
        real = self.scene.path if setup.update != "sgd" else None
        if real is None and rules is not None:
            real = UpdatePath(setup.scored, rules, "secant", self.run.buffers)
        with self.run.capture.paused():
            self.places.measure_zero_move(real, setup.validation, self.scene.number)
        self.run.audits.spent(time.perf_counter() - began)

    def check_scored(self, contributions: Tensor, microbatches: list[Microbatch]) -> None:
        """Conservation is checked when the optimizers step."""

    def measure_end(self) -> None:
        """Measure the losses after the move, where the accounts are measured."""
        if not self.measured or self.scene.skipped.why is not None:
            return
        began = time.perf_counter()
        with self.run.capture.paused():
            self.places.after = self.setup.validation.losses(self.scene.number)
        self.run.audits.spent(time.perf_counter() - began)
