"""``second``: ∇̄ = ∇ℓ(w) + ½H(δ_∅ + Δ), the paper's Theorem 2 for SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inrun.errors import ConfigurationError
from inrun.old.methods.registry import Look, Method, register


@register
@dataclass(frozen=True)
class Second(Method):
    """The validation gradient before the step, bent by the Hessian along the move."""

    name = "second"
    summary = "second order: the validation gradient, bent by its curvature along the step"
    deferred = True
    #: "double" (double backward) or "differences" (two more gradients).
    hessian: str = "double"

    def __post_init__(self) -> None:
        """Check the option."""
        if self.hessian not in ("double", "differences"):
            raise ConfigurationError(f'hessian is {self.hessian!r}; accepted are "double" and "differences"')

    def at_step(self, look: Look) -> Any:
        """Return ∇ℓ(w) + ½H(δ_∅ + Δ)."""
        return look.bent(by_differences=self.hessian == "differences")
