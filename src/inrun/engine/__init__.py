"""The engine: from the backward of a step to the credits of its samples."""

from inrun.engine.accountant import Accountant
from inrun.engine.folds import folds
from inrun.engine.ids import with_ids
from inrun.engine.options import Options

__all__ = ["Accountant", "Options", "folds", "with_ids"]
