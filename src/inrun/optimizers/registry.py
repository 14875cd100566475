"""What an optimizer does to a gradient: the registry by optimizer class.

A rule describes one update u(G) of one parameter through its *gain*, −P per unit of learning rate, so that the share
of sample n is δ_n = −lr · gain ∘ g_n and its contribution lr · ⟨g_n, gain ∘ ∇ℓ⟩.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from inrun.errors import OptimizerError

Group = dict[str, Any]
State = dict[str, Any]


class UpdateRule:
    """The update of one optimizer class."""

    #: True where the gain is one number per tensor, known before the gradient.
    linear: bool = False

    def check(self, group: Group) -> None:
        """Raise OptimizerError for options the rule does not describe."""

    def frozen(self, raw: Tensor, parameter: Tensor, group: Group, state: State) -> float | None:
        """Turn validation gradients into directions in place, with the state as it stands before the step.

        Args:
            raw: Validation gradients ∇ℓ, ``[k, *shape]``; becomes gain ∘ ∇ℓ up to the returned factor.
            parameter: The parameter, ``[*shape]``.
            group: Its parameter group.
            state: Its optimizer state.

        Returns:
            The factor still to be applied, or None where the gain is not known before the gradient.
        """
        raise NotImplementedError

    def thaw(self, v: Tensor, group: Group, state: State) -> Tensor:
        """Return the validation gradients from which ``frozen`` made ``v``, where no gain was 0."""
        raise NotImplementedError

    def without_history(self, state: State) -> int:
        """Return how many entries of a parameter never had a gradient, so that their frozen gain is 0."""
        return 0

    def can_thaw(self, state: State) -> bool:
        """Whether ``frozen`` can be undone, so that no copy of the validation gradients is needed."""
        return False

    def secant(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor | float:
        """Return (u(0) − u(G)) / (lr · G) elementwise, given the gradient the optimizer is about to use.

        All tensors may be the same selection of rows of a parameter.
        """
        raise NotImplementedError


_rules: dict[type[torch.optim.Optimizer], UpdateRule] = {}
U = TypeVar("U", bound=type[UpdateRule])


def register(*optimizer_classes: type[torch.optim.Optimizer]) -> Callable[[U], U]:
    """Register an update rule for optimizer classes (and subclasses that keep their ``step``)."""

    def add(rule: U) -> U:
        for cls in optimizer_classes:
            _rules[cls] = rule()
        return rule

    return add


class PlainRule(UpdateRule):
    """The paper's proxy, whatever the optimizer: w ← w − lr · G."""

    linear = True

    def frozen(self, raw: Tensor, parameter: Tensor, group: Group, state: State) -> float | None:
        """The gain is 1, or −1 where the optimizer maximises."""
        return -1.0 if group.get("maximize", False) else 1.0

    def secant(self, gradient: Tensor, parameter: Tensor, group: Group, state: State) -> Tensor | float:
        """The same number."""
        return -1.0 if group.get("maximize", False) else 1.0


plain = PlainRule()


def _update_of(cls: type) -> Any:
    """Return the class's ``step`` as it was written (torch wraps it for profiling when an optimizer is made)."""
    return inspect.unwrap(cls.step)  # type: ignore[attr-defined]


def find_update(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """Return the update rule of an optimizer, or raise with what is registered."""
    cls = type(optimizer)
    for base in cls.__mro__:
        if base in _rules and _update_of(cls) is _update_of(base):
            rule = _rules[base]
            for group in optimizer.param_groups:
                rule.check(group)
            return rule
    known = ", ".join(sorted(c.__name__ for c in _rules))
    raise OptimizerError(
        f"no update rule for {cls.__module__}.{cls.__name__}; known are {known}. "
        'Use update="sgd" for the plain-SGD proxy, or register a rule with inrun.optimizers.register.'
    )
