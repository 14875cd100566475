"""Gradients divided by their own running size: RMSprop, Adagrad and Adadelta.

With z = ±G + λw:

    RMSprop   s_t = αs + (1−α)z²;  centred: minus the square of a_t = αa + (1−α)z
              buffer ← μ·buffer + z / (√s_t + ε);   w ← w − lr · buffer
    Adagrad   s_t = s + z²;   w ← w − lr / (1 + (t−1)·decay) · z / (√s_t + ε)
    Adadelta  s_t = ρs + (1−ρ)z²;   w ← w − lr · √(d + ε) / √(s_t + ε) · z,   d the running mean of squared moves
"""

from __future__ import annotations

import torch
from torch import Tensor

from inrun.old.optimizers.quotient import QuotientRule, slope_of_root
from inrun.old.optimizers.registry import (
    NO_MEMORY,
    Group,
    Realised,
    Recall,
    State,
    held,
    learning_rate,
    next_step,
    option,
    register,
)


@register(torch.optim.RMSprop)
class RMSpropRule(QuotientRule):
    """RMSprop, centred or not; its momentum comes after the division and is part of the zero-gradient move."""

    def numerator(self, like: Tensor, group: Group, state: State) -> tuple[Tensor | float, Tensor | float]:
        """Only the gradient itself."""
        return 0.0, learning_rate(group)

    def constant(self, like: Tensor, group: Group, state: State) -> Tensor | float:
        """Return −lr·μ·buffer."""
        momentum = option(group, "momentum")
        if momentum <= 0.0:
            return 0.0
        return held(state, "momentum_buffer", like) * (-learning_rate(group) * momentum)

    def recall(self, group: Group, state: State) -> Recall | None:
        """The buffer forgets by μ and takes all of what comes, divided by the size of its own step."""
        momentum = option(group, "momentum")
        return Recall(momentum, 1.0) if momentum > 0.0 else NO_MEMORY

    def remembered(self, state: State) -> Tensor | None:
        """Return the buffer, if there is momentum."""
        return state.get("momentum_buffer")

    @torch.no_grad()
    def realised(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Realised:
        """With momentum q is the buffer, and a gradient enters it over the size of its own step."""
        found = super().realised(gradient, parameter, group, state)
        momentum = option(group, "momentum")
        if momentum <= 0.0:
            return found
        assert isinstance(found.gain, Tensor)
        q = found.gain * found.q + held(state, "momentum_buffer", found.q) * momentum
        return Realised(1.0, q, found.pace, entry=found.gain)

    def _mean(self, z: Tensor, group: Group, state: State) -> Tensor:
        return torch.lerp(held(state, "grad_avg", z), z, 1.0 - float(group["alpha"]))

    def size(self, z: Tensor, group: Group, state: State) -> Tensor:
        """Return the root of the second moment or of the variance."""
        alpha = float(group["alpha"])
        second = torch.addcmul(held(state, "square_avg", z) * alpha, z, z, value=1.0 - alpha)
        if group["centered"]:
            mean = self._mean(z, group, state)
            # Rounding can make a variance negative; the real step then writes nan.
            second = torch.addcmul(second, mean, mean, value=-1.0).clamp_min(0.0)
        return torch.sqrt(second)

    def slope(self, z0: Tensor, z1: Tensor, r0: Tensor, r1: Tensor, group: Group, state: State) -> Tensor:
        """The divided difference of s_t − a_t² is (1−α)(z₀ + z₁ − a₀ − a₁)."""
        slope = z0 + z1
        if group["centered"]:
            slope = slope - self._mean(z0, group, state) - self._mean(z1, group, state)
        return slope_of_root(slope * (1.0 - float(group["alpha"])), r0, r1)


@register(torch.optim.Adagrad)
class AdagradRule(QuotientRule):
    """Adagrad with its learning rate decay and initial accumulator."""

    def numerator(self, like: Tensor, group: Group, state: State) -> tuple[Tensor | float, Tensor | float]:
        """Only the gradient itself."""
        return 0.0, learning_rate(group) / (1.0 + (next_step(state) - 1.0) * option(group, "lr_decay"))

    def size(self, z: Tensor, group: Group, state: State) -> Tensor:
        """Return √(s + z²)."""
        start = torch.full_like(z, option(group, "initial_accumulator_value"))
        return torch.sqrt(torch.addcmul(state["sum"].to(z.dtype) if "sum" in state else start, z, z))

    def slope(self, z0: Tensor, z1: Tensor, r0: Tensor, r1: Tensor, group: Group, state: State) -> Tensor:
        """The divided difference of z² is z₀ + z₁."""
        return slope_of_root(z0 + z1, r0, r1)


@register(torch.optim.Adadelta)
class AdadeltaRule(QuotientRule):
    """Adadelta; ε is inside both roots, so that an entry without history has a gain too."""

    def numerator(self, like: Tensor, group: Group, state: State) -> tuple[Tensor | float, Tensor | float]:
        """The gradient times the root of the mean squared move."""
        return 0.0, torch.sqrt(held(state, "acc_delta", like) + option(group, "eps")) * learning_rate(group)

    def size(self, z: Tensor, group: Group, state: State) -> Tensor:
        """Return √(s_t + ε)."""
        rho = float(group["rho"])
        second = torch.addcmul(held(state, "square_avg", z) * rho, z, z, value=1.0 - rho)
        return torch.sqrt(second + option(group, "eps"))

    def epsilon(self, group: Group) -> float:
        """Nothing is added outside the root."""
        return 0.0

    def slope(self, z0: Tensor, z1: Tensor, r0: Tensor, r1: Tensor, group: Group, state: State) -> Tensor:
        """The divided difference of s_t is (1−ρ)(z₀ + z₁)."""
        return slope_of_root((z0 + z1) * (1.0 - float(group["rho"])), r0, r1)
