"""Points and weights on [0, 1] by which the validation gradient is averaged along the data's part of a move."""

from __future__ import annotations

import numpy as np

#: (place on the way, weight); weights sum to 1.
Rule = tuple[tuple[float, float], ...]

named_rules: dict[str, Rule] = {
    "midpoint": ((0.5, 1.0),),
    "trapezoid": ((0.0, 0.5), (1.0, 0.5)),
    "simpson": ((0.0, 1 / 6), (0.5, 4 / 6), (1.0, 1 / 6)),
}


def gauss(n: int) -> Rule:
    """Return the Gauss-Legendre rule of n points, exact for polynomials of degree 2n − 1."""
    places, weights = np.polynomial.legendre.leggauss(n)
    return tuple((float(0.5 * (x + 1.0)), float(0.5 * w)) for x, w in zip(places, weights, strict=True))
