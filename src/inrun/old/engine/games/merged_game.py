"""The step game in one pass: the last rows of the batch are validation rows, and their gradient comes with the backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from inrun.ledger.labels import Label
from inrun.old.engine.checks.merged import check_merged_model, check_scored
from inrun.old.engine.games.game import Game, Scene
from inrun.old.engine.games.step_game import StepGame
from inrun.old.engine.merged import MergedDirections, MergedMicrobatch, open_merged
from inrun.old.engine.microbatch import Microbatch


class MergedGame(StepGame):
    """Scores of a merged step; there is nothing to measure losses with."""

    def __init__(self, scene: Scene, rows: int, points: bool) -> None:
        """``rows`` of validation end the batch; ``points`` gives each a column of its own."""
        Game.__init__(self, scene)
        check_merged_model(self.setup)
        self.rows, self.per_point, self.measured = rows, points, False
        self.columns = [Label("validation", j if points else None) for j in range(rows if points else 1)]
        self._play(MergedDirections, keep_raw=False)
        self.directions.prepare(count=scene.audited)

    def microbatch(self, common: tuple[Any, ...]) -> Microbatch:
        """Return a new microbatch whose last rows are of validation."""
        checked = self.scene.audited or self.scene.watch.hooked or self.run.last is None
        return open_merged(self.setup, common, self.rows, self.per_point, checked, self.run.capture.repeated)

    def complete(self, microbatches: list[Microbatch], coarse: bool) -> None:
        """Contract what the backward left, and go on as in the step game."""
        for micro in microbatches:
            if isinstance(micro, MergedMicrobatch):
                micro.settle()
        super().complete(microbatches, coarse)

    def take_losses(self, losses: Tensor) -> None:
        """Take the validation losses that the loop told, ``[k]``."""
        self.places.before = losses
        super().take_losses(losses)

    def check_scored(self, contributions: Tensor, microbatches: list[Microbatch]) -> None:
        """Raise if nobody scored anything, unless both losses were told and none of them lost its rows."""
        arrived = any(m.has_arrived() for m in microbatches if isinstance(m, MergedMicrobatch))
        still = not any(bool(seen.norm) for seen in self.scene.watch.seen.values())
        check_scored(contributions, self.rows, self.factors.moves, self.losses is not None and (arrived or still))
