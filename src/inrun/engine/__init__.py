"""The accountant and what it is made of."""

from inrun.engine.accountant import Accountant
from inrun.engine.fold import folds
from inrun.engine.ids import with_ids

__all__ = ["Accountant", "folds", "with_ids"]
