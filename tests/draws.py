"""How many shapes are drawn, test by test: the numbers are in one place so that their sum can be held to.

Each is drawn by hypothesis and checked against gradients that are formed, or taken one sample at a time, in float64. What is
``slow`` runs with ``-m slow``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings

#: By what is drawn: how many in the suite, and how many more where slow tests run.
DRAWS = {
    "outer products": (600, 0),
    "gram": (600, 0),
    "documents in rows": (60, 0),
    "cases": (150, 800),
    "merged cases": (150, 400),
}
#: Tests that draw for each of several layers.
TIMES = {"documents in rows": 4}


def draw(what: str, slow: bool = False) -> Callable[[Any], Any]:
    """Let a test draw as often as the table says."""
    return settings(max_examples=DRAWS[what][slow], deadline=None)


def drawn(slow: bool) -> int:
    """Return how many shapes are drawn in all, with or without slow tests."""
    return sum(TIMES.get(what, 1) * sum(counts[: 1 + slow]) for what, counts in DRAWS.items())
