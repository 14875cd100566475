"""The errors of inrun.

Each message says what was received, what is accepted and what to do next. All derive from
:class:`InrunError`; those caused by an argument are ``ValueError`` too.
"""

from __future__ import annotations


class InrunError(Exception):
    """Base class of all errors raised by inrun."""


class ConfigurationError(InrunError, ValueError):
    """An argument has an unknown value, contradicts another, or names something that is not supported."""


class IdsError(InrunError, ValueError):
    """Sample ids have the wrong type, shape or number."""


class ValidationError(InrunError, ValueError):
    """A validation callable did not return a usable loss."""


class CoverageError(InrunError):
    """A parameter received gradient through no function that was observed, or there is no parameter to score."""


class RowOwnershipError(InrunError):
    """Rows of a tensor cannot be assigned to samples: samples meet, change places, or have no dimension."""


class ConservationError(InrunError):
    """The samples' gradients do not add up to the gradient that the optimizer uses; found by an audit."""


class CreditError(InrunError):
    """The optimizer's state is not what the gradients of the open steps made of it."""


class OptimizerError(InrunError):
    """An optimizer, or one of its options, is not supported by the chosen method."""


class StepError(InrunError):
    """Calls around one optimizer step came in an order that cannot be scored, or an earlier audit failed."""


class ProcessError(StepError):
    """Another process of the run died, or is at another place of the step."""


class LedgerError(InrunError):
    """The ledger cannot be opened or written."""


class TrainingError(InrunError):
    """A run of ``inrun train`` cannot start, continue or be resumed."""


class DataError(InrunError, ValueError):
    """Training data that cannot be read, or a token store that is damaged."""
