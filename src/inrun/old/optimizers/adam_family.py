"""Relatives of Adam: NAdam, RAdam and Adamax.

With z = ±G (+ λw where decay is added to the gradient), m_t = β₁m + (1−β₁)z and s_t = β₂s + (1−β₂)z²:

    NAdam     μ_t = β₁(1 − ½·0.96^(tψ)),  Π_t = μ₁⋯μ_t
              w ← w − lr · ((1−μ_t) z / (1−Π_t) + μ_{t+1} m_t / (1−Π_{t+1})) / (√(s_t / (1−β₂ᵗ)) + ε)
    RAdam     ρ_t = ρ − 2tβ₂ᵗ/(1−β₂ᵗ),  ρ = 2/(1−β₂) − 1;  while ρ_t ≤ 5:  w ← w − lr · m_t / (1−β₁ᵗ);  later
              w ← w − lr · ϱ_t · m_t / (1−β₁ᵗ) · √(1−β₂ᵗ) / (√s_t + ε),  ϱ_t² = (ρ_t−4)(ρ_t−2)ρ / ((ρ−4)(ρ−2)ρ_t)
    Adamax    n_t = max(β₂n, |z| + ε);  w ← w − lr · m_t / (1−β₁ᵗ) / n_t
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inrun.old.optimizers.adam import MomentsRule, first_moment, slope_above
from inrun.old.optimizers.quotient import QuotientRule
from inrun.old.optimizers.registry import Group, Recall, State, held, learning_rate, next_step, option, register


@register(torch.optim.NAdam)
class NAdamRule(MomentsRule):
    """Adam that looks ahead: this step's gradient enters twice."""

    def numerator(self, like: Tensor, group: Group, state: State) -> tuple[Tensor | float, Tensor | float]:
        """Return the coefficients of m and z, z entering directly and through m_t."""
        beta1, lr = float(group["betas"][0]), learning_rate(group)
        direct, ahead = self._weights(group, state)
        return held(state, "exp_avg", like) * (lr * ahead * beta1), lr * (direct + ahead * (1.0 - beta1))

    def _weights(self, group: Group, state: State) -> tuple[float, float]:
        """Return the coefficients of z and of m_t in the numerator."""
        beta1, t, psi = float(group["betas"][0]), next_step(state), option(group, "momentum_decay")
        mu, mu_next = (beta1 * (1.0 - 0.5 * 0.96 ** (i * psi)) for i in (t, t + 1.0))
        product = state.get("mu_product")
        if product is None:
            product = torch.ones((), dtype=torch.promote_types(torch.float32, torch.get_default_dtype()))
        # The optimizer keeps the product in float32: its rounding is part of the real step.
        product = float(product * mu)
        return (1.0 - mu) / (1.0 - product), mu_next / (1.0 - product * mu_next)

    def recall(self, group: Group, state: State) -> Recall | None:
        """m_t is read with the look-ahead's weight, and this step's gradient enters once more."""
        direct, ahead = self._weights(group, state)
        moment = first_moment(group)
        return Recall(moment.keep, moment.enter, ahead, direct)


@register(torch.optim.RAdam)
class RAdamRule(MomentsRule):
    """Adam that divides by the second moment only once its estimate has settled."""

    def correction(self, group: Group, state: State) -> float:
        """ε is added before the bias correction here, so that the correction is part of the step size."""
        return 1.0

    def _rectified(self, group: Group, state: State) -> float | None:
        beta2, t = float(group["betas"][1]), next_step(state)
        longest = 2.0 / (1.0 - beta2) - 1.0
        length = longest - 2.0 * t * beta2**t / (1.0 - beta2**t)
        if length <= 5.0:
            return None
        squared = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        return math.sqrt(squared * (1.0 - beta2**t))

    def numerator(self, like: Tensor, group: Group, state: State) -> tuple[Tensor | float, Tensor | float]:
        """Return the step size times β₁m and 1−β₁."""
        beta1, rectified = float(group["betas"][0]), self._rectified(group, state)
        step = learning_rate(group) / (1.0 - beta1 ** next_step(state)) * (1.0 if rectified is None else rectified)
        return held(state, "exp_avg", like) * (step * beta1), step * (1.0 - beta1)

    def constant_gain(self, group: Group, state: State) -> float | None:
        """Not rectified yet: momentum without a denominator."""
        if self._rectified(group, state) is not None:
            return None
        beta1 = float(group["betas"][0])
        return learning_rate(group) / (1.0 - beta1 ** next_step(state)) * (1.0 - beta1)


@register(torch.optim.Adamax)
class AdamaxRule(QuotientRule):
    """Adam with the largest gradient so far, slowly forgotten, in place of the second moment."""

    def numerator(self, like: Tensor, group: Group, state: State) -> tuple[Tensor | float, Tensor | float]:
        """Return lr/(1−β₁ᵗ) times β₁m and 1−β₁."""
        beta1 = float(group["betas"][0])
        step = learning_rate(group) / (1.0 - beta1 ** next_step(state))
        return held(state, "exp_avg", like) * (step * beta1), step * (1.0 - beta1)

    def size(self, z: Tensor, group: Group, state: State) -> Tensor:
        """Return n_t, which has ε inside."""
        return torch.maximum(self._forgotten(z, group, state), z.abs() + option(group, "eps"))

    def _forgotten(self, z: Tensor, group: Group, state: State) -> Tensor:
        return held(state, "exp_inf", z) * float(group["betas"][1])

    def recall(self, group: Group, state: State) -> Recall | None:
        """The first moment is Adam's."""
        return first_moment(group)

    def remembered(self, state: State) -> Tensor | None:
        """Return the first moment."""
        return state.get("exp_avg")

    def epsilon(self, group: Group) -> float:
        """Nothing is added outside."""
        return 0.0

    def floor(self, group: Group) -> float:
        """An entry that never had a gradient has n = ε."""
        return option(group, "eps")

    def slope(self, z0: Tensor, z1: Tensor, r0: Tensor, r1: Tensor, group: Group, state: State) -> Tensor:
        """The divided difference of |z| is (z₀ + z₁) / (|z₀| + |z₁|)."""
        apart = z0.abs() + z1.abs()
        slope, eps = (z0 + z1) / torch.where(apart == 0, 1.0, apart), option(group, "eps")
        return slope_above(self._forgotten(z0, group, state), z0.abs() + eps, z1.abs() + eps, slope, z1 - z0)
