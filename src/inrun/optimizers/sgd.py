"""SGD and ASGD, linear in the gradient, and Rprop."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from inrun.optimizers.lists import TINY, filled, quotient
from inrun.optimizers.registry import register
from inrun.optimizers.rule import NO_MEMORY, Group, GroupStep, Memory, State, UpdateRule


def plain_rate(step: GroupStep) -> list[Tensor] | float:
    """Return the learning rate as a factor."""
    return step.lr if isinstance(step.lr, float) else filled(step.gradients, step.lr)


@register(torch.optim.SGD)
class SGDRule(UpdateRule):
    """z = ±G + λw;  b ← μb + (1−τ)z, at first b = z;  w ← w − lr·(b, or z + μb with nesterov)."""

    elementwise = True
    buffer = "momentum_buffer"  # None until the first step with momentum
    decoupled = False

    def memory(self, step: GroupStep) -> list[Memory] | None:
        """The buffer forgets by μ; nesterov reads μ times the buffer and z once more."""
        momentum = step.option("momentum")
        if momentum == 0.0:
            return [NO_MEMORY] * len(step.states)
        read, direct = (momentum, 1.0) if step.group["nesterov"] else (1.0, 0.0)
        start = Memory(0.0, 1.0, read, direct, keep_later=momentum)
        usual = Memory(momentum, 1.0 - step.option("dampening"), read, direct)
        return [start if first else usual for first in step.first]

    def factor(self, step: GroupStep) -> list[Tensor] | float:
        """Return lr."""
        return plain_rate(step)

    @torch.no_grad()
    def pushed(self, step: GroupStep) -> list[Tensor]:
        """Return z, the buffer, or z + μ·buffer."""
        momentum = step.option("momentum")
        if momentum == 0.0:
            return self.entering(step)
        buffers = super().pushed(step)
        if not step.group["nesterov"]:
            return buffers
        return list(torch._foreach_add(self.entering(step), buffers, alpha=momentum))


@register(torch.optim.ASGD)
class ASGDRule(UpdateRule):
    """w ← w − η·(±G + (λ + λ′)w), λ the weight decay and λ′ the option ``lambd``.

    η = lr / (1 + λ′·lr·(t−1))^α is computed at the end of the step before, with the learning rate
    of that time, and overwritten at the end of this one. ``before_step`` notes it; without that
    call the learning rate is assumed to be what it was.
    """

    forgetful = True

    def __init__(self) -> None:
        super().__init__()
        self._used = WeakTensorKeyDictionary()

    def before_step(self, group: Group, states: list[State]) -> None:
        """Copy η, which the step will use and overwrite."""
        for state in states:
            if "eta" in state:
                self._used[state["eta"]] = state["eta"].clone()

    def coupled(self, group: Group) -> float:
        """Return λ + λ′."""
        return float(group["lambd"] + group["weight_decay"])

    @torch.no_grad()
    def factor(self, step: GroupStep) -> list[Tensor] | float:
        """Return η."""
        slowed = (step.counts() - 1.0) * step.lr * step.option("lambd") + 1.0
        steady = step.lr / slowed ** step.option("alpha")
        etas = [state["eta"] for state in step.states]
        used = [self._used.get(eta, s.to(eta.dtype)) for eta, s in zip(etas, steady, strict=True)]
        return filled(step.gradients, used)


@register(torch.optim.Rprop)
class RpropRule(UpdateRule):
    """w ← w − sign(z)·size; where z changed its sign the weight stays. A = size / |z|."""

    adaptive = forgetful = elementwise = True

    @torch.no_grad()
    def factor(self, step: GroupStep) -> list[Tensor] | float:
        """Return size / |z|; ``prev`` is z, or 0 where the sign changed."""
        used = torch._foreach_abs(step.kept("prev"))
        out = quotient(used, torch._foreach_clamp_min(used, TINY), 1.0)
        torch._foreach_mul_(out, step.kept("step_size"))
        return out
