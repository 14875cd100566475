"""Methods: at which points the validation gradient is taken, and when they are known.

The data's part of a step leads from w + δ_∅ (what the optimizer does without a gradient) to w' = w + Δ. A method is an
average ∇̄ of the validation gradient along the way. Importing a file registers its method.
"""

from inrun.old.methods.registry import CREDITS, KNOWN_AT_STEP, METHODS, UPDATES, Look, Method, find_method, register, resolve_update

# Importing registers a method; this is the order in which they are listed.
# isort: off
from inrun.old.methods import first  # noqa: F401
from inrun.old.methods import lookahead  # noqa: F401
from inrun.old.methods import second  # noqa: F401
from inrun.old.methods import midpoint  # noqa: F401
# isort: on

__all__ = ["CREDITS", "KNOWN_AT_STEP", "METHODS", "UPDATES", "Look", "Method", "find_method", "register", "resolve_update"]
