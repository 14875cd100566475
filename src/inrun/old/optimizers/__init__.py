"""What optimizers do to a gradient: one small rule per optimizer class."""

from inrun.old.optimizers import adafactor, adam, adam_family, lion, muon, scaled, sgd  # noqa: F401 - importing registers the rules
from inrun.old.optimizers.registry import Realised, Recall, UpdateRule, find_update, plain, register

__all__ = ["Realised", "Recall", "UpdateRule", "find_update", "plain", "register"]
