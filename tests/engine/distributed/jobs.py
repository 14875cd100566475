"""What the jobs of several processes run: conditions by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exchanges import EXCHANGES

JOBS: dict[str, dict[str, Callable[[int, int], Any]]] = {"exchanges": EXCHANGES}
