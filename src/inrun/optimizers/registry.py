"""Which rule describes which optimizer class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from inrun.errors import OptimizerError
from inrun.optimizers.rule import UpdateRule

R = TypeVar("R", bound=type[UpdateRule])

_rules: dict[type | str, type[UpdateRule]] = {}


def register(*classes: type[torch.optim.Optimizer] | str) -> Callable[[R], R]:
    """Register a rule for optimizer classes, and for subclasses that keep their ``step``.

    A class that should not be imported is given as ``"package.module.Class"``, where it is defined.
    """

    def add(rule: R) -> R:
        for cls in classes:
            _rules[cls] = rule
        return rule

    return add


def find_rule(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """Return a new rule for an optimizer, its options checked.

    An unknown class, or a subclass with a ``step`` of its own, gets a plain ``UpdateRule``: no
    memory, and an own direction that shares out the real move.

    Raises:
        OptimizerError: For LBFGS and SparseAdam, and for options that a rule does not describe.
    """
    cls = type(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise OptimizerError(
            f"{cls.__name__} cannot be scored: LBFGS evaluates the loss several times in a step, "
            "SparseAdam needs sparse gradients. Use another optimizer.",
        )
    for base in cls.__mro__:
        found = _rules.get(base) or _rules.get(f"{base.__module__}.{base.__qualname__}")
        if found is not None and _step_of(cls) is _step_of(base):
            rule = found()
            rule.bind(optimizer)
            return rule
    return UpdateRule()


def _step_of(cls: Any) -> Any:
    """Return ``step`` as it was written (torch wraps it when an optimizer is made)."""
    return inspect.unwrap(cls.step)
