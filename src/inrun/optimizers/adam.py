"""Adam and AdamW (with amsgrad, maximize and either kind of weight decay).

At step t, with z = ±G (+ λw for Adam's L2 decay):

    m_t = β₁m + (1−β₁)z     s_t = β₂s + (1−β₂)z²     w ← w − lr · (m_t / (1−β₁ᵗ)) / (√(s_t / (1−β₂ᵗ)) + ε)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inrun.optimizers.registry import Group, State, UpdateRule, register


@register(torch.optim.Adam)
class AdamRule(UpdateRule):
    """Adam's update; elementwise but not linear in the gradient."""

    #: AdamW shrinks the weights beside the update; Adam adds λw to the gradient, unless its group says otherwise.
    decoupled = False

    def frozen(self, raw: Tensor, parameter: Tensor, group: Group, state: State) -> float | None:
        """Divide by √(s_{t−1} / (1−β₂ᵗ⁻¹)) + ε; entries that never had a gradient get the gain 0.

        The gain is (1−β₁)/(1−β₁ᵗ) / (√(s_{t−1} / (1−β₂ᵗ⁻¹)) + ε). Where s = 0 that would be 1/ε, which no real step
        does: the real step divides by the new gradient's own size.
        """
        if "exp_avg_sq" not in state or float(state["step"]) < 1:
            return None
        t = float(state["step"]) + 1.0
        beta1, _ = group["betas"]
        raw.div_(self._denominator(group, state))
        sign = -1.0 if group["maximize"] else 1.0
        return sign * self._correction(group, state) * (1.0 - float(beta1)) / (1.0 - float(beta1) ** t)

    def _correction(self, group: Group, state: State) -> float:
        return math.sqrt(1.0 - float(group["betas"][1]) ** float(state["step"]))

    def _denominator(self, group: Group, state: State) -> Tensor:
        """Return √s + ε√(1−β₂ᵗ⁻¹), infinite where s = 0."""
        denominator = torch.sqrt(state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"])
        denominator = torch.threshold_(denominator, 0.0, math.inf)
        return denominator.add_(float(group["eps"]) * self._correction(group, state))

    def thaw(self, v: Tensor, group: Group, state: State) -> Tensor:
        """Multiply by what ``frozen`` divided by."""
        return v * self._denominator(group, state)

    def without_history(self, state: State) -> int:
        """Count the entries whose second moment is 0."""
        second = state.get("exp_avg_sq")
        return 0 if second is None else second.numel() - int(torch.count_nonzero(second))

    def can_thaw(self, state: State) -> bool:
        """Only where every entry has had a gradient."""
        return "exp_avg_sq" in state and self.without_history(state) == 0

    def secant(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor | float:
        """Return the divided difference of the update between no gradient and the real one, in closed form.

        With z₀ = λw, z₁ = z₀ ± G, q(z) the bias-corrected second moment and D = √q + ε:

            (u(z₁) − u(z₀)) / (z₁ − z₀) ∝ (1−β₁)/D₁ − (β₁m + (1−β₁)z₀) · q′ / ((√q₀ + √q₁) D₀ D₁)

        with q′ = (q₁ − q₀)/(z₁ − z₀). No difference of nearly equal numbers is taken, however small G is.
        """
        beta1, beta2 = (float(b) for b in group["betas"])
        t = float(state["step"]) + 1.0 if "step" in state else 1.0
        correction1, correction2 = 1.0 - beta1**t, 1.0 - beta2**t
        entering = (1.0 - beta2) / correction2
        sign, eps = -1.0 if group["maximize"] else 1.0, float(group["eps"])
        zero = gradient.new_zeros(()).expand_as(gradient)
        first, second = state.get("exp_avg", zero), state.get("exp_avg_sq", zero)
        z1 = -gradient if group["maximize"] else gradient
        coupled = float(group["weight_decay"]) != 0.0 and not group.get("decoupled_weight_decay", self.decoupled)
        if coupled:
            z0 = parameter * float(group["weight_decay"])
            z1 = z0 + z1
            held, slope = beta1 * first + (1.0 - beta1) * z0, entering * (z0 + z1)
            q0 = torch.addcmul(second * (beta2 / correction2), z0, z0, value=entering)
            q1 = torch.addcmul(second * (beta2 / correction2), z1, z1, value=entering)
        else:
            held, slope = beta1 * first, entering * z1
            q0 = second * (beta2 / correction2)
            q1 = torch.addcmul(q0, z1, z1, value=entering)
        if group["amsgrad"]:
            largest = state.get("max_exp_avg_sq", zero) / correction2
            slope = _slope_above(largest, q0, q1, slope, z1 - z0 if coupled else z1)
            q0, q1 = torch.maximum(q0, largest), torch.maximum(q1, largest)
        r0, r1 = q0.sqrt_(), q1.sqrt_()
        both = r0 + r1
        d0, d1 = r0.add_(eps), r1.add_(eps)
        # Both moments 0 and no gradient: nothing moves, whatever the samples' gradients that cancelled.
        moves = both > 0
        drag = held.mul(slope).div_(both.mul_(d0))
        gain = drag.neg_().add_(1.0 - beta1).div_(d1).mul_(sign / correction1)
        return torch.where(moves, gain, 0.0)


@register(torch.optim.AdamW)
class AdamWRule(AdamRule):
    """Adam with decoupled weight decay, which is part of the zero-gradient move."""

    decoupled = True


def _slope_above(floor: Tensor, q0: Tensor, q1: Tensor, slope: Tensor, step: Tensor) -> Tensor:
    """Return the divided difference of max(floor, q) over a step of z, given that of q."""
    crossing = (torch.maximum(q1, floor) - torch.maximum(q0, floor)) / torch.where(step == 0, 1.0, step)
    both_above = (q0 >= floor) & (q1 >= floor)
    return torch.where(both_above, slope, torch.where(step == 0, torch.zeros_like(slope), crossing))
