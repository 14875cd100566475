"""Small numerical tools that several rooms share."""

from __future__ import annotations

import numpy as np


def gauss_legendre(n: int) -> tuple[tuple[float, float], ...]:
    """Return the Gauss-Legendre rule of n points on [0, 1] as (place, weight), exact for polynomials of degree 2n − 1."""
    places, weights = np.polynomial.legendre.leggauss(n)
    return tuple((float(0.5 * (x + 1.0)), float(0.5 * w)) for x, w in zip(places, weights, strict=True))
