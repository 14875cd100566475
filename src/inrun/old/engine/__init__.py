"""The accountant and what it is made of."""

from inrun.engine.folds import folds
from inrun.engine.ids import with_ids
from inrun.old.engine.accountant import Accountant

__all__ = ["Accountant", "folds", "with_ids"]
