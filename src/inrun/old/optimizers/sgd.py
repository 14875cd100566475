"""SGD and ASGD: linear in the gradient."""

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
    held,
    learning_rate,
    option,
    register,
    sign_of,
)


@register(torch.optim.SGD)
class SGDRule(UpdateRule):
    """d = ±G + λw;  buffer ← μ·buffer + (1−τ)·d (the first time: d);  w ← w − lr·(buffer, or d + μ·buffer)."""

    linear = True

    def _coefficients(self, group: Group, state: State) -> tuple[float, float]:
        """Return the coefficients of d and of the old buffer in the update."""
        momentum, buffer = option(group, "momentum"), state.get("momentum_buffer")
        if momentum == 0.0:
            return 1.0, 0.0
        entering, kept = (1.0, 0.0) if buffer is None else (1.0 - option(group, "dampening"), momentum)
        return (1.0 + momentum * entering, momentum * kept) if group["nesterov"] else (entering, kept)

    def move(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return −lr · (coefficient · d + coefficient · buffer)."""
        fresh, old = self._coefficients(group, state)
        lr, weight = learning_rate(group), parameter.detach().to(gradient.dtype)
        d = gradient * sign_of(group) + weight * option(group, "weight_decay")
        moved = d * (-lr * fresh)
        return moved if old == 0.0 else moved - held(state, "momentum_buffer", gradient) * (lr * old)

    @torch.no_grad()
    def zero_move(self, parameter: Tensor, group: Group, state: State) -> tuple[Tensor | None, Tensor]:
        """Decay enters linearly like the gradient, so that this step's part of it can be told from the buffer."""
        weight = parameter.detach().to(at_least_float32(parameter.dtype))
        fresh, old = self._coefficients(group, state)
        lr, shrink = learning_rate(group), option(group, "weight_decay")
        decay = weight * (-lr * fresh * shrink) if shrink else weight.new_zeros(()).expand_as(weight)
        return decay, decay if old == 0.0 else decay - held(state, "momentum_buffer", weight) * (lr * old)

    def frozen(self, raw: Tensor, parameter: Tensor, group: Group, state: State) -> float | None:
        """Return the coefficient of G in the update; decay and the old buffer are the zero-gradient move."""
        return sign_of(group) * self._coefficients(group, state)[0]

    def secant(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor | float:
        """A linear update is its own secant."""
        return sign_of(group) * self._coefficients(group, state)[0] * learning_rate(group)

    adaptive = False

    def recall(self, group: Group, state: State) -> Recall | None:
        """The buffer forgets by μ and takes 1 − τ of what comes, all of it the first time; nesterov adds it once more."""
        momentum = option(group, "momentum")
        if momentum == 0.0:
            return NO_MEMORY
        first = state.get("momentum_buffer") is None
        keep, enter = (0.0, 1.0) if first else (momentum, 1.0 - option(group, "dampening"))
        read, direct = (momentum, 1.0) if group["nesterov"] else (1.0, 0.0)
        return Recall(keep, enter, read, direct, keeps_later=momentum)

    @torch.no_grad()
    def realised(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Realised:
        """Return the buffer (nesterov: d + μ · buffer) and the learning rate."""
        fresh, old = self._coefficients(group, state)
        decay = option(group, "weight_decay")
        q = gradient * (sign_of(group) * fresh)
        if decay != 0.0:
            q.add_(parameter.detach().to(q.dtype), alpha=decay * fresh)
        if old != 0.0:
            q.add_(held(state, "momentum_buffer", q), alpha=old)
        return Realised(1.0, q, learning_rate(group))

    def remembered(self, state: State) -> Tensor | None:
        """Return the buffer."""
        return state.get("momentum_buffer")

    def entering_decay(self, group: Group) -> float:
        """Decay is added to the gradient."""
        return option(group, "weight_decay")


@register(torch.optim.ASGD)
class ASGDRule(UpdateRule):
    """w ← w − η·(±G + (λ + λ′)·w), λ the weight decay and λ′ the option ``lambd``; the average of the weights is beside it.

    η is a state: a step uses the one that the step before left, lr / (1 + λ′·lr·t)^α, and leaves the next one behind. So
    it answers to a new learning rate one step late, and is not 0 when the learning rate has just become 0; that is why
    the rule does not call itself linear, though the update is.
    """

    rate_is_state = True

    def _eta(self, group: Group, state: State) -> float:
        if "eta" in state:
            return float(state["eta"])
        # The optimizer will keep the number in its scalar dtype from the start, rounded.
        double = torch.get_default_dtype() == torch.float64
        return float(torch.tensor(learning_rate(group), dtype=torch.float64 if double else torch.float32))

    def move(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return −η·(±G + (λ + λ′)·w)."""
        shrink = option(group, "lambd") + option(group, "weight_decay")
        weight = parameter.detach().to(gradient.dtype)
        return (gradient * sign_of(group) + weight * shrink) * -self._eta(group, state)

    @torch.no_grad()
    def zero_move(self, parameter: Tensor, group: Group, state: State) -> tuple[Tensor | None, Tensor]:
        """All of it is decay: λ and λ′ both pull the weights to 0."""
        whole = self.move(torch.zeros_like(parameter, dtype=at_least_float32(parameter.dtype)), parameter, group, state)
        return whole, whole

    def frozen(self, raw: Tensor, parameter: Tensor, group: Group, state: State) -> float | None:
        """Return η per unit of learning rate, where there is one."""
        lr = learning_rate(group)
        return None if lr == 0.0 else sign_of(group) * self._eta(group, state) / lr

    def secant(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor | float:
        """A linear update is its own secant."""
        return sign_of(group) * self._eta(group, state)

    adaptive = False

    def recall(self, group: Group, state: State) -> Recall | None:
        """Nothing is remembered."""
        return NO_MEMORY

    @torch.no_grad()
    def realised(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Realised:
        """Return ±G + (λ + λ′)w and η."""
        z = gradient * sign_of(group)
        decay = self.entering_decay(group)
        return Realised(1.0, z.add_(parameter.detach().to(z.dtype), alpha=decay) if decay else z, self._eta(group, state))

    def entering_decay(self, group: Group) -> float:
        """Return λ + λ′."""
        return option(group, "lambd") + option(group, "weight_decay")


@register(torch.optim.Rprop)
class RpropRule(UpdateRule):
    """w ← w − sign(G) · size, the size of an entry growing while its gradient keeps its sign.

    size ← size · η₊ where G agrees in sign with the last gradient, size · η₋ where not (then the weight stays), kept
    within bounds. Elementwise; without a gradient nothing moves, and the learning rate is only the first size.
    """

    def move(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return −sign(G) · size, 0 where the sign has changed."""
        shrink, grow = (float(x) for x in group["etas"])
        least, most = (float(x) for x in group["step_sizes"])
        g = gradient * sign_of(group)
        agrees = torch.sign(g * held(state, "prev", gradient))
        size = held(state, "step_size", gradient) if "step_size" in state else torch.full_like(gradient, learning_rate(group))
        size = torch.where(agrees > 0, size * grow, torch.where(agrees < 0, size * shrink, size)).clamp(least, most)
        return torch.where(agrees < 0, 0.0, -torch.sign(g) * size)

    def scale(self, parameter: Tensor, group: Group, state: State) -> Tensor:
        """The update is a sign: it has no straight part, and no gradient is no gain."""
        return torch.zeros_like(parameter)

    whole_on_request = "its moves are signs: one sample may get many times the fall of the loss"

    def recall(self, group: Group, state: State) -> Recall | None:
        """Nothing is remembered but signs and sizes."""
        return NO_MEMORY

    @torch.no_grad()
    def realised(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Realised:
        """Return G and the real move over G."""
        moved, z = self.move(gradient, parameter, group, state), gradient * sign_of(group)
        return Realised(torch.where(z == 0, 0.0, -moved / torch.where(z == 0, 1.0, z)), z, 1.0)
