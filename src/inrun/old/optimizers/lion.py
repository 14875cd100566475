"""Lion as lion-pytorch, timm and pytorch-optimizer have it: w ← w − lr · sign(β₁m + (1−β₁)z), z = ±G (+ λw).

The packages are recognised by where their class is defined and never imported. They agree on the update and differ in
what weight decay is multiplied by, some of it kept in the optimizer and not in its groups; :meth:`LionRule.bind` reads it.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from inrun.errors import OptimizerError
from inrun.old.optimizers.registry import (
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
)

#: Options that mix the entries of a tensor, or the moments of a step, in ways not described here.
UNKNOWN = ("caution", "cautious", "use_gc", "adanorm")


@register(
    "lion_pytorch.lion_pytorch.Lion",
    "lion_pytorch.foreach.Lion",
    "timm.optim.lion.Lion",
    "pytorch_optimizer.optimizer.lion.Lion",
)
class LionRule(UpdateRule):
    """A sign: an entry is moved by the data only where the gradient turned it."""

    #: From the optimizer: whether it maximises, and the learning rate by which decay is divided (None: not divided).
    maximize: bool = False
    decay_over: float | None = None

    def check(self, group: Group) -> None:
        """Raise for options that are not elementwise."""
        for name in UNKNOWN:
            if group.get(name):
                raise OptimizerError(f"Lion with {name}={group[name]!r} is not described; leave the option out or use update='sgd'")

    def bind(self, optimizer: torch.optim.Optimizer) -> UpdateRule:
        """Read the options that the optimizer keeps outside its groups."""
        rule: LionRule = copy.copy(self)
        rule.maximize = bool(getattr(optimizer, "maximize", False))
        if getattr(optimizer, "decoupled_wd", False):
            rule.decay_over = float(optimizer._init_lr)  # type: ignore[attr-defined]
        if any(group.get("corrected_weight_decay") for group in optimizer.param_groups):
            rule.decay_over = float(optimizer.defaults["lr"])
        for group in optimizer.param_groups:
            rule.check(group)
        return rule

    def _shrinks(self, group: Group) -> float:
        """Return the factor of −w in the move; 0 where decay is added to the gradient."""
        decay, lr = option(group, "weight_decay"), learning_rate(group)
        if decay == 0.0 or not group.get("weight_decouple", True):
            return 0.0
        if group.get("fixed_decay", False):
            return decay
        if group.get("corrected_weight_decay", False):
            assert self.decay_over is not None
            return decay * lr * lr / self.decay_over
        if "corrected_weight_decay" not in group and self.decay_over is not None:
            return decay * lr / self.decay_over
        return decay * lr

    def _coupled(self, group: Group) -> float:
        return 0.0 if group.get("weight_decouple", True) else option(group, "weight_decay")

    def varying(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return −lr · sign(β₁m + (1−β₁)z)."""
        return torch.sign(self._turned(gradient, parameter, group, state)) * -learning_rate(group)

    def _turned(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return β₁m + (1−β₁)z."""
        beta1 = float(group["betas"][0])
        z = -gradient if self.maximize or group.get("maximize", False) else gradient
        if self._coupled(group) != 0.0:
            z = torch.add(z, parameter.detach().to(z.dtype), alpha=self._coupled(group))
        return held(state, "exp_avg", z) * beta1 + z * (1.0 - beta1)

    def move(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Return the sign step and the decay."""
        moved = self.varying(gradient, parameter, group, state)
        return torch.add(moved, parameter.detach().to(moved.dtype), alpha=-self._shrinks(group))

    def scale(self, parameter: Tensor, group: Group, state: State) -> Tensor:
        """Far below the momentum a gradient turns nothing; with no momentum there is nothing but a jump."""
        return held(state, "exp_avg", parameter).abs() + parameter.detach().abs() * self._coupled(group)

    @torch.no_grad()
    def zero_move(self, parameter: Tensor, group: Group, state: State) -> tuple[Tensor | None, Tensor]:
        """Decay beside the sign can be told from it."""
        weight = parameter.detach().to(at_least_float32(parameter.dtype))
        whole = self.move(torch.zeros_like(weight), weight, group, state)
        return (None if self._coupled(group) != 0.0 else weight * -self._shrinks(group)), whole

    whole_on_request = "its moves are signs: in a rough run one sample may get many times the fall of the loss"

    def recall(self, group: Group, state: State) -> Recall | None:
        """The step reads β₁m + (1−β₁)z and then keeps β₂m + (1−β₂)z."""
        beta1, beta2 = (float(b) for b in group["betas"])
        if beta2 == 0.0:
            return None
        read = beta1 / beta2
        return Recall(beta2, 1.0 - beta2, read, 1.0 - beta1 - read * (1.0 - beta2))

    @torch.no_grad()
    def realised(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Realised:
        """Return β₁m + (1−β₁)z and one over its size."""
        q = self._turned(gradient, parameter, group, state)
        return Realised(torch.where(q == 0, 0.0, 1.0 / torch.where(q == 0, 1.0, q.abs())), q, learning_rate(group))

    def remembered(self, state: State) -> Tensor | None:
        """Return the moment."""
        return state.get("exp_avg")

    def entering_decay(self, group: Group) -> float:
        """Return λ where weight decay is added to the gradient."""
        return self._coupled(group)

    def decay_beside(self, parameter: Tensor, group: Group, state: State) -> float:
        """Return the factor of −w."""
        return self._shrinks(group)
