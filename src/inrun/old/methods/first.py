"""``first``: ∇̄ = ∇ℓ(w), the paper's Theorem 1 for SGD."""

from __future__ import annotations

from typing import Any

from inrun.old.methods.registry import Look, Method, register


@register
class First(Method):
    """The validation gradient before the step."""

    name = "first"
    summary = "first order: the validation gradient before the step"
    benchmarked_with = ("frozen", "sgd")
    benchmarked_forms = ("shared", "project")
    studied_with = ("sgd", "frozen", "secant")

    def before(self, look: Look) -> Any:
        """Return ∇ℓ(w)."""
        return look.here()
