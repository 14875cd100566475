"""Adafactor, torch's and transformers': the gradient over a second moment kept as a row times a column.

    w ← w − lr·λ·w − α · F∘G / max(1, rms(F∘G) / d)        F = 1 / √(row · column / mean(row))

row and column are running means of G² along the other dimension. Not elementwise: an entry's divisor depends on its row,
its column, and (through the clipping by d) on the whole tensor. The move is the gradient times a tensor of gains all the
same, and it is 0 without a gradient unless there is momentum or decay.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inrun.old.optimizers.registry import (
    NO_MEMORY,
    Group,
    Realised,
    Recall,
    State,
    UpdateRule,
    at_least_float32,
    gauss_legendre,
    held,
    in_panels,
    learning_rate,
    next_step,
    option,
    register,
    sign_of,
)


class FactoredRule(UpdateRule):
    """What both have in common: u(G) = c − gains(G)∘G."""

    elementwise = False

    #: The name of the option d.
    threshold: str

    def inverse_size(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return F, ``[*shape]``."""
        raise NotImplementedError

    def rate(self, parameter: Tensor, group: Group, state: State) -> float:
        """Return α, negative where the optimizer maximises."""
        raise NotImplementedError

    def gains(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return the tensor by which this gradient is multiplied, ``[*shape]``."""
        inverse = self.inverse_size(gradient, parameter, group, state)
        clip = root_mean_square(inverse * gradient) / float(group[self.threshold])
        return inverse * (self.rate(parameter, group, state) / clip.clamp_min(1.0))

    @torch.no_grad()
    def path(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> list[tuple[float, float]]:
        """Where clipping sets in on the way, the update has a kink: take the points on either side of it."""

        def clips(s: float) -> bool:
            part = gradient * s
            return bool(root_mean_square(self.inverse_size(part, parameter, group, state) * part) > float(group[self.threshold]))

        if not clips(1.0):
            return gauss_legendre(self.points)
        low, high = 0.0, 1.0
        for _ in range(10):
            middle = (low + high) / 2
            low, high = (low, middle) if clips(middle) else (middle, high)
        return in_panels([1.0, (low + high) / 2, 0.0], self.points)

    def shrinks(self, parameter: Tensor, group: Group, state: State) -> float:
        """Return the factor of −w in the move."""
        raise NotImplementedError

    def memory(self, like: Tensor, group: Group, state: State) -> Tensor | None:
        """Return what momentum adds to the move, if anything."""
        return None

    def seen(self, like: Tensor, state: State) -> Tensor:
        """Return where the second moment has a history, as zeros and ones ``[*shape]``."""
        raise NotImplementedError

    def move(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return c − gains∘G."""
        g = gradient.to(at_least_float32(gradient.dtype))
        weight = parameter.detach().to(g.dtype)
        moved = -self.gains(g, parameter.detach(), group, state) * g - weight * self.shrinks(weight, group, state)
        memory = self.memory(g, group, state)
        return (moved if memory is None else moved + memory).to(gradient.dtype)

    @torch.no_grad()
    def zero_move(self, parameter: Tensor, group: Group, state: State) -> tuple[Tensor | None, Tensor]:
        """Decay is beside the update, and without momentum it is all that happens."""
        weight = parameter.detach().to(at_least_float32(parameter.dtype))
        decay, memory = weight * -self.shrinks(weight, group, state), self.memory(weight, group, state)
        return decay, decay if memory is None else decay + memory

    @torch.no_grad()
    def direction(self, raw: Tensor, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return the mean Jacobian along s·G for entries with a history, and the real step's gains for the others.

        Without a history the divisor is the gradient's own size: the move jumps at s = 0, which no point on the way sees.
        """
        wide = raw.to(at_least_float32(torch.promote_types(raw.dtype, gradient.dtype)))
        g = gradient.detach().to(wide.dtype)
        seen = self.seen(g, state)
        fresh = wide * (self.gains(g, parameter.detach(), group, state) * (1.0 - seen))
        if not bool(seen.any()):
            return fresh.to(raw.dtype)
        return (super().direction(wide * seen, g, parameter, group, state) + fresh).to(raw.dtype)


class AdafactorRule(FactoredRule):
    """torch's: α = max(ε₂, rms(w)) · min(lr, 1/√t), and a share t^decay of the new G² in the second moment."""

    threshold = "d"

    def rate(self, parameter: Tensor, group: Group, state: State) -> float:
        """Return ±α."""
        alpha = max(float(group["eps"][1]), float(root_mean_square(parameter)))
        return sign_of(group) * alpha * min(learning_rate(group), 1.0 / math.sqrt(next_step(state)))

    def inverse_size(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return the root of the inverse second moment."""
        eps = group["eps"][0]
        eps = torch.finfo(parameter.dtype).eps if eps is None else float(eps)
        share, squared = next_step(state) ** float(group["beta2_decay"]), gradient.square()
        if gradient.dim() > 1:
            row = lerp_from(state, "row_var", squared.mean(-1, keepdim=True), share)
            column = lerp_from(state, "col_var", squared.mean(-2, keepdim=True), share)
            second = row @ column / row.mean(-2, keepdim=True).clamp_min(eps)
        else:
            second = lerp_from(state, "variance", squared, share)
        return second.clamp_min(eps * eps).rsqrt()

    def shrinks(self, parameter: Tensor, group: Group, state: State) -> float:
        """Return lr·λ."""
        return learning_rate(group) * option(group, "weight_decay")

    def seen(self, like: Tensor, state: State) -> Tensor:
        """An entry has a history if its row and its column do."""
        if like.dim() > 1:
            both = (held_or_zero(state, "row_var", like) > 0) & (held_or_zero(state, "col_var", like) > 0)
            return both.to(like).expand_as(like)
        return (held(state, "variance", like) > 0).to(like)

    def recall(self, group: Group, state: State) -> Recall | None:
        """Nothing is remembered but sizes."""
        return NO_MEMORY

    @torch.no_grad()
    def realised(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Realised:
        """Return the gradient and what it is multiplied by."""
        g, sign = gradient.to(at_least_float32(gradient.dtype)), sign_of(group)
        return Realised(self.gains(g, parameter.detach(), group, state) * sign, g * sign, 1.0)

    def decay_beside(self, parameter: Tensor, group: Group, state: State) -> float:
        """Return lr·λ."""
        return self.shrinks(parameter, group, state)


@register("transformers.optimization.Adafactor")
class TransformersAdafactorRule(FactoredRule):
    """transformers': its own learning rate schedule, and momentum after the division (part of the zero-gradient move)."""

    threshold = "clip_threshold"

    def _whole_rate(self, parameter: Tensor, group: Group, state: State) -> float:
        t = next_step(state)
        if group["relative_step"]:
            rate = min(1e-6 * t if group["warmup_init"] else 1e-2, 1.0 / math.sqrt(t))
        else:
            rate = learning_rate(group)
        return rate * max(float(group["eps"][1]), float(root_mean_square(parameter))) if group["scale_parameter"] else rate

    def rate(self, parameter: Tensor, group: Group, state: State) -> float:
        """Return α, of which momentum lets 1−β₁ through at once."""
        entering = 1.0 if group["beta1"] is None else 1.0 - float(group["beta1"])
        return entering * self._whole_rate(parameter, group, state)

    def inverse_size(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return the root of the inverse second moment."""
        share = next_step(state) ** float(group["decay_rate"])
        squared = gradient.square() + float(group["eps"][0])
        if gradient.dim() < 2:
            return lerp_from(state, "exp_avg_sq", squared, share).rsqrt()
        row = lerp_from(state, "exp_avg_sq_row", squared.mean(-1), share)
        column = lerp_from(state, "exp_avg_sq_col", squared.mean(-2), share)
        return (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1) * column.unsqueeze(-2).rsqrt()

    def shrinks(self, parameter: Tensor, group: Group, state: State) -> float:
        """Return rate·λ."""
        decay = option(group, "weight_decay")
        return 0.0 if decay == 0.0 else decay * self._whole_rate(parameter, group, state)

    def memory(self, like: Tensor, group: Group, state: State) -> Tensor | None:
        """Return −β₁ times the running mean of moves."""
        return None if group["beta1"] is None else held(state, "exp_avg", like) * -float(group["beta1"])

    def seen(self, like: Tensor, state: State) -> Tensor:
        """An entry has a history if its row and its column do, beyond the ε that is always added."""
        small = 1e-25
        if like.dim() >= 2 and "exp_avg_sq_row" in state:
            row, column = state["exp_avg_sq_row"].unsqueeze(-1), state["exp_avg_sq_col"].unsqueeze(-2)
            return ((row > small) & (column > small)).to(like)
        return (held(state, "exp_avg_sq", like) > small).to(like)


def held_or_zero(state: State, name: str, like: Tensor) -> Tensor:
    """Return a tensor of the state, or one zero."""
    return state[name].to(like.dtype) if name in state else like.new_zeros(())


def lerp_from(state: State, name: str, new: Tensor, share: float) -> Tensor:
    """Return the running mean of a state entry with a share of something new, the entry being 0 before the first step."""
    return new * share + held_or_zero(state, name, new) * (1.0 - share)


def root_mean_square(x: Tensor) -> Tensor:
    """Return √(mean of x²)."""
    return torch.linalg.vector_norm(x) / math.sqrt(x.numel())


if hasattr(torch.optim, "Adafactor"):
    register(torch.optim.Adafactor)(AdafactorRule)
