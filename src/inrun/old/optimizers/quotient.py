"""Updates that are a quotient: a numerator linear in the gradient over a size that grows with it.

    u(z) = c − (a + b·z) / (r(z) + ε)        z = ±G, plus λw where weight decay is added to the gradient

Adam and its relatives, RMSprop, Adagrad and Adadelta differ only in a, b, c, r and ε. Between no gradient (z₀) and the
real one (z₁), with D = r + ε and the slope r′ = (r₁ − r₀) / (z₁ − z₀),

    (u(z₀) − u(z₁)) / (z₁ − z₀) = b/D₁ − (a + b·z₀) · r′ / (D₀D₁)

and r′ has a closed form too ((q₁ − q₀) / (z₁ − z₀) / (r₀ + r₁) for r = √q), so that no difference of nearly equal
numbers is taken however small G is. The two terms may still cancel (an entry the gradient hardly moves): that is why it
is computed in float64.
"""

from __future__ import annotations

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
    by_chunks,
    learning_rate,
    option,
    sign_of,
)


class QuotientRule(UpdateRule):
    """An update of the form above. All tensors ``[*shape]``, in the dtype of ``z``."""

    #: Whether weight decay shrinks the weights beside the update, where the group does not say.
    decoupled = False

    def numerator(self, like: Tensor, group: Group, state: State) -> tuple[Tensor | float, Tensor | float]:
        """Return a and b, learning rate included."""
        raise NotImplementedError

    def size(self, z: Tensor, group: Group, state: State) -> Tensor:
        """Return r(z) ≥ 0."""
        raise NotImplementedError

    def slope(self, z0: Tensor, z1: Tensor, r0: Tensor, r1: Tensor, group: Group, state: State) -> Tensor:
        """Return (r₁ − r₀) / (z₁ − z₀), in a form that stays accurate for z₁ → z₀."""
        raise NotImplementedError

    def epsilon(self, group: Group) -> float:
        """Return ε."""
        return option(group, "eps")

    def floor(self, group: Group) -> float:
        """Return the size of an entry that never had a gradient: with no gradient now either, its gain is 0."""
        return 0.0

    def constant(self, like: Tensor, group: Group, state: State) -> Tensor | float:
        """Return what of c is not weight decay."""
        return 0.0

    def constant_gain(self, group: Group, state: State) -> float | None:
        """Return the gain where the update is linear for now, else None."""
        return None

    def coupled(self, group: Group) -> float:
        """Return λ where weight decay is added to the gradient, else 0."""
        return 0.0 if group.get("decoupled_weight_decay", self.decoupled) else option(group, "weight_decay")

    def shrinks(self, group: Group) -> float:
        """Return lr·λ where weight decay is beside the gradient, else 0."""
        beside = group.get("decoupled_weight_decay", self.decoupled)
        return learning_rate(group) * option(group, "weight_decay") if beside else 0.0

    def _entering(self, gradient: Tensor, parameter: Tensor, group: Group) -> Tensor:
        """Return z."""
        z, decay = gradient * sign_of(group), self.coupled(group)
        return z if decay == 0.0 else torch.add(z, parameter.detach().to(z.dtype), alpha=decay)

    def varying(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return −(a + b·z) / D."""
        z = self._entering(gradient, parameter, group)
        a, b = self.numerator(z, group, state)
        if self.constant_gain(group, state) is not None:
            return -(a + b * z)
        return (a + b * z) / -(self.size(z, group, state) + self.epsilon(group))

    def move(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return u(G)."""
        moved = self.varying(gradient, parameter, group, state) + self.constant(gradient, group, state)
        shrinks = self.shrinks(group)
        return moved if shrinks == 0.0 else torch.add(moved, parameter.detach().to(moved.dtype), alpha=-shrinks)

    @torch.no_grad()
    def zero_move(self, parameter: Tensor, group: Group, state: State) -> tuple[Tensor | None, Tensor]:
        """Decay beside the update is −lr·λ·w; decay that went through it cannot be told from memory."""
        weight = parameter.detach().to(at_least_float32(parameter.dtype))
        whole = self.move(torch.zeros_like(weight), weight, group, state)
        if self.coupled(group) != 0.0:
            return None, whole
        shrinks = self.shrinks(group)
        return (weight * -shrinks if shrinks else weight.new_zeros(()).expand_as(weight)), whole

    @torch.no_grad()
    def secant(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor | float:
        """Return the divided difference of the update in closed form."""
        linear = self.constant_gain(group, state)
        if linear is not None:
            return sign_of(group) * linear

        def gain(g: Tensor, w: Tensor, part: State) -> Tensor:
            z0, z1 = self._entering(torch.zeros_like(g), w, group), self._entering(g, w, group)
            r0, r1 = self.size(z0, group, part), self.size(z1, group, part)
            slope = self.slope(z0, z1, r0, r1, group, part)
            a, b = self.numerator(g, group, part)
            eps = self.epsilon(group)
            drag = (a + b * z0) * slope / (r0 + eps)
            return torch.where(r0 + r1 > 2 * self.floor(group), sign_of(group) * (b - drag) / (r1 + eps), 0.0)

        return by_chunks(gain, gradient, parameter, state)

    # Whole credit

    def recall(self, group: Group, state: State) -> Recall | None:
        """Nothing is remembered but sizes, unless a rule says more."""
        return NO_MEMORY

    def entering_decay(self, group: Group) -> float:
        """Return λ where weight decay is added to the gradient."""
        return self.coupled(group)

    def decay_beside(self, parameter: Tensor, group: Group, state: State) -> float:
        """Return lr·λ where weight decay is beside the gradient."""
        return self.shrinks(group)

    @torch.no_grad()
    def realised(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Realised:
        """Return q = (a + b·z) κ/b and the gain b/κ / D, κ the coefficient of z in q; both per unit of learning rate."""
        recall = self.recall(group, state)
        assert recall is not None
        unit = {**group, "lr": 1.0}
        z = self._entering(gradient, parameter, group)
        a, b = self.numerator(z, unit, state)
        q = z if isinstance(a, float) else (a + b * z) * (recall.own / b)
        if self.constant_gain(unit, state) is not None:
            return Realised(b / recall.own, q, learning_rate(group))
        size = self.size(z, group, state)
        gain = (b / recall.own) / (size + self.epsilon(group))
        return Realised(torch.where(size > self.floor(group), gain, 0.0), q, learning_rate(group))


def slope_of_root(q_slope: Tensor, r0: Tensor, r1: Tensor) -> Tensor:
    """Return the divided difference of √q, given that of q."""
    return q_slope / (r0 + r1)
