"""Validation gradients at places around the move of one step: what methods ask for (see ``methods.Look``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from inrun.errors import ValidationError
from inrun.old.engine.capture import Capture
from inrun.old.engine.curvature import add_scaled, bent_by_differences, check_hessian, own
from inrun.old.engine.sites import Called, Scored
from inrun.old.engine.update_path import Place, UpdatePath
from inrun.old.engine.validation import Gradients, Validation


class StepLook:
    """The places that the weights pass in one step, and the validation gradients there."""

    def __init__(
        self,
        validation: Validation,
        path: UpdatePath,
        capture: Capture,
        step: int,
        moved_last: list[Scored] | None,
        trust_hessian: bool,
    ) -> None:
        """``moved_last`` are the parameters that moved in the last step; ``trust_hessian`` that products were checked."""
        self.validation, self.path, self.capture, self.step = validation, path, capture, step
        self.parameters = [s.parameter for s in path.scored]
        self.moved_last, self.hessian_checked = moved_last, trust_hessian
        #: Losses at w, once some gradient was taken there.
        self.at_start: Tensor | None = None

    def _gradients(self) -> Gradients:
        with self.capture.noting_calls() as called:
            return self.validation.gradients(self.parameters, self.step, lambda raw: self._check_cut(raw, called))

    def _check_cut(self, raw: list[Tensor | None], called: Called) -> None:
        """Raise if the validation pass called modules, and none of their parameters with gradient."""
        cut = [
            s.name
            for s, g in zip(self.path.scored, raw, strict=True)
            if g is None and any(site in called for site, _ in s.uses) and not any(called.get(site) for site, _ in s.uses)
        ]
        if cut:
            raise ValidationError(
                f"the validation pass ran the modules of {', '.join(cut[:5])} without gradient, so that they would score 0. Usual "
                "causes: reentrant activation checkpointing (take use_reentrant=False, or none in eval mode), or no_grad inside "
                "the callable."
            )

    def here(self) -> Gradients:
        """Return ∇ℓ(w)."""
        found = self._gradients()
        self.at_start = found.losses
        return found

    def after_zero_move(self) -> Gradients:
        """Return ∇ℓ(w + δ_∅). Which parameters will get a gradient is not known yet: those that did in the last step."""
        with self.path.at_zero_move(self.path.scored if self.moved_last is None else self.moved_last):
            return self._gradients()

    def along(self, points: Sequence[tuple[float, float]]) -> Gradients:
        """Return Σ_q w_q ∇ℓ(w + δ_∅ + s_q · data)."""
        moving = self.path.moving()
        return self.averaged(lambda fraction: self.path.along(moving, fraction), points)

    def averaged(self, place: Callable[[float], Place], points: Sequence[tuple[float, float]]) -> Gradients:
        """Return Σ_q w_q ∇ℓ at the places s_q of a way."""
        average: Gradients | None = None
        for fraction, weight in points:
            with place(fraction):
                found = self._gradients()
            if len(points) == 1:
                return found
            if average is None:
                average = own(found).scaled(weight)
            else:
                average.losses = average.losses + weight * found.losses
                add_scaled(average, found, weight)
        assert average is not None
        return average

    def bent(self, by_differences: bool) -> Gradients:
        """Return ∇ℓ(w) + ½H(δ_∅ + Δ)."""
        moving = self.path.moving()
        move = self.path.twice_to_the_middle(moving)
        around = (self.validation, self.path, self.parameters, moving, move, self.step)
        with self.capture.noting_calls() as called:
            if by_differences:
                found = bent_by_differences(*around, called=called)[0]
            else:
                found = self.validation.bent_gradients(self.parameters, self.step, move)
                if not self.hessian_checked:
                    found = own(found)  # the check takes gradients too, into the same buffers
                    self.hessian_checked = check_hessian(found, *around)
        self.at_start = found.losses
        return found
