"""The engine before issue 36, until the new one has taken its place everywhere."""

from inrun.errors import InrunError


class DeferredMemoryError(InrunError):
    """A method that waits for the optimizer's step would keep more than ``deferred_memory`` allows."""
