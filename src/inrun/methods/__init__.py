"""Methods: at which points the validation gradient is taken, and when they are known.

The data's part of a step leads from w + δ_∅ (what the optimizer does without a gradient) to w' = w + Δ. A method is an
average ∇̄ of the validation gradient along the way:

========== ============================ =========================================
first      ∇ℓ(w)                        before the backward: contractions stream
lookahead  ∇ℓ(w + δ_∅)                  before the backward: contractions stream
second     ∇ℓ(w) + ½H(δ_∅ + Δ)          when the optimizer is about to step
midpoint   Σ_q w_q ∇ℓ(w + δ_∅ + s_q·data)  when the optimizer is about to step
========== ============================ =========================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from inrun.errors import ConfigurationError
from inrun.methods.quadrature import Rule as QuadratureRule
from inrun.methods.quadrature import gauss, named_rules

__all__ = ["METHODS", "UPDATES", "Method", "QuadratureRule", "find_method", "find_quadrature", "gauss", "resolve_update"]


@dataclass(frozen=True)
class Method:
    """A choice of the averaged validation gradient ∇̄."""

    name: str
    #: Whether ∇̄ is known only when the optimizer is about to step (contractions wait until then).
    deferred: bool


METHODS = {
    "first": Method("first", deferred=False),
    "lookahead": Method("lookahead", deferred=False),
    "second": Method("second", deferred=True),
    "midpoint": Method("midpoint", deferred=True),
}
UPDATES = ("auto", "sgd", "frozen", "secant")


def find_method(name: str) -> Method:
    """Return a method by name."""
    if name not in METHODS:
        raise ConfigurationError(f"unknown method {name!r}; available: {', '.join(METHODS)}")
    return METHODS[name]


def resolve_update(update: str, method: Method) -> str:
    """Return the update rule that "auto" stands for: frozen where contractions stream, secant where they wait."""
    if update not in UPDATES:
        raise ConfigurationError(f"unknown update {update!r}; available: {', '.join(UPDATES)}")
    if update == "sgd" and method.name == "lookahead":
        raise ConfigurationError(
            'method="lookahead" looks ahead by the optimizer\'s momentum and decay, which update="sgd" leaves out: '
            'take method="first", or update="frozen"'
        )
    if update == "auto":
        return "secant" if method.deferred else "frozen"
    return update


def find_quadrature(name: str | None, method: Method) -> QuadratureRule:
    """Return the points and weights along the data's part of the move, by name: midpoint, trapezoid, simpson, gauss N."""
    if name is None:
        return named_rules["midpoint"]
    if method.name != "midpoint":
        raise ConfigurationError(f'quadrature={name!r} belongs to method="midpoint"; the method is {method.name!r}')
    key = str(name).strip().lower()
    if key in named_rules:
        return named_rules[key]
    found = re.fullmatch(r"gauss[ -]?(\d{1,2})", key)
    if found and 1 <= int(found.group(1)) <= 32:
        return gauss(int(found.group(1)))
    raise ConfigurationError(f"quadrature is {name!r}; accepted are {', '.join(named_rules)} and gauss1 to gauss32")
