"""SGD with momentum, Nesterov momentum, dampening and weight decay: linear in the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from inrun.optimizers.registry import Group, State, UpdateRule, register


@register(torch.optim.SGD)
class SGDRule(UpdateRule):
    """d = ±G + λw;  buffer ← μ·buffer + (1−τ)·d (the first time: d);  w ← w − lr·(buffer, or d + μ·buffer)."""

    linear = True

    def frozen(self, raw: Tensor, parameter: Tensor, group: Group, state: State) -> float | None:
        """Return the coefficient of G in the update; decay and the old buffer are the zero-gradient move."""
        sign = -1.0 if group["maximize"] else 1.0
        momentum = float(group["momentum"])
        if momentum == 0.0:
            return sign
        entering = 1.0 if state.get("momentum_buffer") is None else 1.0 - float(group["dampening"])
        return sign * (1.0 + momentum * entering if group["nesterov"] else entering)

    def secant(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor | float:
        """A linear update is its own secant."""
        factor = self.frozen(gradient, parameter, group, state)
        assert factor is not None
        return factor
