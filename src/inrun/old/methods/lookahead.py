"""``lookahead``: ∇̄ = ∇ℓ(w + δ_∅): with momentum, most of a move is known before the backward."""

from __future__ import annotations

from typing import Any

from inrun.old.methods.registry import Look, Method, register


@register
class Lookahead(Method):
    """The validation gradient where momentum and decay alone carry the weights."""

    name = "lookahead"
    summary = "first order, seen from where momentum and decay carry the weights"
    refuses = {  # noqa: RUF012 - dataclass fields have annotations; this has none
        "sgd": "it looks ahead by the optimizer's momentum and decay, which the proxy leaves out: "
        'take method="first", or update="frozen"'
    }
    benchmarked_with = ("frozen",)
    studied_with = ("frozen",)

    def before(self, look: Look) -> Any:
        """Return ∇ℓ(w + δ_∅)."""
        return look.after_zero_move()
