"""Between the backward and the optimizer: clipping, loss scaling, learning rates, for each optimizer of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from inrun.errors import ConservationError, OptimizerError, StepError
from inrun.old.engine.checks.gradients import GradientWatch, norm_of
from inrun.old.engine.directions import Asks
from inrun.old.engine.setup import Setup
from inrun.old.engine.sites import Scored


class Factors:
    """What was done to each optimizer's gradients since the backward, and the rates it stepped with."""

    def __init__(self, setup: Setup, watch: GradientWatch, directions: Asks) -> None:
        """Nothing is measured yet."""
        self.setup, self.watch, self.directions = setup, watch, directions
        self._rates: dict[int, float | None] = {}
        #: Whether some group of an optimizer that stepped has a rate other than 0.
        self.moves = False
        #: The factors that steps were settled with, and those measured when the directions were completed.
        self._clips: dict[int, float] = {}
        self._measured: dict[int, float] = {}
        #: Optimizers whose gradients were changed by more than one factor.
        self._reworked: set[int] = set()

    def _mine(self, optimizer: int) -> list[Scored]:
        return [s for s in self.setup.scored if s.optimizer == optimizer]

    def note_rate(self, optimizer: int) -> None:
        """Remember the learning rate that an optimizer is about to step with; Adafactor may have none."""
        groups = self.setup.optimizers[optimizer].param_groups
        rate = groups[0].get("lr")
        self._rates[optimizer] = None if rate is None else float(rate)
        self.moves |= any(group.get("lr") is None or float(group["lr"]) != 0 for group in groups)

    def rates(self) -> tuple[float | None, ...]:
        """Return the learning rate of each optimizer's first group."""
        return tuple(self._rates.get(i) for i in range(len(self.setup.optimizers)))

    def clips(self) -> tuple[float, ...]:
        """Return the factor of each optimizer, 1 where it did not step."""
        return tuple(self._clips.get(i, 1.0) for i in range(len(self.setup.optimizers)))

    def measure_all(self) -> None:
        """Before the first optimizer steps: measure every factor."""
        for index in range(len(self.setup.optimizers)):
            if any(s.parameter in self.watch.seen for s in self._mine(index)):
                self._measured[index] = self._measure(index)

    def measured(self) -> dict[int, float]:
        """Return the factors that were measured before the first optimizer stepped."""
        return dict(self._measured)

    def _measure(self, optimizer: int) -> float:
        """Return the factor between backward and optimizer; note where it is not one number and need not be."""
        seen = [s for s in self._mine(optimizer) if s.parameter in self.watch.seen]
        # What was contracted inside the backward can be multiplied by one number afterwards, and by nothing else.
        # Entry by entry it is told from the samples' gradients, which no process has all of.
        strict = self.setup.credit is not None or self.setup.processes.several
        strict = strict or any(s.parameter in self.directions.streaming for s in seen)
        found = self.watch.factor(seen, strict=strict)
        if found is None:
            if self.setup.extra:
                raise OptimizerError(
                    f"extra={self.setup.extra!r} tells of gradients that were multiplied by one number between backward and "
                    "optimizer.step(), and value clipping or clipping by groups does more than that: leave extra= out, or clip by "
                    "the global norm"
                )
            self._reworked.add(optimizer)
            return 1.0
        return found / self._loss_scale(optimizer)

    def _loss_scale(self, optimizer: int) -> float:
        """Return the scale that a fused optimizer divides out by itself (GradScaler hands it over), else 1."""
        scale = getattr(self.setup.optimizers[optimizer], "grad_scale", None)
        return 1.0 if scale is None else float(scale)

    def settle(self, optimizer: int, others_have_stepped: bool) -> float:
        """Return the factor that an optimizer steps with; raise if it changed after another had stepped."""
        if optimizer not in self._measured:
            factor = self._measure(optimizer)
        else:
            factor = self._measured[optimizer]
            if others_have_stepped:
                was_reworked = optimizer in self._reworked
                now = self._measure(optimizer)
                if (optimizer in self._reworked and not was_reworked) or abs(now - factor) > 1e-5 * abs(now):
                    raise StepError(
                        "a gradient was clipped or unscaled after another optimizer had stepped; the whole move is measured before "
                        "the first one steps. Clip and unscale (scaler.unscale_) for all optimizers before the first "
                        "optimizer.step()."
                    )
        self._clips[optimizer] = factor
        return factor

    def reworked(self, optimizer: int) -> bool:
        """Whether an optimizer's gradients were changed by more than one factor."""
        return optimizer in self._reworked

    def rework(self, s: Scored, total: Tensor, step: int) -> Tensor:
        """Return entry by entry what was done to a gradient since the backward (value clipping, clipping by groups).

        The share of a sample is then P ∘ rework ∘ g_n. Added noise is nobody's share: where signs turn, raise.

        Args:
            s: The parameter.
            total: Σ_n g_n, ``[*shape]``.
            step: For the message.
        """
        used = s.used_gradient
        total = total.to(used.dtype)
        before = float(self.watch.seen[s.parameter].norm)
        if abs(float(norm_of(total)) - before) > 1e-3 * before:
            raise ConservationError(
                f"at step {step} the samples' gradients of {s.name} do not add up to its gradient: some of it flows "
                "through no sample's rows (a penalty on the weights in the loss, a weight multiplied outside its module)"
            )
        # Above what rounding may leave of samples that cancel.
        rounding = min(1e-3, 1e4 * torch.finfo(used.dtype).eps)
        clear = total.abs() > rounding * before / max(total.numel(), 1) ** 0.5
        ratio = used / torch.where(total == 0, 1.0, total)
        if bool((clear & (ratio < 0)).any()):
            raise OptimizerError(
                f"between backward and optimizer.step() entries of the gradient of {s.name} changed their sign: something was "
                "added to it (noise?), which is no sample's share. Clipping and scaling of any kind can be scored."
            )
        largest = float(ratio[clear].max()) if bool(clear.any()) else 0.0
        small = ratio[~clear & (total != 0)]
        if len(small):  # value clipping lets the smallest through: where all others were clipped, those tell of what they are like
            largest = max(largest, float(small.median()))
        return torch.where(total == 0, 0.0, ratio.clamp(0.0, largest))
