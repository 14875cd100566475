"""What optimizers do with gradients: one small rule per optimizer class."""

from inrun.optimizers import adam, scaled, sgd, signs  # noqa: F401 - register
from inrun.optimizers.lists import agree
from inrun.optimizers.registry import find_rule, register
from inrun.optimizers.rule import NO_MEMORY, GroupStep, Memory, UpdateRule

__all__ = ["NO_MEMORY", "GroupStep", "Memory", "UpdateRule", "agree", "find_rule", "register"]
