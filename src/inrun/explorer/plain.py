"""Values on their way into JSON: exact where JavaScript is not, and texts in which nothing is hidden."""

from __future__ import annotations

import math
from typing import Any

from inrun.report.text import visible

#: Integers that JavaScript holds exactly.
SAFE = 2**53 - 1


def plain(value: Any, most: int | None = None) -> Any:
    """Return a value for JSON. Numbers that JavaScript would round or not know become texts or null; texts are made visible."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) <= SAFE else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    return visible(value, most)
