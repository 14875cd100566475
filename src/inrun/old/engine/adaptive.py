"""The step game at rough steps: more points along the data's part of the move, until they explain what it did to the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from inrun.ledger.labels import Label
from inrun.old.engine.checks.conservation import inner
from inrun.old.engine.directions import Directions
from inrun.old.engine.factors import Factors
from inrun.old.engine.look import StepLook
from inrun.old.engine.microbatch import Microbatch
from inrun.old.engine.processes import Processes
from inrun.old.engine.record import spreads
from inrun.old.engine.refinement import Points, Usual, refine
from inrun.old.engine.settlement import Settlement
from inrun.old.engine.sites import Scored
from inrun.old.engine.update_path import Place, UpdatePath
from inrun.old.engine.validation import Gradients


class DataWay:
    """The data's part of a move: from w + δ_∅ to where the update that is scored leads."""

    def __init__(self, path: UpdatePath, processes: Processes) -> None:
        """All parameters that move do so together."""
        self.path, self.moving, self.processes = path, path.moving(), processes

    def at(self, fraction: float) -> Place:
        """Hold the model at w + δ_∅ + fraction · (data's part)."""
        return self.path.along(self.moving, fraction)

    def worth(self, raw: list[Tensor | None]) -> Tensor:
        """Return −⟨data's part, ∇ℓ⟩ for validation gradients ``[k, *shape]``, which are overwritten: Σ_n c_n by them, ``[k]``."""
        of = dict(zip(self.path.scored, raw, strict=True))
        return self.processes.joined(_summed((s, self.path.direction(s, g)) for s in self.moving if (g := of[s]) is not None))


@dataclass(frozen=True)
class Shared:
    """What contributions sum to, and Σ|c_n| as the books have it, ``[k]`` each."""

    whole: Tensor
    spread: Tensor


class StepRefinement:
    """Whether one step is rough, and what is done about it."""

    def __init__(
        self, look: StepLook, directions: Directions, factors: Factors, settlement: Settlement, take: Callable[[Gradients], None]
    ) -> None:
        """``take`` is told the validation gradients that directions are made of from now on."""
        self.look, self.directions, self.factors, self.settlement, self.take = look, directions, factors, settlement, take
        self.processes = look.validation.processes
        self.way = DataWay(look.path, self.processes)

    @torch.no_grad()
    def is_rough(self, usual: Usual) -> bool:
        """Whether clipping or Σ_n c_n (one inner product per parameter) stand out from what is usual; remember them."""
        clip, fall = min(self.factors.measured().values(), default=1.0), float(self._whole().abs().sum())
        if not math.isfinite(clip + fall):
            return False  # such a step is not scored
        rough = usual.is_rough(clip, fall)
        usual.note(clip, fall)
        return rough

    def refine(self, before: Tensor, microbatches: list[Microbatch], columns: list[Label], used: int, coarse: bool) -> int:
        """Take more points while ℓ(w + δ_∅) − ℓ(end) − Σ_n c_n is too large; return how many were taken.

        Args:
            before: The losses at w + δ_∅, ``[k]``.
            microbatches: Of the step.
            columns: What the losses are of.
            used: Points that the directions are made of by now.
            coarse: Whether passes run in half precision.
        """
        look = self.look
        with look.capture.paused(), self.way.at(1.0):
            after = look.validation.losses(look.step)

        def shared() -> Shared:
            tried = self.settlement.tried(microbatches, len(columns))
            spread = torch.tensor(spreads(columns, tried), dtype=torch.float64)
            return Shared(self._whole(), self.processes.summed("accounts", spread))

        def again(points: Points) -> Shared:
            self.take(look.averaged(self.way.at, points))
            self.directions.complete()
            return shared()

        return refine(look, self.way, before.cpu(), after.cpu(), shared(), used, again, coarse)[1]

    def _whole(self) -> Tensor:
        """Return Σ_n c_n = ⟨G, v⟩ by the directions as they stand, ``[k]``."""
        ready = self.directions.ready
        return self.processes.joined(_summed((s, ready[s.parameter]) for s in self.way.moving if s.parameter in ready))


def _summed(directions: Iterable[tuple[Scored, Tensor]]) -> Tensor:
    """Return Σ ⟨G, v⟩ over parameters, ``[k]``, in double precision on the host."""
    products = [inner(s.used_gradient, v) for s, v in directions]
    return torch.stack(products).sum(0).cpu() if products else torch.zeros(1, dtype=torch.float64)
