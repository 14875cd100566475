"""The engine: from the backward of a step to the credits of its samples."""

from inrun.engine.accountant import Accountant
from inrun.engine.folds import folds
from inrun.engine.ids import with_ids

__all__ = ["Accountant", "folds", "with_ids"]
