"""Methods: at which point the validation gradient is taken, and when it is known."""

from __future__ import annotations

from dataclasses import dataclass

from inrun.errors import ConfigurationError


@dataclass(frozen=True)
class Method:
    """A choice of the averaged validation gradient ∇̄."""

    name: str
    #: Whether ∇̄ is known only when the optimizer is about to step (contractions wait until then).
    deferred: bool


METHODS = {"first": Method("first", deferred=False)}
UPDATES = ("auto", "sgd", "frozen")


def find_method(name: str) -> Method:
    """Return a method by name."""
    if name not in METHODS:
        raise ConfigurationError(f"unknown method {name!r}; available: {', '.join(METHODS)}")
    return METHODS[name]


def resolve_update(update: str, method: Method) -> str:
    """Return the update rule that "auto" stands for."""
    if update not in UPDATES:
        raise ConfigurationError(f"unknown update {update!r}; available: {', '.join(UPDATES)}")
    return "frozen" if update == "auto" else update
