"""``midpoint``: ∇̄ = Σ_q w_q ∇ℓ(w + δ_∅ + s_q · data's part), the Aumann-Shapley value of the data's part of the move."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from inrun.errors import ConfigurationError
from inrun.old.methods.registry import Look, Method, register
from inrun.statistics import gauss_legendre

#: (place on the way, weight); weights sum to 1.
Quadrature = tuple[tuple[float, float], ...]

#: The midpoint rule, and more points at rough steps: what is taken unless a rule is named.
ADAPTIVE = "adaptive"
NAMED: dict[str, Quadrature] = {
    ADAPTIVE: ((0.5, 1.0),),
    "midpoint": ((0.5, 1.0),),
    "trapezoid": ((0.0, 0.5), (1.0, 0.5)),
    "simpson": ((0.0, 1 / 6), (0.5, 4 / 6), (1.0, 1 / 6)),
}


def find_quadrature(name: str) -> Quadrature:
    """Return points and weights on [0, 1] by name: midpoint (where "adaptive" begins), trapezoid, simpson, gauss1 to gauss32."""
    key = str(name).strip().lower()
    if key in NAMED:
        return NAMED[key]
    found = re.fullmatch(r"gauss[ -]?(\d{1,2})", key)
    if found and 1 <= int(found.group(1)) <= 32:
        return gauss_legendre(int(found.group(1)))
    raise ConfigurationError(f"quadrature is {name!r}; accepted are {', '.join(NAMED)} and gauss1 to gauss32")


@register
@dataclass(frozen=True)
class Midpoint(Method):
    """The validation gradient averaged along the data's part of the move."""

    name = "midpoint"
    summary = "the validation gradient in the middle of the data's part of the step; an error of third order"
    deferred = True
    studied_variants = ("gauss2",)
    quadrature: str = ADAPTIVE

    def __post_init__(self) -> None:
        """Check the option."""
        find_quadrature(self.quadrature)

    def at_step(self, look: Look) -> Any:
        """Return the average over the points of the quadrature."""
        return look.along(self.points)

    @property
    def points(self) -> Quadrature:
        """Return the points that every step begins with."""
        return find_quadrature(self.quadrature)

    @property
    def adaptive(self) -> bool:
        """Whether rough steps take more points: unless a rule is named."""
        return str(self.quadrature).strip().lower() == ADAPTIVE

    def finer(self) -> str:
        """More points, or shorter steps."""
        return (
            "Take a smaller learning rate: the gradient turns along the way, and rough steps take more points by themselves. "
            'If quadrature= was given, leave it out, or take "gauss3" or finer.'
        )
