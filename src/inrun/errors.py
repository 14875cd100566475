"""Everything inrun raises on purpose.

Each error says what was received, what is accepted and what to do next. All derive from
:class:`InrunError`; those caused by an argument are ``ValueError`` too.
"""

from __future__ import annotations


class InrunError(Exception):
    """Base class of all errors raised by inrun."""


class ConfigurationError(InrunError, ValueError):
    """An argument of the accountant is unknown or contradicts another."""


class IdsError(InrunError, ValueError):
    """Sample ids of the wrong type, shape or number."""


class ValidationError(InrunError, ValueError):
    """A validation callable did not return a usable loss."""


class CoverageError(InrunError):
    """A trainable parameter received gradient that no rule scored."""


class RowOwnershipError(InrunError):
    """Rows at a module cannot be assigned to samples."""


class ConservationError(InrunError):
    """The contributions of a step do not sum to the inner product of its gradient and the direction."""


class CreditError(InrunError):
    """What the optimizer remembers is not what the samples of the open windows pushed."""


class OptimizerError(InrunError):
    """An optimizer, or a change of the gradient, that the chosen update rule cannot describe."""


class StepError(InrunError):
    """Calls around one optimizer step came in an order that cannot be scored."""


class ProcessError(StepError):
    """Another process of the run died, or is somewhere else in it."""


class DeferredMemoryError(InrunError):
    """A method that waits for the optimizer's step would keep more than ``deferred_memory`` allows."""


class LedgerError(InrunError):
    """The ledger cannot be opened or written."""


class TrainingError(InrunError):
    """A run of ``inrun train`` cannot begin, go on or be resumed."""


class DataError(InrunError, ValueError):
    """Training data that cannot be read, or a token store that is damaged."""
